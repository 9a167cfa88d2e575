"""Heads that keep a sink and a window of their K/V, by configuration: it shows in what is held alone."""

from __future__ import annotations

import json
import random
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from deploy.preflight import warnings_of
from specdec.core.errors import ConfigError, InputError
from specdec.core.ids import RequestId
from specdec.core.plan import TargetStep
from specdec.core.proposal import Proposal
from specdec.core.sampling_params import SamplingParams
from specdec.core.sequence import SequenceView
from specdec.engine.config import EngineConfig
from specdec.engine.engine import Engine
from specdec.engine.targets.local_target import LocalTarget
from specdec.proposers.config import SpeculativeConfig
from specdec.proposers.draft_model import DraftModelProposer
from specdec.proposers.draft_window import draft_window
from tests.architectures import VOCAB_SIZE
from tests.rank_pool import Pools
from tests.specdec.engine.configured_heads import config_of, remote_config, serve
from tests.specdec.engine.drafter_bench import Bench
from tests.specdec.engine.fitted_drafters import FittedDrafters
from tests.specdec.engine.remote_heads import RemoteHeads, generate_each
from tests.specdec.engine.sampling_kinds import GREEDY, KINDS
from tests.specdec.engine.tiny_models import PROMPTS, Models
from tests.specdec.engine.toy_engines import request

pytestmark = pytest.mark.usefixtures("one_thread")
STREAMING: dict[str, Any] = {"policy": "streaming", "budget": 14}
"""Of prompts of up to 40 tokens, which are continued by 20."""
CHAIN: dict[str, Any] = {"num_speculative_tokens": 4}
STATIC: dict[str, Any] = {"tree": {"shape": "static", "widths": [3, 2]}, "num_speculative_tokens": 9}
DYNAMIC: dict[str, Any] = {
    "tree": {"shape": "dynamic", "top_k": 3, "depth": 4},
    "num_speculative_tokens": 10,
}
CHOSEN: dict[str, Any] = {**CHAIN, "controller": "goodput", "profile_seconds": 0.0}


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(Models(tmp_path_factory.mktemp("models")))


@pytest.fixture(scope="module")
def drafters(bench: Bench, tmp_path_factory: pytest.TempPathFactory) -> FittedDrafters:
    return FittedDrafters(bench, tmp_path_factory)


Configure = Callable[..., EngineConfig]


@pytest.fixture(scope="module")
def configured(bench: Bench, drafters: FittedDrafters) -> Configure:
    def configure(kind: str, *, own_blocks: int = 200, target_blocks: int = 60, **more: Any) -> EngineConfig:
        method = "hydra" if kind == "hydra++" else kind.split(maxsplit=1)[0]
        cache = {"block_size": 4, "num_blocks": target_blocks}
        config = config_of(bench, drafters.folder_of(kind), method, cache=cache, **{"kv": STREAMING, **more})
        own = {"cache": {"block_size": 4, "num_blocks": own_blocks}}
        speculative = config.speculative_config.model_dump() | own
        return config.model_copy(update={"speculative_config": SpeculativeConfig.model_validate(speculative)})

    return configure


