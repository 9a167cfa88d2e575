"""Engines over the toy target, drafters that tests put beside it, requests, and the check of what comes."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence

from specdec.core.clock import Clock
from specdec.core.ids import Epoch, RequestId
from specdec.core.outputs import RequestOutput
from specdec.core.plan import TargetStep
from specdec.core.proposal import Proposal
from specdec.core.request import Request
from specdec.core.sampling_params import SamplingParams
from specdec.core.sequence import SequenceView
from specdec.engine.engine import Engine
from specdec.engine.targets.toy_runner import ToyRunner
from specdec.engine.targets.toy_target import ToyModel, ToyTarget, ToyTokenizer
from specdec.kv.selection import KvBudgets
from specdec.proposers.base import Proposer, ProposerCapabilities
from specdec.proposers.draft_choice import DraftChoice
from specdec.proposers.draft_model import DraftModelProposer
from specdec.proposers.draft_sequences import DraftReading
from specdec.proposers.ngram import NgramProposer
from specdec.proposers.none import NoProposer
from specdec.sampling.sampler import Sampler
from specdec.scheduling.config import SchedulerConfig
from specdec.scheduling.speculation.controller import FixedController

VOCAB_SIZE = 16
MODEL = ToyModel(VOCAB_SIZE, seed=1)
GREEDY = SamplingParams(temperature=0.0, max_tokens=20)
SAMPLED = SamplingParams(temperature=1.0, max_tokens=20)


class OracleProposer:
    """Proposes what the target will say, or with `wrong_from` something else from there on."""

    capabilities = ProposerCapabilities(name="oracle")

    def __init__(self, model: ToyModel = MODEL, *, wrong_from: int | None = None) -> None:
        self._model = model
        self._wrong_from = wrong_from
        self.released: list[RequestId] = []

    def propose(
        self, sequences: Sequence[SequenceView], num_draft_tokens: Mapping[RequestId, int]
    ) -> dict[RequestId, Proposal]:
        return {
            one.request_id: self.proposal(one, num_draft_tokens[one.request_id])
            for one in sequences
            if num_draft_tokens.get(one.request_id, 0) > 0
        }

    def proposal(self, one: SequenceView, budget: int) -> Proposal:
        tokens = self._model.continuation(one.token_ids, one.params, one.seed, budget)
        if self._wrong_from is not None:
            tokens[self._wrong_from :] = [(token + 1) % VOCAB_SIZE for token in tokens[self._wrong_from :]]
        return Proposal(
            request_id=one.request_id,
            committed_len=one.committed_len,
            prefix_hash=one.prefix_hash,
            token_ids=tuple(tokens),
            method="oracle",
        )

    def release(self, request_ids: Iterable[RequestId]) -> None:
        self.released.extend(request_ids)

    def close(self) -> None:
        pass


class Forgetful:
    """A drafter that has nothing behind an odd number of tokens, whatever they are."""

    def __init__(self, drafter: Proposer) -> None:
        self._drafter = drafter
        self.capabilities = drafter.capabilities

    def propose(
        self, sequences: Sequence[SequenceView], num_draft_tokens: Mapping[RequestId, int]
    ) -> dict[RequestId, Proposal]:
        made = self._drafter.propose(sequences, num_draft_tokens)
        return {name: one for name, one in made.items() if one.committed_len % 2 == 0}

    def release(self, request_ids: Iterable[RequestId]) -> None:
        self._drafter.release(request_ids)

    def close(self) -> None:
        self._drafter.close()


def toy_draft_model(*, num_blocks: int = 256, max_read_tokens: int = 512) -> DraftModelProposer:
    """A draft model that agrees with the target except for what depends on the whole prefix."""
    similar = ToyModel(VOCAB_SIZE, seed=1, perturbation=0.0)
    runner = ToyRunner(similar, num_blocks=num_blocks)
    return DraftModelProposer(
        runner,
        DraftChoice(sampler=Sampler(), vocab_size=VOCAB_SIZE),
        reading=DraftReading(max_read_tokens=max_read_tokens),
    )


def make_proposer(name: str) -> Proposer:
    """Return the proposer of that name."""
    if name == "none":
        return NoProposer()
    if name == "ngram":
        return NgramProposer(prompt_lookup_min=1, prompt_lookup_max=3)
    if name == "draft_model":
        return toy_draft_model()
    assert name == "oracle"
    return OracleProposer()


def toy_engine(
    proposer: Proposer | None = None,
    *,
    target: ToyTarget | None = None,
    num_draft_tokens: int = 4,
    max_num_seqs: int = 8,
    max_num_batched_tokens: int = 64,
    max_num_waiting: int = 1024,
    clock: Clock | None = None,
    prefix_caching: bool = True,
    kv_budgets: KvBudgets | None = None,
) -> Engine:
    """Return an engine over a toy target of 256 blocks of 4 tokens, unless another one is given."""
    return Engine.from_parts(
        target=target or ToyTarget(MODEL),
        proposer=proposer or NoProposer(),
        tokenizer=ToyTokenizer.of_letters(VOCAB_SIZE),
        scheduler=SchedulerConfig(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_num_waiting=max_num_waiting,
        ),
        controller=FixedController(num_draft_tokens),
        clock=clock,
        prefix_caching=prefix_caching,
        kv_budgets=kv_budgets,
    )


def request(
    name: str = "r",
    prompt: Sequence[int] = (1, 2, 3),
    params: SamplingParams = GREEDY,
    *,
    seed: int = 5,
    epoch: int = 0,
    delivered: Sequence[int] = (),
    num_draft_tokens: int | None = None,
    priority: int = 0,
    owner: str | None = None,
    timeout_s: float | None = None,
) -> Request:
    """Return a request."""
    return Request(
        request_id=RequestId(name),
        prompt_token_ids=tuple(prompt),
        params=params,
        seed=seed,
        epoch=Epoch(epoch),
        delivered_token_ids=tuple(delivered),
        num_draft_tokens=num_draft_tokens,
        priority=priority,
        owner=owner,
        timeout_s=timeout_s,
    )


def expected_tokens(one: Request) -> list[int]:
    """What the model says to a request that ends by max_tokens, computed without an engine."""
    assert one.params.max_tokens is not None
    return MODEL.continuation(one.prompt_token_ids, one.params, one.seed, one.params.max_tokens)


def run(engine: Engine, *requests: Request) -> dict[str, list[RequestOutput]]:
    """Add requests, step until nothing is left, return each one's outputs."""
    for one in requests:
        engine.add_request(one)
    outputs: dict[str, list[RequestOutput]] = {one.request_id: [] for one in requests}
    while engine.has_work:
        for output in engine.step():
            outputs.setdefault(output.request_id, []).append(output)
        engine.check_integrity()
    return outputs


