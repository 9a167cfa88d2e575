"""Draft models away from the engine follow grammars as those in its process do, and never have to."""

from __future__ import annotations

import errno
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from specdec.core.clock import ManualClock
from specdec.core.errors import InputError, RequestFailed
from specdec.core.ids import RequestId
from specdec.core.sampling_params import Grammar, SamplingParams
from specdec.engine.build_drafter import build_draft_part
from specdec.engine.config import EngineConfig
from specdec.engine.draft_pool.grammar import DraftGrammars
from specdec.engine.draft_pool.remote_proposer import RemoteProposer
from specdec.engine.draft_pool.server import DraftServer
from specdec.engine.draft_pool.shares import DraftShareConfig
from specdec.engine.engine import Engine
from specdec.engine.ranks.follower import follow_drafter
from specdec.engine.ranks.leader import LeadingProposer
from specdec.engine.targets.local_target import LocalTarget
from specdec.model.config import CompileConfig, ModelConfig
from specdec.model.parallel.group import RankGroup
from specdec.proposers.base import ProposerCapabilities
from specdec.proposers.config import SpeculativeConfig
from specdec.sampling.config import GrammarConfig
from specdec.sampling.grammar import GrammarCompiler, GrammarState
from specdec.sampling.sampler import Sampler
from specdec.scheduling.config import SchedulerConfig
from specdec.scheduling.speculation.controller import FixedController
from specdec.transport.base import PeerId
from specdec.transport.memory import Faults, MemoryNetwork
from specdec.transport.messages import DraftOpening, ProposeEntry, Release
from tests.rank_pool import Pools
from tests.specdec.engine.draft_pool.shared_worker import Pool, an_entry
from tests.specdec.engine.grammar_models import EOS, VOCAB_SIZE, GrammarModels, models
from tests.specdec.engine.grammars_of_all_kinds import GRAMMARS, PROMPTS, params_of, streams

pytest.importorskip("llguidance")
__all__ = ["models"]

REMOTE = ProposerCapabilities(name="draft_model", sampled=True, kv="own", remote=True)
NUM_DRAFT_TOKENS = 4


class PromptCompiler(GrammarCompiler):
    """Is always in time."""

    def begin(self, grammar: Grammar, token_ids: Sequence[int] = ()) -> Future[GrammarState]:
        future = super().begin(grammar, token_ids)
        wait([future], 60)
        return future


class SlowCompiler(GrammarCompiler):
    """Is never done."""

    num_begun = 0

    def begin(self, grammar: Grammar, token_ids: Sequence[int] = ()) -> Future[GrammarState]:
        self.num_begun += 1
        return Future()


def compiler(
    models: GrammarModels, kind: type[GrammarCompiler] = PromptCompiler, **bounds: Any
) -> GrammarCompiler:
    return kind(
        models.tokenizer.to_json,
        vocab_size=VOCAB_SIZE,
        eos_token_ids=(EOS,),
        config=GrammarConfig(**bounds),
    )


class Remote:
    """An engine whose draft model is behind a simulated network."""

    def __init__(
        self,
        models: GrammarModels,
        drafter: str,
        grammars: DraftGrammars | None,
        faults: Faults | None = None,
    ) -> None:
        self.clock = ManualClock()
        self.network = MemoryNetwork(seed=1, clock=self.clock)
        self.models, self.drafter, self.grammars = models, drafter, grammars
        self.proposer = RemoteProposer(
            self.network.open(PeerId("coordinator")),
            capabilities=REMOTE,
            vocab_size=VOCAB_SIZE,
            clock=self.clock,
        )
        self.server = self.start("draft-1")
        self.network.faults = faults or Faults()
        self.engine = Engine.from_parts(
            target=LocalTarget(models.runner(0, 1000), Sampler()),
            proposer=self.proposer,
            tokenizer=models.tokenizer,
            scheduler=SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=256),
            controller=FixedController(NUM_DRAFT_TOKENS),
        )

    def start(self, name: str) -> DraftServer:
        """Draft by another worker from now on."""
        channel = self.network.open(PeerId(name))
        channel.admit([self.proposer._channel.address])
        server = DraftServer(
            channel, self.models.proposer(self.drafter, 1000), grammars=self.grammars, clock=self.clock
        )
        self.network.serve(PeerId(name), lambda: server.step(0))
        self.proposer.set_workers([channel.address])
        return server

    def close(self) -> None:
        self.engine.close()
        if self.grammars is not None:
            self.grammars.close()


@pytest.fixture
def remote(models: GrammarModels) -> Iterator[Callable[..., Remote]]:
    made: list[Remote] = []

    def make(drafter: str = "same model", kind: Any = PromptCompiler, **bounds: Any) -> Remote:
        grammars = None if kind is None else DraftGrammars(compiler(models, kind, **bounds))
        made.append(Remote(models, drafter, grammars))
        return made[-1]

    yield make
    for one in made:
        one.close()