class Held:
    """Looks at the drafter's books after every call."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.most: dict[int, int] = {}
        """Blocks that were held, by how many sequences were known."""
        propose = DraftModelProposer.propose

        def watched(
            proposer: DraftModelProposer,
            sequences: Sequence[SequenceView],
            num_draft_tokens: Mapping[RequestId, int],
        ) -> dict[RequestId, Proposal]:
            proposals = propose(proposer, sequences, num_draft_tokens)
            proposer.check_integrity()
            num = len(proposer.sequences.known)
            self.most[num] = max(self.most.get(num, 0), proposer.sequences.num_held_blocks)
            return proposals

        monkeypatch.setattr(DraftModelProposer, "propose", watched)


@pytest.mark.parametrize(
    ("method", "kind", "more"),
    [
        ("eagle", "greedy", CHAIN),
        ("eagle3", "plain", CHAIN),
        ("mtp", "penalties", CHAIN),
        ("eagle3", "greedy", STATIC),
        ("mtp", "plain", DYNAMIC),
        ("mtp of three", "plain", CHAIN),
        ("eagle", "plain", {**CHAIN, "own_blocks": 20}),
        ("hydra++", "plain", {"num_speculative_tokens": 3}),
        ("eagle3", "cut", CHOSEN),
        pytest.param("mtp of three", "cut", {**DYNAMIC, "own_blocks": 40}, marks=pytest.mark.full),
        pytest.param("eagle", "plain", STATIC, marks=pytest.mark.full),
        pytest.param("eagle", "greedy", DYNAMIC, marks=pytest.mark.full),
        pytest.param("hydra++", "greedy", {**DYNAMIC, "num_speculative_tokens": 8}, marks=pytest.mark.full),
        pytest.param("parallel_heads", "plain", {"num_speculative_tokens": 3}, marks=pytest.mark.full),
    ],
)
def test_nothing_of_it_shows(
    bench: Bench,
    configured: Configure,
    monkeypatch: pytest.MonkeyPatch,
    method: str,
    kind: str,
    more: dict[str, Any],
) -> None:
    """With preemptions of the target; and with a cache of the drafter's that does not hold all requests."""
    config = configured(method, target_blocks=20, **more)
    held = Held(monkeypatch)
    with Engine(config) as engine:
        results = engine.generate(PROMPTS, KINDS[kind])
        metrics = engine.metrics()
        engine.check_integrity()
    assert [one.token_ids for one in results] == bench.alone("llama", kind)
    assert metrics.num_preemptions > 0
    assert metrics.num_draft_tokens > 0
    # How much the controller has drafted depends on how long it takes.
    assert metrics.num_accepted_tokens > 10 or more is CHOSEN
    window = draft_window(config.speculative_config)
    assert window is not None
    for num, blocks in held.most.items():
        assert blocks <= num * window.max_blocks(1 << 20, 4)


@pytest.mark.parametrize("method", ["eagle", "hydra++"])
def test_a_pool_smaller_than_a_window_is_told(
    configured: Configure, method: str, caplog: pytest.LogCaptureFixture
) -> None:
    for own_blocks in (5, 40):
        caplog.clear()
        with Engine(configured(method, own_blocks=own_blocks, num_speculative_tokens=3)):
            said = [one.getMessage() for one in caplog.records if "kv.budget: 14" in one.getMessage()]
        assert len(said) == (own_blocks == 5)
        assert all("speculative_config.cache.num_blocks: 5 makes a pool of 5 blocks" in one for one in said)


@pytest.mark.parametrize("method", ["eagle", pytest.param("hydra++", marks=pytest.mark.full)])
def test_a_cached_prefix_is_read_from_its_rows_piece_by_piece(
    bench: Bench, configured: Configure, method: str
) -> None:
    with Engine(configured(method, target_blocks=200, num_speculative_tokens=3)) as engine:
        for _ in range(2):
            results = engine.generate(PROMPTS, GREEDY)
            assert [one.token_ids for one in results] == bench.alone("llama", "greedy")
            assert engine.metrics().num_accepted_tokens > 10
        assert engine.metrics().prefix_cache_hits > 100


