"""A model divided into stages: its logits are those of the whole, and no stage reads more than its layers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from specdec.core.errors import CheckpointError, ConfigError
from specdec.kv.config import CacheConfig
from specdec.model.batch import SequenceSlice
from specdec.model.config import ModelConfig
from specdec.model.loader import load_model
from specdec.model.parallel import loading
from specdec.model.parallel.group import RankGroup
from specdec.model.parallel.plan import UnsupportedParallelism
from specdec.model.parallel.stages import divide, plan_stages
from specdec.model.pipeline import StageRunner, micro_batches
from specdec.model.runner import ModelRunner
from tests.architectures import ARCHITECTURES, VARIED_ARCHITECTURES, VOCAB_SIZE, save_model, with_layers
from tests.pairwise import mostly_full
from tests.rank_pool import Failure, Pools
from tests.specdec.model.parallel.small_models import CONFIGS, SMALL, TOKENS, on_paper, save

NUM_LAYERS = 5


def model_config(folder: Path, stages: int, width: int = 1, min_tokens: int = 1) -> ModelConfig:
    return ModelConfig(
        model=str(folder),
        dtype="float32",
        tensor_parallel_size=width,
        pipeline_parallel_size=stages,
        pipeline_micro_batch_tokens=min_tokens,
    )


def piece(first: int, end: int, blocks: Sequence[int], rows: int | None = None) -> SequenceSlice:
    return SequenceSlice(
        token_ids=TOKENS[first:end],
        start=first,
        block_table=blocks,
        num_logit_rows=end - first if rows is None else rows,
    )


ROUNDS = [
    [piece(0, 12, range(1, 6)), piece(0, 1, range(6, 11)), piece(0, 7, range(11, 16), rows=0)],
    [piece(12, 20, range(1, 6)), piece(1, 6, range(6, 11)), piece(7, 13, range(11, 16), rows=2)],
]
"""Ragged: chunks, single tokens, chains with and without logits."""


def logits(group: RankGroup | None, folder: Path, stages: int = 1, width: int = 1) -> torch.Tensor:
    """Logits of all rounds, where they come out."""
    config = model_config(folder, stages, width)
    loaded = load_model(config, None, group)
    cache = CacheConfig(block_size=4, num_blocks=20)
    if loaded.stage is None:
        runner = ModelRunner(loaded, cache, max_num_seqs=3)
    else:
        runner = StageRunner(
            loaded, cache, max_num_seqs=3, micro_batch_tokens=config.pipeline_micro_batch_tokens
        )
    return torch.cat([runner.forward(slices).clone() for slices in ROUNDS])


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    def make(name: str) -> Path:
        folder = tmp_path_factory.mktemp(f"stages-{name.replace('/', '-')}")
        if name in CONFIGS:
            return save(folder, with_layers(CONFIGS[name], NUM_LAYERS))
        save_model(folder, name, num_layers=NUM_LAYERS)
        return folder

    return make


@pytest.mark.parametrize("name", mostly_full([*ARCHITECTURES, *CONFIGS], [*VARIED_ARCHITECTURES, *CONFIGS]))
def test_logits_are_those_of_the_whole(rank_pool: Pools, folder_of: Callable[[str], Path], name: str) -> None:
    folder = folder_of(name)
    whole = logits(None, folder)
    last, *others = rank_pool(4).run(logits, folder, 4)
    assert all(other.shape[0] == 0 for other in others)
    assert last.shape == whole.shape
    assert float(whole.std()) > 0.01
    torch.testing.assert_close(last, whole, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    "name",
    mostly_full(
        ["llama_tied", "gemma2", "gpt2", "falcon", "qwen3_moe", "gemma3"], ["llama_tied", "gpt2", "qwen3_moe"]
    ),
)
def test_two_stages_of_two_ranks(rank_pool: Pools, folder_of: Callable[[str], Path], name: str) -> None:
    folder = folder_of(name)
    whole = logits(None, folder)
    first, second, *others = rank_pool(4).run(logits, folder, 2, 2)
    assert all(other.shape[0] == 0 for other in others)
    torch.testing.assert_close(torch.cat((first, second), -1), whole, rtol=0, atol=1e-5)


def read_bytes(group: RankGroup, folder: Path, stages: int) -> tuple[int, int]:
    """Bytes read from safetensors, and bytes of all parameters, by this rank."""
    count, lock = 0, threading.Lock()
    read = loading.StoredTensor._read

    def counted(self: loading.StoredTensor) -> torch.Tensor:
        nonlocal count
        tensor = read(self)
        with lock:
            count += tensor.nbytes
        return tensor

    loading.StoredTensor._read = counted  # type: ignore[method-assign]
    try:
        loaded = load_model(model_config(folder, stages, group.size // stages), None, group)
    finally:
        loading.StoredTensor._read = read  # type: ignore[method-assign]
    return count, sum(parameter.nbytes for parameter in loaded.model.parameters())


@pytest.mark.parametrize("architecture", ["llama", "llama_tied", "qwen3_moe", "gpt2", "falcon"])
def test_a_stage_reads_only_its_layers(rank_pool: Pools, tmp_path: Path, architecture: str) -> None:
    model = save_model(tmp_path, architecture, num_layers=NUM_LAYERS)
    is_tied = model.config.tie_word_embeddings
    embedding: Any = model.get_input_embeddings()
    whole = sum(parameter.nbytes for parameter in model.parameters())
    answers = rank_pool(4).run(read_bytes, tmp_path, 4)
    assert all(count == held for count, held in answers)
    assert sum(held for _, held in answers) == whole + is_tied * embedding.weight.nbytes
    last, third, second, first = (held for _, held in answers)
    assert max(second, third) < 0.5 * whole
    assert embedding.weight.nbytes < min(first, last)


def test_a_grid_reads_every_weight_once(rank_pool: Pools, tmp_path: Path) -> None:
    model = save_model(tmp_path, "llama", num_layers=4)
    whole = sum(parameter.nbytes for parameter in model.parameters())
    answers = rank_pool(4).run(read_bytes, tmp_path, 2)
    assert all(count == held for count, held in answers)
    # Norms are in both ranks of a stage; embedding and head are cut.
    norms = sum(parameter.nbytes for parameter in model.parameters() if parameter.dim() == 1)
    assert sum(held for _, held in answers) == whole + norms


def test_a_checkpoint_in_several_files(rank_pool: Pools, tmp_path: Path) -> None:
    one, several = tmp_path / "one", tmp_path / "several"
    model = save_model(one, "llama")
    model.save_pretrained(several, max_shard_size="30KB")
    pool = rank_pool(2)
    first, second = (pool.run(logits, folder, 2)[0] for folder in (one, several))
    assert torch.equal(first, second)


def wait_for_one_another(group: RankGroup, folder: Path) -> int:
    """A round in which the last stage ends no part before the first stage has begun the next one."""
    config = model_config(folder, 2, min_tokens=2)
    loaded = load_model(config, None, group)
    assert loaded.stage is not None
    store, num_parts = group.open_store(), 0
    store.set_timeout(timedelta(seconds=60))

    class Watched(StageRunner):
        def _run_stage(self, *args: Any) -> torch.Tensor:
            nonlocal num_parts
            output = super()._run_stage(*args)
            if self._stage.is_first:
                store.set(f"begun-{num_parts}", "")
            elif num_parts < 3:
                store.wait([f"begun-{num_parts + 1}"])
            num_parts += 1
            return output

    cache = CacheConfig(block_size=4, num_blocks=20)
    runner = Watched(loaded, cache, max_num_seqs=3, micro_batch_tokens=2)
    runner.forward([piece(0, 8, range(1, 6))])
    return num_parts


def test_stages_work_at_the_same_time(rank_pool: Pools, folder_of: Callable[[str], Path]) -> None:
    assert rank_pool(2).run(wait_for_one_another, folder_of("llama")) == [4, 4]


def kv_layers(group: RankGroup, folder: Path) -> tuple[int, list[int], int]:
    config = model_config(folder, group.size)
    loaded = load_model(config, None, group)
    assert loaded.stage is not None
    cache = CacheConfig(block_size=4, memory_bytes=80_000)
    runner = StageRunner(loaded, cache, max_num_seqs=3, micro_batch_tokens=config.pipeline_micro_batch_tokens)
    return loaded.stage.index, [layer.layer_idx for layer in loaded.layers], runner.num_blocks


def test_every_stage_has_a_cache_for_its_layers(rank_pool: Pools, folder_of: Callable[[str], Path]) -> None:
    answers = rank_pool(4).run(kv_layers, folder_of("mistral"))
    assert [stage for stage, _, _ in answers] == [3, 2, 1, 0]
    indices = [index for _, layers, _ in reversed(answers) for index in layers]
    assert indices == list(range(NUM_LAYERS))
    assert len({num_blocks for _, _, num_blocks in answers}) == 1, "as many as the fullest stage has room for"


# --------------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("config", "size", "message"),
    [
        (transformers.LlamaConfig(**SMALL), 3, "its 2 layers cannot be divided over 3 stages"),
        (
            transformers.Gemma3nTextConfig(
                num_hidden_layers=4,
                vocab_size=64,
                vocab_size_per_layer_input=64,
                hidden_size=32,
                hidden_size_per_layer_input=8,
                intermediate_size=32,
                num_attention_heads=4,
                num_key_value_heads=2,
                num_kv_shared_layers=0,
                laurel_rank=4,
            ),
            2,
            "its layers are handed more of what comes before them than the hidden states",
        ),
    ],
)
def test_what_cannot_be_divided_is_refused_on_paper(
    config: transformers.PretrainedConfig, size: int, message: str
) -> None:
    with pytest.raises(UnsupportedParallelism, match=message):
        plan_stages(on_paper(config), size)


class Skipping(transformers.LlamaForCausalLM):
    """The embeddings are added once more behind the layers."""

    def forward(self, input_ids: Any, **kwargs: Any) -> Any:
        output = super().forward(input_ids, **kwargs)
        output.logits = self.lm_head(self.model.embed_tokens(input_ids)) + output.logits
        return output


class Parallel(torch.nn.Module):
    """Two layers that do not follow one another."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.config = model.config
        self.embed = model.model.embed_tokens
        self.layers = model.model.layers

    def get_decoder(self) -> torch.nn.Module:
        return self

    def forward(self, input_ids: Any, **kwargs: Any) -> Any:
        hidden = self.embed(input_ids)
        total = self.layers[0](hidden) + self.layers[1](hidden)
        return transformers.modeling_outputs.CausalLMOutput(logits=total)


