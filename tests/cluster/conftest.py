"""One local Ray cluster for the whole test session, and tiny models for it to serve."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from cluster.config import ClusterConfig, MembershipConfig
from specdec.core.request import Request
from specdec.engine.config import EngineConfig
from specdec.engine.engine import Engine
from specdec.kv.config import CacheConfig
from specdec.model.config import CompileConfig, ModelConfig
from specdec.proposers.config import SpeculativeConfig
from specdec.scheduling.config import SchedulerConfig
from specdec.transport.config import ChannelConfig
from tests.architectures import save_model

Plain = Callable[[Sequence[Request]], dict[str, list[int]]]

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def ray_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A Ray cluster of its own on this machine, as small as it gets: two CPUs."""
    import ray
    from ray import serve

    # Unix socket paths are limited to 107 bytes, which pytest's own folders use up.
    temp = tmp_path_factory.mktemp("ray")
    short = Path("/tmp") / f"dh{os.getpid()}"
    short.symlink_to(temp)
    for name, value in {
        "RAY_AUTH_MODE": "disabled",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_worker_niceness": "0",
        "RAY_TMPDIR": str(short),
        "PYTHONPATH": str(ROOT),
        "HF_MODULES_CACHE": str(temp / "modules"),  # code that checkpoints bring
    }.items():
        os.environ[name] = value
    ray.init(
        num_cpus=2,
        include_dashboard=False,
        object_store_memory=80 << 20,
        log_to_driver=bool(os.environ.get("DRAFTHOUSE_TEST_LOGS")),
        _temp_dir=str(short),
    )
    serve.start(proxy_location="Disabled", logging_config={"log_level": "WARNING"})
    yield
    serve.shutdown()
    ray.shutdown()
    short.unlink()


@contextmanager
def deployed_on_ray(engine: EngineConfig, cluster: ClusterConfig) -> Iterator[None]:
    """Serve one application, named as its namespace, and leave nothing of it behind.

    Its directory is detached from it: idle ones take a hundredth of a core each.
    """
    from ray import serve

    from cluster.application import build_application
    from cluster.directory_actor import close_directory

    serve.run(build_application(engine, cluster), name=cluster.namespace, route_prefix=None)
    try:
        yield
    finally:
        serve.delete(cluster.namespace)
        close_directory(cluster.namespace)


@pytest.fixture(scope="session")
def model_folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A tiny target, and a draft that agrees with it often: the same model, a little disturbed."""
    import torch

    folder = tmp_path_factory.mktemp("models")
    target, draft = folder / "target", folder / "draft"
    model = save_model(target)
    save_model(draft)
    with torch.no_grad():
        generator = torch.Generator().manual_seed(1)
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.02 * parameter.std())
    model.save_pretrained(draft)
    return target, draft


@pytest.fixture(scope="session")
def engine_config(model_folders: tuple[Path, Path]) -> EngineConfig:
    target, draft = model_folders
    eager = CompileConfig(mode="off")
    return EngineConfig(
        target=ModelConfig(model=str(target), num_threads=1, compile=eager),
        speculative_config=SpeculativeConfig(
            method="draft_model",
            model=str(draft),
            num_threads=1,
            compile=eager,
            num_speculative_tokens=3,
            controller="fixed",
        ),
        cache=CacheConfig(num_blocks=256, block_size=4),
        scheduler=SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=64),
    )


@pytest.fixture(scope="session")
def cluster_config() -> ClusterConfig:
    return ClusterConfig(
        namespace="drafthouse-tests",
        channels=ChannelConfig(bind="loopback"),
        membership=MembershipConfig(lease_s=3.0, renew_s=0.25),
        drain_timeout_s=2.0,
        failover_timeout_s=120.0,
    )


@pytest.fixture(scope="module")
def alone(engine_config: EngineConfig) -> Iterator[Plain]:
    """Tokens of one process without speculation, by request id."""
    plain = engine_config.model_copy(update={"speculative_config": SpeculativeConfig(method="none")})
    with Engine(plain) as engine:

        def run(wanted: Sequence[Request]) -> dict[str, list[int]]:
            tokens: dict[str, list[int]] = {request.request_id: [] for request in wanted}
            for request in wanted:
                engine.add_request(request)
            while engine.has_work:
                for output in engine.step():
                    tokens[output.request_id].extend(output.token_ids)
            return tokens

        yield run
