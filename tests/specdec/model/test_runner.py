"""The paged runner against transformers' own forward and generate, in fp32."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import replace

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from transformers import PreTrainedModel

from specdec.kv.config import CacheConfig
from specdec.model.batch import PositionShift, SequenceSlice
from specdec.model.runner import ForwardInputs, ModelRunner
from tests.architectures import (
    ARCHITECTURES,
    CORE_ARCHITECTURES,
    ORIGINAL_POSITIONS,
    VOCAB_SIZE,
    make_model,
)
from tests.specdec.model.conftest import Pair

OTHER_ARCHITECTURES = tuple(name for name in ARCHITECTURES if name not in CORE_ARCHITECTURES)
TOLERANCE = 2e-5
PairOf = Callable[[str], Pair]


def random_tokens(count: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(2, VOCAB_SIZE), k=count)


class Tables:
    """Hands out blocks in random order: nothing may depend on where a block lies."""

    def __init__(self, runner: ModelRunner, seed: int = 0) -> None:
        self._block_size = runner.block_size
        self._free = list(range(1, runner.num_blocks))
        random.Random(seed).shuffle(self._free)

    def take(self, num_tokens: int) -> list[int]:
        return [self._free.pop() for _ in range(-(-num_tokens // self._block_size))]


def reference_logits(model: PreTrainedModel, token_ids: Sequence[int]) -> torch.Tensor:
    with torch.inference_mode():
        return model(torch.tensor([list(token_ids)])).logits[0]


def reference_greedy(model: PreTrainedModel, prompt: list[int], count: int) -> list[int]:
    """transformers' own generate, not stopping at EOS."""
    with torch.inference_mode():
        output = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            do_sample=False,
            max_new_tokens=count,
            eos_token_id=None,
            pad_token_id=0,
        )
    return output[0, len(prompt) :].tolist()


def feed(
    runner: ModelRunner,
    token_ids: Sequence[int],
    start: int,
    table: Sequence[int],
    num_logit_rows: int,
    *,
    prompt_len: int = 1,
) -> torch.Tensor:
    piece = SequenceSlice(
        token_ids=list(token_ids),
        start=start,
        block_table=table,
        num_logit_rows=num_logit_rows,
        shift=shift_of(runner, prompt_len),
    )
    return runner.forward([piece]).clone()


