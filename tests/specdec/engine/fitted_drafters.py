"""Drafters from hidden states, fitted to texts of the tiny target, and folders as they are published."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
import torch

from specdec.drafters.attention import CausalRows
from specdec.drafters.base import FeatureDrafter, SequentialHeads, TargetParts
from specdec.drafters.checkpoints.eagle import save_eagle
from specdec.drafters.checkpoints.eagle3 import save_eagle3
from specdec.drafters.checkpoints.hydra import save_hydra
from specdec.drafters.checkpoints.medusa import save_medusa
from specdec.drafters.checkpoints.mtp import save_modules, save_mtp
from specdec.drafters.checkpoints.parallel_heads import save_parallel_heads
from specdec.drafters.eagle import Eagle
from specdec.drafters.eagle3 import Eagle3, Eagle3Settings
from specdec.drafters.hydra import Hydra
from specdec.drafters.medusa import Medusa
from specdec.drafters.mtp import Mtp
from specdec.drafters.parallel_heads import ParallelHeads
from specdec.drafters.vocabulary import DraftVocabulary
from specdec.proposers.heads import Heads
from tests.architectures import VOCAB_SIZE
from tests.specdec.engine.drafter_bench import Bench
from tests.specdec.engine.linear_heads import hidden_of
from tests.specdec.engine.tiny_models import PROMPTS

NUM_HEADS = 3
KNOWN_IDS = torch.arange(VOCAB_SIZE)[torch.arange(VOCAB_SIZE) % 8 != 7]
"""Of a drafter that knows a part of the vocabulary; the target also says others."""
_IGNORED = -100
"""Of tokens that the drafter cannot say."""


def fit(
    drafter: FeatureDrafter, reference: Any, texts: Sequence[Sequence[int]], num_steps: int = 150
) -> None:
    """Fit it to texts of the target: the tokens behind every row, and the features that stand for its own."""
    rows = [(torch.tensor([text]), hidden_of(reference, text, drafter.hidden_layers)[None]) for text in texts]
    parameters = [one for one in drafter.parameters() if one.requires_grad]
    optimizer = torch.optim.Adam(parameters, lr=3e-3)
    for step in range(num_steps):
        tokens, hidden = rows[step % len(rows)]
        true = drafter.fuse(hidden)
        features, loss = true[:, :-1], torch.zeros(())
        for depth in range(drafter.num_modules):
            made = drafter.step(
                drafter.embed(tokens[:, 1 + depth :]),
                features[:, : tokens.shape[1] - 1 - depth],
                torch.arange(tokens.shape[1] - 1 - depth)[None],
                CausalRows(),
                depth,
            )
            guesses, wanted = drafter.logits(made.outputs[0, :-1]), tokens[0, 2 + depth :]
            if (vocabulary := drafter.vocabulary) is not None:
                guesses = vocabulary.expand(guesses)
                wanted = wanted.where(vocabulary.t2d[wanted], _IGNORED)
            loss = loss + torch.nn.functional.cross_entropy(guesses, wanted, ignore_index=_IGNORED)
            if drafter.num_modules == 1:
                loss = loss + torch.nn.functional.smooth_l1_loss(made.features, true[:, 1:].detach())
            features = made.features
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()


def fit_heads(heads: Heads, bench: Bench, num_steps: int = 150) -> None:
    """Fit every head to the tokens that it is to give, behind every row of texts of the target."""
    reference = bench.models.reference("llama")
    rows: list[tuple[torch.Tensor, torch.Tensor]] = []
    for kind in ("greedy", "plain"):
        for prompt, stream in zip(PROMPTS, bench.alone("llama", kind), strict=True):
            text = [*prompt, *stream]
            rows.append((torch.tensor(text), hidden_of(reference, text, heads.hidden_layers)))
    parameters = [one for one in heads.parameters() if one.requires_grad]
    optimizer = torch.optim.Adam(parameters, lr=3e-3)
    for step in range(num_steps):
        tokens, hidden = rows[step % len(rows)]
        prepared = heads.prepare(hidden[None], torch.arange(len(tokens))[None], CausalRows())[0]
        loss = torch.zeros(())
        for depth in range(NUM_HEADS):
            known = len(tokens) - depth - 2
            if isinstance(heads, SequentialHeads):
                paths = tokens.unfold(0, depth + 1, 1)[1 : known + 1]
                guesses = heads.logits(depth, prepared[:known], paths)
            else:
                guesses = heads.logits(prepared)[depth, :known]
            loss = loss + torch.nn.functional.cross_entropy(guesses, tokens[depth + 2 :])
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()


class FittedDrafters:
    """Made once each, when they are asked for."""

    def __init__(self, bench: Bench, folders: pytest.TempPathFactory) -> None:
        self._bench = bench
        self._folders = folders
        self._target = TargetParts.of(bench.models.reference("llama"))
        self._fitted: dict[str, FeatureDrafter] = {}
        self._saved: dict[str, Path] = {}

    def fitted(self, method: str) -> FeatureDrafter:
        """Return an EAGLE, EAGLE-3 or MTP."""
        if method not in self._fitted:
            torch.manual_seed(0)
            drafter: FeatureDrafter
            if method == "eagle":
                drafter = Eagle(self._target, self._target.config)
            elif method == "mtp":
                drafter = Mtp(self._target)
            elif method == "mtp of three":
                drafter = Mtp(self._target, num_modules=3)
            else:
                drafter = self._eagle3(method)
            fit(drafter, self._bench.models.reference("llama"), self._texts())
            self._fitted[method] = drafter.requires_grad_(requires_grad=False).eval()
        return self._fitted[method]

    def folder_of(self, method: str) -> Path:
        if method not in self._saved:
            folder = self._saved[method] = self._folders.mktemp(method)
            if method == "medusa":
                save_medusa(self._medusa(), folder, base_model="tiny")
                return folder
            if method == "parallel_heads":
                save_parallel_heads(self._parallel_heads(), folder, base_model="tiny")
                return folder
            if method in ("hydra", "hydra++"):
                save_hydra(self._hydra(has_prefix_layer=method == "hydra++"), folder, base_model="tiny")
                return folder
            if method == "mtp":  # lies beside the target's own files
                copytree(self._bench.models.load("llama").path, folder, dirs_exist_ok=True)
            save: Any = {
                "eagle": save_eagle,
                "eagle3": save_eagle3,
                "eagle3 of a part": save_eagle3,
                "eagle3.1": save_eagle3,
                "mtp": save_mtp,
                "mtp of three": save_modules,
            }[method]
            save(self.fitted(method), folder)
        return self._saved[method]

    def _texts(self) -> list[list[int]]:
        return [
            [*prompt, *stream]
            for kind in ("greedy", "plain")
            for prompt, stream in zip(PROMPTS, self._bench.alone("llama", kind), strict=True)
        ]

    def _eagle3(self, kind: str) -> Eagle3:
        is_later = kind == "eagle3.1"
        settings = Eagle3Settings(
            config=self._target.config,
            fused_layers=(0, 1),
            has_embeddings=True,
            fc_norm=is_later,
            norm_output=is_later,
        )
        is_part = kind == "eagle3 of a part"
        return Eagle3(
            self._target, settings, DraftVocabulary.of_ids(KNOWN_IDS, VOCAB_SIZE) if is_part else None
        )

    @torch.no_grad()
    def _medusa(self) -> Medusa:
        weights = self._bench.fitted("llama", (-1,))
        medusa = Medusa(self._target, num_heads=len(weights))
        for head, weight in zip(medusa.heads, weights, strict=True):
            head[-1].weight.copy_(weight.T)  # type: ignore[index]
        return medusa

    def _hydra(self, *, has_prefix_layer: bool) -> Hydra:
        torch.manual_seed(0)
        hydra = Hydra(self._target, num_heads=NUM_HEADS, has_prefix_layer=has_prefix_layer)
        hydra.start_from_target()
        fit_heads(hydra, self._bench)
        return hydra.requires_grad_(requires_grad=False).eval()

    def _parallel_heads(self) -> ParallelHeads:
        torch.manual_seed(0)
        heads = ParallelHeads(self._target, num_heads=NUM_HEADS)
        fit_heads(heads, self._bench)
        return heads.requires_grad_(requires_grad=False).eval()
