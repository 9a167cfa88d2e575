"""Every drafter of the table (`tests/specdec/engine/drafter_table.py`) on a GPU: what the target says alone.

Heads are fitted to the target's texts on the CPU, so that drafts stand and fall.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import pytest
import torch

from benchmarks.tensor_memory import live_tensor_bytes
from specdec.engine.config import EngineConfig
from specdec.engine.engine import Engine
from specdec.model.config import CompileConfig
from tests.quantizer import some_quantizer
from tests.specdec.engine.drafter_bench import Bench
from tests.specdec.engine.drafter_files import DrafterFiles
from tests.specdec.engine.drafter_table import DRAFTERS, SHAPES, Files, Shape
from tests.specdec.engine.request_waves import serve, wanted
from tests.specdec.engine.tiny_models import Models

pytestmark = pytest.mark.gpu

CASES = [
    pytest.param(name, shape, id=f"{name}-{shape}".replace(" ", "_"))
    for name, shape in product(DRAFTERS, SHAPES)
    if DRAFTERS[name].refusal(shape, "compiled") is None
]
FEW_GRAPHS = CompileConfig(cuda_graph_max_rows=32)


@pytest.fixture(scope="module", autouse=True)
def _quantizer() -> Iterator[None]:
    with some_quantizer():
        yield


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(Models(tmp_path_factory.mktemp("models")))


@pytest.fixture(scope="module")
def files(bench: Bench, tmp_path_factory: pytest.TempPathFactory) -> Files:
    return DrafterFiles(bench, tmp_path_factory)


def on_gpu(config: EngineConfig) -> EngineConfig:
    """Return it with the target on a GPU, where heads follow it; a draft model goes there by itself."""
    packed = any(one.kv.dtype == "int8" for one in config.speculative_config.every_drafter)
    target = config.target.model_copy(
        update={
            "device": "cuda",
            "compile": FEW_GRAPHS,
            "attention_backend": "sdpa" if packed else "auto",  # nothing else reads packed K/V there
        }
    )
    return config.model_copy(update={"target": target})


@pytest.mark.parametrize(("name", "shape"), CASES)
def test_it_does_not_show(bench: Bench, files: Files, name: str, shape: Shape) -> None:
    drafter = DRAFTERS[name]
    waves, expected = wanted(bench, "sampled", "mix", drafter.names)
    with Engine(on_gpu(drafter.config(shape, "compiled", files))) as engine:
        engine.warm_up()
        done = serve(engine, waves)
    assert done.streams == expected
    assert (done.num_drafted > 0) == (name != "none")
    assert done.num_accepted > 0 or not drafter.is_often_right
    assert done.num_dropped == 0


def test_tensors_are_counted_by_device() -> None:
    before = live_tensor_bytes()
    kept = torch.zeros(1000, device="cuda")
    after = live_tensor_bytes()
    assert after["cuda"] - before["cuda"] == kept.nbytes
    assert after["cpu"] == before["cpu"]