def tokens_of(outputs: Sequence[RequestOutput]) -> list[int]:
    """All tokens of one request, after checking that its outputs fit together."""
    tokens: list[int] = []
    for output in outputs:
        assert output.first_index == outputs[0].first_index + len(tokens)
        tokens.extend(output.token_ids)
        assert output.num_generated_tokens == outputs[0].first_index + len(tokens)
    assert [output.finish_reason is not None for output in outputs] == [False] * (len(outputs) - 1) + [True]
    return tokens


def text_of(outputs: Sequence[RequestOutput]) -> str:
    """All text of one request."""
    return "".join(output.text for output in outputs)


class WatchedTarget(ToyTarget):
    """Remembers its steps."""

    def __init__(self, **options: int) -> None:
        super().__init__(MODEL, **options)
        self.steps: list[TargetStep] = []

    def submit(self, step: TargetStep) -> None:
        self.steps.append(step)
        super().submit(step)


def requests_of(count: int, seed: int = 0, *, max_tokens: int = 24) -> list[Request]:
    """Some greedy, some not; some begin alike."""
    rng = random.Random(seed)
    begin = rng.choices(range(VOCAB_SIZE), k=12)
    return [
        request(
            f"r{index}",
            [*begin[: rng.choice([0, 4, 8, 12])], *rng.choices(range(VOCAB_SIZE), k=rng.randint(1, 9))],
            SamplingParams(temperature=rng.choice([0.0, 0.8, 1.0]), max_tokens=rng.randint(1, max_tokens)),
            seed=rng.getrandbits(64),
        )
        for index in range(count)
    ]


def check_streams(engine: Engine, requests: Sequence[Request]) -> None:
    outputs = run(engine, *requests)
    for one in requests:
        assert tokens_of(outputs[one.request_id]) == expected_tokens(one)