def test_a_forward_that_does_more_than_its_layers_is_refused_on_paper() -> None:
    with torch.device("meta"):
        skipping = Skipping(transformers.LlamaConfig(**SMALL))
        parallel = Parallel(transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL)))
    with pytest.raises(UnsupportedParallelism, match="what comes behind its layers is handed more"):
        plan_stages(skipping, 2)
    with pytest.raises(UnsupportedParallelism, match="its layers do not follow one another"):
        plan_stages(parallel, 2)


def test_a_second_list_of_layers_is_refused_on_paper() -> None:
    model: Any = on_paper(transformers.LlamaConfig(**SMALL))
    model.model.more = torch.nn.ModuleList([torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)])
    with pytest.raises(
        UnsupportedParallelism, match=r"not in one list, but in model\.layers and model\.more"
    ):
        plan_stages(model, 2)


def test_weights_that_text_does_not_need_are_read_by_the_first_stage_alone() -> None:
    plan = plan_stages(on_paper(with_layers(ARCHITECTURES["gemma3_with_images"](), 4)), 2)
    assert plan.stack.endswith("language_model.layers")
    assert plan.idle == {"model.vision_tower", "model.multi_modal_projector"}
    assert plan_stages(on_paper(transformers.LlamaConfig(**SMALL)), 2).idle == frozenset()


