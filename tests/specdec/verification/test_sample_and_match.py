from __future__ import annotations

import math
import random
from collections.abc import Callable
from itertools import product
from subprocess import run
from sys import executable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specdec.core.proposal import NoiseStream, Verdict
from specdec.core.sampling_params import SamplingParams
from specdec.sampling.sampler import RowSpec, Sampler, SamplingRows, noisy_scores
from specdec.tree.topology import ROOT, Topology, chain
from specdec.verification.base import Draft, TargetRows
from specdec.verification.chance import CounterChance
from specdec.verification.reference import matching_round
from specdec.verification.registry import rule_named
from specdec.verification.sample_and_match import match

Tokens = tuple[int, ...]
VOCAB = 4
PROMPT: Tokens = (0,)
NUM_TOKENS = 24
TREES = [
    Topology.from_parents(parents)
    for num_nodes in range(5)
    for parents in product(*(range(ROOT, node) for node in range(num_nodes)))
]


# ---- the walk -----------------------------------------------------------------------------------


def test_chains() -> None:
    assert match((), None, (7,)) == Verdict(accepted_nodes=(), token_ids=(7,))
    assert match((5, 6), None, (7, 8, 9)) == Verdict(accepted_nodes=(), token_ids=(7,))
    assert match((7, 6), None, (7, 8, 9)) == Verdict(accepted_nodes=(0,), token_ids=(7, 8))
    assert match((7, 8), None, (7, 8, 9)) == Verdict(accepted_nodes=(0, 1), token_ids=(7, 8, 9))
    # Row 2 belongs to a path that was not taken, even though its token fits.
    assert match((5, 8), None, (7, 8, 9)) == Verdict(accepted_nodes=(), token_ids=(7,))


def test_a_tree() -> None:
    topology = Topology.from_parents((-1, -1, 0, 0, 1))
    tokens = (1, 2, 3, 4, 5)
    assert match(tokens, topology, (2, 9, 5, 9, 9, 6)) == Verdict(accepted_nodes=(1, 4), token_ids=(2, 5, 6))
    assert match(tokens, topology, (1, 4, 9, 9, 8, 9)) == Verdict(accepted_nodes=(0, 3), token_ids=(1, 4, 8))
    assert match(tokens, topology, (1, 5, 9, 9, 9, 9)) == Verdict(accepted_nodes=(0,), token_ids=(1, 5))
    assert match(tokens, topology, (3, 3, 3, 3, 3, 3)) == Verdict(accepted_nodes=(), token_ids=(3,))


@given(st.lists(st.integers(0, 2), max_size=6), st.data())
def test_a_chain_is_the_tree_of_its_parents(tokens: list[int], data: st.DataObject) -> None:
    wanted = data.draw(st.lists(st.integers(0, 2), min_size=len(tokens) + 1, max_size=len(tokens) + 1))
    expected = match(tokens, None, wanted)
    assert match(tokens, chain(len(tokens)), wanted) == expected
    # An extra leaf that never matches takes the general path.
    branched = Topology.from_parents((*chain(len(tokens)).parents, ROOT))
    assert match((*tokens, 99), branched, (*wanted, 0)) == expected


def test_numbers_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="need 3 target rows, got 2"):
        match((1, 2), None, (1, 2))
    with pytest.raises(ValueError, match="topology of 3 nodes"):
        match((1, 2), chain(3), (1, 2, 3))


def test_matching_does_not_need_torch() -> None:
    code = "import sys, specdec.verification.sample_and_match; sys.exit('torch' in sys.modules)"
    assert run([executable, "-c", code], check=False).returncode == 0


# ---- whatever drafts, the tokens are those of the token function --------------------------------


class MarkovTarget:
    """A model over VOCAB tokens whose next row depends on the last two."""

    def __init__(self, seed: int, sharpness: float = 1.5) -> None:
        generator = torch.Generator().manual_seed(seed)
        self._logits = torch.randn(VOCAB, VOCAB, VOCAB, generator=generator) * sharpness

    def logits(self, prefix: Tokens) -> torch.Tensor:
        return self._logits[prefix[-2] if len(prefix) > 1 else 0, prefix[-1]]


class Stream:
    """The token function of one request."""

    def __init__(self, model: MarkovTarget, params: SamplingParams, seed: int) -> None:
        self._model, self._params, self._seed = model, params, seed
        self._sampler = Sampler()

    def token(self, prefix: Tokens) -> int:
        return self.tokens([prefix])[0]

    def tokens(self, prefixes: list[Tokens]) -> Tokens:
        rows = SamplingRows.build([RowSpec(self._params, self._seed, len(one), 1) for one in prefixes])
        logits = torch.stack([self._model.logits(prefix) for prefix in prefixes])
        return tuple(self._sampler.sample(logits, rows).token_ids.tolist())

    def ranked(self, prefix: Tokens) -> list[int]:
        """Tokens by falling noisy score: what a drafter of trees proposes."""
        rows = SamplingRows.build([RowSpec(self._params, self._seed, len(prefix), 1)])
        scores = noisy_scores(self._model.logits(prefix)[None], rows)[0]
        return [int(token) for token in scores.argsort(descending=True)]


