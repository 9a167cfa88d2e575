"""The families of drafters that `benchmarks.drafters` measures: a line for each, and that is all it takes.

Whatever the engine runs can be a family: give it a name, the `speculative_config` that is its own, and the
draft lengths (nodes, of trees) that are tried for it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

Needs = Literal["nothing", "draft", "heads", "corpus"]
"""What is beside the target: a draft model, a folder of heads that were trained for it, texts to look up."""
EVALUATION = "acceptance.json"
"""What `drafthouse train` notes beside heads."""
PLAIN = "none"
"""Drafts nothing: beside itself, it shows how far the comparison can be trusted."""
_DYNAMIC = {"shape": "dynamic", "top_k": 4, "depth": 5}
_TWO_DEEP = {"shape": "static", "widths": [4, 2]}
"""Of as many depths as the demo target's heads have."""
_FOUR_DEEP: dict[str, Any] = {"shape": "static", "widths": [4, 2, 1, 1]}
"""Of as many as the papers' have."""
_NARROW = {"shape": "static", "widths": [2, 1]}
"""For drafters of which each depth costs much of a step of the target."""
_BUDGET = {"budget": 64, "floor": 64}


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """Where the things are that families need."""

    draft: Path
    heads: Path
    """A folder for each family."""
    corpus: Path
    index: Path
    """Where the index of the corpus is kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One way to draft."""

    name: str
    lengths: tuple[int, ...]
    """Draft tokens for each round that are tried: the best of them is measured."""
    needs: Needs = "nothing"
    heads: str | None = None
    """Folder of its heads; None: of its name."""
    chain: str | None = None
    """Of trees: the family whose chains the same drafter drafts."""
    settings: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """Of `speculative_config`, what is its own."""
    deep_lengths: tuple[int, ...] = ()
    """The same where its heads were trained for four tokens ahead; its tree is as deep then."""

    @property
    def method(self) -> str:
        """Of the engine."""
        return str(self.settings.get("method", self.name))

    def folder(self, places: Places) -> Path | None:
        """Return where its weights have to be, if it has any."""
        if self.needs == "heads":
            return places.heads / (self.heads or self.name)
        return places.draft if self.needs == "draft" else None

    def is_there(self, places: Places) -> bool:
        """Whether it can be measured: its weights are there, or it has none."""
        folder = self.folder(places)
        return folder is None or (folder / "config.json").is_file()

    def with_heads_of(self, places: Places) -> Family:
        """Return the family as it is measured with the heads that are there."""
        folder = self.folder(places)
        if not self.deep_lengths or folder is None or not (folder / EVALUATION).is_file():
            return self
        noted = json.loads((folder / EVALUATION).read_text())
        if noted["recipe"]["depth"] < len(_FOUR_DEEP["widths"]):
            return self
        tree = {"tree": _FOUR_DEEP} if "tree" in self.settings else {}
        return replace(self, lengths=self.deep_lengths, settings={**self.settings, **tree})

    def config(self, places: Places) -> dict[str, Any]:
        """Return its `speculative_config`."""
        config = {"method": self.method, "num_speculative_tokens": max(self.lengths), **self.settings}
        folder = self.folder(places)
        if folder is not None:
            config["model"] = str(folder)
        if self.needs == "corpus":
            looked_up = {"path": str(places.corpus), "cache_dir": str(places.index)}
            config["retrieval"] = {**looked_up, **config.get("retrieval", {})}
        return config


