"""A model cut over ranks: its logits are those of the whole, and no rank reads more than its part."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from specdec.core.errors import CheckpointError, ConfigError, TransportError
from specdec.kv.config import CacheConfig
from specdec.model.batch import SequenceSlice
from specdec.model.config import ModelConfig
from specdec.model.loader import load_model
from specdec.model.parallel import loading, surgery
from specdec.model.parallel.cuts import Cut, cuts_of, share_of
from specdec.model.parallel.group import RankGroup
from specdec.model.parallel.plan import UnsupportedParallelism, generic_name, layout_of, plan_of
from specdec.model.parallel.surgery import check_parallel
from specdec.model.runner import ModelRunner
from tests.architectures import ARCHITECTURES, save_model
from tests.rank_pool import BreakablePools, Failure, Pools
from tests.specdec.model.parallel.small_models import CONFIGS, SMALL, TOKENS, on_paper, save

DIFFERENT_HEADS: dict[str, Any] = {
    "layer_types": ["sliding_attention", "full_attention"],
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": 101,
    "attention_k_eq_v": True,
    "num_global_key_value_heads": 1,
}


def model_config(folder: Path, size: int) -> ModelConfig:
    return ModelConfig(model=str(folder), dtype="float32", tensor_parallel_size=size)


def logits(group: RankGroup | None, folder: Path, size: int = 1) -> torch.Tensor:
    """Logits of TOKENS, of the whole model or this rank's token ids."""
    runner = ModelRunner(
        load_model(model_config(folder, size), None, group),
        CacheConfig(block_size=4, num_blocks=20),
        max_num_seqs=1,
    )
    table = range(1, 10)
    head = SequenceSlice(token_ids=TOKENS[:12], start=0, block_table=table, num_logit_rows=12)
    tail = SequenceSlice(token_ids=TOKENS[12:], start=12, block_table=table, num_logit_rows=8)
    return torch.cat([runner.forward([piece]).clone() for piece in (head, tail)])


@pytest.mark.cover(1)
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", CONFIGS)
def test_logits_are_those_of_the_whole(rank_pool: Pools, tmp_path: Path, name: str, size: int) -> None:
    folder = save(tmp_path, CONFIGS[name])
    whole = logits(None, folder)
    parts = torch.cat(rank_pool(size).run(logits, folder, size), -1)
    assert parts.shape == whole.shape
    assert float(whole.std()) > 0.1
    torch.testing.assert_close(parts, whole, rtol=0, atol=1e-5)


def read_bytes(group: RankGroup, folder: Path, size: int) -> tuple[int, int]:
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
        loaded = load_model(model_config(folder, size), None, group)
    finally:
        loading.StoredTensor._read = read  # type: ignore[method-assign]
    return count, sum(parameter.nbytes for parameter in loaded.model.parameters())


@pytest.mark.parametrize("architecture", ["llama", "qwen3_moe", "gpt2"])
def test_a_rank_reads_only_its_part(rank_pool: Pools, tmp_path: Path, architecture: str) -> None:
    model = save_model(tmp_path, architecture)
    whole = sum(parameter.nbytes for parameter in model.parameters())
    for count, held in rank_pool(4).run(read_bytes, tmp_path, 4):
        assert count == held
        assert held < 0.4 * whole


