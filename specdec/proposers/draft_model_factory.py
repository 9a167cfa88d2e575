"""Loads the draft model that a configuration names."""

from __future__ import annotations

from specdec.core.errors import ConfigError
from specdec.model.config import ModelConfig
from specdec.model.loader import LoadedModel, load_model, load_tokenizer
from specdec.model.runner import ModelRunner
from specdec.proposers.config import SpeculativeConfig
from specdec.proposers.draft_model import DraftModelProposer
from specdec.proposers.registry import TargetFacts
from specdec.sampling.sampler import Sampler


def load_draft_model(config: SpeculativeConfig, target: TargetFacts) -> DraftModelProposer:
    """Load the draft model, its cache and its sampler.

    Raises:
        ConfigError: its tokenizer is not the target's.
        CheckpointError: the folder or a file in it is missing, corrupt or of an unsupported kind.
        ResourceError: the cache's memory does not hold a single block.
    """
    assert config.model is not None, "checked by SpeculativeConfig"
    if target.model is not None:
        require_same_tokenizer(config.model, target.model)
    model_config = ModelConfig.model_validate(
        {
            "model": config.model,
            "dtype": target.dtype if config.dtype == "auto" else config.dtype,
            "num_threads": config.num_threads,
            "compile": config.compile,
        }
    )
    return make_draft_model_proposer(load_model(model_config), config, target)


def make_draft_model_proposer(
    loaded: LoadedModel, config: SpeculativeConfig, target: TargetFacts
) -> DraftModelProposer:
    """Return the proposer over a draft model that is loaded already."""
    runner = ModelRunner(loaded, config.cache, max_num_seqs=target.max_num_seqs)
    sampler = Sampler()
    sampler.warm_up()
    return DraftModelProposer(runner, sampler, vocab_size=target.vocab_size, max_context=config.max_model_len)


def require_same_tokenizer(draft_folder: str, target_folder: str) -> None:
    """Check that both models mean the same text by the same token ids.

    Raises:
        ConfigError: naming the first token id on which they differ.
        CheckpointError: one of the tokenizers cannot be loaded.
    """
    draft_tokens = _tokens_by_id(draft_folder)
    target_tokens = _tokens_by_id(target_folder)
    for token_id in sorted(draft_tokens.keys() | target_tokens.keys()):
        ours, theirs = draft_tokens.get(token_id), target_tokens.get(token_id)
        if ours != theirs:
            raise ConfigError(
                f"speculative_config.model: the tokenizer of {draft_folder} is not that of {target_folder}: "
                f"token id {token_id} is {ours!r} in the one and {theirs!r} in the other; "
                "draft_model needs a draft model that was trained with the target's tokenizer"
            )


def _tokens_by_id(folder: str) -> dict[int, str]:
    return {token_id: token for token, token_id in load_tokenizer(folder).get_vocab().items()}
