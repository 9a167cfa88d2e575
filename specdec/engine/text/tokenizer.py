"""What the engine needs of a tokenizer, and how the Hugging Face ones give it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import cached_property
from typing import Any, Protocol

from specdec.engine.config import EngineConfig


class TokenDecoder(Protocol):
    """Tokens to text."""

    @property
    def special_ids(self) -> Collection[int]:
        """Tokens that never show in text."""
        ...

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of these tokens; bytes that are no UTF-8 become U+FFFD."""
        ...


class Tokenizer(TokenDecoder, Protocol):
    """Text to tokens and back."""

    def to_json(self) -> str | None:
        """Return the content of a tokenizer.json, for grammars; None where there is none."""
        ...

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a prompt, with whatever the model expects at its start."""
        ...


class HuggingFaceTokenizer:
    """A tokenizer of `transformers`, decoding by the Rust tokenizer behind it where there is one."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._backend = getattr(tokenizer, "backend_tokenizer", None)
        self.special_ids = special_ids_of(tokenizer)
        self._single: dict[int, str] = {}

    def to_json(self) -> str | None:
        """Return the content of a tokenizer.json; None where the tokenizer is not one of the Rust library."""
        return None if self._backend is None else self._backend.to_str()

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a prompt, special tokens that the tokenizer adds at its start included."""
        token_ids: list[int] = self._tokenizer(text)["input_ids"]
        return token_ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text without special tokens."""
        if len(token_ids) != 1:
            return self._decode(token_ids)
        token_id = token_ids[0]
        text = self._single.get(token_id)
        if text is None:
            text = self._single[token_id] = self._decode(token_ids)
        return text

    def _decode(self, token_ids: Sequence[int]) -> str:
        text: str
        if self._backend is not None:
            text = self._backend.decode(token_ids, skip_special_tokens=True)
        else:
            # Models often have more ids than their tokenizer; without text they are nothing, as in Rust.
            known = [token_id for token_id in token_ids if token_id in self._known_ids]
            text = self._tokenizer.decode(known, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return text

    @cached_property
    def _known_ids(self) -> frozenset[int]:
        tokenizer = self._tokenizer
        return frozenset((*tokenizer.get_vocab().values(), *tokenizer.added_tokens_decoder))


def special_ids_of(tokenizer: Any) -> frozenset[int]:
    """Return what a tokenizer of `transformers` leaves out of text.

    With a Rust tokenizer behind it that may be more than `all_special_ids`.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    added = {} if backend is None else backend.get_added_tokens_decoder()
    hidden = {token_id for token_id, token in added.items() if token.special}
    return frozenset(tokenizer.all_special_ids) | hidden


def build_tokenizer(config: EngineConfig) -> Tokenizer:
    """Load the target's tokenizer.

    Raises:
        CheckpointError: it is missing or unreadable.
    """
    from specdec.model.tokenizer import load_tokenizer

    target = config.target
    return HuggingFaceTokenizer(load_tokenizer(target.model, trust_remote_code=target.trust_remote_code))