def test_codes_are_not_taken_for_weights(rank_pool: Pools, tmp_path: Path) -> None:
    save_model(tmp_path, "llama")
    weights = load_file(tmp_path / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    weights[name] = weights[name].to(torch.float8_e4m3fn)
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    for failure in rank_pool(2).attempt(logits, tmp_path, 2):
        assert isinstance(failure, Failure)
        assert isinstance(failure.error, CheckpointError)
        assert f"tensor {name} is stored as F8_E4M3" in failure.text


@pytest.mark.parametrize(
    ("name", "dim"), [("mlp.up_proj.weight", 0), ("mlp.down_proj.weight", 1), ("input_layernorm.weight", 0)]
)
def test_weights_that_config_json_does_not_describe_are_refused(
    rank_pool: Pools, tmp_path: Path, name: str, dim: int
) -> None:
    """A part of a larger tensor has the shape that a part is to have."""
    save_model(tmp_path, "llama")
    weights = load_file(tmp_path / "model.safetensors")
    stored = f"model.layers.0.{name}"
    weights[stored] = torch.cat([weights[stored], weights[stored].narrow(dim, 0, 8)], dim)
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    for failure in rank_pool(2).attempt(logits, tmp_path, 2):
        assert isinstance(failure, Failure)
        assert isinstance(failure.error, CheckpointError)
        assert f"tensor {stored} has shape" in failure.text


def test_a_checkpoint_in_several_files(rank_pool: Pools, tmp_path: Path) -> None:
    one, several = tmp_path / "one", tmp_path / "several"
    model = save_model(one, "llama")
    model.save_pretrained(several, max_shard_size="30KB")
    assert len(list(several.glob("*.safetensors"))) > 2
    pool = rank_pool(2)
    for first, second in zip(pool.run(logits, one, 2), pool.run(logits, several, 2), strict=True):
        assert torch.equal(first, second)


# --------------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("config", "size", "message"),
    [
        (transformers.LlamaConfig(**SMALL), 3, "4 attention heads cannot be divided over 3 ranks"),
        (
            transformers.LlamaConfig(
                **{**SMALL, "hidden_size": 48, "num_attention_heads": 12, "num_key_value_heads": 3}
            ),
            2,
            "3 key/value heads can neither be divided over 2 ranks nor",
        ),
        (transformers.GPT2Config(vocab_size=64, n_embd=24, n_head=3, n_layer=1), 2, "3 attention heads"),
        (transformers.OPTConfig(vocab_size=64, hidden_size=32, num_attention_heads=4), 2, "no tp_plan"),
        (transformers.LlamaConfig(**{**SMALL, "vocab_size": 1, "pad_token_id": None}), 2, "1 token ids"),
        (
            transformers.Gemma4TextConfig(**SMALL, **DIFFERENT_HEADS),
            2,
            "layers have different numbers of heads .num_key_value_heads is 2 and 1.",
        ),
    ],
)
def test_what_cannot_be_cut_is_refused_on_paper(
    config: transformers.PretrainedConfig, size: int, message: str
) -> None:
    with pytest.raises(UnsupportedParallelism, match=message):
        check_parallel(on_paper(config), size)


def test_an_unknown_style_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = on_paper(transformers.LlamaConfig(**SMALL))
    model._tp_plan = {**model._tp_plan, "model.layers.*.mlp.up_proj": "sideways"}
    with pytest.raises(
        UnsupportedParallelism, match=r"model\.layers\.0\.mlp\.up_proj in the style 'sideways'"
    ):
        plan_of(model, 2)


def attempt_with_weights_gone(group: RankGroup, folder: Path, size: int) -> None:
    """Reading weights would raise something else."""
    own = loading.StoredTensor._read
    loading.StoredTensor._read = None  # type: ignore[assignment,method-assign]
    try:
        load_model(model_config(folder, size), None, group)
    finally:
        loading.StoredTensor._read = own  # type: ignore[method-assign]


def test_refusals_come_before_weights_are_read_and_from_all_ranks(rank_pool: Pools, tmp_path: Path) -> None:
    folder = save(
        tmp_path,
        transformers.LlamaConfig(
            **{**SMALL, "num_attention_heads": 3, "hidden_size": 48, "num_key_value_heads": 3}
        ),
    )
    for failure in rank_pool(2).attempt(attempt_with_weights_gone, folder, 2):
        assert isinstance(failure, Failure)
        assert isinstance(failure.error, CheckpointError)
        assert "llama cannot be served with tensor_parallel_size 2: its 3 attention heads" in failure.text


def load_own(group: RankGroup, folders: list[Path]) -> None:
    load_model(model_config(folders[group.rank], group.size), None, group)


def test_what_keeps_one_rank_from_loading_is_what_all_say(rank_pool: Pools, tmp_path: Path) -> None:
    folder = save(tmp_path / "model", CONFIGS["uneven"])
    pool = rank_pool(2)
    here, there = pool.attempt(load_own, [folder, tmp_path / "missing"])
    assert isinstance(here.error, CheckpointError)
    assert "rank 1: model folder" in here.text
    assert "does not exist" in there.text
    assert "rank 1" not in str(there.error)
    # Nothing is left half done: the same ranks can go on.
    pool.run(logits, folder, 2)


