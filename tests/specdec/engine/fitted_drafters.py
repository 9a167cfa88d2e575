"""Drafters from hidden states, fitted to texts of the tiny target, and folders as they are published."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
import torch

from specdec.drafters.attention import CausalRows
from specdec.drafters.base import FeatureDrafter, TargetParts
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
from tests.specdec.engine.linear_heads import hidden_of
from tests.specdec.engine.targets.test_target_drafting import PROMPTS, Bench
from tests.specdec.engine.test_head_layers import NUM_HEADS
from tests.specdec.engine.test_head_layers import fit as fit_heads


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
            guesses = drafter.logits(made.outputs[0, :-1])
            loss = loss + torch.nn.functional.cross_entropy(guesses, tokens[0, 2 + depth :])
            if drafter.num_modules == 1:
                loss = loss + torch.nn.functional.smooth_l1_loss(made.features, true[:, 1:].detach())
            features = made.features
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
                settings = Eagle3Settings(
                    config=self._target.config, fused_layers=(0, 1), has_embeddings=True
                )
                drafter = Eagle3(self._target, settings)
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
