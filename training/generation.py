"""Batched sampling with a preallocated KV cache and Gumbel-max noise that depends on (seed, step) alone.

Target and draft that sample with the same seed see the same noise at the same generated position; this is
what same-noise drafting is measured with. (Serving uses the engine's counter-based noise.)
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from transformers import AttentionInterface, AttentionMaskInterface, LlamaForCausalLM, StaticCache
from transformers.masking_utils import sdpa_mask

_ATTENTION = "grouped_decode"
_SEEDS_OF_A_TEXT = 1 << 32
"""Between the seeds of texts that follow each other in a row."""


def grouped_decode_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention contract: returns ([B, T, heads, D], None).

    One-token steps multiply each KV head once with all its query heads; torch's CPU kernel with a mask takes
    eight times as long. Longer inputs (the prompts) go to that kernel, unless scores are capped (``softcap``,
    Gemma 2), which it does not do.
    """
    batch, heads, length, size = query.shape
    kv_heads = key.shape[1]
    if softcap is not None:
        return _capped(query * scaling, key, value, attention_mask, softcap), None
    if length > 1 or attention_mask is None:
        groups = heads // kv_heads
        key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
        is_causal = length > 1 and attention_mask is None
        output = F.scaled_dot_product_attention(
            query, key, value, attn_mask=attention_mask, is_causal=is_causal, scale=scaling
        )
        return output.transpose(1, 2).contiguous(), None
    grouped = query.reshape(batch, kv_heads, heads // kv_heads, size) * scaling
    scores = torch.matmul(grouped, key.transpose(2, 3)).masked_fill(~attention_mask, float("-inf"))
    output = torch.matmul(scores.softmax(dim=-1, dtype=torch.float32).to(value.dtype), value)
    return output.reshape(batch, 1, heads, size), None


def _capped(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    softcap: float,
) -> torch.Tensor:
    """Attention [B, T, heads, D] of scaled queries [B, heads, T, D] with scores of at most ``softcap``.

    As elsewhere in transformers, inputs of several positions without a mask are the first of their text, and
    behind the keys of these stands what a cache has not been given yet.
    """
    batch, heads, length, size = query.shape
    kv_heads, num_keys = key.shape[1:3]
    if attention_mask is None:
        seen = torch.ones((length, num_keys), dtype=torch.bool, device=query.device)
        attention_mask = (seen.tril() if length > 1 else seen)[None, None]
    grouped = query.reshape(batch, kv_heads, heads // kv_heads, length, size)
    scores = softcap * torch.tanh(grouped @ key[:, :, None].transpose(3, 4) / softcap)
    # Padding sees nothing. Infinities would make it no number, and with its values all that is near it.
    scores = scores.masked_fill(~attention_mask[:, :, None], torch.finfo(scores.dtype).min)
    output = scores.softmax(dim=-1, dtype=torch.float32).to(value.dtype) @ value[:, :, None]
    return output.reshape(batch, heads, length, size).transpose(1, 2).contiguous()


AttentionInterface.register(_ATTENTION, grouped_decode_attention)
AttentionMaskInterface.register(_ATTENTION, sdpa_mask)


@contextmanager
def _decoding(model: LlamaForCausalLM) -> Iterator[None]:
    """Use the decoding attention for a while, in models that leave theirs to others: Falcon does not."""
    if not model.is_backend_compatible():
        yield
        return
    previous = model.config._attn_implementation
    model.config._attn_implementation = _ATTENTION
    try:
        yield
    finally:
        model.config._attn_implementation = previous


def gumbel_noise(seed: int, step: int, rows: int, vocab_size: int) -> torch.Tensor:
    """float32 [rows, vocab_size] of standard Gumbel noise for generated position ``step``."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
    uniform = torch.rand(rows, vocab_size, generator=generator, dtype=torch.float64)
    return -torch.log(-torch.log1p(-(uniform + 2.0**-54).clamp(max=1 - 2.0**-53))).float()


def noisy_choice(
    logits: torch.Tensor, temperatures: torch.Tensor, noise: torch.Tensor | None
) -> torch.Tensor:
    """int64 [N]: argmax of logits [N, V] / temperature + noise; the plain argmax at temperature 0.

    Ties go to the lowest id.
    """
    if noise is None:
        return logits.argmax(dim=-1)
    heated = logits.float() / temperatures.clamp(min=1e-6).unsqueeze(1) + noise
    return torch.where(temperatures > 0, heated.argmax(dim=-1), logits.argmax(dim=-1))


@torch.inference_mode()
def sample(
    model: LlamaForCausalLM,
    prompts: Sequence[Sequence[int]],
    *,
    num_tokens: int,
    temperatures: torch.Tensor,
    seed: int,
    num_ids: int | None = None,
    num_positions: int | None = None,
) -> torch.Tensor:
    """Continue each prompt by ``num_tokens`` tokens: int64 [rows, num_tokens].

    ``temperatures`` float [rows]; ``num_ids``: only ids below it are chosen, None: all that the model has;
    ``num_positions``: what rows say from there on is not used. Rows go on past end-of-text; the caller cuts
    them (`text_length`). The model may be on a GPU; noise and what is returned are on the host, so that the
    noise is the same everywhere.
    """
    device = model.device
    longest = max(map(len, prompts))
    # Masked wherever it stands, so any id does where the model has none for it.
    pad = model.config.get_text_config().pad_token_id or 0
    padded = [[pad] * (longest - len(prompt)) + list(prompt) for prompt in prompts]
    tokens = torch.tensor(padded, device=device)
    there = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    mask = torch.tensor(there, device=device)
    positions = (mask.cumsum(dim=1) - 1).clamp(min=0)
    has_padding = bool((mask == 0).any())
    cache = StaticCache(config=model.config, max_cache_len=longest + num_tokens)
    is_noisy = bool((temperatures > 0).any())
    output = torch.empty(len(prompts), num_tokens, dtype=torch.int64)
    with _decoding(model):
        for step in range(num_tokens):
            said = model(
                input_ids=tokens,
                attention_mask=mask if has_padding else None,
                position_ids=positions,
                past_key_values=cache,
                logits_to_keep=1,
            )
            logits = said.logits[:, -1, :num_ids].cpu()
            noise = gumbel_noise(seed, step, *logits.shape) if is_noisy else None
            chosen = noisy_choice(logits.float(), temperatures.cpu(), noise)
            output[:, step] = chosen
            tokens = chosen.unsqueeze(1).to(device)
            positions = positions[:, -1:] + 1
            if num_positions is not None:
                positions = positions.clamp(max=num_positions - 1)
            mask = torch.cat([mask, mask.new_ones(len(prompts), 1)], dim=1)
    return output


def text_length(tokens: Sequence[int], ends: Collection[int]) -> int:
    """Return how many of these tokens are of the first text: up to and including the first of ``ends``."""
    return next((index + 1 for index, token in enumerate(tokens) if token in ends), len(tokens))


def write_rows(
    model: LlamaForCausalLM,
    beginnings: Callable[[int], torch.Tensor],
    *,
    length: int,
    temperatures: torch.Tensor,
    seed: int,
    ends: Collection[int],
    num_ids: int | None = None,
) -> torch.Tensor:
    """Return rows int64 [R, length] of texts that a model writes, whole or cut by the row's end.

    What a model says behind the end of a text is never asked for when it is used: there another text begins
    in the same row, of which the model sees those before it.

    Args:
        model: what writes.
        beginnings: from how many texts have been begun before to beginnings int64 [R, P] of the next ones.
        length: tokens of a row, more than P.
        temperatures: float [R].
        seed: of the noise.
        ends: token ids that end a text.
        num_ids: as in `sample`.
    """
    rows: list[list[int]] = beginnings(0).tolist()
    unfinished, number = list(range(len(rows))), 0
    while unfinished:
        said = sample(
            model,
            [rows[row] for row in unfinished],
            num_tokens=length - min(len(rows[row]) for row in unfinished),
            temperatures=temperatures[unfinished],
            seed=seed + number * _SEEDS_OF_A_TEXT,
            num_ids=num_ids,
            num_positions=length,
        )
        for row, tokens in zip(unfinished, said.tolist(), strict=True):
            rows[row] += tokens[: min(length - len(rows[row]), text_length(tokens, ends))]
        number += 1
        following = beginnings(number).tolist()
        for row in unfinished:
            rows[row] += following[row][: length - len(rows[row])]
        unfinished = [row for row in unfinished if len(rows[row]) < length]
    return torch.tensor(rows)
