"""Rules of security that a commit could break unseen: what may not be imported, called or logged."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from specdec.model.config import ModelConfig

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("specdec", "workers", "cluster", "deploy", "training")
FORBIDDEN = (
    "import torch.distributed as dist\ndist.all_gather_object([], 1)\n",
    "import torch.distributed as dist\ndist.broadcast_object_list([])\n",
    "from torch.distributed import gather_object\n",
    "from torch.distributed import send_object_list\n",
    "from torch import distributed\ndistributed.recv_object_list([])\n",
    "import torch\ntorch.distributed.scatter_object_list([], [])\n",
    "from torch.distributed.distributed_c10d import all_gather_object\n",
    "import torch.distributed.rpc\n",
    "import pickle\npickle.loads(b'')\n",
    "import pickle\npickle.Unpickler(None)\n",
    "import marshal\nmarshal.loads(b'')\n",
    "import shelve\nshelve.open('x')\n",
    "import cloudpickle\n",
    "from ray import cloudpickle\n",
    "import dill\n",
    "from multiprocessing.connection import Listener\n",
    "from multiprocessing.managers import BaseManager\n",
    "import torch\ntorch.load('weights.bin')\n",
    "import torch\ntorch.load('weights.bin', weights_only=True)\n",
    "import yaml\nyaml.load('x', Loader=yaml.Loader)\n",
    "eval('1')\n",
    "exec('1')\n",
    "import subprocess\nsubprocess.run('ls', shell=True)\n",
    "import httpx\nhttpx.get('https://x', verify=False)\n",
    "import ray.util.client\n",
)


@pytest.mark.parametrize("folder", ["specdec", "workers", "cluster", "deploy", "training"])
def test_lint_forbids_what_runs_what_it_is_sent(folder: str, tmp_path: Path) -> None:
    """With the project's own settings, as `make lint` reads them; each line is refused by itself."""
    for number, code in enumerate(FORBIDDEN):
        (tmp_path / folder).mkdir(exist_ok=True)
        (tmp_path / folder / f"forbidden_{number}.py").write_text(code)
    result = subprocess.run(
        (
            *(sys.executable, "-m", "ruff", "check", "--config", str(ROOT / "pyproject.toml"), "--no-cache"),
            *("--select", "TID251,S", "--output-format", "concise", "."),
        ),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    found = {line.split(":")[0].rpartition("_")[2] for line in result.stdout.splitlines() if ".py:" in line}
    missed = [code for number, code in enumerate(FORBIDDEN) if f"{number}.py" not in found]
    assert missed == [], result.stdout + result.stderr


def calls() -> Iterator[tuple[str, ast.Call]]:
    """Every call in the packages, with the place that it is at."""
    for package in PACKAGES:
        for file in sorted((ROOT / package).rglob("*.py")):
            for node in ast.walk(ast.parse(file.read_text())):
                if isinstance(node, ast.Call):
                    yield f"{file.relative_to(ROOT)}:{node.lineno}", node


def test_nobody_trusts_a_models_code_or_its_pickles_by_himself() -> None:
    """`trust_remote_code` comes from the configuration, where it is off, and weights are safetensors."""
    assert ModelConfig(model="x").trust_remote_code is False
    found = []
    for place, call in calls():
        given = {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg}
        for name, allowed in (
            ("trust_remote_code", False),
            ("use_safetensors", True),
            ("weights_only", True),
        ):
            value = given.get(name)
            if isinstance(value, ast.Constant) and value.value is not allowed:
                found.append(f"{place}: {name}={value.value}")
        # Left out, transformers asks whoever sits at the terminal.
        loads_by_name = re.fullmatch(r"_?Auto\w+\.from_pretrained", ast.unparse(call.func), re.IGNORECASE)
        if loads_by_name and "trust_remote_code" not in given:
            found.append(f"{place}: from_pretrained does not say whom it trusts")
    assert found == []
