"""What every test stands on: threads, seeds, no network, hypothesis profiles, what is left to the full run.

Markers and the rule that warnings are errors are in pyproject.toml.
"""

from __future__ import annotations

import glob
import os
import random
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import hypothesis
import numpy as np
import pytest

from tests import kept_results
from tests.pairwise import chosen_cover

# What support modules assert is explained as in tests: said before anything imports them.
pytest.register_assert_rewrite(
    *(f"tests.{path.name}" for path in Path(__file__).parent.iterdir() if path.is_dir())
)

SEED = 0x5EED
STARTING_RAY = (
    "tests/cluster/",
    "tests/deploy/test_serve.py",
    "tests/deploy/test_serve_faults.py",
    "tests/deploy/test_local_ray.py",
    "tests/deploy/test_foreign_ray.py",
    "tests/deploy/test_serve_deploy.py",
    "tests/deploy/test_haproxy.py",
    "tests/deploy/test_pod_logs.py",
    "tests/deploy/test_rolling_update.py",
    "tests/deploy/monitoring/test_live_cluster.py",
    "tests/deploy/monitoring/test_live_faults.py",
)


def _num_threads() -> int:
    """Two at most: the machines that tests run on have two cores, and idle OpenMP threads spin.

    One where several pytest processes share these cores (`pytest -n`).
    """
    if "PYTEST_XDIST_WORKER" in os.environ:
        return 1
    return min(2, len(os.sched_getaffinity(0)))


# Before anything imports torch, and inherited by the processes that tests start.
for _name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ.setdefault(_name, str(_num_threads()))
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ["HF_HUB_OFFLINE"] = "1"
# Triton reads it when it is imported, which torch and transformers may do: its kernels then run on the CPU.
if not glob.glob("/dev/nvidia*"):
    os.environ.setdefault("TRITON_INTERPRET", "1")
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"

# `HYPOTHESIS_PROFILE=explore` looks for new examples; the others repeat theirs, so that a failure stays.
_unhurried = [hypothesis.HealthCheck.too_slow]
hypothesis.settings.register_profile(
    "default",
    deadline=None,
    derandomize=True,
    database=None,
    max_examples=50,
    suppress_health_check=_unhurried,
)
hypothesis.settings.register_profile("full", hypothesis.settings.get_profile("default"), max_examples=500)
hypothesis.settings.register_profile(
    "explore", deadline=None, max_examples=2_000, print_blob=True, suppress_health_check=_unhurried
)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """Every test starts from the same random state, whatever ran before it."""
    random.seed(SEED)
    np.random.seed(SEED)
    # A test of pure bookkeeping need not pay for importing torch; torch's own first seed is fixed.
    if (torch := sys.modules.get("torch")) is not None:
        torch.manual_seed(SEED)


@contextmanager
def _torch_threads(number: int | None) -> Iterator[None]:
    import torch

    before = torch.get_num_threads()
    if number is not None:
        torch.set_num_threads(number)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """For a whole module, its fixtures included: models are tiny, more threads would mostly wait."""
    with _torch_threads(1):
        yield


@pytest.fixture
def one_thread_each() -> Iterator[None]:
    """For each test anew, which may set another number; fixtures of the module keep theirs."""
    with _torch_threads(1):
        yield


@pytest.fixture
def threads_as_before() -> Iterator[None]:
    """Whatever number of threads the test sets."""
    with _torch_threads(None):
        yield


def pytest_addoption(parser: pytest.Parser) -> None:
    kept_results.add_option(parser)


def pytest_configure(config: pytest.Config) -> None:
    kept_results.configure(config)


@pytest.hookimpl(tryfirst=True)  # before `-m` is looked at
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    _leave_most_to_the_full_run(items)
    _skip_without_gpu(items)
    kept_results.leave_out_kept(config, items)


def _leave_most_to_the_full_run(items: Sequence[pytest.Item]) -> None:
    """`cover(ways)`: of the cases of a test, those beyond a cover of its values are marked `full`."""
    cases_of: dict[tuple[str, str], list[pytest.Function]] = {}
    for item in items:
        markers = {marker.name for marker in item.iter_markers()}
        if isinstance(item, pytest.Function) and "cover" in markers and "full" not in markers:
            cases_of.setdefault((item.parent.nodeid, item.originalname), []).append(item)
    for cases in cases_of.values():
        marker = cases[0].get_closest_marker("cover")
        assert marker is not None
        chosen = set(chosen_cover([case.callspec.params for case in cases], *marker.args))
        for index, case in enumerate(cases):
            if index not in chosen:
                case.add_marker(pytest.mark.full)


def _skip_without_gpu(items: Sequence[pytest.Item]) -> None:
    needing_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if not needing_gpu:
        return
    import torch

    if not torch.cuda.is_available():
        for item in needing_gpu:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With `pytest -n`, modules stay together, and those that start Ray too: one cluster at a time."""
    from xdist.scheduler import LoadScopeScheduling

    class Scheduler(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            module = nodeid.partition("::")[0]
            return "ray" if module.startswith(STARTING_RAY) else module

    return Scheduler(config, log)


def pytest_report_header() -> str:
    profile = hypothesis.settings.get_current_profile_name()
    return f"threads: {os.environ['OMP_NUM_THREADS']}, hypothesis profile: {profile}"
