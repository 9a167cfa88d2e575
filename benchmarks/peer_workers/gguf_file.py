"""A Llama checkpoint of transformers as a GGUF file in bf16, without a vocabulary: it is fed token ids."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

_LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_OTHER_NAMES = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def gguf_name(name: str) -> str:
    """GGUF's name of a tensor of transformers' Llama."""
    stem = name.removesuffix(".weight")
    if stem in _OTHER_NAMES:
        return _OTHER_NAMES[stem] + ".weight"
    index, part = stem.removeprefix("model.layers.").split(".", 1)
    return f"blk.{index}.{_LAYER_NAMES[part]}.weight"


def interleave_rotary_pairs(weight: NDArray[Any], num_heads: int) -> NDArray[Any]:
    """Reorder a query or key projection: rows i and i + half of a head become neighbours.

    llama.cpp rotates neighbours, transformers rows that are half a head apart.
    """
    num_rows, width = weight.shape
    heads = weight.reshape(num_heads, 2, num_rows // num_heads // 2, width)
    return np.ascontiguousarray(heads.swapaxes(1, 2)).reshape(num_rows, width)


def read_bfloat16(file: Path) -> Iterator[tuple[str, NDArray[np.uint16]]]:
    """The tensors of a safetensors file, as the bits of bfloat16."""
    data = file.read_bytes()
    header_end = 8 + int.from_bytes(data[:8], "little")
    for name, entry in json.loads(data[8:header_end]).items():
        if name == "__metadata__":
            continue
        if entry["dtype"] != "BF16":
            raise ValueError(f"{file}: {name} is {entry['dtype']}, not BF16")
        start, end = (header_end + offset for offset in entry["data_offsets"])
        yield name, np.frombuffer(data[start:end], np.uint16).reshape(entry["shape"])


def write_gguf(model: Path, file: Path) -> None:
    """Convert the checkpoint in folder `model`."""
    import gguf

    config = json.loads((model / "config.json").read_text())
    num_heads, num_kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(num_heads)
    writer.add_head_count_kv(num_kv_heads)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("no_vocab")
    for name, bits in read_bfloat16(model / "model.safetensors"):
        if bits.ndim == 1:
            writer.add_tensor(gguf_name(name), (bits.astype(np.uint32) << 16).view(np.float32))
            continue
        if ".q_proj." in name or ".k_proj." in name:
            bits = interleave_rotary_pairs(bits, num_heads if ".q_proj." in name else num_kv_heads)
        writer.add_tensor(gguf_name(name), bits.view(np.uint8), raw_dtype=gguf.GGMLQuantizationType.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