def short(kind: str, **fields: Any) -> SamplingParams:
    return params_of(kind, **{"max_tokens": 40, **fields})


class Outcome(NamedTuple):
    streams: Any
    num_drafted: int
    num_accepted: int


def outcome(engine: Engine, params: SamplingParams) -> Outcome:
    results = engine.generate(PROMPTS, params)
    metrics = engine.metrics()
    return Outcome(streams(results), metrics.num_draft_tokens, metrics.num_accepted_tokens)


@cache
def in_process(models: GrammarModels, drafter: str, params: SamplingParams) -> Outcome:
    with models.engine(drafter, NUM_DRAFT_TOKENS) as engine:
        return outcome(engine, params)


COVER = [
    ("schema", "same model", {}),
    ("schema", "other model", {"temperature": 1.5, "top_p": 0.9}),
    ("regex", "same model", {"temperature": 0.0}),
    ("choice", "other model", {"frequency_penalty": 0.5}),
    ("lark", "same model", {}),
    ("gbnf", "other model", {"logit_bias": ((50, 3.0),)}),
]


@pytest.mark.parametrize(("kind", "drafter", "fields"), COVER)
def test_drafts_are_those_of_a_draft_model_in_process(
    models: GrammarModels,
    remote: Callable[..., Remote],
    kind: str,
    drafter: str,
    fields: dict[str, Any],
) -> None:
    """The same noise and the same masks: the same drafts, of which the same are accepted."""
    params = short(kind, **fields)
    expected = in_process(models, drafter, params)
    cluster = remote(drafter)
    assert outcome(cluster.engine, params) == expected
    assert expected.num_accepted > 0
    assert cluster.proposer.counters.get("draft_grammar_failures", 0) == 0


@pytest.mark.full
@pytest.mark.parametrize("kind", GRAMMARS)
@pytest.mark.parametrize("drafter", ["same model", "other model"])
@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.5])
def test_drafts_are_those_of_a_draft_model_in_process_in_every_setting(
    models: GrammarModels, remote: Callable[..., Remote], kind: str, drafter: str, temperature: float
) -> None:
    test_drafts_are_those_of_a_draft_model_in_process(
        models, remote, kind, drafter, {"temperature": temperature}
    )


def test_without_the_grammar_less_is_accepted(models: GrammarModels, remote: Callable[..., Remote]) -> None:
    """The control, and what is lost by a worker that knows no grammars: not a token."""
    params = short("schema")
    expected = in_process(models, "same model", params)
    blind = outcome(remote(kind=None).engine, params)
    assert blind.streams == expected.streams
    assert blind.num_accepted < 0.7 * expected.num_accepted


def test_nobody_waits_for_the_compiler(models: GrammarModels, remote: Callable[..., Remote]) -> None:
    params = short("schema")
    cluster = remote(kind=SlowCompiler)
    slow = outcome(cluster.engine, params)
    assert slow == outcome(remote(kind=None).engine, params)
    assert cluster.proposer.counters.get("draft_grammar_failures", 0) == 0
    assert cluster.grammars is not None
    assert isinstance(cluster.grammars._compiler, SlowCompiler)
    assert cluster.grammars._compiler.num_begun == min(len(PROMPTS), cluster.grammars._compiler.num_threads)
    cluster.network.run_for(0.1)
    assert cluster.grammars.num_waiting == 0, "nothing waits for sequences that have ended"


@pytest.mark.parametrize(
    "bounds",
    [{"max_bytes": 10}, {"max_size": 3}, {"mask_timeout_s": 1e-9}],
    ids=["too long", "too complex", "too slow"],
)
def test_a_failure_costs_drafts_and_is_counted(
    models: GrammarModels, remote: Callable[..., Remote], bounds: dict[str, Any]
) -> None:
    params = short("schema")
    cluster = remote(**bounds)
    failed = outcome(cluster.engine, params)
    assert failed.streams == in_process(models, "same model", params).streams
    assert cluster.proposer.counters["draft_grammar_failures"] == len(PROMPTS)
    assert cluster.server.counters["draft_grammar_failures"] == len(PROMPTS)


def test_what_cannot_be_tried_costs_drafts_and_is_counted(
    models: GrammarModels, remote: Callable[..., Remote]
) -> None:
    class Childless(PromptCompiler):
        def _try(self, *_: object) -> None:
            raise OSError(errno.EAGAIN, "Resource temporarily unavailable")

    params = short("schema")
    cluster = remote(kind=Childless)
    assert outcome(cluster.engine, params).streams == in_process(models, "same model", params).streams
    assert cluster.server.counters["draft_grammar_failures"] == len(PROMPTS)


