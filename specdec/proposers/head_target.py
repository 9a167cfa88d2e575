"""The target that heads draft for, as far as they have to do with it: beside them, or in another process."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import torch
from torch import nn

from specdec.core.errors import ConfigError
from specdec.drafters.base import Borrowed, Drafter, TargetParts
from specdec.model.config import ModelConfig
from specdec.model.devices import resolve_device
from specdec.model.facts import read_facts
from specdec.model.loader import LoadedModel
from specdec.model.on_paper import check_servable
from specdec.model.whole_ends import End, read_end, read_module, require_plain

_ENDS: tuple[End, ...] = ("embeddings", "head")
_EMBEDDINGS: tuple[End, ...] = ("embeddings",)


class _Completed(Protocol):
    """Brings parts of a target in full that are not here, or not in full."""

    def __call__(self, parts: TargetParts, names: Collection[Borrowed]) -> TargetParts: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadTarget:
    """What is known of the target, and where its parts come from that heads compute with."""

    path: Path
    parts: TargetParts
    """Where they are `incomplete`, those that heads compute with have to be completed first."""
    dtype: torch.dtype
    """Of the heads."""
    device: torch.device
    """Theirs, too."""
    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    is_quantized: bool = False
    """Whether the weights of its parts are."""
    stored_head: Callable[[], nn.Module] | None = None
    """Reads the LM head that is quantized here; None: it is not."""
    incomplete: _Completed | None = None
    """None: all parts are here."""

    @staticmethod
    def beside(loaded: LoadedModel) -> HeadTarget:
        """Return the target that is loaded in this process, or this rank's part of it."""
        parts = TargetParts.of(loaded.model)
        if loaded.vocab is not None:
            parts = replace(parts, vocab_size=loaded.vocab_size)  # this rank has a part of the head

        def complete(parts: TargetParts, names: Collection[Borrowed]) -> TargetParts:
            return _with_ends(parts, {name: read_end(loaded, name) for name in names})

        is_quantized = loaded.quantization is not None
        is_divided = loaded.vocab is not None or loaded.stage is not None
        return HeadTarget(
            path=loaded.path,
            parts=parts,
            dtype=loaded.dtype,
            device=loaded.device,
            vocab_size=loaded.vocab_size,
            max_model_len=loaded.max_model_len,
            eos_token_ids=loaded.eos_token_ids,
            is_quantized=is_quantized,
            stored_head=(lambda: read_end(loaded, "head")) if is_quantized else None,
            incomplete=complete if is_divided else None,
        )

    @staticmethod
    def elsewhere(config: ModelConfig, *, device: str, dtype: str) -> HeadTarget:
        """Return a target that other processes run, of which only the folder is looked at.

        `device` and `dtype` are those of the heads, as in `ModelConfig`; dtype `auto` is the target's.

        Raises:
            CheckpointError, ConfigError: as `check_servable`.
            ResourceError: there is no such device.
        """
        facts = read_facts(config if dtype == "auto" else config.model_copy(update={"dtype": dtype}))
        on_paper = check_servable(config)
        parts = TargetParts.of(on_paper.model)
        path, place = Path(config.model), resolve_device(device)
        numbers: torch.dtype = getattr(torch, facts.dtype)

        def read(module: nn.Module) -> nn.Module:
            return read_module(on_paper.model, module, path, place, numbers)

        def complete(parts: TargetParts, names: Collection[Borrowed]) -> TargetParts:
            ends: dict[Borrowed, nn.Module] = {"embeddings": parts.embeddings, "head": parts.head}
            for name in names:
                require_plain(ends[name], name, path.name)
            read_ends = {name: read(ends[name]) for name in names}
            return replace(_with_ends(parts, read_ends), final_norm=read(parts.final_norm))

        return HeadTarget(
            path=path,
            parts=parts,
            dtype=numbers,
            device=place,
            vocab_size=parts.vocab_size,
            max_model_len=on_paper.max_model_len,
            eos_token_ids=facts.eos_token_ids,
            incomplete=complete,
        )

    def whole(self) -> HeadTarget:
        """Return it with all parts in full."""
        if self.incomplete is None:
            return self
        return replace(self, parts=self.incomplete(self.parts, _ENDS), incomplete=None)

    def with_embeddings(self) -> HeadTarget:
        """Return it with its embeddings in full, for whoever compares a head's own with them.

        Where they are more than a matrix there is nothing to compare, and a head's stay its own.
        """
        if self.incomplete is None:
            return self
        try:
            parts = self.incomplete(self.parts, _EMBEDDINGS)
        except ConfigError:
            nothing = nn.Embedding(self.parts.vocab_size, self.parts.hidden_size, device="meta")
            parts = replace(self.parts, embeddings=nothing)
        return replace(self, parts=parts, incomplete=None)

    def with_stored_head(self) -> HeadTarget:
        """Return it with its LM head as it is stored, for whoever compares a head's own with it.

        Where it is quantized there is no matrix of it here.
        """
        if self.stored_head is None:
            return self
        return replace(self, parts=replace(self.parts, head=self.stored_head()))

    def lend(self, drafter: Drafter) -> None:
        """Give a drafter what it borrows, in full, whatever it was compared with when it was loaded."""
        complete = self.incomplete
        drafter.target = self.parts if complete is None else complete(self.parts, drafter.borrowed)


def _with_ends(parts: TargetParts, ends: dict[Borrowed, nn.Module]) -> TargetParts:
    return replace(
        parts,
        embeddings=ends.get("embeddings", parts.embeddings),
        head=ends.get("head", parts.head),
    )
