"""All that can be told of an engine's models without their weights, in the words of those who load them.

For whoever checks a configuration: it takes seconds, and the memory of no model. Whether heads fit their
target is left to who loads them, and so are models with code of their own, which may need packages that are
not here, and what depends on the machine (devices, packages, memory).
"""

from __future__ import annotations

from specdec.engine.build_drafter import facts_of_folder
from specdec.engine.config import EngineConfig
from specdec.engine.text.tokenizer import build_tokenizer
from specdec.model.config import ModelConfig
from specdec.model.on_paper import ModelOnPaper, check_servable
from specdec.model.stored_shapes import check_stored_shapes
from specdec.model.views import check_exit, check_fewer_bits
from specdec.proposers.config import SpeculativeConfig
from specdec.proposers.corpus import corpus_files
from specdec.proposers.draft_model_factory import draft_model_config, require_same_tokenizer
from specdec.proposers.target_facts import TargetFacts


def check_on_paper(config: EngineConfig) -> None:
    """Check that target and drafters are of kinds that can be run as configured, and that weights fit them.

    Raises:
        CheckpointError: a model cannot be served, divided or quantized so, its files are not those that its
            config.json describes, or its tokenizer cannot be loaded.
        ConfigError: a draft cannot be had of such a target, or there is no corpus to look it up in.
    """
    paper = _check_model(config.target)
    target = facts_of_folder(config)
    build_tokenizer(config)
    for drafter in config.speculative_config.every_drafter:
        _check_drafter(drafter, config.target, paper, target)


def _check_model(config: ModelConfig, *, is_draft: bool = False) -> ModelOnPaper | None:
    if config.trust_remote_code:
        return None
    paper = check_servable(config, is_draft=is_draft)
    check_stored_shapes(config, is_draft=is_draft)
    return paper


def _check_drafter(
    drafter: SpeculativeConfig, model: ModelConfig, paper: ModelOnPaper | None, target: TargetFacts
) -> None:
    if drafter.method == "draft_model" and drafter.model is not None:
        require_same_tokenizer(
            drafter.model,
            model.model,
            trust_draft_code=drafter.trust_remote_code,
            trust_target_code=model.trust_remote_code,
        )
        _check_model(draft_model_config(drafter, target), is_draft=True)
    elif drafter.method == "retrieval" and drafter.retrieval is not None:
        corpus_files(drafter.retrieval, model.model)
    elif paper is None:
        return
    elif drafter.method == "layerskip" and drafter.exit_layer is not None:
        check_exit(paper.config, paper.model, model.model, drafter.exit_layer)
    elif drafter.method == "quantized" and drafter.quantization is not None:
        check_fewer_bits(paper.model, model.model, drafter.quantization)