FAMILIES: tuple[Family, ...] = (
    Family(name=PLAIN, lengths=(1,)),
    Family(name="ngram", lengths=(2, 4, 8)),
    # What other requests wrote would be the very same text here: every prompt is decoded several times.
    Family(name="suffix", lengths=(4, 8, 16), settings={"suffix": {"max_shared_tokens": 0}}),
    Family(
        name="suffix_tree",
        chain="suffix",
        lengths=(4, 8, 16),
        settings={"method": "suffix", "suffix": {"max_shared_tokens": 0, "shape": "tree"}},
    ),
    Family(name="retrieval", lengths=(2, 4, 8), needs="corpus"),
    Family(
        name="retrieval_tree",
        chain="retrieval",
        lengths=(4, 8, 16),
        needs="corpus",
        settings={"method": "retrieval", "retrieval": {"shape": "tree"}},
    ),
    Family(name="lookahead", lengths=(4, 8, 15)),
    Family(name="draft_model", lengths=(1, 2, 4, 6, 8), needs="draft"),
    Family(
        name="draft_model_static",
        chain="draft_model",
        lengths=(4, 12),
        needs="draft",
        settings={"method": "draft_model", "tree": {"shape": "static", "widths": [3, 1, 1, 1]}},
    ),
    Family(
        name="draft_model_dynamic",
        chain="draft_model",
        lengths=(4, 8, 16),
        needs="draft",
        settings={"method": "draft_model", "tree": _DYNAMIC},
    ),
    Family(
        name="lookup_first",
        lengths=(2, 4, 6, 8),
        needs="draft",
        settings={"method": "draft_model", "lookup_first": 8, "suffix": {"max_shared_tokens": 0}},
    ),
    Family(
        name="self_streaming",
        lengths=(1, 2, 4),
        settings={"method": "self", "kv": {"policy": "streaming", **_BUDGET}},
    ),
    Family(
        name="self_snapkv",
        lengths=(1, 2, 4),
        settings={"method": "self", "kv": {"policy": "snapkv", **_BUDGET}},
    ),
    Family(
        name="self_tree",
        chain="self_streaming",
        lengths=(4,),
        settings={"method": "self", "kv": {"policy": "streaming", **_BUDGET}, "tree": _NARROW},
    ),
    Family(name="layerskip", lengths=(1, 2, 4), settings={"exit_layer": 4}),
    Family(
        name="layerskip_tree",
        chain="layerskip",
        lengths=(4,),
        settings={"method": "layerskip", "exit_layer": 4, "tree": _NARROW},
    ),
    Family(name="quantized", lengths=(1, 2, 4), settings={"quantization": "int4"}),
    Family(
        name="quantized_tree",
        chain="quantized",
        lengths=(4,),
        settings={"method": "quantized", "quantization": "int4", "tree": _NARROW},
    ),
    Family(name="medusa", lengths=(1, 2), deep_lengths=(1, 2, 4), needs="heads"),
    Family(
        name="medusa_tree",
        chain="medusa",
        lengths=(4, 12),
        deep_lengths=(4, 12, 28),
        needs="heads",
        heads="medusa",
        settings={"method": "medusa", "tree": _TWO_DEEP},
    ),
    Family(name="hydra", lengths=(1, 2), deep_lengths=(1, 2, 4), needs="heads"),
    Family(
        name="hydra_tree",
        chain="hydra",
        lengths=(4, 12),
        deep_lengths=(4, 12, 28),
        needs="heads",
        heads="hydra",
        settings={"method": "hydra", "tree": _TWO_DEEP},
    ),
    Family(
        name="hydra_plus",
        lengths=(1, 2),
        deep_lengths=(1, 2, 4),
        needs="heads",
        settings={"method": "hydra"},
    ),
    Family(name="parallel_heads", lengths=(1, 2), deep_lengths=(1, 2, 4), needs="heads"),
    Family(
        name="parallel_heads_tree",
        chain="parallel_heads",
        lengths=(4, 12),
        deep_lengths=(4, 12, 28),
        needs="heads",
        heads="parallel_heads",
        settings={"method": "parallel_heads", "tree": _TWO_DEEP},
    ),
    Family(name="eagle", lengths=(1, 2, 4, 7), needs="heads"),
    Family(
        name="eagle_tree",
        chain="eagle",
        lengths=(4, 8, 16),
        needs="heads",
        heads="eagle",
        settings={"method": "eagle", "tree": _DYNAMIC},
    ),
    Family(
        name="lookup_first_eagle",
        lengths=(1, 2, 4, 7),
        needs="heads",
        heads="eagle",
        settings={"method": "eagle", "lookup_first": 8, "suffix": {"max_shared_tokens": 0}},
    ),
    Family(name="eagle3", lengths=(1, 2, 4, 7), needs="heads"),
    Family(
        name="eagle3_tree",
        chain="eagle3",
        lengths=(4, 8, 16),
        needs="heads",
        heads="eagle3",
        settings={"method": "eagle3", "tree": _DYNAMIC},
    ),
    Family(name="eagle31", lengths=(1, 2, 4, 7), needs="heads", settings={"method": "eagle3"}),
    Family(name="mtp", lengths=(1, 2, 4, 7)),
    Family(
        name="mtp_tree",
        chain="mtp",
        lengths=(4, 8, 16),
        settings={"method": "mtp", "tree": _DYNAMIC},
    ),
    Family(name="mtp_reused", lengths=(1, 2, 4, 7), needs="heads", heads="mtp", settings={"method": "mtp"}),
)
"""In the order of tables. `mtp` drafts with the target's own module, which was trained for one token ahead;
`mtp_reused` with that one trained further, for every depth."""


def families_of(names: tuple[str, ...]) -> tuple[Family, ...]:
    """Return the families of these names; without names, all.

    Raises:
        ValueError: there is no family of a name.
    """
    known = {family.name: family for family in FAMILIES}
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ValueError(f"there is no family {unknown[0]!r}; known are {', '.join(known)}")
    return tuple(known[name] for name in names) if names else FAMILIES
