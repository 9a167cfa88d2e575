"""What the drafters of `drafter_table` need, for the tiny target: made when it is first asked for."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.architectures import make_tokenizer, save_model
from tests.specdec.engine.drafter_bench import Bench
from tests.specdec.engine.fitted_drafters import FittedDrafters


class DrafterFiles:
    """Implements `drafter_table.Files`."""

    def __init__(self, bench: Bench, folders: pytest.TempPathFactory) -> None:
        self._bench = bench
        self._folder = folders.mktemp("files")
        self._fitted = FittedDrafters(bench, folders)

    def __call__(self, name: str) -> str:
        """Return the path of "target", "draft", "corpus", "index" (a folder), or of fitted heads."""
        path = self._folder / name
        if name == "target":
            path = self._bench.models.load("llama").path
        elif name == "draft" and not path.exists():
            _save_disturbed(path)
        elif name == "corpus" and not path.exists():
            _save_corpus(path, self._bench)
        elif name not in ("draft", "corpus", "index"):
            path = self._fitted.folder_of(name)
        return str(path)


def _save_disturbed(folder: Path) -> None:
    """Save a model that agrees with the target often."""
    model = save_model(folder)
    with torch.no_grad():
        generator = torch.Generator().manual_seed(1)
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.02 * parameter.std())
    model.save_pretrained(folder)


def _save_corpus(path: Path, bench: Bench) -> None:
    """Save what the target says."""
    tokenizer = make_tokenizer()
    texts = [tokenizer.decode(one) for kind in ("greedy", "plain") for one in bench.alone("llama", kind)]
    path.write_text("\n".join(texts))
