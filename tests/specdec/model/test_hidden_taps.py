"""Hidden states out of forwards, against those that transformers returns; eager, compiled, beside the K/V."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import pytest
import torch

from specdec.attention.cpu import CpuPagedAttention
from specdec.attention.native import NativeUnavailable
from specdec.core.errors import ConfigError
from specdec.core.sampling_params import SamplingParams
from specdec.kv.config import CacheConfig
from specdec.model.batch import SequenceSlice
from specdec.model.config import CompileConfig, ModelConfig
from specdec.model.graphs import CompiledForward
from specdec.model.hidden_taps import resolve_layers
from specdec.model.layer_map import CONFIG_KEY
from specdec.model.loader import LoadedModel, load_model
from specdec.model.runner import ModelRunner
from specdec.sampling.sampler import Sampler
from specdec.sampling.sequence_sampling import SequenceSampling
from tests.architectures import ARCHITECTURES, VOCAB_SIZE, save_model

BLOCK_SIZE = 4
QUICK = ("llama", "qwen3", "gemma3", "gpt2")
TAPPED = [
    *QUICK,
    *(pytest.param(name, marks=pytest.mark.full) for name in sorted(set(ARCHITECTURES) - set(QUICK))),
]


@cache
def is_compilable() -> bool:
    try:
        CpuPagedAttention()
    except NativeUnavailable:
        return False
    return True


@pytest.fixture(scope="module")
def model_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[object, LoadedModel]]:
    @cache
    def make(architecture: str, dtype: str = "float32") -> tuple[object, LoadedModel]:
        folder: Path = tmp_path_factory.mktemp(architecture)
        reference = save_model(folder, architecture)
        return reference, load_model(ModelConfig.model_validate({"model": str(folder), "dtype": dtype}))

    return make


def make_runner(loaded: LoadedModel, layers: Sequence[int], *, compiled: bool = False) -> ModelRunner:
    cache_config = CacheConfig(num_blocks=60, block_size=BLOCK_SIZE)
    runner = ModelRunner(loaded, cache_config, max_num_seqs=8, hidden_layers=layers)
    if compiled:
        forward = CompiledForward(runner, CompileConfig())
        assert forward.warm_up() == "ready"
        runner.graphs = forward
    return runner


def tokens(count: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(2, VOCAB_SIZE, (count,), generator=generator).tolist()


def piece(
    token_ids: Sequence[int], start: int, table: Sequence[int], num_logit_rows: int = 1
) -> SequenceSlice:
    return SequenceSlice(token_ids=token_ids, start=start, block_table=table, num_logit_rows=num_logit_rows)


def expected_rows(reference: object, token_ids: Sequence[int], layers: Sequence[int]) -> torch.Tensor:
    with torch.inference_mode():
        output = reference(input_ids=torch.tensor([token_ids]), output_hidden_states=True)  # type: ignore[operator]
    return torch.cat([output.hidden_states[layer][0] for layer in layers], dim=-1).float()


@pytest.mark.parametrize("architecture", TAPPED)
def test_rows_are_the_hidden_states_that_transformers_returns(
    model_of: Callable[..., tuple[object, LoadedModel]], architecture: str
) -> None:
    reference, loaded = model_of(architecture)
    layers = (0, 1, 2, -1)
    token_ids, others = tokens(11, 1), tokens(3, 2)
    table, other_table = [5, 2, 9], [7]
    expected = expected_rows(reference, token_ids, layers)
    for compiled in (False, True) if is_compilable() else (False,):
        runner = make_runner(loaded, layers, compiled=compiled)
        # In chunks, beside another sequence, with a draft that is rejected and overwritten.
        runner.forward([piece(token_ids[:4], 0, table, 0), piece(others, 0, other_table)])
        runner.forward([piece([*token_ids[4:7], 99, 98], 4, table, 3)])
        runner.forward([piece(token_ids[7:], 7, table, 4)])
        assert runner.hidden is not None
        rows = runner.hidden.read(table, 0, 11)
        assert rows.shape == (11, 4 * 32)
        torch.testing.assert_close(rows, expected, rtol=0, atol=2e-5 * float(expected.abs().max()))
        theirs = expected_rows(reference, others, layers)
        torch.testing.assert_close(
            runner.hidden.read(other_table, 0, 3), theirs, rtol=0, atol=2e-5 * float(theirs.abs().max())
        )


def test_compiled_rows_do_not_depend_on_the_batch(
    model_of: Callable[..., tuple[object, LoadedModel]],
) -> None:
    if not is_compilable():
        pytest.skip("no compiled forward here")
    for dtype in ("float32", "bfloat16"):
        _, loaded = model_of("llama", dtype)
        runner = make_runner(loaded, (1, -1), compiled=True)
        assert runner.hidden is not None
        token_ids, table = tokens(9, 3), [3, 4, 5]
        runner.forward([piece(token_ids, 0, table)])
        at_once = runner.hidden.read(table, 0, 9)
        assert at_once.dtype is loaded.dtype
        for place, token_id in enumerate(token_ids):
            runner.forward([piece(tokens(5, place), 0, [8, 9]), piece([token_id], place, table)])
        assert torch.equal(runner.hidden.read(table, 0, 9), at_once)


def test_verification_in_one_native_call_keeps_its_rows(
    model_of: Callable[..., tuple[object, LoadedModel]],
) -> None:
    if not is_compilable():
        pytest.skip("no compiled forward here")
    _, loaded = model_of("llama")
    runner = make_runner(loaded, (1, -1), compiled=True)
    assert runner.hidden is not None
    token_ids, table = tokens(10, 4), [3, 4, 5]
    runner.forward([piece(token_ids, 0, table)])
    expected = runner.hidden.read(table, 0, 10)
    runner.hidden.rows.zero_()
    sampler = Sampler()
    sampler.warm_up()
    chooser = sampler.chooser([SequenceSampling(SamplingParams(), 1)], runner.vocab_size)
    assert chooser is not None
    for begin, end in ((0, 6), (6, 10)):
        slices = [piece(token_ids[begin:end], begin, table)]
        assert runner.try_generate(slices, [0], chooser) is not None
    assert torch.equal(runner.hidden.read(table, 0, 10), expected)
    # The rows of all its forwards but the last would be lost.
    assert runner.try_generate([piece(token_ids[6:], 6, table)], [1], chooser) is None


def test_runners_of_one_model_tap_what_each_was_asked_for(
    model_of: Callable[..., tuple[object, LoadedModel]],
) -> None:
    _, loaded = model_of("llama")
    first, second, without = make_runner(loaded, (1,)), make_runner(loaded, (2, 0)), make_runner(loaded, ())
    token_ids, table = tokens(5, 6), [3, 4]
    for runner in (first, without, second):
        runner.forward([piece(token_ids, 0, table)])
    assert without.hidden is None
    assert first.hidden is not None
    assert second.hidden is not None
    assert (first.hidden.width, second.hidden.width) == (32, 64)
    assert not torch.equal(first.hidden.read(table, 0, 5), second.hidden.read(table, 0, 5)[:, :32])


def test_layers_of_the_original_are_found_in_an_inflated_checkpoint(
    model_of: Callable[..., tuple[object, LoadedModel]],
) -> None:
    """Layer 1 of the original does what layers 1 and 2 here do; its state is there behind the second."""
    reference, loaded = model_of("llama")
    setattr(loaded.config, CONFIG_KEY, [0, 2])
    try:
        runner = make_runner(loaded, (0, 1, 2))
    finally:
        delattr(loaded.config, CONFIG_KEY)
    token_ids, table = tokens(5, 7), [3, 4]
    runner.forward([piece(token_ids, 0, table)])
    assert runner.hidden is not None
    expected = expected_rows(reference, token_ids, (0, 2, 3))
    torch.testing.assert_close(runner.hidden.read(table, 0, 5), expected, rtol=0, atol=1e-4)


def test_blocks_that_are_copied_take_their_rows_along(
    model_of: Callable[..., tuple[object, LoadedModel]],
) -> None:
    _, loaded = model_of("llama")
    runner = make_runner(loaded, (-1,))
    runner.forward([piece(tokens(8, 8), 0, [3, 4])])
    runner.copy_blocks([3, 4], [10, 12])
    assert runner.hidden is not None
    assert torch.equal(runner.hidden.read([10, 12], 0, 8), runner.hidden.read([3, 4], 0, 8))


def test_a_pool_of_given_memory_holds_fewer_blocks_with_rows(
    model_of: Callable[..., tuple[object, LoadedModel]],
) -> None:
    _, loaded = model_of("llama")
    sizes = []
    for layers in ((), (1, -1)):
        cache_config = CacheConfig(memory_bytes=1 << 18, block_size=BLOCK_SIZE)
        runner = ModelRunner(loaded, cache_config, max_num_seqs=64, hidden_layers=layers)
        hidden_bytes = 0 if runner.hidden is None else runner.hidden.num_bytes
        assert runner.pool.num_bytes + hidden_bytes <= 1 << 18
        sizes.append(runner.num_blocks)
    assert sizes[1] < sizes[0]


def test_layers_are_counted_as_transformers_counts_them() -> None:
    assert resolve_layers((0, 2, -1, -4), 3, "m") == (0, 2, 3, 0)
    with pytest.raises(ConfigError, match=r"hidden_layers: 4 is not .* numbers 0 .* to 3"):
        resolve_layers((1, 4), 3, "m")
    with pytest.raises(ConfigError, match="hidden_layers: -5"):
        resolve_layers((-5,), 3, "m")


def test_a_model_that_hands_on_something_else_is_refused_at_once(
    model_of: Callable[..., tuple[object, LoadedModel]], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, loaded = model_of("qwen2")
    text_config = loaded.config.get_text_config()
    monkeypatch.setattr(text_config, "hidden_size", 16)
    with pytest.raises(
        ConfigError, match=r"cannot be tapped.*shape \[1, 1, 32\] instead of \[1, tokens, 16\]"
    ):
        make_runner(loaded, (1,))
