"""Heads in draft workers, by configuration, draft as heads beside the target do; and nothing of it shows."""

from __future__ import annotations

import random
from typing import Any

import pytest

from specdec.core.ids import RequestId
from specdec.core.request import Request
from specdec.core.sampling_params import SamplingParams
from specdec.engine.config import EngineConfig
from specdec.engine.engine import Engine
from specdec.sampling.noise import choice_seed
from specdec.transport.memory import Faults
from tests.specdec.engine.configured_heads import remote_config
from tests.specdec.engine.drafter_bench import Bench
from tests.specdec.engine.fitted_drafters import FittedDrafters
from tests.specdec.engine.remote_heads import RemoteHeads, generate_each
from tests.specdec.engine.sampling_kinds import GREEDY, KINDS
from tests.specdec.engine.tiny_models import PROMPTS, Models

pytestmark = pytest.mark.usefixtures("one_thread")
CHAIN: dict[str, Any] = {"num_speculative_tokens": 4}
DYNAMIC: dict[str, Any] = {
    "tree": {"shape": "dynamic", "top_k": 3, "depth": 4},
    "num_speculative_tokens": 10,
}
LONGER = PROMPTS[1:]
"""The first wish for a sequence is fulfilled after a step: behind a prompt of one token that is late."""
STATIC: dict[str, Any] = {"tree": {"shape": "static", "widths": [3, 2]}, "num_speculative_tokens": 9}


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(Models(tmp_path_factory.mktemp("models")))


@pytest.fixture(scope="module")
def drafters(bench: Bench, tmp_path_factory: pytest.TempPathFactory) -> FittedDrafters:
    return FittedDrafters(bench, tmp_path_factory)


def request_of(name: str, prompt: tuple[int, ...], params: SamplingParams) -> Request:
    """As `Engine.generate` makes it."""
    seed = choice_seed(params.seed or 0, 0)
    return Request(request_id=RequestId(name), prompt_token_ids=prompt, params=params, seed=seed)


def beside_the_target(config: EngineConfig, params: SamplingParams) -> tuple[int, int]:
    """Return what the same configuration drafts, and what of it stands, in one process."""
    with Engine(config) as engine:
        generate_each(engine, LONGER, params)
        metrics = engine.metrics()
        return metrics.num_draft_tokens, metrics.num_accepted_tokens


@pytest.mark.parametrize(
    ("method", "kind", "shape"),
    [
        ("eagle3", "greedy", CHAIN),
        ("eagle3", "plain", DYNAMIC),
        ("medusa", "greedy", CHAIN),
        ("eagle3", "greedy", {**CHAIN, "lookup_first": 2}),
        pytest.param("medusa", "plain", {**STATIC, "lookup_first": 2}, marks=pytest.mark.full),
        pytest.param("eagle3", "plain", CHAIN, marks=pytest.mark.full),
        pytest.param("eagle3", "greedy", DYNAMIC, marks=pytest.mark.full),
        pytest.param("eagle", "greedy", STATIC, marks=pytest.mark.full),
        pytest.param("eagle", "plain", CHAIN, marks=pytest.mark.full),
        pytest.param("mtp", "greedy", CHAIN, marks=pytest.mark.full),
        pytest.param("medusa", "plain", STATIC, marks=pytest.mark.full),
        pytest.param("parallel_heads", "greedy", CHAIN, marks=pytest.mark.full),
    ],
)
def test_they_draft_what_heads_beside_the_target_draft(
    bench: Bench, drafters: FittedDrafters, method: str, kind: str, shape: dict[str, Any]
) -> None:
    """A state that is late, or of another position, node or request, would cost acceptance."""
    config = remote_config(bench, drafters, method, **shape)
    expected = beside_the_target(config, KINDS[kind])
    assert expected[1] > 20, "not fitted"
    remote = RemoteHeads(config)
    assert generate_each(remote.engine, LONGER, KINDS[kind]) == bench.alone("llama", kind)[1:]
    assert remote.acceptance == expected
    (inbox,) = remote.inboxes.values()
    dropped = [name for name, count in inbox.counters.items() if name.endswith("_dropped") and count]
    assert not dropped
    assert inbox.counters["hidden_gaps"] == inbox.counters["hidden_waits_in_vain"] == 0
    remote.check_nothing_is_left()
    assert inbox.num_rows == 0
    remote.close()


