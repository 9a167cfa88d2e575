"""Every drafter of the table in a cluster on Ray: what is said is what the target says alone."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from functools import partial

import pytest

from cluster.config import BundleConfig, ClusterConfig, DraftPoolConfig, TargetGroupsConfig
from cluster.pool_drafter import drafter_of_pool
from specdec.engine.config import EngineConfig
from tests.cluster.conftest import deployed_on_ray
from tests.cluster.running_service import Streams, metric, with_service
from tests.quantizer import HAS_TORCHAO
from tests.specdec.engine.drafter_bench import Bench
from tests.specdec.engine.drafter_files import DrafterFiles
from tests.specdec.engine.drafter_table import DRAFTERS, Place, Shape
from tests.specdec.engine.request_waves import Wanted, wanted
from tests.specdec.engine.tiny_models import Models

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.full]

Case = tuple[str, Place, Shape]
PLACES: tuple[Place, ...] = ("workers", "draft pool")
SHAPES: tuple[Shape, ...] = ("chain", "tree")
CASES: list[Case] = [
    (name, place, shape)
    for name in DRAFTERS
    for place in PLACES
    for shape in SHAPES
    if DRAFTERS[name].refusal(shape, place) is None
]


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(Models(tmp_path_factory.mktemp("models")))


@pytest.fixture(scope="module")
def files(bench: Bench, tmp_path_factory: pytest.TempPathFactory) -> DrafterFiles:
    return DrafterFiles(bench, tmp_path_factory)


@pytest.fixture(
    params=CASES, ids=lambda case: "-".join(case).replace(" ", "_").replace(",", "").replace("/", "")
)
def case(request: pytest.FixtureRequest) -> Case:
    name, place, shape = request.param
    if name.startswith("quantized") and not HAS_TORCHAO:
        pytest.skip("workers quantize with torchao, which is not installed")
    return name, place, shape


@pytest.fixture
def engine(case: Case, files: DrafterFiles) -> EngineConfig:
    name, place, shape = case
    config = DRAFTERS[name].config(shape, place, files)
    return config.model_copy(update={"target": config.target.model_copy(update={"num_threads": 1})})


@pytest.fixture
def deployed(
    ray_cluster: None, case: Case, engine: EngineConfig, cluster_config: ClusterConfig
) -> Iterator[ClusterConfig]:
    half = BundleConfig(num_cpus=0.5)
    config = cluster_config.model_copy(
        update={
            "namespace": f"drafthouse-every-{CASES.index(case)}",
            "target_groups": TargetGroupsConfig(bundle=half),
            "draft_pool": DraftPoolConfig(bundle=half),
        }
    )
    with deployed_on_ray(engine, config):
        yield config


def test_it_does_not_show(deployed: ClusterConfig, case: Case, engine: EngineConfig, bench: Bench) -> None:
    """Greedy requests and sampled ones, one after the other in one batch."""
    drafter = DRAFTERS[case[0]]
    asked: Wanted = wanted(bench, "sampled", "mix", drafter.names)

    async def scenario(service: object) -> None:
        streams = Streams(service, [one for wave in asked.waves for one in wave])
        await streams.finish()
        assert streams.tokens == asked.expected
        if case[0] != "none":
            what = "accepted" if drafter.is_often_right else "draft"
            await metric(service, f"spec_decode_num_{what}_tokens", partial(operator.lt, 0))
        values = await service.metrics()  # type: ignore[attr-defined]
        assert not values.get('spec_decode_num_proposals_dropped{reason="malformed"}')

    with_service(deployed, scenario, num_drafters=0 if drafter_of_pool(engine) is None else 1)
