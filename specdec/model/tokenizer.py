"""The tokenizer of a model folder, and whether two models mean the same by a token id."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specdec.core.errors import CheckpointError
from specdec.core.extras import how_to_install
from specdec.model.checkpoint import (
    foreign_files,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SENTENCEPIECE = "sentencepiece"
"""A package, and the extra that brings it."""

_WHOLE_IN_FILE = ("PreTrainedTokenizerFast", "TokenizersBackend")
"""Two names of the class that is nothing but tokenizer.json."""
CLASSES_STATED: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("llama", "mistral", "mixtral", "gemma", "gemma2", "granite", "olmo2"), _WHOLE_IN_FILE),
    **dict.fromkeys(("qwen2", "qwen2_moe", "qwen3", "qwen3_moe"), ("Qwen2Tokenizer",)),
}
"""By model type: what tokenizer_config.json may state that `AutoTokenizer` would take at its word.

It reads the model's configuration to find that out, which brings PyTorch and much else: 4 s of a processor
and 200 MB, in processes that need neither.
"""


def load_tokenizer(path: str | Path, *, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a model folder.

    Raises:
        CheckpointError: the folder or the tokenizer's files are missing or unreadable, or need a package that
            is not installed.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise CheckpointError(f"model folder {folder} does not exist")
    with foreign_files(f"{folder} has no tokenizer that can be loaded{_package_hint(folder)}"):
        import transformers  # a second, which who only looks at configurations need not wait for

        kind = getattr(transformers, _class_stated(folder) or "AutoTokenizer")
        tokenizer: PreTrainedTokenizerBase = kind.from_pretrained(
            folder, local_files_only=True, trust_remote_code=trust_remote_code
        )
    return tokenizer


def _class_stated(folder: Path) -> str | None:
    """Return the class that a folder states, if that is all there is to know; None: `AutoTokenizer` knows."""
    if not (folder / "tokenizer.json").is_file():
        return None
    try:
        model = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        stated = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    if not isinstance(model, dict) or not isinstance(stated, dict) or "auto_map" in {**model, **stated}:
        return None
    name = stated.get("tokenizer_class")
    return name if name in CLASSES_STATED.get(str(model.get("model_type")), ()) else None


def _package_hint(folder: Path) -> str:
    """Say what may be missing: transformers asks for another package where this one is not installed."""
    models = sorted(file.name for file in folder.glob("*.model"))
    if not models or (folder / "tokenizer.json").is_file() or find_spec(SENTENCEPIECE) is not None:
        return ""
    return (
        f"; to read {models[0]} alone takes the package `{SENTENCEPIECE}` ({how_to_install(SENTENCEPIECE)})"
    )


def check_same_tokenizer(
    target_path: str | Path,
    draft_path: str | Path,
    *,
    trust_target_code: bool = False,
    trust_draft_code: bool = False,
) -> tuple[str, ...]:
    """Check that a draft model means by every token id what the target means by it.

    Vocabulary sizes of models say nothing (they are padded differently), so the tokenizers are compared,
    token text by token text.

    Args:
        target_path: the target's folder.
        draft_path: the draft model's folder.
        trust_target_code: run Python code that comes with the target's tokenizer.
        trust_draft_code: the same of the draft model's.

    Returns:
        Warnings for the user: differences in special tokens or in the chat template. They do not make
        drafts wrong, but the two models may have been trained for different formats.

    Raises:
        CheckpointError: a token id with different texts, or known to only one of the two; or one of the
            tokenizers cannot be loaded.
    """
    target = load_tokenizer(target_path, trust_remote_code=trust_target_code)
    draft = load_tokenizer(draft_path, trust_remote_code=trust_draft_code)
    target_texts = {token_id: text for text, token_id in target.get_vocab().items()}
    draft_texts = {token_id: text for text, token_id in draft.get_vocab().items()}
    for token_id in sorted(target_texts.keys() | draft_texts.keys()):
        ours, theirs = target_texts.get(token_id), draft_texts.get(token_id)
        if ours != theirs:
            raise CheckpointError(
                f"the draft model {draft_path} has another tokenizer than the target {target_path}: token id "
                f"{token_id} is {_text_or_absent(theirs)} in the draft and {_text_or_absent(ours)} in the "
                "target; a draft model must use the target's tokenizer"
            )
    return tuple(_format_differences(target, draft))


def _text_or_absent(text: str | None) -> str:
    return "absent" if text is None else repr(text)


def _format_differences(target: PreTrainedTokenizerBase, draft: PreTrainedTokenizerBase) -> Iterator[str]:
    ours: dict[str, Any] = dict(target.special_tokens_map)
    theirs: dict[str, Any] = dict(draft.special_tokens_map)
    for name in sorted(ours.keys() | theirs.keys()):
        if str(ours.get(name)) != str(theirs.get(name)):
            yield (
                f"special token {name} is {theirs.get(name)!r} in the draft model's tokenizer and "
                f"{ours.get(name)!r} in the target's"
            )
            break
    our_template, their_template = str(target.chat_template or ""), str(draft.chat_template or "")
    if our_template != their_template:
        pairs = zip(our_template, their_template, strict=False)
        same = next((index for index, (a, b) in enumerate(pairs) if a != b), None)
        place = min(len(our_template), len(their_template)) if same is None else same
        yield f"the chat templates of draft model and target differ from character {place} on"