def test_requests_share_a_draft_worker_whose_memory_stays_small(
    bench: Bench, drafters: FittedDrafters
) -> None:
    """With preemptions of the target; what has been read is not kept."""
    cache = {"block_size": 4, "num_blocks": 24}
    config = remote_config(bench, drafters, "eagle3", cache=cache, **CHAIN)
    remote = RemoteHeads(config)
    for index, prompt in enumerate(PROMPTS):
        params = KINDS["plain" if index % 2 else "greedy"]
        remote.engine.add_request(request_of(f"r{index}", prompt, params))
    most = 0
    while remote.engine.has_work:
        remote.engine.step()
        remote.engine.check_integrity()
        most = max(most, *(inbox.num_rows for inbox in remote.inboxes.values()))
    num_drafted, num_accepted = remote.acceptance
    assert num_accepted > 0.3 * num_drafted > 20
    assert remote.engine.metrics().num_preemptions > 0
    (inbox,) = remote.inboxes.values()
    assert inbox.counters["hidden_rows_received"] > sum(map(len, PROMPTS))
    assert most < sum(map(len, PROMPTS))
    remote.close()


@pytest.mark.parametrize("method", ["eagle3", pytest.param("medusa", marks=pytest.mark.full)])
def test_states_that_were_lost_are_sent_again(bench: Bench, drafters: FittedDrafters, method: str) -> None:
    """All of a prompt's, and some of later rounds: the heads miss them, say so, and go on."""
    config = remote_config(bench, drafters, method, **CHAIN)
    params = SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True)
    with Engine(config) as engine:
        expected = generate_each(engine, [PROMPTS[6]], params)
    slow = Faults(delay_s=(0.005, 0.005))
    whole, lossy = RemoteHeads(config, faults=slow), RemoteHeads(config, faults=slow, lost=(0, 4))
    for remote in (whole, lossy):
        assert generate_each(remote.engine, [PROMPTS[6]], params) == expected
    (server,), (inbox,) = lossy.servers.values(), lossy.inboxes.values()
    assert inbox.counters["hidden_gaps"] >= 1
    if method == "eagle3":  # medusa reads the newest state alone
        assert server.counters["states_asked_again"] >= 1
    # Not all that was missed, but drafting goes on.
    assert whole.acceptance[1] > lossy.acceptance[1] > 0
    assert lossy.acceptance[1] > 0.7 * whole.acceptance[1]
    for remote in (whole, lossy):
        remote.close()


def test_a_worker_that_takes_over_gets_the_states_of_the_whole_prefix(
    bench: Bench, drafters: FittedDrafters
) -> None:
    """The target has kept them: the worker that joins drafts behind a prefix that it has never seen."""
    remote = RemoteHeads(remote_config(bench, drafters, "eagle3", **CHAIN))
    tokens: list[int] = []
    remote.engine.add_request(request_of("r", PROMPTS[6], GREEDY))
    while len(tokens) < 6:
        tokens += [token for output in remote.engine.step() for token in output.token_ids]
    remote.stop_drafter(next(iter(remote.inboxes)))
    before = remote.acceptance[1]
    tokens += [token for output in remote.engine.step() for token in output.token_ids]
    assert remote.acceptance[1] == before
    remote.start_drafter()
    while remote.engine.has_work:
        tokens += [token for output in remote.engine.step() for token in output.token_ids]
    assert tuple(tokens) == bench.alone("llama", "greedy")[6]
    assert remote.acceptance[1] > before
    (inbox,) = remote.inboxes.values()
    assert inbox.counters["hidden_rows_received"] >= len(PROMPTS[6]) + 6
    remote.close()