class Borrowing(transformers.LlamaForCausalLM):
    """A module's weight is taken past the module."""

    def forward(self, input_ids: Any, **kwargs: Any) -> Any:
        output = self.model(input_ids=input_ids, **kwargs)
        logits = output.last_hidden_state @ self.lm_head.weight.T
        return transformers.modeling_outputs.CausalLMOutput(logits=logits)


def test_weights_without_their_module_are_refused_on_paper() -> None:
    with torch.device("meta"):
        model = Borrowing(transformers.LlamaConfig(**SMALL))
    with pytest.raises(UnsupportedParallelism, match="takes weights of lm_head without calling it"):
        plan_stages(model, 2)


def test_planning_leaves_the_model_as_it_was() -> None:
    model = on_paper(transformers.LlamaConfig(**SMALL))
    modules = dict(model.named_modules())
    plan = plan_stages(model, 2)
    assert dict(model.named_modules()) == modules
    assert not any(module._forward_hooks for module in modules.values())
    assert plan.before == {"model.embed_tokens": 32}
    assert plan.behind == {"model.norm", "lm_head"}


def attempt_with_weights_gone(group: RankGroup, folder: Path, stages: int) -> None:
    """Reading weights would raise something else."""
    own = loading.StoredTensor._read
    loading.StoredTensor._read = None  # type: ignore[assignment,method-assign]
    try:
        load_model(model_config(folder, stages, group.size // stages), None, group)
    finally:
        loading.StoredTensor._read = own  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("stages", "size", "message"),
    [
        (4, 4, "llama cannot be served with pipeline_parallel_size 4: its 3 layers cannot be divided"),
        pytest.param(
            2,
            6,
            "llama cannot be served with tensor_parallel_size 3: its 4 attention heads",
            marks=pytest.mark.full,
        ),
    ],
)
def test_refusals_come_before_weights_are_read_and_from_all_ranks(
    rank_pool: Pools, tmp_path: Path, stages: int, size: int, message: str
) -> None:
    save_model(tmp_path, "llama")
    for failure in rank_pool(size).attempt(attempt_with_weights_gone, tmp_path, stages):
        assert isinstance(failure, Failure)
        assert isinstance(failure.error, CheckpointError)
        assert message in failure.text


def test_a_size_without_ranks_is_refused(tmp_path: Path) -> None:
    save_model(tmp_path, "llama")
    with pytest.raises(ConfigError, match="pipeline_parallel_size = 2 needs as many ranks; here is 1"):
        load_model(model_config(tmp_path, 2))
    with pytest.raises(
        ConfigError,
        match="tensor_parallel_size = 3 x pipeline_parallel_size = 2 needs as many ranks; here is 1",
    ):
        load_model(model_config(tmp_path, 2, 3))


def load_mismatched(group: RankGroup, folder: Path) -> Any:
    """A model type that no test covers is looked at over its stages; here one of them computes nonsense."""
    from specdec.model import inspection

    attend = inspection.PagedBatch.attend
    if group.rank == 1:
        inspection.PagedBatch.attend = lambda self, *args: attend(self, *args).roll(1, 0)  # type: ignore[method-assign]
    try:
        return load_unknown(group, folder)
    finally:
        inspection.PagedBatch.attend = attend  # type: ignore[method-assign]


def test_an_unknown_model_is_compared_over_its_stages(
    rank_pool: Pools, folder_of: Callable[[str], Path]
) -> None:
    for failure in rank_pool(2).attempt(load_mismatched, folder_of("llama")):
        assert isinstance(failure.error, CheckpointError)
        assert "over a paged cache its logits differ" in failure.text


def load_unknown(group: RankGroup, folder: Path) -> int:
    from specdec.model import inspection

    tested, inspection.TESTED_MODEL_TYPES = inspection.TESTED_MODEL_TYPES, frozenset()
    try:
        return load_model(model_config(folder, group.size), None, group).vocab_size
    finally:
        inspection.TESTED_MODEL_TYPES = tested


def test_an_unknown_model_that_is_right_is_taken(rank_pool: Pools, folder_of: Callable[[str], Path]) -> None:
    assert rank_pool(4).run(load_unknown, folder_of("gemma2")) == [VOCAB_SIZE] * 4


def load_without_its_window(group: RankGroup, folder: Path) -> Any:
    """As if PhiMoE were a type of which nobody knew where its window is."""
    from specdec.attention import hf

    told, hf._WINDOW_IN_MASK_ALONE = hf._WINDOW_IN_MASK_ALONE, frozenset()
    try:
        config = model_config(folder, group.size).model_copy(update={"max_model_len": 40})
        return load_model(config, None, group)
    finally:
        hf._WINDOW_IN_MASK_ALONE = told


def test_a_window_that_is_in_the_mask_alone(rank_pool: Pools, tmp_path: Path) -> None:
    window = transformers.PhimoeConfig(
        **{**SMALL, "intermediate_size": 64}, num_local_experts=4, sliding_window=40
    )
    folder = save(tmp_path, window)
    assert rank_pool(2).run(load_unknown, folder) == [SMALL["vocab_size"]] * 2
    for failure in rank_pool(2).attempt(load_without_its_window, folder):
        assert isinstance(failure.error, CheckpointError)
        assert "window shows either in the mask of its attention alone" in failure.text


# --------------------------------------------------------------------------------------- bookkeeping


def test_stages_have_equal_shares_of_what_is_read() -> None:
    assert divide([10] * 8, 0, 4) == (0, 2, 4, 6, 8)
    assert divide([10] * 32, 50, 4) == (0, 9, 18, 27, 32), "the head weighs five layers"
    assert divide([10] * 4, 500, 4) == (0, 1, 2, 3, 4), "no stage without a layer"
    assert divide([30, 10, 10, 10], 0, 2) == (0, 1, 4)


@pytest.mark.parametrize(
    ("lengths", "limit", "min_tokens", "expected"),
    [
        ([1] * 8, 2, 1, [[1] * 4, [1] * 4]),
        ([1] * 8, 2, 5, [[1] * 8]),
        ([5, 5, 5, 5, 5], 4, 5, [[5, 2], [3, 3], [2, 4], [1, 5]]),
        ([64], 4, 16, [[16]] * 4),
        ([100, 1, 1, 1], 4, 32, [[35], [34], [31, 1, 1, 1]]),
        ([1, 100], 2, 32, [[1, 50], [50]]),
        ([3], 4, 100, [[3]]),
    ],
)
def test_micro_batches(lengths: list[int], limit: int, min_tokens: int, expected: list[list[int]]) -> None:
    slices = [
        SequenceSlice(token_ids=range(length), start=7, block_table=[index], num_logit_rows=1)
        for index, length in enumerate(lengths)
    ]
    parts = micro_batches(slices, limit=limit, min_tokens=min_tokens)
    assert [[len(one.token_ids) for one in part] for part in parts] == expected


@pytest.mark.parametrize("seed", range(60))
def test_micro_batches_are_the_batch(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)

    def number(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=generator))

    slices = []
    for index in range(number(1, 9)):
        length = number(1, 40)
        is_tree = number(0, 3) == 0
        slices.append(
            SequenceSlice(
                token_ids=[100 * index + step for step in range(length)],
                start=number(0, 50),
                block_table=[index],
                num_logit_rows=number(0, length + 1),
                parents=[-1] * length if is_tree else None,
            )
        )
    limit, min_tokens = number(1, 6), number(1, 20)
    parts = micro_batches(slices, limit=limit, min_tokens=min_tokens)
    assert len(parts) <= limit
    assert rows_of([one for part in parts for one in part]) == rows_of(slices)
    trees = [one for one in slices if one.parents is not None]
    assert [one for part in parts for one in part if one.parents is not None] == trees
    if len(parts) > 1:
        assert min(sum(len(one.token_ids) for one in part) for part in parts) >= min_tokens


def rows_of(slices: Sequence[SequenceSlice]) -> list[tuple[int, int, int, bool]]:
    return [
        (one.block_table[0], one.start + row, token_id, row >= len(one.token_ids) - one.num_logit_rows)
        for one in slices
        for row, token_id in enumerate(one.token_ids)
    ]