@pytest.mark.parametrize("method", ["eagle3", "mtp of three"])
def test_what_a_long_text_holds_is_what_a_short_one_holds(
    configured: Configure, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    config = configured(method, **CHAIN)
    generator = random.Random(1)
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    most: list[int] = []
    for length in (40, 200):
        held = Held(monkeypatch)
        with Engine(config) as engine:
            engine.generate([tuple(generator.choices(range(2, VOCAB_SIZE), k=length))], params)
            assert engine.metrics().num_draft_tokens > 0
        most.append(held.most[1])
        monkeypatch.undo()
    assert 0 < most[1] <= most[0]


@pytest.mark.parametrize(
    ("method", "more"),
    [
        ("eagle", CHAIN),
        ("eagle3", DYNAMIC),
        ("mtp of three", CHAIN),
    ],
)
def test_with_a_budget_above_the_length_as_many_drafts_stand_as_without(
    configured: Configure, method: str, more: dict[str, Any]
) -> None:
    counted: list[tuple[int, int]] = []
    for kv in ({}, {"policy": "streaming", "budget": 96}, STREAMING):
        with Engine(configured(method, kv=kv, **more)) as engine:
            for kind in ("greedy", "plain"):
                generate_each(engine, PROMPTS, KINDS[kind])
            metrics = engine.metrics()
            counted.append((metrics.num_draft_tokens, metrics.num_accepted_tokens))
    assert counted[0] == counted[1]
    assert counted[0] != counted[2], "the control"


@pytest.mark.cover(1)
@pytest.mark.parametrize("method", ["eagle3", "mtp", "hydra++"])
@pytest.mark.parametrize("more", [{"num_speculative_tokens": 3}, {**DYNAMIC, "num_speculative_tokens": 8}])
def test_compiled_they_draft_what_they_draft_eagerly(
    bench: Bench, configured: Configure, method: str, more: dict[str, Any]
) -> None:
    counted: list[tuple[int, int]] = []
    for mode in ("off", "auto"):
        with Engine(configured(method, compile={"mode": mode}, **more)) as engine:
            engine.warm_up()
            if engine.idle_work[1].state != ("off" if mode == "off" else "ready"):
                pytest.skip("no compiled drafters here")
            for kind in ("greedy", "plain"):
                results = engine.generate(PROMPTS, KINDS[kind])
                assert [one.token_ids for one in results] == bench.alone("llama", kind)
            metrics = engine.metrics()
            counted.append((metrics.num_draft_tokens, metrics.num_accepted_tokens))
    assert counted[0] == counted[1]
    assert counted[0][1] > 20


OWN = (None, 12, 24, 0.9, 4096, 12, None, 20)


def test_requests_have_budgets_of_their_own(
    bench: Bench, configured: Configure, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the first piece of their prompts on, and the engine's changes while it runs."""
    seen: dict[str, set[int]] = {}
    run = LocalTarget.run

    def seeing(target: LocalTarget, step: TargetStep) -> Any:
        for work in step.works:
            seen.setdefault(work.request_id, set()).add(work.kv_budget)
        return run(target, step)

    monkeypatch.setattr(LocalTarget, "run", seeing)
    params = KINDS["plain"]
    with Engine(configured("eagle3", target_blocks=24, **CHAIN)) as engine:
        for index, (prompt, own) in enumerate(zip(PROMPTS, OWN, strict=True)):
            one = request(f"r{index}", prompt, params, seed=index)
            engine.add_request(msgspec.structs.replace(one, kv_budget=own))
        got: dict[str, list[int]] = {}
        number = 0
        while engine.has_work:
            number += 1
            if number == 8:
                engine.set_kv_budget(18)
            for output in engine.step():
                got.setdefault(output.request_id, []).extend(output.token_ids)
        assert engine.metrics().num_accepted_tokens > 10
        with pytest.raises(InputError, match="7 tokens do not hold"):
            engine.add_request(msgspec.structs.replace(one, request_id=RequestId("x"), kv_budget=7))
    monkeypatch.undo()
    with Engine(configured("eagle3", kv={}, **CHAIN)) as engine:
        for index, prompt in enumerate(PROMPTS):
            engine.add_request(request(f"r{index}", prompt, params, seed=index))
        alone: dict[str, list[int]] = {}
        while engine.has_work:
            for output in engine.step():
                alone.setdefault(output.request_id, []).extend(output.token_ids)
    assert got == alone
    assert [seen[f"r{index}"] for index in (1, 2, 4, 5, 7)] == [{12}, {24}, {4096}, {12}, {20}]
    assert seen["r0"] | seen["r6"] == {14, 18}


def beside_lookup(
    bench: Bench,
    drafters: FittedDrafters,
    heads: dict[str, Any],
    lookup: dict[str, Any] | None = None,
    **more: Any,
) -> EngineConfig:
    """Heads with a window as one of two drafters."""
    both = [
        {"name": "lookup", "method": "ngram", "prompt_lookup_min": 1, **(lookup or {})},
        {
            "name": "heads",
            "method": "eagle3",
            "model": str(drafters.folder_of("eagle3")),
            "cache": {"block_size": 4, "num_blocks": 100},
            **heads,
        },
    ]
    return config_of(bench, None, "several", model=None, drafters=both, **more)


@pytest.mark.parametrize("kind", ["greedy", "plain"])
def test_they_are_one_of_several_drafters(
    bench: Bench, drafters: FittedDrafters, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    config = beside_lookup(
        bench,
        drafters,
        {"kv": STREAMING, "share": 0.5},
        {"share": 0.5},
        cache={"block_size": 4, "num_blocks": 20},
    )
    held = Held(monkeypatch)
    with Engine(config) as engine:
        results = engine.generate(PROMPTS, KINDS[kind])
        metrics = engine.metrics()
        engine.check_integrity()
    assert [one.token_ids for one in results] == bench.alone("llama", kind)
    assert metrics.by_drafter["heads"].num_accepted_tokens > 0
    assert metrics.by_drafter["lookup"].num_drafts > 0
    window = draft_window(config.speculative_config.at_target)
    assert window is not None
    assert all(blocks <= num * window.max_blocks(1 << 20, 4) for num, blocks in held.most.items())


@pytest.mark.parametrize("kind", ["greedy", "plain"])
def test_as_one_of_several_their_budget_changes_with_the_drafter(
    bench: Bench, drafters: FittedDrafters, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """They read along whoever drafts, and never keep more than the largest of their budgets."""
    kv = {"policy": "streaming", "budget": [12, 24, "50%"], "floor": 12}
    config = beside_lookup(bench, drafters, {"kv": kv}, cache={"block_size": 4, "num_blocks": 20})
    seen: set[int] = set()
    run = LocalTarget.run

    def seeing(target: LocalTarget, step: TargetStep) -> Any:
        seen.update(work.kv_budget for work in step.works)
        return run(target, step)

    monkeypatch.setattr(LocalTarget, "run", seeing)
    held = Held(monkeypatch)
    rng = random.Random(2)
    with Engine(config) as engine:
        parts = engine._parts
        assert parts.drafters is not None
        assert parts.kv_budgets is not None
        options = config.speculative_config.at_target.kv.budgets
        parts.drafters.pick = lambda _request_id, _class_name: rng.randrange(2)
        parts.kv_budgets.pick = lambda _request_id, _class_name: rng.choice(options)
        results = engine.generate(PROMPTS, KINDS[kind])
        metrics = engine.metrics()
        engine.check_integrity()
    assert [one.token_ids for one in results] == bench.alone("llama", kind)
    assert metrics.by_drafter["heads"].num_accepted_tokens > 0
    assert metrics.by_drafter["lookup"].num_drafts > 0
    assert {12, 24} < seen
    assert 0 not in seen, "they hear of a request's budget while another has it, too"
    window = draft_window(config.speculative_config.at_target)
    assert window is not None
    longest = max(map(len, PROMPTS)) + 64
    assert all(blocks <= num * window.max_blocks(longest, 4) for num, blocks in held.most.items())


@pytest.mark.parametrize("is_own", [True, False])
def test_a_larger_budget_than_configured_counts_before_they_get_the_request(
    bench: Bench, drafters: FittedDrafters, monkeypatch: pytest.MonkeyPatch, is_own: bool
) -> None:
    """What they leave out while another drafter has it would be lost for good."""
    config = beside_lookup(bench, drafters, {"kv": STREAMING}, controller="fixed")
    longest = max(range(len(PROMPTS)), key=lambda index: len(PROMPTS[index]))
    token_ids: list[int] = []
    num_dropped: set[int] = set()
    propose = DraftModelProposer.propose

    def watched(proposer: DraftModelProposer, *arguments: Any) -> dict[RequestId, Proposal]:
        proposals = propose(proposer, *arguments)
        num_dropped.update(state.table.num_dropped for state in proposer.sequences._states.values())
        return proposals

    monkeypatch.setattr(DraftModelProposer, "propose", watched)
    with Engine(config) as engine:
        parts, num_rounds = engine._parts, 0
        assert parts.drafters is not None
        parts.drafters.pick = lambda _request_id, _class_name: int(num_rounds >= 4)
        one = request("a", PROMPTS[longest], KINDS["greedy"], seed=longest)
        if not is_own:
            engine.set_kv_budget(64)
        engine.add_request(msgspec.structs.replace(one, kv_budget=64 if is_own else None))
        while engine.has_work:
            for output in engine.step():
                token_ids += output.token_ids
            num_rounds += 1
        assert engine.metrics().by_drafter["heads"].num_drafts > 0
    assert num_dropped == {0}
    assert tuple(token_ids) == bench.alone("llama", "greedy")[longest]


@pytest.mark.parametrize(
    ("method", "kind", "more"),
    [
        ("eagle3", "plain", CHAIN),
        ("mtp", "greedy", DYNAMIC),
        pytest.param("parallel_heads", "plain", {"num_speculative_tokens": 3}, marks=pytest.mark.full),
    ],
)
def test_in_draft_workers_as_beside_the_target(
    bench: Bench,
    drafters: FittedDrafters,
    monkeypatch: pytest.MonkeyPatch,
    method: str,
    kind: str,
    more: dict[str, Any],
) -> None:
    config = remote_config(bench, drafters, method, kv=STREAMING, **more)
    held = Held(monkeypatch)
    remote = RemoteHeads(config)
    assert generate_each(remote.engine, PROMPTS, KINDS[kind]) == bench.alone("llama", kind)
    num_drafted, num_accepted = remote.acceptance
    assert num_accepted > 0.2 * num_drafted > 5
    remote.check_nothing_is_left()
    remote.close()
    window = draft_window(config.speculative_config)
    assert window is not None
    assert all(blocks <= num * window.max_blocks(1 << 20, 16) for num, blocks in held.most.items())


@pytest.mark.full
def test_for_a_target_over_two_ranks(bench: Bench, configured: Configure, rank_pool: Pools) -> None:
    config = configured("eagle3", target={"tensor_parallel_size": 2}, **CHAIN)
    streams, num_accepted = rank_pool(2).run(serve, config)[0]
    assert streams == bench.alone("llama", "greedy")
    assert num_accepted > 20


@pytest.mark.parametrize("rule", ["rejection", pytest.param("block", marks=pytest.mark.full)])
def test_rules_that_look_at_probabilities_get_them(bench: Bench, configured: Configure, rule: str) -> None:
    with Engine(configured("eagle", rejection_sample_method=rule, **CHAIN)) as engine:
        results = engine.generate(PROMPTS, GREEDY)
        assert [one.token_ids for one in results] == bench.alone("llama", "greedy")
        before = engine.metrics().num_accepted_tokens
        engine.generate(PROMPTS, SamplingParams(temperature=0.8, max_tokens=16, seed=3))
        assert engine.metrics().num_accepted_tokens > before


@pytest.mark.parametrize("place", ["target", "draft_pool"])
@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"method": "medusa"}, "kv.policy: streaming .* method medusa has none: leave out kv"),
        (
            {"kv": {"policy": "snapkv"}},
            "kv.policy: snapkv needs method self.* heads would have freed.* streaming",
        ),
        ({"kv": {"policy": "verified"}}, "kv.policy: verified needs method self.* write policy: streaming"),
        ({"kv": {"policy": "streaming", "budget": 7}}, r"kv.budget: 7 tokens do not hold .* at least 8"),
        ({"kv": {"policy": "streaming", "positions": "in_cache"}}, "method eagle3 tokens keep theirs"),
        ({"kv": {"policy": "streaming", "dtype": "int8"}}, "kv.dtype: int8 .* method eagle3 makes none"),
        ({**DYNAMIC, "kv": {"policy": "streaming", "budget": 12}}, r"kv.budget: 12 tokens .* at least 14"),
    ],
)
def test_what_does_not_go_together_is_refused(fields: dict[str, Any], message: str, place: str) -> None:
    config = {"method": "eagle3", "model": "x", "heads_at": place, "kv": STREAMING, **fields}
    with pytest.raises(ValueError, match=message):
        SpeculativeConfig.model_validate(config)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kv": STREAMING}, r"kv\.policy: streaming .* the heads in .* have none: leave out kv"),
        ({"max_model_len": 64}, r"speculative_config\.max_model_len: 64 .* have none: leave it out"),
    ],
)
def test_heads_that_turn_out_to_have_no_kv_are_refused(
    bench: Bench, drafters: FittedDrafters, settings: dict[str, Any], message: str
) -> None:
    config = config_of(bench, Path(drafters.folder_of("hydra")), "hydra", **settings)
    with pytest.raises(ConfigError, match=message):
        Engine(config)


