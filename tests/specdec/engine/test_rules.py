"""Verification rules in running engines: distributions, greedy identity, refusals, and over the wire."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
from pydantic import ValidationError

from specdec.core.distributions import TokenDistribution
from specdec.core.errors import ConfigError
from specdec.core.ids import RequestId
from specdec.core.proposal import Proposal
from specdec.core.sampling_params import SamplingParams
from specdec.core.sequence import SequenceView
from specdec.engine.config import EngineConfig
from specdec.engine.engine import Engine
from specdec.engine.targets.toy_runner import ToyRunner
from specdec.engine.targets.toy_target import ToyModel, ToyTarget
from specdec.kv.config import CacheConfig
from specdec.model.config import CompileConfig, ModelConfig
from specdec.proposers.base import Proposer, ProposerCapabilities
from specdec.proposers.config import SpeculativeConfig
from specdec.proposers.draft_choice import DraftChoice
from specdec.proposers.draft_model import DraftModelProposer
from specdec.proposers.draft_sampling import DraftSampling
from specdec.proposers.lookup_config import SuffixConfig
from specdec.proposers.ngram import NgramProposer
from specdec.proposers.suffix import SuffixProposer
from specdec.sampling.sampler import Sampler
from specdec.transport.memory import Faults
from specdec.transport.messages import ProposeAnswer, ProposeReply, decode, encode
from specdec.verification.registry import capabilities_of
from tests.architectures import save_model
from tests.pairwise import mostly_full
from tests.specdec.engine import remote_cluster, toy_engines
from tests.specdec.engine.judged_engines import JUDGED, LOSSLESS, drafter_for, engine_of, judge_of
from tests.specdec.engine.remote_cluster import Cluster, a_request
from tests.specdec.engine.stream_frequencies import TINY_DRAFT, p_value
from tests.specdec.engine.toy_engines import request, run, tokens_of

# ---- temperature 0 ------------------------------------------------------------------------------


def proposers_for(rule: str) -> Iterator[Proposer]:
    similar = ToyModel(toy_engines.VOCAB_SIZE, seed=1, perturbation=0.2)
    yield drafter_for(rule, toy_engines.MODEL)
    yield drafter_for(rule, similar, top_k=3, num_blocks=40)
    yield NgramProposer(prompt_lookup_min=1, prompt_lookup_max=3)
    yield toy_engines.OracleProposer(wrong_from=2)


@pytest.mark.parametrize("rule", ["sample_and_match", *JUDGED])
def test_greedy_tokens_are_the_targets(rule: str) -> None:
    requests = [request(f"r{n}", [1 + n % 3, 2, 3, 1, 2], seed=n) for n in range(6)]
    for proposer in proposers_for(rule):
        engine = engine_of(rule, toy_engines.MODEL, proposer, num_draft_tokens=3)
        outputs = run(engine, *requests)
        for one in requests:
            assert tokens_of(outputs[one.request_id]) == toy_engines.expected_tokens(one)
        assert engine.metrics().num_draft_tokens > 0
        assert engine.metrics().num_lossy_tokens == 0


# ---- the distribution ---------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("rule", mostly_full(LOSSLESS, ["block"]))
def test_what_comes_out_is_distributed_as_the_target(rule: str) -> None:
    assert p_value(rule, drafter_for(rule, TINY_DRAFT)) > 1e-4


@pytest.mark.full
@pytest.mark.slow
def test_a_drafter_may_cut_its_own_distribution() -> None:
    assert p_value("block", drafter_for("block", TINY_DRAFT, top_k=2)) > 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("rule", mostly_full(["rejection", "block"], ["rejection"]))
def test_deterministic_drafts_are_exact(rule: str) -> None:
    assert p_value(rule, NgramProposer(prompt_lookup_min=1, prompt_lookup_max=3)) > 1e-4


def suffix_of(rule: str, **settings: object) -> SpeculativeConfig:
    return SpeculativeConfig.model_validate(
        {"method": "suffix", "rejection_sample_method": rule, "allow_lossy": True, "suffix": settings}
    )


@pytest.mark.slow
@pytest.mark.parametrize("rule", mostly_full(LOSSLESS, ["rejection"]))
def test_the_same_request_again_is_sampled_like_the_first(rule: str) -> None:
    """Its own text is looked up, and not what the same random numbers have decided before."""
    proposer = SuffixProposer(suffix_of(rule, min_token_probability=0.0).lookup)
    assert p_value(rule, proposer, num_streams=2_000, num_times=3, num_more=3) > 1e-4


@pytest.mark.slow
def test_control_texts_of_the_same_seed() -> None:
    proposer = SuffixProposer(SuffixConfig())
    assert p_value("rejection", proposer, num_streams=2_000, num_times=3, num_more=3) < 1e-10


@pytest.mark.parametrize("rule", ["sample_and_match", *JUDGED])
def test_which_rules_share_texts_between_requests(rule: str) -> None:
    shares = rule not in LOSSLESS
    assert (suffix_of(rule).lookup.num_shared_tokens > 0) == shares
    assert suffix_of(rule, max_shared_tokens=0).lookup.num_shared_tokens == 0
    if shares:
        assert suffix_of(rule, max_shared_tokens=100).lookup.num_shared_tokens == 100
    else:
        with pytest.raises(ValidationError, match=r"suffix\.max_shared_tokens: 100 does not go with"):
            suffix_of(rule, max_shared_tokens=100)


@pytest.mark.slow
def test_control_typical_is_lossy() -> None:
    assert p_value("typical", drafter_for("typical", TINY_DRAFT), num_streams=2_000) < 1e-10


class Boastful(DraftModelProposer):
    """Tells of a sharper q than it has drawn from."""

    def propose(
        self, sequences: Sequence[SequenceView], num_draft_tokens: Mapping[RequestId, int]
    ) -> dict[RequestId, Proposal]:
        made = super().propose(sequences, num_draft_tokens)
        return {
            name: msgspec.structs.replace(proposal, q_rows=tuple(map(sharper, proposal.q_rows or ())))
            for name, proposal in made.items()
        }


def sharper(row: TokenDistribution) -> TokenDistribution:
    q = np.frombuffer(row.probabilities, np.float32) ** 2
    return TokenDistribution(row.token_ids, (q / q.sum()).astype(np.float32).tobytes())


@pytest.mark.slow
def test_control_q_at_another_temperature() -> None:
    sampling = DraftSampling.under(capabilities_of("rejection"))
    choice = DraftChoice(sampler=Sampler(), vocab_size=4, sampling=sampling)
    proposer = Boastful(ToyRunner(TINY_DRAFT), choice)
    assert p_value("rejection", proposer) < 1e-10


# ---- in detail ----------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", LOSSLESS)
def test_a_drafter_that_is_the_target_is_always_right(rule: str) -> None:
    """p and q go through the same transforms at the same positions, or some would be rejected."""
    params = SamplingParams(temperature=0.9, max_tokens=20)
    engine = engine_of(rule, toy_engines.MODEL, drafter_for(rule, toy_engines.MODEL))
    run(engine, *(request(f"r{n}", (1, 2, 3), params, seed=n) for n in range(8)))
    metrics = engine.metrics()
    assert metrics.num_accepted_tokens > 0.99 * metrics.num_draft_tokens > 0


SHAPED = SamplingParams(
    temperature=0.9,
    top_k=60,
    top_p=0.95,
    min_p=0.001,
    repetition_penalty=1.3,
    frequency_penalty=0.4,
    presence_penalty=0.2,
    logit_bias=((5, 2.0), (120, 1.5), (64, -3.0)),
    bad_words=((5, 5), (9,), (120, 64)),
    min_tokens=12,
    max_tokens=16,
    ignore_eos=True,  # what was drafted behind an end is not accepted
)


def share_accepted(folder: Path, rule: str, draft_top_k: int | None) -> float:
    """Of a model that drafts for itself."""
    speculative = {
        "controller": "fixed",
        "method": "draft_model",
        "model": str(folder),
        "rejection_sample_method": rule,
        "draft_top_k": draft_top_k,
        "num_threads": 1,
        "compile": {"mode": "off"},
        "cache": {"num_blocks": 60, "block_size": 4},
    }
    config = EngineConfig(
        target=ModelConfig(
            model=str(folder), dtype="float32", num_threads=1, compile=CompileConfig(mode="off")
        ),
        speculative_config=SpeculativeConfig.model_validate(speculative),
        cache=CacheConfig(num_blocks=60, block_size=4),
    )
    with Engine(config) as engine:
        engine.generate([[5, 9, 23, 5, 9], [40] * 6, [7, 8, 9]], SHAPED)
        metrics = engine.metrics()
        assert metrics.num_draft_tokens > 20
        return metrics.num_accepted_tokens / metrics.num_draft_tokens


@pytest.mark.parametrize("rule", LOSSLESS)
def test_every_parameter_reaches_p_and_q_at_every_position(rule: str, tmp_path: Path) -> None:
    save_model(tmp_path)
    assert share_accepted(tmp_path, rule, None) == 1.0
    assert share_accepted(tmp_path, rule, 5) < 0.9, "control: another q"


@pytest.mark.parametrize("rule", JUDGED)
def test_the_same_seed_gives_the_same_tokens(rule: str) -> None:
    params = SamplingParams(temperature=1.0, max_tokens=20, logprobs=2)
    similar = ToyModel(toy_engines.VOCAB_SIZE, seed=1, perturbation=0.0)

    def generate(seed: int) -> tuple[list[int], int]:
        engine = engine_of(rule, toy_engines.MODEL, drafter_for(rule, similar))
        outputs = run(engine, request("r", (1, 2, 3), params, seed=seed))["r"]
        tokens = tokens_of(outputs)
        logprobs = [entry.token_id for output in outputs for entry in output.logprobs or ()]
        assert logprobs == tokens
        return tokens, engine.metrics().num_lossy_tokens

    found = [generate(seed) for seed in (1, 2, 3)]
    assert found == [generate(seed) for seed in (1, 2, 3)]
    assert len({tuple(tokens) for tokens, _ in found}) > 1
    for tokens, num_lossy in found:
        assert (0 < num_lossy <= len(tokens)) == (rule == "typical")


@pytest.mark.parametrize("rule", JUDGED)
def test_requests_of_all_kinds_share_a_batch(rule: str) -> None:
    """Greedy and sampled, long and short prompts, preempted in a small pool."""
    rng = random.Random(3)
    target = ToyTarget(toy_engines.MODEL, num_blocks=14, judge=judge_of(rule))
    engine = toy_engines.toy_engine(
        drafter_for(rule, toy_engines.MODEL, num_blocks=30), target=target, max_num_batched_tokens=16
    )
    requests = [
        request(
            f"r{n}",
            rng.choices(range(toy_engines.VOCAB_SIZE), k=rng.randint(1, 20)),
            SamplingParams(temperature=rng.choice([0.0, 1.0]), max_tokens=rng.randint(1, 20)),
            seed=n,
        )
        for n in range(12)
    ]
    outputs = run(engine, *requests)
    for one in requests:
        tokens = tokens_of(outputs[one.request_id])
        assert len(tokens) == one.params.max_tokens
        if one.params.is_greedy:
            assert tokens == toy_engines.expected_tokens(one)
    assert engine.metrics().num_preemptions > 0


# ---- what is refused ----------------------------------------------------------------------------


class Named:
    """A proposer that never runs."""

    def __init__(self, capabilities: ProposerCapabilities) -> None:
        self.capabilities = capabilities

    def propose(
        self, sequences: Sequence[SequenceView], num_draft_tokens: Mapping[RequestId, int]
    ) -> dict[RequestId, Proposal]:
        raise AssertionError

    def release(self, request_ids: object) -> None:
        """Nothing is kept."""

    def close(self) -> None:
        """Nothing is held."""


@pytest.mark.parametrize(
    ("rule", "capabilities", "message"),
    [
        (
            "rejection",
            ProposerCapabilities(name="it", sampled=True, noise_stream="draft"),
            r"rejection needs the distributions \(q\) .* it gives none: use sample_and_match",
        ),
        (
            "block",
            ProposerCapabilities(name="it", sampled=True),
            "needs drafts sampled with noise stream 'draft'",
        ),
        ("typical", ProposerCapabilities(name="it", sampled=True), "it samples with 'target'"),
        ("block", ProposerCapabilities(name="it", shape="tree"), "takes chains, but it drafts trees"),
    ],
)
def test_a_proposer_that_does_not_fit_the_rule(
    rule: str, capabilities: ProposerCapabilities, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        engine_of(rule, toy_engines.MODEL, Named(capabilities))
    engine_of("sample_and_match", toy_engines.MODEL, Named(capabilities)).close()


Q_ROW = TokenDistribution(np.array([3, 5], np.uint32).tobytes(), np.array([0.5, 0.5], np.float32).tobytes())


class Faulty(Named):
    """Proposes token 3 again and again, with something wrong."""

    def __init__(self, **wrong: object) -> None:
        super().__init__(drafter_for("rejection", toy_engines.MODEL).capabilities)
        self._wrong = wrong

    def propose(
        self, sequences: Sequence[SequenceView], num_draft_tokens: Mapping[RequestId, int]
    ) -> dict[RequestId, Proposal]:
        return {
            one.request_id: Proposal(
                **{  # type: ignore[arg-type]
                    "request_id": one.request_id,
                    "committed_len": one.committed_len,
                    "prefix_hash": one.prefix_hash,
                    "token_ids": (3,),
                    "noise_stream": "draft",
                    "q_rows": (Q_ROW,),
                    **self._wrong,
                }
            )
            for one in sequences
            if num_draft_tokens.get(one.request_id)
        }


@pytest.mark.parametrize(
    ("wrong", "is_used"),
    [
        ({}, True),
        ({"noise_stream": None, "q_rows": None}, True),
        ({"q_rows": None}, False),
        ({"noise_stream": None}, False),
        ({"noise_stream": "target"}, False),
        ({"q_rows": ()}, False),
        ({"q_rows": (Q_ROW, Q_ROW)}, False),
        ({"token_ids": (4,)}, False),
        ({"q_rows": (TokenDistribution(b"\0\0\0", b"\0\0\0\0"),)}, False),
        ({"q_rows": (TokenDistribution(Q_ROW.token_ids, Q_ROW.probabilities[:4]),)}, False),
        ({"q_rows": (TokenDistribution(np.uint32([3, 99]).tobytes(), Q_ROW.probabilities),)}, False),
        ({"q_rows": (TokenDistribution(Q_ROW.token_ids, np.float32([0, 1]).tobytes()),)}, False),
    ],
)
def test_what_cannot_be_verified_is_dropped_and_counted(wrong: dict[str, object], is_used: bool) -> None:
    engine = engine_of("rejection", toy_engines.MODEL, Faulty(**wrong))
    params = SamplingParams(temperature=1.0, max_tokens=6)
    assert len(tokens_of(run(engine, request("r", (1, 2), params))["r"])) == 6
    metrics = engine.metrics()
    assert (metrics.num_drafts > 0) == is_used
    assert (metrics.proposals_dropped["unverifiable"] > 0) == (not is_used)


# ---- over the wire ------------------------------------------------------------------------------


def remote(rule: str, faults: Faults, seed: int = 0, **options: int) -> Cluster:
    def make() -> Proposer:
        return drafter_for(rule, remote_cluster.OTHER_MODEL)

    capabilities = replace(make().capabilities, remote=True)
    return Cluster(
        faults, seed, capabilities=capabilities, make_drafter=make, judge=judge_of(rule), **options
    )


@pytest.mark.parametrize("rule", JUDGED)
def test_remote_parts_say_what_local_ones_say(rule: str) -> None:
    """Probabilities cross the wire in full: not a single decision differs."""
    rng = random.Random(4)
    requests = [a_request(f"r{n}", rng) for n in range(8)]
    cluster = remote(rule, Faults())
    metrics = cluster.engine.metrics()
    for one in requests:  # one by one: what shares a round decides when a prompt has been read
        engine = engine_of(rule, remote_cluster.MODEL, drafter_for(rule, remote_cluster.OTHER_MODEL))
        assert cluster.run([one])[one.request_id] == tokens_of(run(engine, one)[one.request_id])
    assert metrics.num_accepted_tokens > 0
    assert not metrics.proposals_dropped


@pytest.mark.parametrize("rule", JUDGED)
def test_drafts_that_a_draft_worker_makes_shorter_are_those_of_a_smaller_k(rule: str) -> None:
    rng = random.Random(4)
    requests = [a_request(f"r{n}", rng) for n in range(8)]
    cluster = remote(rule, Faults(), max_draft_tokens=2)
    for one in requests:
        drafter = drafter_for(rule, remote_cluster.OTHER_MODEL)
        engine = engine_of(rule, remote_cluster.MODEL, drafter, num_draft_tokens=2)
        assert cluster.run([one])[one.request_id] == tokens_of(run(engine, one)[one.request_id])
    metrics = cluster.engine.metrics()
    assert metrics.num_accepted_tokens > 0
    assert not metrics.proposals_dropped


@pytest.mark.parametrize("rule", JUDGED)
@pytest.mark.parametrize("seed", range(3))
def test_a_bad_network_costs_drafts_only(rule: str, seed: int) -> None:
    rng = random.Random(seed)
    requests = [a_request(f"r{n}", rng) for n in range(10)]
    faults = Faults(delay_s=(0.0, 0.02), loss=0.1, duplication=0.1, in_order=False)
    tokens = remote(rule, faults, seed, num_drafters=2).run(requests)
    for one in requests:
        assert len(tokens[one.request_id]) == one.params.max_tokens
        if one.params.is_greedy:
            assert tokens[one.request_id] == remote_cluster.expected(one)


def test_messages_carry_distributions() -> None:
    answer = ProposeAnswer(RequestId("r"), 1, 2, 3, (3,), "draft", None, False, (Q_ROW,))
    reply = ProposeReply(1, (answer, msgspec.structs.replace(answer, q_rows=None)))
    assert decode(encode(reply)) == reply