Children = Callable[[Tokens, int], list[int]]
"""(prefix, number of children) to their tokens."""


def drafters(target: Stream, params: SamplingParams, seed: int) -> dict[str, Children]:
    similar = Stream(MarkovTarget(1, sharpness=1.2), params, seed)
    rng = random.Random(seed)
    return {
        "target itself": lambda prefix, number: target.ranked(prefix)[:number],
        "similar model, same noise": lambda prefix, number: similar.ranked(prefix)[:number],
        "random": lambda prefix, number: [rng.randrange(VOCAB) for _ in range(number)],
        "always wrong": lambda prefix, number: [(target.token(prefix) + 1) % VOCAB] * number,
    }


def draft_tree(topology: Topology, prefix: Tokens, children_of: Children) -> Tokens:
    tokens = [0] * topology.num_nodes
    for row, children in enumerate(topology.children):
        path = (*prefix, *(tokens[node] for node in topology.path(row - 1)))
        for node, token in zip(children, children_of(path, len(children)), strict=True):
            tokens[node] = token
    return tuple(tokens)


def decode(target: Stream, topology: Topology, children_of: Children) -> tuple[Tokens, int]:
    """Tokens after the prompt, and in how many rounds."""
    prefix, num_rounds = PROMPT, 0
    while len(prefix) < NUM_TOKENS:
        tokens = draft_tree(topology, prefix, children_of)
        prefixes = [
            (*prefix, *(tokens[above] for above in topology.path(node)))
            for node in range(ROOT, topology.num_nodes)
        ]
        prefix = (*prefix, *match(tokens, topology, target.tokens(prefixes)).token_ids)
        num_rounds += 1
    return prefix[:NUM_TOKENS], num_rounds


def decode_alone(target: Stream) -> Tokens:
    prefix = PROMPT
    while len(prefix) < NUM_TOKENS:
        prefix = (*prefix, target.token(prefix))
    return prefix


SHAPES = [*[chain(k) for k in range(5)], *random.Random(0).sample(TREES, 8)]


@pytest.mark.cover(1)
@pytest.mark.parametrize("topology", SHAPES, ids=lambda tree: str(tree.parents))
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_tokens_are_those_of_the_target_alone(topology: Topology, temperature: float) -> None:
    params, seed = SamplingParams(temperature=temperature, top_p=0.95), 7
    target = Stream(MarkovTarget(0), params, seed)
    expected = decode_alone(target)
    assert len(set(expected)) > 1
    for name, children_of in drafters(target, params, seed).items():
        tokens, num_rounds = decode(target, topology, children_of)
        assert tokens == expected, name
        if name == "target itself" and topology.is_chain:
            assert num_rounds == math.ceil((NUM_TOKENS - len(PROMPT)) / (topology.max_depth + 1))


def test_the_oracle_agrees() -> None:
    params = SamplingParams(temperature=0.9)
    target = Stream(MarkovTarget(0), params, 3)
    draft = Stream(MarkovTarget(1), params, 3)
    prefix = PROMPT
    while len(prefix) < NUM_TOKENS:
        after = matching_round(target.token, draft.token, prefix, 3)
        tokens = draft_tree(chain(3), prefix, lambda path, number: draft.ranked(path)[:number])
        prefixes = [(*prefix, *tokens[:length]) for length in range(4)]
        assert after == (*prefix, *match(tokens, None, target.tokens(prefixes)).token_ids)
        prefix = after


def test_control_a_stale_proposal_is_noticed() -> None:
    """Rows that were computed after another prefix of the same length give other tokens."""
    params = SamplingParams(temperature=0.9)
    target = Stream(MarkovTarget(0), params, 3)
    prefix = PROMPT
    while len(prefix) < NUM_TOKENS:
        other = (*prefix[:-1], (prefix[-1] + 1) % VOCAB)
        tokens = draft_tree(chain(2), other, lambda path, number: target.ranked(path)[:number])
        prefixes = [(*other, *tokens[:length]) for length in range(3)]
        prefix = (*prefix, *match(tokens, None, target.tokens(prefixes)).token_ids)
    assert prefix[:NUM_TOKENS] != decode_alone(target)


# ---- as a rule ----------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [None, "target", "draft"])
def test_the_rule_takes_any_draft(stream: NoiseStream | None) -> None:
    rule = rule_named("sample_and_match")
    assert not rule.capabilities.needs_p_rows
    assert rule.capabilities.draft_stream == "target"
    draft = Draft(token_ids=(1, 2), first_position=1, parents=(-1, -1), noise_stream=stream)
    found = rule.verify(draft, TargetRows(token_ids=(2, 0, 3)), CounterChance(1))
    assert found == Verdict(accepted_nodes=(1,), token_ids=(2, 3))
    with pytest.raises(ValueError, match="needs the target's tokens"):
        rule.verify(draft, TargetRows(), CounterChance(1))
