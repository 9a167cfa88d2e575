"""Every way to draft that can be configured, by what is written into `speculative_config`.

`test_every_drafter` takes all of them through everything that must not show in the output, in one process,
over two ranks and over workers; `tests/cluster/test_every_drafter_in_cluster.py` through a cluster on Ray.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from specdec.engine.config import EngineConfig

Shape = Literal["chain", "tree"]
Place = Literal["one process", "compiled", "two ranks", "workers", "draft pool"]
"""Of the target, and of what drafts. compiled: one process, by native calls, as is the default; all others
run eagerly. workers: as in a cluster, draft models in draft workers, all else where the target is; draft
pool: heads in draft workers too."""
SHAPES: Final[tuple[Shape, ...]] = ("chain", "tree")
PLACES: Final[tuple[Place, ...]] = ("one process", "compiled", "two ranks", "workers", "draft pool")

Keys = dict[str, Any]
Files = Callable[[str], str]
"""Gives the path of what a drafter needs: "target", "draft", "corpus", "index", or fitted heads by name."""
KeysOf = Callable[[Files], Keys]

SMALL_CACHE: Final = {"block_size": 4, "num_blocks": 200}
EAGER: Final = {"mode": "off"}
COMPILED: Final = {"mode": "auto"}


def _nothing(_: Files) -> Keys:
    return {}


def _static(_: Files) -> Keys:
    return {"tree": {"shape": "static", "widths": [3, 2]}, "num_speculative_tokens": 9}


def _dynamic(_: Files) -> Keys:
    return {"tree": {"shape": "dynamic", "top_k": 3, "depth": 4}, "num_speculative_tokens": 9}


@dataclass(frozen=True, kw_only=True)
class Drafter:
    """One way to draft."""

    keys: KeysOf
    """Of `speculative_config`."""
    chain: KeysOf = _nothing
    """Further ones, for chains."""
    tree: KeysOf = _static
    """Further ones, for trees."""
    is_often_right: bool = True
    """Whether something of what it drafts stands in every test: lookups find little in random texts."""
    names: tuple[str, ...] = ()
    """Of several drafters: those that requests may ask for."""
    refused: Mapping[tuple[Shape | None, Place | None], str] = field(default_factory=dict)
    """Where it cannot be had, and what the configuration says of it; None stands for all."""

    def refusal(self, shape: Shape, place: Place) -> str | None:
        """Return what is said where it cannot be had; None: it can."""
        for (its_shape, its_place), message in self.refused.items():
            if its_shape in (None, shape) and its_place in (None, place):
                return message
        return None

    def config(self, shape: Shape, place: Place, files: Files, *, num_blocks: int = 200) -> EngineConfig:
        """Return an engine's configuration with it.

        Raises:
            ValidationError: it is refused.
        """
        more = self.chain if shape == "chain" else self.tree
        heads_at = {"heads_at": "draft_pool"} if place == "draft pool" else {}
        how = COMPILED if place == "compiled" else EAGER
        return EngineConfig.model_validate(
            {
                "target": {
                    "model": files("target"),
                    "dtype": "float32",
                    "compile": how,
                    "tensor_parallel_size": 2 if place == "two ranks" else 1,
                },
                "speculative_config": {
                    "controller": "fixed",
                    **_running({**self.keys(files), **more(files)}, how),
                    **heads_at,
                },
                "cache": {"block_size": 4, "num_blocks": num_blocks},
                "scheduler": {"max_num_seqs": 8, "max_num_batched_tokens": 64},
            }
        )


def _running(keys: Keys, how: Keys) -> Keys:
    """Return keys with how models of their own run, in each of several drafters too."""
    own = {"compile": how} if "model" in keys else {}
    each = {"drafters": [_running(one, how) for one in keys["drafters"]]} if "drafters" in keys else {}
    return {**keys, **own, **each}


def _suffix(**more: Any) -> Keys:
    return {"method": "suffix", "suffix": {"max_spec_factor": 4.0, **more}}


def _retrieval(files: Files, **more: Any) -> Keys:
    corpus = {"path": files("corpus"), "cache_dir": files("index"), "min_match_tokens": 1}
    return {"method": "retrieval", "retrieval": {**corpus, **more}}


def _draft_model(files: Files) -> Keys:
    return {"method": "draft_model", "model": files("draft"), "cache": SMALL_CACHE}


_STREAMING: Final = {"policy": "streaming", "budget": 20, "sink_tokens": 4}


def _window() -> Keys:
    return {"method": "self", "kv": _STREAMING}


def _heads(
    method: str, name: str | None = None, tree: KeysOf = _dynamic, more: Keys | None = None
) -> Drafter:
    def keys(files: Files) -> Keys:
        return {"method": method, "model": files(name or method), "cache": SMALL_CACHE, **(more or {})}

    return Drafter(keys=keys, tree=tree)


def _several(files: Files, *, lookup: Keys | None = None, tree: bool = False) -> Keys:
    static, dynamic = (_static(files), _dynamic(files)) if tree else ({}, {})
    return {
        "method": "several",
        "drafters": [
            {"name": "lookup", **(lookup or _suffix())},
            {"name": "window", **_window(), **static},
            {"name": "small", **_draft_model(files), **dynamic},
            {"name": "next", "method": "ngram", "shadow": 1.0},
        ],
    }


_NO_HEADS: Final = {(None, "draft pool"): "heads_at: draft_pool is about heads"}
_NO_TREES: Final = {("tree", None): "is about what a model or heads draft; method .* has neither"}

DRAFTERS: Final[Mapping[str, Drafter]] = {
    "none": Drafter(
        keys=lambda _: {"method": "none"}, is_often_right=False, refused={**_NO_TREES, **_NO_HEADS}
    ),
    "ngram": Drafter(
        keys=lambda _: {"method": "ngram", "prompt_lookup_min": 1},
        is_often_right=False,
        refused={**_NO_TREES, **_NO_HEADS},
    ),
    "suffix": Drafter(
        keys=lambda _: _suffix(),
        tree=lambda _: {**_suffix(shape="tree"), "num_speculative_tokens": 9},
        is_often_right=False,
        refused=_NO_HEADS,
    ),
    "retrieval": Drafter(
        keys=_retrieval,
        tree=lambda files: {**_retrieval(files, shape="tree"), "num_speculative_tokens": 9},
        is_often_right=False,
        refused=_NO_HEADS,
    ),
    "lookahead": Drafter(
        keys=lambda _: {"method": "lookahead", "lookahead": {"window_size": 2, "ngram_size": 3}},
        chain=lambda _: {"rejection_sample_method": "rejection"},  # there is no other way to ask for any
        tree=_nothing,
        is_often_right=False,
        refused={("chain", None): "method lookahead drafts trees", **_NO_HEADS},
    ),
    "draft_model": Drafter(keys=_draft_model, tree=_dynamic, refused=_NO_HEADS),
    "draft_model with a window": Drafter(
        keys=lambda files: {**_draft_model(files), "kv": _STREAMING}, tree=_dynamic, refused=_NO_HEADS
    ),
    "draft_model behind lookups": Drafter(
        keys=lambda files: {**_draft_model(files), "lookup_first": 2, "fallback": "ngram"},
        tree=_dynamic,
        refused=_NO_HEADS,
    ),
    "self": Drafter(keys=lambda _: _window(), refused=_NO_HEADS),
    "layerskip": Drafter(
        keys=lambda _: {"method": "layerskip", "exit_layer": 2}, tree=_dynamic, refused=_NO_HEADS
    ),
    "quantized": Drafter(keys=lambda _: {"method": "quantized", "quantization": "int8"}, refused=_NO_HEADS),
    "self over 8 bits": Drafter(
        keys=lambda _: {"method": "self", "kv": {"dtype": "int8"}}, refused=_NO_HEADS
    ),
    "quantized over 8 bits": Drafter(
        keys=lambda _: {"method": "quantized", "quantization": "int8", "kv": {"dtype": "int8"}},
        refused=_NO_HEADS,
    ),
    "medusa": _heads("medusa", tree=_static),
    "hydra": _heads("hydra", tree=_static),
    "hydra++": _heads("hydra", "hydra++"),
    "eagle": _heads("eagle"),
    "eagle behind lookups": _heads("eagle", more={"lookup_first": 2}),
    "eagle3": _heads("eagle3"),
    "eagle3 of a part of the vocabulary": _heads("eagle3", "eagle3 of a part"),
    "eagle3.1": _heads("eagle3", "eagle3.1"),
    "eagle3 with a window": _heads("eagle3", more={"kv": _STREAMING}),
    "mtp": _heads("mtp"),
    "mtp of three": _heads("mtp", "mtp of three"),
    "parallel_heads": _heads("parallel_heads"),
    "several": Drafter(
        keys=_several,
        tree=lambda files: {
            **_several(files, lookup=_suffix(shape="tree"), tree=True),
            "num_speculative_tokens": 9,
        },
        names=("lookup", "window", "small"),
        refused=_NO_HEADS,
    ),
}
"""By name: every method of the registry, heads of different structure, and what keeps a window."""