def shift_of(runner: ModelRunner, prompt_len: int) -> PositionShift | None:
    """Of a prompt, where the rotary embedding goes by its length."""
    rotary = runner.loaded.rotary
    if rotary is None:
        return None
    variant = rotary.variants.of(num_prompt_tokens=prompt_len, num_tokens=prompt_len)
    return rotary.shift(variant, prompt_len)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_chunked_prefill_gives_the_logits_of_one_forward(pair_of: PairOf, architecture: str) -> None:
    pair = pair_of(architecture)
    runner = pair.runner()
    tokens = random_tokens(45)
    expected = reference_logits(pair.reference, tokens)
    for cuts in ([0, 45], [0, 1, 2, 20, 45], [0, 16, 32, 45], [0, 13, 14, 31, 44, 45]):
        table = Tables(runner, seed=len(cuts)).take(45)
        chunks = [
            feed(runner, tokens[low:high], low, table, high - low, prompt_len=45)
            for low, high in itertools.pairwise(cuts)
        ]
        torch.testing.assert_close(torch.cat(chunks), expected, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize(
    "architecture",
    [*CORE_ARCHITECTURES, *(pytest.param(name, marks=pytest.mark.full) for name in OTHER_ARCHITECTURES)],
)
def test_greedy_decoding_of_a_ragged_batch_is_that_of_generate(pair_of: PairOf, architecture: str) -> None:
    pair = pair_of(architecture)
    runner = pair.runner()
    count = 12
    prompts = [random_tokens(length, seed=length) for length in (1, 5, 14, 33)]
    tables = Tables(runner)
    held = [tables.take(len(prompt) + count) for prompt in prompts]
    fed, generated = [0] * len(prompts), [list(prompt) for prompt in prompts]
    chooser = random.Random(7)
    while any(len(out) < len(prompt) + count for out, prompt in zip(generated, prompts, strict=True)):
        slices, members = [], []
        for index, out in enumerate(generated):
            remaining = len(out) - fed[index]
            if len(out) >= len(prompts[index]) + count or chooser.random() < 0.2:
                continue
            chunk = min(remaining, chooser.choice((1, 7, 40)))
            slices.append(
                SequenceSlice(
                    token_ids=out[fed[index] : fed[index] + chunk],
                    start=fed[index],
                    block_table=held[index],
                    num_logit_rows=int(chunk == remaining),
                )
            )
            members.append(index)
        if not slices:
            continue
        chosen = iter(runner.forward(slices).argmax(-1).tolist())
        for index, piece in zip(members, slices, strict=True):
            fed[index] += len(piece.token_ids)
            if piece.num_logit_rows:
                generated[index].append(next(chosen))
    for out, prompt in zip(generated, prompts, strict=True):
        assert out[len(prompt) :] == reference_greedy(pair.reference, prompt, count)


@pytest.mark.parametrize("architecture", CORE_ARCHITECTURES)
def test_verification_rows_equal_decoding_one_by_one(pair_of: PairOf, architecture: str) -> None:
    pair = pair_of(architecture)
    tokens = random_tokens(30)
    rows = []
    for batched in (False, True):
        runner = pair.runner()
        table = Tables(runner, seed=int(batched)).take(30)
        feed(runner, tokens[:20], 0, table, 0)
        if batched:
            rows.append(feed(runner, tokens[20:], 20, table, 10))
        else:
            rows.append(torch.cat([feed(runner, [tokens[at]], at, table, 1) for at in range(20, 30)]))
    torch.testing.assert_close(rows[1], rows[0], rtol=0, atol=TOLERANCE)
    torch.testing.assert_close(rows[0], reference_logits(pair.reference, tokens)[20:], rtol=0, atol=TOLERANCE)


def test_rejected_tokens_leave_no_trace(pair_of: PairOf) -> None:
    """After a wrong draft the same positions are written again with other tokens."""
    pair = pair_of("llama")
    runner = pair.runner()
    tokens, wrong = random_tokens(24), random_tokens(24, seed=1)
    table = Tables(runner).take(24)
    feed(runner, tokens[:16], 0, table, 0)
    feed(runner, wrong[16:24], 16, table, 8)
    got = torch.cat([feed(runner, tokens[16:20], 16, table, 4), feed(runner, tokens[20:], 20, table, 4)])
    torch.testing.assert_close(got, reference_logits(pair.reference, tokens)[16:], rtol=0, atol=TOLERANCE)


@hypothesis.settings(max_examples=15)
@hypothesis.given(data=st.data())
@pytest.mark.parametrize("architecture", CORE_ARCHITECTURES)
def test_a_tree_gives_each_path_what_it_gets_alone(
    pair_of: PairOf, architecture: str, data: st.DataObject
) -> None:
    pair = pair_of(architecture)
    runner = pair.runner()
    tables = Tables(runner)
    prompt = random_tokens(data.draw(st.sampled_from((1, 11, 26))))
    count = data.draw(st.integers(2, 10))
    # The first row is the last committed token, all others descend from it.
    parents = (-1, *(data.draw(st.integers(0, row - 1)) for row in range(1, count)))
    nodes = random_tokens(count, seed=count)
    table = tables.take(len(prompt) + count)
    neighbour = random_tokens(9, seed=3)
    tree = SequenceSlice(
        token_ids=nodes, start=len(prompt), block_table=table, num_logit_rows=count, parents=parents
    )
    chain = SequenceSlice(token_ids=neighbour, start=0, block_table=tables.take(9), num_logit_rows=2)
    feed(runner, prompt, 0, table, 0)
    got = runner.forward([chain, tree])
    torch.testing.assert_close(
        got[:2], reference_logits(pair.reference, neighbour)[-2:], rtol=0, atol=TOLERANCE
    )
    paths: list[list[int]] = []
    for row, parent in enumerate(parents):
        paths.append([*(paths[parent] if parent >= 0 else []), nodes[row]])
        expected = reference_logits(pair.reference, prompt + paths[row])[-1]
        torch.testing.assert_close(got[2 + row], expected, rtol=0, atol=TOLERANCE)


def test_only_wanted_rows_yield_logits(pair_of: PairOf) -> None:
    pair = pair_of("llama")
    runner = pair.runner()
    tables = Tables(runner)
    prompts = [random_tokens(length, seed=length) for length in (6, 9, 4)]
    wanted = (0, 3, 1)
    slices = [
        SequenceSlice(token_ids=prompt, start=0, block_table=tables.take(len(prompt)), num_logit_rows=rows)
        for prompt, rows in zip(prompts, wanted, strict=True)
    ]
    got = runner.forward(slices)
    expected = torch.cat(
        [
            reference_logits(pair.reference, prompt)[len(prompt) - rows :]
            for prompt, rows in zip(prompts, wanted, strict=True)
        ]
    )
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, expected, rtol=0, atol=TOLERANCE)


