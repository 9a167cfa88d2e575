"""A target without an engine: what it drafts behind one long text, and what transformers would."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from specdec.core.ids import RequestId
from specdec.core.plan import AdmittedSequence, TargetStep, TargetWork, WorkResult
from specdec.core.sampling_params import SamplingParams
from specdec.engine.targets.local_target import LocalTarget
from specdec.sampling.sampler import RowSpec, Sampler, SamplingRows
from tests.specdec.engine.sampling_kinds import GREEDY
from tests.specdec.engine.self_drafting import BLOCK_SIZE, SelfSetting
from tests.specdec.engine.tiny_models import Models

LONG = [(5 + 7 * index * index) % 120 + 2 for index in range(37)]


def draft_once(
    models: Models,
    setting: SelfSetting,
    params: SamplingParams,
    num_tokens: int,
    architecture: str = "llama",
) -> WorkResult:
    """Return what the target says of drafting so many tokens behind `LONG`."""
    runner = setting.runner(models.load(architecture), setting.num_blocks)
    target = LocalTarget(
        runner, setting.sampler(), self_drafting=setting.kv.make(BLOCK_SIZE), self_tree=setting.tree
    )
    name = RequestId("a")
    blocks = tuple(range(40, 20, -1))
    prefill = TargetWork(name, tuple(LONG[:-1]), 0, 0, 0, blocks)
    admitted = AdmittedSequence(name, 12345, params)
    target.submit(TargetStep(0, (prefill,), (admitted,)))
    target.collect()
    work = TargetWork(name, (LONG[-1],), len(LONG) - 1, 1, len(blocks), (), num_self_drafted=num_tokens)
    target.submit(TargetStep(1, (work,)))
    (answer,) = target.collect().results
    return answer


def reference_logits(
    models: Models, selected: Sequence[int], path: Sequence[int], architecture: str = "llama"
) -> torch.Tensor:
    """What transformers says behind `LONG` and a path, [1, V], of which rows see only `selected` and it."""
    tokens, first = [*LONG, *path], len(LONG) - 1
    length = len(tokens)
    allowed = torch.ones(length, length, dtype=torch.bool).tril()
    allowed[first:, [one for one in range(first) if one not in selected]] = False
    mask = torch.zeros(length, length).masked_fill(~allowed, float("-inf"))[None, None]
    model = models.reference(architecture)
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([tokens]), attention_mask=mask).logits[0, -1:]
    return logits


def reference_draft(
    models: Models,
    selected: Sequence[int],
    params: SamplingParams,
    num_tokens: int,
    architecture: str = "llama",
) -> tuple[int, ...]:
    """The chain that it would draft."""
    path: list[int] = []
    for depth in range(num_tokens):
        logits = reference_logits(models, selected, path, architecture)
        rows = SamplingRows.build([RowSpec(params, 12345, len(LONG) + depth, 1)])
        path.append(int(Sampler().sample(logits, rows).token_ids))
    return tuple(path)


def draft_behind(target: LocalTarget, num_tokens: int) -> tuple[int, ...]:
    """What the target drafts behind `LONG`; its prompt is in the cache but for the last token."""
    name, blocks = RequestId("a"), tuple(range(40, 20, -1))
    prefill = TargetWork(name, tuple(LONG[:-1]), 0, 0, 0, blocks)
    target.run(TargetStep(0, (prefill,), (AdmittedSequence(name, 12345, GREEDY),)))
    work = TargetWork(name, (LONG[-1],), len(LONG) - 1, 1, len(blocks), (), num_self_drafted=num_tokens)
    (answer,) = target.run(TargetStep(1, (work,))).results
    return answer.drafted


class Rounds:
    """One sequence at a target, round by round, greedy."""

    def __init__(self, target: LocalTarget) -> None:
        self.target = target
        self.tokens = list(LONG)
        self.name, blocks = RequestId("a"), tuple(range(1, 41))
        prefill = TargetWork(self.name, tuple(LONG[:-1]), 0, 0, 0, blocks)
        target.run(TargetStep(0, (prefill,), (AdmittedSequence(self.name, 3, GREEDY),)))

    def run(self, num_tokens: int, num_drafted: int) -> None:
        while len(self.tokens) < len(LONG) + num_tokens:
            work = TargetWork(
                self.name,
                (self.tokens[-1],),
                len(self.tokens) - 1,
                1,
                40,
                (),
                num_self_drafted=num_drafted,
            )
            (answer,) = self.target.run(TargetStep(1, (work,))).results
            for index, token in enumerate(answer.token_ids):
                self.tokens.append(token)
                if index < len(answer.drafted) and answer.drafted[index] != token:
                    break

    def kept(self, num_tokens: int) -> list[torch.Tensor]:
        """K and V of the first tokens, layer by layer."""
        pool = self.target.runner.pool
        num_blocks, rest = divmod(len(LONG) - 1 + num_tokens, BLOCK_SIZE)
        kept = []
        for one in (*pool.keys, *pool.values):
            rows = one[1 : 2 + num_blocks].transpose(1, 2).flatten(0, 1)
            kept.append(rows[: num_blocks * BLOCK_SIZE + rest].clone())
        return kept