def test_a_failure_on_the_way(
    models: GrammarModels, remote: Callable[..., Remote], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Masks that take too long from the tenth one on: drafts go on without."""
    params = short("schema")
    expected = in_process(models, "same model", params)
    cluster = remote()
    own, num_masks = GrammarState.allowed_after, 0

    def late(self: GrammarState, drafted: Sequence[int]) -> bytes | None:
        nonlocal num_masks
        num_masks += 1
        if num_masks == 10:
            self.failure = "finding the allowed tokens took 9.00 s"
        return own(self, drafted)

    monkeypatch.setattr(GrammarState, "allowed_after", late)
    found = outcome(cluster.engine, params)
    assert found.streams == expected.streams
    assert 0 < found.num_accepted < expected.num_accepted
    assert cluster.proposer.counters["draft_grammar_failures"] == 1


def test_another_worker_goes_on_where_the_grammar_is(
    models: GrammarModels, remote: Callable[..., Remote]
) -> None:
    """It is told the whole prefix: generated tokens are followed, those of the prompt are not."""
    params = short("schema")
    expected = in_process(models, "same model", params)
    cluster = remote()
    num_steps = 0
    own = cluster.engine.step

    def step() -> Any:
        nonlocal num_steps
        num_steps += 1
        if num_steps == 4:
            cluster.network.kill(PeerId("draft-1"))
            cluster.start("draft-2")
        return own()

    cluster.engine.step = step  # type: ignore[method-assign]
    found = outcome(cluster.engine, params)
    assert num_steps > 6
    assert found.streams == expected.streams
    assert found.num_accepted > 0.9 * expected.num_accepted
    assert cluster.proposer.counters.get("draft_grammar_failures", 0) == 0


def test_coordinators_hear_of_the_draft_side_prefix_cache(
    models: GrammarModels, remote: Callable[..., Remote]
) -> None:
    cluster = remote()
    prompt = list(range(100, 140))
    params = SamplingParams(temperature=0.0, max_tokens=4)
    for _ in range(2):
        cluster.engine.generate([prompt], params)
    told = cluster.proposer.counters
    drafter: Any = cluster.server._proposer
    assert told["draft_prefix_cache_queries"] == drafter.counters["draft_prefix_cache_queries"] == 80
    assert told["draft_prefix_cache_hits"] == drafter.counters["draft_prefix_cache_hits"] == 32
    with models.engine("same model") as engine:
        for _ in range(2):
            engine.generate([prompt], params)
        assert engine.draft_counters == {
            "draft_prefix_cache_queries": 80,
            "draft_prefix_cache_hits": 32,
            "draft_ahead_branches": 0,
            "draft_ahead_branches_true": 0,
            "draft_ahead_branches_left_out": 0,
            "draft_sequences_too_long": 0,
            "draft_windows_reread": 0,
        }


# --------------------------------------------------------------------------------- several coordinators


class ByHandCompiler(GrammarCompiler):
    """Is done when the test says so."""

    def __init__(self, **fields: Any) -> None:
        super().__init__(lambda: None, vocab_size=24, eos_token_ids=(0,), **fields)
        self.begun: list[str] = []
        self.futures: list[Future[GrammarState]] = []

    def begin(self, grammar: Grammar, token_ids: Sequence[int] = ()) -> Future[GrammarState]:
        self.begun.append(grammar.text)
        self.futures.append(Future())
        return self.futures[-1]

    def finish_one(self) -> None:
        """End the one that was begun first."""
        self.futures.pop(0).set_exception(InputError("not today", param="regex"))


def with_grammar(name: str, text: str) -> ProposeEntry:
    opening = DraftOpening(SamplingParams(), 7, 1, None, Grammar(kind="regex", text=text))
    return an_entry(name, [1, 2, 3], opening=opening)


def test_coordinators_take_turns_at_the_compiler() -> None:
    """One sends many grammars, all different; those of the other are compiled in turn with them."""
    made = ByHandCompiler(config=GrammarConfig(num_threads=2))
    pool = Pool(shares=DraftShareConfig(max_sequences=64), grammars=DraftGrammars(made))
    pool.send("bad", *[with_grammar(f"b{index}", f"bad{index}") for index in range(20)])
    pool.serve_all()
    pool.send("good", *[with_grammar(f"g{index}", f"good{index}") for index in range(3)])
    pool.serve_all()
    assert made.begun == ["bad0", "bad1"], "one for each thread"
    for _ in range(8):
        made.finish_one()
    assert [text for text in made.begun if "good" in text] == ["good0", "good1", "good2"]
    order = [text.rstrip("0123456789") for text in made.begun]
    assert order[2:8] in (["bad", "good"] * 3, ["good", "bad"] * 3)
    assert len(made.begun) == 10
    assert len(made.futures) == 2


def test_nothing_waits_for_grammars_that_cannot_be_begun() -> None:
    """However many do: each ends at once, in turn."""

    class Failing(ByHandCompiler):
        def begin(self, grammar: Grammar, token_ids: Sequence[int] = ()) -> Future[GrammarState]:
            future = super().begin(grammar, token_ids)
            if self.futures.index(future) > 0:
                future.set_exception(RequestFailed("not now", code="grammar_not_compiled"))
            return future

    made = Failing(config=GrammarConfig(num_threads=1))
    grammars = DraftGrammars(made)
    followed = [grammars.follow(Grammar("regex", f"a{index}"), [1, 2], 1, "one") for index in range(3000)]
    assert grammars.num_waiting == 2999
    made.futures[0].set_exception(InputError("not today", param="regex"))
    assert grammars.num_waiting == 0
    assert [one.allowed_after(()) for one in followed if one is not None] == [None] * 3000
    assert grammars.counters["grammar_failures"] == 3000


def test_grammars_of_forgotten_sequences_are_not_compiled() -> None:
    """Who opens and releases at once leaves nothing behind."""
    made = ByHandCompiler(config=GrammarConfig(num_threads=1))
    grammars = DraftGrammars(made)
    pool = Pool(shares=DraftShareConfig(max_sequences=16), grammars=grammars)
    for tick in range(50):
        pool.send("bad", *[with_grammar(f"{tick}-{index}", f"bad{tick}-{index}") for index in range(12)])
        pool.serve_all()
        assert grammars.num_waiting <= 16, "no more than sequences"
        released = tuple((RequestId(f"{tick}-{index}"), 1) for index in range(12))
        pool.channels["bad"].send(PeerId("draft"), Release(released))
        pool.serve_all()
        assert grammars.num_waiting == 0
    pool.send("good", with_grammar("g", "good"))
    pool.serve_all()
    made.finish_one()
    assert made.begun == ["bad0-0", "good"]


def test_compiling_goes_on_in_threads_until_nothing_waits(models: GrammarModels) -> None:
    """The turns, with the real compiler: all are followed in the end, whatever the order."""
    grammars = DraftGrammars(compiler(models, GrammarCompiler))
    followed = [
        grammars.follow(Grammar(kind="regex", text=f"a{{{index + 1}}}"), [], 0, owner)
        for index in range(10)
        for owner in ("one", "two")
    ]
    until_s = time.monotonic() + 60
    while any(one is not None and one.allowed_after(()) is None for one in followed):
        assert time.monotonic() < until_s
        time.sleep(0.01)
    assert grammars.num_waiting == 0
    grammars.close()


# --------------------------------------------------------------------------------- over several ranks


def draft_config(folder: Path, size: int) -> EngineConfig:
    return EngineConfig(
        target=ModelConfig(model=str(folder), dtype="float32", compile=CompileConfig(mode="off")),
        speculative_config=SpeculativeConfig.model_validate(
            {
                "controller": "fixed",
                "method": "draft_model",
                "model": str(folder),
                "dtype": "float32",
                "draft_tensor_parallel_size": size,
                "compile": {"mode": "off"},
                "cache": {"num_blocks": 1000, "block_size": 8},
            }
        ),
    )


def draft_over_ranks(group: RankGroup, folder: Path, knows_grammars: bool, params: SamplingParams) -> Any:
    """Rank 0: what an engine makes of drafts of all ranks."""
    part = build_draft_part(draft_config(folder / "bytes-0", group.size), group)
    models = GrammarModels(folder / "of-ranks")  # files of the part must stay as they are
    if group.rank > 0:
        kind = PromptCompiler if knows_grammars else SlowCompiler
        grammars = DraftGrammars(compiler(models, kind))
        follow_drafter(part, group, grammars)
        grammars.close()
        return None
    with Engine.from_parts(
        target=LocalTarget(models.runner(0, 1000), Sampler()),
        proposer=LeadingProposer(part, group),
        tokenizer=models.tokenizer,
        scheduler=SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=256),
        controller=FixedController(NUM_DRAFT_TOKENS),
    ) as engine:
        return outcome(engine, params)


@pytest.mark.parametrize("kind", [pytest.param("schema", marks=pytest.mark.full), "regex"])
def test_ranks_of_a_draft_model_follow_a_grammar(rank_pool: Pools, models: GrammarModels, kind: str) -> None:
    params = short(kind)
    expected = in_process(models, "same model", params)
    folder = models._folder
    assert rank_pool(2).run(draft_over_ranks, folder, True, params)[0] == expected
    one_sided = rank_pool(2).run(draft_over_ranks, folder, False, params)[0]
    assert one_sided.streams == expected.streams
    assert one_sided.num_accepted < expected.num_accepted