def test_ranks_with_different_models_are_found_out(rank_pool: Pools, tmp_path: Path) -> None:
    one = save(tmp_path / "one", CONFIGS["uneven"])
    other = save(tmp_path / "other", transformers.LlamaConfig(**{**SMALL, "rms_norm_eps": 0.5}))
    for failure in rank_pool(2).attempt(load_own, [one, other]):
        assert isinstance(failure.error, CheckpointError)
        assert "rank 1 has read another model than rank 0" in failure.text


def test_a_size_without_ranks_is_refused(tmp_path: Path) -> None:
    folder = save(tmp_path, CONFIGS["uneven"])
    with pytest.raises(ConfigError, match="tensor_parallel_size = 2 needs as many ranks; here is 1"):
        load_model(model_config(folder, 2))


# ------------------------------------------------------------------------------------------- groups


def talk(group: RankGroup) -> list[bytes]:
    sizes = (0, 1, 4088, 4089, 100_000)
    messages = [bytes([size % 251]) * size for size in sizes]
    if group.rank == 0:
        for message in messages:
            group.send_command(message)
        return messages
    return [group.receive_command() for _ in messages]


def test_commands_of_any_size_arrive(rank_pool: Pools) -> None:
    first, *others = rank_pool(4).run(talk)
    assert all(other == first for other in others)


def agree(group: RankGroup) -> tuple[int, list[bytes]]:
    return group.smallest(100 - group.rank), group.exchange(b"x" * (3 * group.rank))


def test_exchanges(rank_pool: Pools) -> None:
    for answer in rank_pool(4).run(agree):
        assert answer == (97, [b"", b"xxx", b"x" * 6, b"x" * 9])


def gather_once(group: RankGroup) -> None:
    group.gather(torch.zeros(3))


def test_a_lost_peer_is_an_error_not_a_wait(breakable_pool: BreakablePools) -> None:
    with breakable_pool(2) as pool:
        pool.kill(1)
        pool.send_to(0, gather_once)
        failure = pool.receive(0)
        assert isinstance(failure.error, TransportError)


# --------------------------------------------------------------------------------------- bookkeeping


def test_generic_names() -> None:
    assert generic_name("model.layers.12.mlp.experts.3.up_proj") == "model.layers.*.mlp.experts.*.up_proj"
    assert generic_name("lm_head") == "lm_head"


@pytest.mark.parametrize("architecture", [*ARCHITECTURES, *CONFIGS])
@pytest.mark.parametrize("size", [2, 4])
def test_every_element_has_a_rank(architecture: str, size: int) -> None:
    """The cuts of all ranks cover each parameter; only copied key/value heads are there twice."""
    config = CONFIGS[architecture] if architecture in CONFIGS else ARCHITECTURES[architecture]()
    model = on_paper(config)
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    plan = plan_of(model, size)
    layouts = [layout_of(config, rank, size) for rank in range(size)]
    per_rank = [cuts_of(model, plan, layout) for layout in layouts]
    assert per_rank[0]
    for name in per_rank[0]:
        covered = [0] * shapes[name][per_rank[0][name].dim]
        for cuts in per_rank:
            for first, end in cuts[name].ranges:
                for index in range(first, end):
                    covered[index] += 1
        has_copies = any(part in name for part in ("k_proj", "v_proj", "k_norm", "qkv", "query_key_value"))
        assert min(covered) >= 1, name
        assert max(covered) <= (layouts[0].kv_copies if has_copies else 1), name


def test_even_shares_are_put_together_without_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiled forward has no form for it."""
    monkeypatch.setattr(surgery, "all_gather", lambda part, _: torch.stack([part, part + 10]))
    monkeypatch.setattr(surgery.F, "pad", lambda *_: pytest.fail("padded"))
    group: Any = SimpleNamespace(size=2)
    gathered = surgery.gather_columns(torch.arange(6.0).reshape(2, 3), 6, group)
    assert gathered.tolist() == [[0, 1, 2, 10, 11, 12], [3, 4, 5, 13, 14, 15]]


def test_shares_and_cuts() -> None:
    shares = [share_of(10, rank, 4) for rank in range(4)]
    assert shares == [(0, 2), (2, 5), (5, 7), (7, 10)]
    cut = Cut(0, ((1, 3), (6, 9)))
    assert cut.length == 5
    assert cut.within(5, 10) == Cut(0, ((1, 4),))