@pytest.mark.parametrize(
    ("num_positions", "settings", "said"),
    [
        (64, {}, r"heads was made for texts of up to 64 tokens .* up to 256 here: .*max_model_len: 64 these"),
        (64, {"max_model_len": 100}, "drafts behind up to 100 here"),
        (64, {"max_model_len": 64}, None),
        (256, {}, None),
        (None, {}, None),
    ],
)
def test_heads_that_were_made_for_shorter_texts_are_warned_of(
    bench: Bench,
    drafters: FittedDrafters,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    num_positions: int | None,
    settings: dict[str, Any],
    said: str | None,
) -> None:
    """By `config validate`, and in the same words where they are loaded."""
    folder = tmp_path / "heads"
    shutil.copytree(drafters.folder_of("eagle"), folder)
    file = folder / "config.json"
    stated = json.loads(file.read_text()) | {"max_position_embeddings": num_positions}
    file.write_text(json.dumps({name: value for name, value in stated.items() if value is not None}))
    config = config_of(bench, folder, "eagle", **settings)
    texts = warnings_of(config)
    with caplog.at_level("WARNING", logger="specdec.proposers.heads_factory"), Engine(config):
        pass
    logged = [one.getMessage() for one in caplog.records if one.name == "specdec.proposers.heads_factory"]
    assert logged == texts
    assert len(texts) == (said is not None)
    assert said is None or re.search(said, texts[0]), texts