def test_a_step_may_want_no_logits_at_all(pair_of: PairOf) -> None:
    runner = pair_of("llama").runner()
    assert feed(runner, [5, 6, 7], 0, [1], 0).shape == (0, VOCAB_SIZE)


def test_a_model_that_cannot_keep_rows_gives_the_same(pair_of: PairOf) -> None:
    runner = pair_of("llama").runner()
    kept = feed(runner, [5, 6, 7], 0, [1], 2)
    runner._keeps_logits = False
    assert torch.equal(feed(runner, [5, 6, 7], 0, [1], 2), kept)


def test_compiled_graphs_are_asked_first(pair_of: PairOf) -> None:
    class Graphs:
        def __init__(self) -> None:
            self.seen: list[int] = []

        def try_run(self, inputs: ForwardInputs) -> torch.Tensor | None:
            self.seen.append(inputs.metadata.num_rows)
            return torch.full((1, VOCAB_SIZE), 7.0) if inputs.metadata.num_rows == 1 else None

    runner = pair_of("llama").runner()
    eager = feed(runner, [5, 6], 0, [1], 1)
    graphs = Graphs()
    runner.graphs = graphs
    assert torch.equal(feed(runner, [5, 6], 0, [1], 1), eager)
    assert feed(runner, [5], 0, [1], 1).eq(7.0).all()
    assert graphs.seen == [2, 1]


def test_sequences_are_no_longer_than_the_cache(pair_of: PairOf, caplog: pytest.LogCaptureFixture) -> None:
    runner = pair_of("llama").runner(num_blocks=11, block_size=4)
    assert runner.max_model_len == 40
    assert "limited to that instead of the model's 256" in caplog.text


@pytest.mark.parametrize(
    ("architecture", "num_tokens"),
    [
        ("llama", 39),
        ("qwen3", 39),
        ("gpt_neox", 39),
        ("llama_linear_rope", 39),
        ("llama_yarn", 39),
        ("llama_yarn", 79),
        ("llama3_rope", 39),
        ("llama3_rope", 79),
        # Shorter and longer than `ORIGINAL_POSITIONS`: with either kind that changes every row.
        ("llama_dynamic_ntk", 31),
        ("llama_dynamic_ntk", 39),
        ("phi3_longrope", 31),
        ("phi3_longrope", 39),
    ],
)
def test_a_part_of_the_context_at_its_own_positions(
    pair_of: PairOf, architecture: str, num_tokens: int
) -> None:
    """Rows behind dropped blocks are those of a forward in which they do not see these tokens."""
    runner = pair_of(architecture).runner(block_size=4)
    size, tokens = runner.block_size, random_tokens(num_tokens)
    first_dropped, first_kept, cut = size, 4 * size, 7 * size + 1
    allowed = torch.ones(len(tokens), len(tokens)).tril()
    allowed[cut:, first_dropped:first_kept] = 0
    mask = torch.zeros(1, 1, len(tokens), len(tokens)).masked_fill(allowed == 0, torch.finfo().min)
    with torch.inference_mode():
        # A fresh one: transformers' own tables remember the longest sequence so far.
        expected = make_model(architecture)(torch.tensor([tokens]), attention_mask=mask).logits[0]
    piece = _behind_a_gap(runner, tokens, cut, (first_dropped, first_kept))
    assert (piece.shift is not None) == (runner.loaded.rotary is not None and num_tokens > ORIGINAL_POSITIONS)
    got = runner.forward([piece])
    torch.testing.assert_close(got, expected[cut:], rtol=0, atol=TOLERANCE)
    wrong = runner.forward([replace(piece, num_dropped=0)])
    assert (wrong - expected[cut:]).abs().max() > 100 * TOLERANCE


