"""What drafts in draft workers, of what an engine is configured to have."""

from __future__ import annotations

from specdec.core.errors import ConfigError
from specdec.engine.config import EngineConfig
from specdec.proposers.base import ProposerCapabilities
from specdec.proposers.config import SpeculativeConfig
from specdec.proposers.draft_sampling import DraftSampling
from specdec.proposers.tree_config import tree_shape
from specdec.tree.growth import levels_of
from specdec.verification.registry import capabilities_of


def drafter_of_pool(engine: EngineConfig) -> EngineConfig | None:
    """Return what draft workers have to do with: an engine with their drafter alone; None: there are none.

    Raises:
        ConfigError: several drafters would have to draft there.
    """
    speculative = engine.speculative_config
    remote = [one for one in speculative.every_drafter if one.drafts_in_pool]
    if len(remote) > 1:
        raise ConfigError(
            f"speculative_config.drafters: {len(remote)} of them are draft models, and draft workers hold "
            "one: leave the others out"
        )
    return engine.model_copy(update={"speculative_config": remote[0]}) if remote else None


def capabilities_in_pool(speculative: SpeculativeConfig) -> ProposerCapabilities:
    """Return what a coordinator may ask of draft workers that hold the drafter of this configuration."""
    sampling = DraftSampling.under(capabilities_of(speculative.rejection_sample_method))
    shape = tree_shape(speculative.tree)
    if shape is not None:
        sampling = sampling.for_trees(shape)
    return ProposerCapabilities(
        name=speculative.method,
        shape="chain" if shape is None else "tree",
        tree_levels=levels_of(shape),
        sampled=not sampling.is_deterministic,
        noise_stream=sampling.noise_stream,
        gives_q_rows=sampling.gives_q_rows,
        kv="own",
        remote=True,
        max_context=speculative.max_prefix_len,
        hidden_layers=(-1,) if speculative.has_heads else (),  # or others: the workers know which
        looks_ahead=shape is None and not speculative.has_heads,
    )
