"""What the demo family is worth: held-out losses, loops, draft acceptance. All numbers of the model card.

Acceptance is measured with same-noise drafting and `sample_and_match`: the target's stream does not depend on
the draft, and an accepted draft token *is* the target's token, so the draft's proposals of every possible
round are its choices on the finished stream. One forward over that stream gives the exact outcome of all
rounds.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F
from transformers import LlamaForCausalLM

from specdec.core.loops import LOOP_LONGEST_PERIOD, LOOP_WINDOW, ends_in_loop
from training.generation import gumbel_noise, noisy_choice, sample, text_length
from training.mtp import MultiTokenPrediction
from training.progress import console
from training.tokenizer import CONTEXT_LENGTH

POSITION_EDGES = (0, 64, 256, 512, 1024, 2048, 4096)
NUM_GENERATED = 256
SPECULATION_LENGTH = 4
TEMPERATURES = (0.0, 0.7, 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """Cross entropy over the held-out files."""

    nats_per_token: float
    bits_per_byte: float
    tokens: int


def held_out_windows(documents: Iterable[np.ndarray], separator: int) -> list[torch.Tensor]:
    """int64 windows of up to 4,096 + 1 tokens, each predicting all but its first token.

    Every token of every document is predicted once; a document's first window starts with the separator,
    later ones repeat the last token of the window before.
    """
    windows: list[torch.Tensor] = []
    for document in documents:
        stream = torch.from_numpy(np.concatenate([[separator], document]).astype(np.int64))
        for start in range(0, len(stream) - 1, CONTEXT_LENGTH):
            windows.append(stream[start : start + CONTEXT_LENGTH + 1])
    return windows


def mean_loss(nats: torch.Tensor, num_bytes: int) -> Loss:
    """Summary of per-token losses [N] (nats) over ``num_bytes`` bytes of UTF-8 text."""
    return Loss(
        nats_per_token=round(nats.mean().item(), 4),
        bits_per_byte=round(nats.sum().item() / math.log(2) / num_bytes, 4),
        tokens=len(nats),
    )


@torch.inference_mode()
def exit_losses(model: LlamaForCausalLM, windows: Sequence[torch.Tensor]) -> torch.Tensor:
    """Per-token losses in nats after every layer through the shared norm and head: float32 [L, N]."""
    inner = model.model
    losses: list[torch.Tensor] = []
    for window in windows:
        inputs, labels = window[None, :-1], window[1:]
        hidden = inner.embed_tokens(inputs)
        rotary = inner.rotary_emb(hidden, torch.arange(inputs.shape[1]).unsqueeze(0))
        rows: list[torch.Tensor] = []
        for block in inner.layers:
            hidden = block(hidden, position_embeddings=rotary)
            rows.append(
                F.cross_entropy(model.lm_head(inner.norm(hidden))[0].float(), labels, reduction="none")
            )
        losses.append(torch.stack(rows))
    return torch.cat(losses, dim=1)


def loss_by_position(nats: torch.Tensor, windows: Sequence[torch.Tensor]) -> dict[str, float]:
    """Mean loss per bucket of the predicting position (0 sees one token)."""
    positions = torch.cat([torch.arange(len(window) - 1) for window in windows])
    buckets = {}
    for low, high in pairwise(POSITION_EDGES):
        inside = (positions >= low) & (positions < high)
        if inside.any():
            buckets[f"{low}-{high - 1}"] = round(nats[inside].mean().item(), 4)
    return buckets


def same_files_by_position(nats: torch.Tensor, windows: Sequence[torch.Tensor]) -> dict[str, float]:
    """`loss_by_position` over full windows only, so that every bucket averages over the same files."""
    full = [len(window) == CONTEXT_LENGTH + 1 for window in windows]
    lengths = [len(window) - 1 for window in windows]
    kept = torch.cat([torch.full((n,), is_full) for n, is_full in zip(lengths, full, strict=True)])
    return loss_by_position(
        nats[kept], [window for window, is_full in zip(windows, full, strict=True) if is_full]
    )


@torch.inference_mode()
def mtp_accuracy(
    target: LlamaForCausalLM, mtp: MultiTokenPrediction, windows: Sequence[torch.Tensor]
) -> dict[str, float]:
    """How well one MTP step predicts token i+2 from position i and token i+1.

    ``agreement``: with the target's own greedy choice at that position; ``accuracy``: with the text.
    """
    agree = correct = target_correct = count = 0
    nats = 0.0
    for window in windows:
        if len(window) < 3:
            continue
        hidden = target.model(window[None, :-1], use_cache=False).last_hidden_state
        embeddings = target.model.embed_tokens(window[None, 1:-1])
        rotary = target.model.rotary_emb(embeddings, torch.arange(embeddings.shape[1]).unsqueeze(0))
        logits = target.lm_head(mtp(hidden[:, :-1], embeddings, rotary))[0].float()
        chosen, labels = logits.argmax(dim=-1), window[2:]
        by_target = target.lm_head(hidden[0, 1:]).argmax(dim=-1)
        agree += int((chosen == by_target).sum())
        correct += int((chosen == labels).sum())
        target_correct += int((by_target == labels).sum())
        nats += F.cross_entropy(logits, labels, reduction="sum").item()
        count += len(labels)
    return {
        "agreement": round(agree / count, 4),
        "accuracy": round(correct / count, 4),
        "target_accuracy": round(target_correct / count, 4),
        "nats_per_token": round(nats / count, 4),
    }


def loop_start(tokens: Sequence[int]) -> int | None:
    """Where a text that ends in a loop begins to repeat itself (after the first cycle), or None."""
    if not ends_in_loop(tokens):
        return None
    length = len(tokens)
    for period in range(1, LOOP_LONGEST_PERIOD + 1):
        start = length
        while start > period and tokens[start - 1] == tokens[start - 1 - period]:
            start -= 1
        if start <= length - LOOP_WINDOW + period:
            return start
    return None


def accepted_per_round(matches: Sequence[bool], k: int) -> list[int]:
    """Accepted draft tokens of each round of ``k`` along a stream; ``matches[t]``: draft = target at t.

    A round at t accepts the run of matches from t (at most k) and commits one token more. Rounds that reach
    past the end of the stream are not counted.
    """
    accepted: list[int] = []
    position = 0
    while position + k <= len(matches):
        run = 0
        while run < k and matches[position + run]:
            run += 1
        accepted.append(run)
        position += run + 1
    return accepted


def acceptance_summary(rounds: Sequence[int], k: int) -> dict[str, Any]:
    """Acceptance over rounds.

    ``acceptance``: accepted / verified draft tokens, where a round verifies up to and including its first
    mismatch (the papers' per-token acceptance rate); ``reached``: share of rounds that accept the i-th
    token; ``conditional``: the same, given that those before it were accepted; ``mean_accepted``: per
    round.
    """
    if not rounds:
        return {"rounds": 0}
    total = len(rounds)
    reached = [sum(accepted > i for accepted in rounds) / total for i in range(k)]
    tested = sum(min(accepted + 1, k) for accepted in rounds)
    return {
        "rounds": total,
        "acceptance": round(sum(rounds) / tested, 4),
        "mean_accepted": round(sum(rounds) / total, 4),
        "tokens_per_round": round(sum(rounds) / total + 1, 4),
        "reached": [round(share, 4) for share in reached],
        "conditional": [
            round(share / before, 4) if before else None
            for share, before in zip(reached, [1.0, *reached], strict=False)
        ],
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Streams:
    """What the target generated for all prompts at one temperature."""

    temperature: float
    seed: int
    prompts: Sequence[Sequence[int]]
    tokens: torch.Tensor
    """int64 [rows, 256]."""
    lengths: list[int]
    """Tokens of each row up to and including end-of-text."""

    @property
    def loop_starts(self) -> list[int | None]:
        """Per row: where it begins to loop, None if it does not."""
        rows = zip(self.tokens.tolist(), self.lengths, strict=True)
        return [loop_start(row[:length]) for row, length in rows]


def generate_streams(
    target: LlamaForCausalLM,
    prompts: Sequence[Sequence[int]],
    temperature: float,
    seed: int,
    ends: frozenset[int],
) -> Streams:
    """256 tokens after each prompt, noise by (seed, position, row)."""
    tokens = sample(
        target,
        prompts,
        num_tokens=NUM_GENERATED,
        temperatures=torch.full((len(prompts),), temperature),
        seed=seed,
    )
    lengths = [text_length(row, ends) for row in tokens.tolist()]
    return Streams(temperature=temperature, seed=seed, prompts=prompts, tokens=tokens, lengths=lengths)


@torch.inference_mode()
def draft_matches(
    draft: LlamaForCausalLM, streams: Streams, exit_layer: int | None = None
) -> list[list[bool]]:
    """Per row and generated position: would the draft, with the same noise, propose the target's token."""
    rows, vocab = len(streams.prompts), draft.config.vocab_size
    choices = torch.empty_like(streams.tokens)
    logits = torch.empty(rows, NUM_GENERATED, vocab)
    for row, prompt in enumerate(streams.prompts):
        inputs = torch.tensor([*prompt, *streams.tokens[row, :-1].tolist()])[None]
        hidden = _hidden_after(draft, inputs, exit_layer)
        logits[row] = draft.lm_head(hidden[0, len(prompt) - 1 :]).float()
    for step in range(NUM_GENERATED):
        noise = gumbel_noise(streams.seed, step, rows, vocab) if streams.temperature > 0 else None
        choices[:, step] = noisy_choice(logits[:, step], torch.full((rows,), streams.temperature), noise)
    matches = choices == streams.tokens
    return [row[:length] for row, length in zip(matches.tolist(), streams.lengths, strict=True)]


def _hidden_after(model: LlamaForCausalLM, inputs: torch.Tensor, exit_layer: int | None) -> torch.Tensor:
    """[B, T, H] after the final norm; ``exit_layer`` counts layers that run (None: all)."""
    inner = model.model
    hidden = inner.embed_tokens(inputs)
    rotary = inner.rotary_emb(hidden, torch.arange(inputs.shape[1]).unsqueeze(0))
    for block in inner.layers[:exit_layer]:
        hidden = block(hidden, position_embeddings=rotary)
    return inner.norm(hidden)


def acceptance(streams: Streams, matches: list[list[bool]], k: int = SPECULATION_LENGTH) -> dict[str, Any]:
    """Summaries over texts that end in a loop, their parts before the loop, texts that do not, and all."""
    starts = streams.loop_starts

    def over(rows: Iterable[Sequence[bool]]) -> dict[str, Any]:
        return acceptance_summary([accepted for row in rows for accepted in accepted_per_round(row, k)], k)

    looping = [(row, start) for row, start in zip(matches, starts, strict=True) if start is not None]
    return {
        "texts": len(starts),
        "looping_texts": len(looping),
        "not_looping": over(row for row, start in zip(matches, starts, strict=True) if start is None),
        "before_loop": over(row[:start] for row, start in looping),
        "looping": over(row for row, _ in looping),
        "all": over(matches),
    }


def evaluate_acceptance(
    target: LlamaForCausalLM,
    draft: LlamaForCausalLM,
    prompts: Sequence[Sequence[int]],
    ends: frozenset[int],
    *,
    seed: int = 0,
    exit_layers: Sequence[int] = (),
) -> dict[str, Any]:
    """Draft acceptance (and that of early exits of the target) at each temperature."""
    report: dict[str, Any] = {}
    for temperature in TEMPERATURES:
        console.print(f"acceptance at temperature {temperature}")
        streams = generate_streams(target, prompts, temperature, seed, ends)
        entry: dict[str, Any] = {"draft": acceptance(streams, draft_matches(draft, streams))}
        for layers in exit_layers:
            entry[f"exit_after_{layers}_layers"] = acceptance(streams, draft_matches(target, streams, layers))
        report[str(temperature)] = entry
    return report


def loss_report(nats: torch.Tensor, windows: Sequence[torch.Tensor], num_bytes: int) -> dict[str, Any]:
    """Loss, and by position over all windows and over the full ones."""
    return {
        **asdict(mean_loss(nats, num_bytes)),
        "by_position": loss_by_position(nats, windows),
        "by_position_full_windows": same_files_by_position(nats, windows),
    }