@pytest.mark.parametrize("num_kept_before", [5, 13], ids=["few tokens before", "more than a layer sees"])
@pytest.mark.parametrize("architecture", ["mistral", "gemma3"])
def test_windows_of_layers_count_what_is_there(
    pair_of: PairOf, architecture: str, num_kept_before: int
) -> None:
    """Behind dropped blocks a layer with a window of 12 sees the last 12 tokens that are left.

    These are the last 12 of the text where so many are left behind the gap. Where there are fewer, tokens
    before the gap are among them, which are farther away than the window of the whole text reaches.
    """
    pair = pair_of(architecture)
    runner, window, size = pair.runner(block_size=4), 12, 4
    assert {layer.sliding_window for layer in runner.loaded.layers} - {None} == {window}
    tokens = random_tokens(9 * size + 3)
    cut = 7 * size + 1
    first_dropped, first_kept = size, cut - num_kept_before
    gap = first_kept - first_dropped
    positions = torch.arange(len(tokens))
    present = positions - gap * (positions >= first_kept)
    causal = torch.ones(len(tokens), len(tokens), dtype=torch.bool).tril()
    left = causal.clone()
    left[cut:, first_dropped:first_kept] = False

    def last(places: torch.Tensor) -> torch.Tensor:
        return places[:, None] - places < window

    is_before = (positions < cut)[:, None]
    among_what_is_left = is_before & causal & last(positions) | ~is_before & left & last(present)
    by_position = left & last(positions)
    is_alike = bool((among_what_is_left == by_position).all())
    assert is_alike == (num_kept_before > window)
    got = runner.forward([_behind_a_gap(runner, tokens, cut, (first_dropped, first_kept))])
    expected = _seen(pair, tokens, left, among_what_is_left)[cut:]
    torch.testing.assert_close(got, expected, rtol=0, atol=TOLERANCE)
    if not is_alike:
        otherwise = _seen(pair, tokens, left, by_position)[cut:]
        assert (got - otherwise).abs().max() > 100 * TOLERANCE, "the control"


def _behind_a_gap(
    runner: ModelRunner, tokens: list[int], cut: int, dropped: tuple[int, int]
) -> SequenceSlice:
    """Read up to `cut`; return the rest, without the blocks of the tokens that are dropped."""
    size, (first_dropped, first_kept) = runner.block_size, dropped
    table = Tables(runner).take(len(tokens))
    feed(runner, tokens[:cut], 0, table, 0, prompt_len=len(tokens))
    gap = first_kept - first_dropped
    return SequenceSlice(
        token_ids=tokens[cut:],
        start=cut - gap,
        block_table=[*table[: first_dropped // size], *table[first_kept // size :]],
        num_logit_rows=len(tokens) - cut,
        shift=shift_of(runner, len(tokens)),
        num_dropped=gap,
    )


def _seen(pair: Pair, tokens: list[int], everything: torch.Tensor, window: torch.Tensor) -> torch.Tensor:
    """Return transformers' logits where rows see so much in layers without a window, and with one."""
    full, sliding = (
        torch.zeros(1, 1, *seen.shape).masked_fill(~seen, torch.finfo().min) for seen in (everything, window)
    )
    has_both = len({layer.sliding_window for layer in pair.runner().loaded.layers}) > 1
    mask = {"full_attention": full, "sliding_attention": sliding} if has_both else sliding
    with torch.inference_mode():
        logits: torch.Tensor = pair.reference(torch.tensor([tokens]), attention_mask=mask).logits[0]
    return logits


def test_a_pool_for_a_part_of_each_sequence(pair_of: PairOf) -> None:
    """Sequences may be as long as the model allows, and the pool is no larger than what is kept of them."""
    loaded = pair_of("llama").runner().loaded
    sized = CacheConfig(memory_bytes=1 << 26, block_size=4)
    runner = ModelRunner(loaded, sized, max_num_seqs=3, max_held_tokens=40)
    assert (runner.num_blocks, runner.max_model_len) == (1 + 3 * 10, loaded.max_model_len)
    small = ModelRunner(loaded, CacheConfig(num_blocks=8, block_size=4), max_num_seqs=3, max_held_tokens=40)
    assert small.max_model_len == 28


@pytest.mark.parametrize("fault", ["foreign block", "shifted position"])
def test_negative_control_a_wrong_context_shows(pair_of: PairOf, fault: str) -> None:
    """The comparisons above would notice one wrong block or a position that is off by one."""
    pair = pair_of("llama")
    runner = pair.runner()
    tokens = random_tokens(16)
    tables = Tables(runner)
    table = tables.take(20)
    feed(runner, tokens[:8], 0, table, 0)
    if fault == "foreign block":
        got = feed(runner, tokens[8:], 8, [*tables.take(1), *table[1:]], 8)
    else:
        got = feed(runner, tokens[8:], 9, table, 8)
    assert (got - reference_logits(pair.reference, tokens)[8:]).abs().max() > 100 * TOLERANCE