@pytest.mark.parametrize(
    ("shape", "seed"),
    [
        (CHAIN, 0),
        (DYNAMIC, 1),
        *(pytest.param(CHAIN, seed, marks=pytest.mark.full) for seed in range(2, 8)),
        *(pytest.param(DYNAMIC, seed, marks=pytest.mark.full) for seed in range(8, 14)),
    ],
)
def test_nothing_shows_through_a_bad_network_and_dying_workers(
    bench: Bench, drafters: FittedDrafters, shape: dict[str, Any], seed: int
) -> None:
    rng = random.Random(seed)
    cache = {"block_size": 4, "num_blocks": rng.choice([24, 60])}
    config = remote_config(bench, drafters, "eagle3", cache=cache, **shape)
    faults = Faults(
        delay_s=(0.0, rng.choice([0.0, 0.02, 0.2])), loss=0.1, duplication=0.1, in_order=rng.random() < 0.5
    )
    remote = RemoteHeads(config, faults=faults, seed=seed, num_drafters=2)
    kinds = [rng.choice(["greedy", "plain"]) for _ in PROMPTS]
    tokens: dict[str, list[int]] = {}
    for index, (prompt, kind) in enumerate(zip(PROMPTS, kinds, strict=True)):
        tokens[f"r{index}"] = []
        remote.engine.add_request(request_of(f"r{index}", prompt, KINDS[kind]))
    while remote.engine.has_work:
        fate = rng.random()
        if fate < 0.05 and remote.inboxes:
            remote.stop_drafter(rng.choice(list(remote.inboxes)))
        elif fate < 0.1:
            remote.start_drafter()
        for output in remote.engine.step():
            assert output.error is None
            tokens[output.request_id].extend(output.token_ids)
        remote.engine.check_integrity()
    for index, kind in enumerate(kinds):
        assert tuple(tokens[f"r{index}"]) == bench.alone("llama", kind)[index]
    remote.network.faults = Faults()
    remote.network.run_for(10.0)
    assert generate_each(remote.engine, PROMPTS[1:2], GREEDY) == bench.alone("llama", "greedy")[1:2]
    assert remote.sender.num_waiting == 0
    remote.close()


@pytest.mark.parametrize(
    ("speculative", "target", "message"),
    [
        ({"method": "ngram"}, {}, "heads_at: draft_pool is about heads"),
        ({"method": "eagle3", "model": "x", "overlap": "ping_pong"}, {}, "a target that is busy sends no"),
        (
            {"method": "eagle3", "model": "x"},
            {"pipeline_parallel_size": 2},
            "heads_at: draft_pool does not go with target.pipeline_parallel_size: 2",
        ),
        (
            {"method": "eagle3", "model": "x", "cache": {"memory_fraction": 0.5}},
            {},
            "method eagle3 has none: write cache.memory_bytes",
        ),
        (
            {"method": "eagle3", "model": "x", "heads_at": "target", "hidden_memory_bytes": 1 << 21},
            {},
            "write heads_at: draft_pool",
        ),
    ],
)
def test_what_is_not_supported_is_refused_by_name(
    speculative: dict[str, Any], target: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        EngineConfig.model_validate(
            {
                "target": {"model": "t", **target},
                "speculative_config": {"heads_at": "draft_pool", **speculative},
            }
        )


def test_what_a_draft_model_may_have_they_may_have_in_draft_workers() -> None:
    config = EngineConfig.model_validate(
        {
            "target": {"model": "t"},
            "speculative_config": {
                "method": "eagle3",
                "model": "x",
                "heads_at": "draft_pool",
                "device": "cpu",
                "dtype": "float32",
                "fallback": "ngram",
            },
        }
    )
    assert config.speculative_config.drafts_in_pool
    alone = config.in_one_process().speculative_config
    assert not alone.drafts_in_pool
    assert (alone.device, alone.dtype) == ("auto", "auto")
