"""Text to token ids at the door, and single tokens back to text for log-probabilities.

(The text of a response comes from the engine's incremental detokenizer, not from here.)
"""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from specdec.core.errors import CapacityError, CheckpointError, InputError
from specdec.engine.text.tokenizer import special_ids_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

T = TypeVar("T")
INLINE_CHARACTERS = 2048
"""Longer texts are tokenized off the event loop (2,000 take about 2 ms)."""
INLINE_TOKENS = 4096
"""More tokens become text off the event loop (4,000 take about half a millisecond)."""
MAX_WAITING_CHARACTERS = 8 << 20
"""More than that may not be there to be tokenized, unless it is a single text: what comes then is refused."""
_CHARACTERS_PER_S = 1e6
"""Roughly, for who asks how long that takes."""
_MESSAGE_CHARACTERS = 64
"""What a message counts as beside its content: the template writes something around it."""
_TEXT_FIELDS = ("content", "name", "reasoning_content", "tool_call_id")
"""Of a message: what a client may make as long as it likes, and a chat template may write."""
_TEMPLATE_ERRORS = (ArithmeticError, AttributeError, LookupError, MemoryError, TypeError, ValueError)
"""What expressions of templates raise, over values that they do not expect."""
_VARIABLES = "chat_template_kwargs"
_TAKEN = frozenset({"messages", "tools", "documents", "add_generation_prompt", "conversations", "self"})
"""Variables of templates that are other fields of bodies, or that the library sets; further ones are its
options and the names of special tokens."""
MAX_VARIABLES_CHARACTERS = 1024
"""A template may write them once for each of tens of thousands of messages."""


@dataclass(frozen=True, slots=True)
class TokenText:
    """One token as clients see it in log-probabilities."""

    text: str
    """Its characters; `bytes:\\xNN...` when its bytes are not whole characters."""
    data: tuple[int, ...]
    """Its bytes."""


class DoorTokenizer(Protocol):
    """What the door needs of a tokenizer."""

    @property
    def special_ids(self) -> Collection[int]:
        """Tokens that never show in text."""
        ...

    async def encode(self, text: str, *, add_special_tokens: bool) -> tuple[int, ...]:
        """Return the token ids of `text`.

        Raises:
            CapacityError: too much waits to be tokenized.
        """
        ...

    async def encode_chat(
        self,
        messages: Sequence[dict[str, Any]],
        *,
        add_generation_prompt: bool,
        tools: Sequence[dict[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> tuple[int, ...]:
        """Return the token ids of a conversation, by the model's chat template.

        `variables` are what the template finds beside what every template is given.

        Raises:
            CapacityError: too much waits to be tokenized.
            InputError: the template refuses the messages or knows nothing of tools, or the model has none; or
                variables have names that mean something else.
        """
        ...

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of tokens, without special ones."""
        ...

    async def decode_prompt(self, token_ids: Sequence[int]) -> str:
        """Return the text of a prompt's tokens, which may be as many as a body holds.

        Raises:
            CapacityError: too much waits for the tokenizer.
        """
        ...

    def token_text(self, token_id: int) -> TokenText:
        """Return one token's text and bytes."""
        ...


class HuggingFaceTokenizer:
    """A checkpoint's own tokenizer and chat template.

    Long texts go through one thread of its own; the loop never waits for them. Those whose requests have
    ended meanwhile are left out, but for the one that is at work.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        # A file may say that texts be cut, or filled up; what is too long for the model is told instead.
        tokenizer.backend_tokenizer.no_truncation()
        tokenizer.backend_tokenizer.no_padding()
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="tokenize")
        self._num_waiting = 0
        """Characters."""
        self._spell = _speller(tokenizer)
        self.special_ids = special_ids_of(tokenizer)
        options = inspect.signature(tokenizer.apply_chat_template).parameters
        self._taken_variables = _TAKEN.union(options, tokenizer.SPECIAL_TOKENS_ATTRIBUTES)
        self._token_texts: dict[int, TokenText] = {}

    @classmethod
    def load(cls, folder: Path, *, trust_remote_code: bool = False) -> HuggingFaceTokenizer:
        """Load the tokenizer of a model folder.

        Raises:
            CheckpointError: the folder holds no (fast) tokenizer that transformers can load.
        """
        from specdec.model.tokenizer import load_tokenizer  # transformers: seconds

        tokenizer = load_tokenizer(folder, trust_remote_code=trust_remote_code)
        if not hasattr(tokenizer, "backend_tokenizer"):
            raise CheckpointError(f"the tokenizer of {folder} has no tokenizer.json, which serving needs")
        return cls(tokenizer)

    async def encode(self, text: str, *, add_special_tokens: bool) -> tuple[int, ...]:
        """Return the token ids of `text`."""
        if len(text) <= INLINE_CHARACTERS:
            return self._encode(text, add_special_tokens)
        return await self._in_turn(len(text), self._encode, text, add_special_tokens)

    async def encode_chat(
        self,
        messages: Sequence[dict[str, Any]],
        *,
        add_generation_prompt: bool,
        tools: Sequence[dict[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> tuple[int, ...]:
        """Return the token ids of a conversation, by the model's chat template.

        `variables` are what the template finds beside what every template is given.

        Raises:
            CapacityError: too much waits to be tokenized.
            InputError: the template refuses the messages or knows nothing of tools, or the model has none; or
                variables have names that mean something else.
        """
        if not self._tokenizer.chat_template:
            raise InputError("this model has no chat template; use /v1/completions", param="messages")
        variables = {} if variables is None else variables
        size = self._size_of_variables(variables) * len(messages)  # a template may repeat them
        size += sum(
            _MESSAGE_CHARACTERS + sum(len(message.get(field) or "") for field in _TEXT_FIELDS)
            for message in messages
        )
        has_calls = any("tool_calls" in message for message in messages)
        if size <= INLINE_CHARACTERS and tools is None and not has_calls:
            return self._encode_chat(messages, add_generation_prompt, None, variables)
        size += len(str(tools)) if tools is not None else 0
        size += sum(len(str(message.get("tool_calls", ""))) for message in messages) if has_calls else 0
        return await self._in_turn(size, self._encode_chat, messages, add_generation_prompt, tools, variables)

    def _size_of_variables(self, variables: Mapping[str, Any]) -> int:
        """Return how many characters they are, if clients may set them."""
        if not variables:
            return 0
        taken = next((name for name in variables if name in self._taken_variables), None)
        if taken is not None:
            raise InputError(f"{_VARIABLES}: {taken!r} is not for clients to set", param=_VARIABLES)
        size = len(str(variables))
        if size > MAX_VARIABLES_CHARACTERS:
            raise InputError(
                f"{_VARIABLES} takes at most {MAX_VARIABLES_CHARACTERS} characters: it is for switches of "
                "templates, not for texts",
                param=_VARIABLES,
            )
        return size

    async def _in_turn(self, size: int, work: Callable[..., T], *arguments: object) -> T:
        if self._num_waiting and self._num_waiting + size > MAX_WAITING_CHARACTERS:
            raise CapacityError(
                "too much text waits to be tokenized", retry_after_s=self._num_waiting / _CHARACTERS_PER_S
            )
        self._num_waiting += size
        try:
            return await asyncio.get_running_loop().run_in_executor(self._executor, work, *arguments)
        finally:
            self._num_waiting -= size

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of tokens, without special ones."""
        text: str = self._tokenizer.backend_tokenizer.decode(list(token_ids), skip_special_tokens=True)
        return text

    async def decode_prompt(self, token_ids: Sequence[int]) -> str:
        """Return the text of a prompt's tokens; one counts as a character of what waits."""
        if len(token_ids) <= INLINE_TOKENS:
            return self.decode(token_ids)
        return await self._in_turn(len(token_ids), self._decode_long, token_ids)

    def token_text(self, token_id: int) -> TokenText:
        """Return one token's text and bytes (remembered: a vocabulary is finite)."""
        known = self._token_texts.get(token_id)
        if known is None:
            data = self._spell(token_id)
            known = self._token_texts[token_id] = TokenText(_readable(data), tuple(data))
        return known

    def _encode(self, text: str, add_special_tokens: bool) -> tuple[int, ...]:
        # Straight to the Rust tokenizer: the Python wrapper sets truncation and padding on it for every
        # call, which fails ("already borrowed") when two threads are in it. And by the batch form: the
        # other one holds the interpreter's lock all the while.
        backend = self._tokenizer.backend_tokenizer
        return tuple(backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids)

    def _decode_long(self, token_ids: Sequence[int]) -> str:
        # By the batch form, as above.
        backend = self._tokenizer.backend_tokenizer
        text: str = backend.decode_batch([list(token_ids)], skip_special_tokens=True)[0]
        return text

    def _encode_chat(
        self,
        messages: Sequence[dict[str, Any]],
        add_generation_prompt: bool,
        tools: Sequence[dict[str, Any]] | None,
        variables: Mapping[str, Any],
    ) -> tuple[int, ...]:
        text = self._render(messages, add_generation_prompt, tools, variables)
        if tools is not None and text == self._render(messages, add_generation_prompt, None, variables):
            raise InputError("this model's chat template knows nothing of tools", param="tools")
        return self._encode(text, False)

    def _render(
        self,
        messages: Sequence[dict[str, Any]],
        add_generation_prompt: bool,
        tools: Sequence[dict[str, Any]] | None,
        variables: Mapping[str, Any],
    ) -> str:
        from jinja2 import TemplateError

        try:
            text = self._tokenizer.apply_chat_template(
                list(messages),
                tools=None if tools is None else list(tools),
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                **variables,
            )
        except (*_TEMPLATE_ERRORS, TemplateError) as error:
            raise InputError(
                f"the model's chat template refuses these messages: {str(error) or type(error).__name__}",
                param="messages",
            ) from error
        assert isinstance(text, str)
        return text


class _Speller(Protocol):
    def __call__(self, token_id: int, /) -> bytes: ...


def _speller(tokenizer: PreTrainedTokenizerBase) -> _Speller:
    """Return the function from token id to bytes for this kind of tokenizer."""
    decoder = json.loads(tokenizer.backend_tokenizer.to_str()).get("decoder") or {}
    kinds = {decoder.get("type")} | {part["type"] for part in decoder.get("decoders", ())}
    added = {token_id: token.content.encode() for token_id, token in tokenizer.added_tokens_decoder.items()}
    byte_of = {character: byte for byte, character in _byte_level_alphabet().items()}

    def token_of(token_id: int) -> str:
        return str(tokenizer.convert_ids_to_tokens(token_id) or "")

    def byte_level(token_id: int) -> bytes:
        return bytes(byte_of[character] for character in token_of(token_id))

    def sentence_piece(token_id: int) -> bytes:
        token = token_of(token_id)
        if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            return bytes([int(token[3:5], 16)])
        return token.replace("\u2581", " ").encode()

    def as_decoded(token_id: int) -> bytes:
        return str(tokenizer.decode([token_id])).encode()

    spell = byte_level if "ByteLevel" in kinds else sentence_piece if "ByteFallback" in kinds else as_decoded
    return lambda token_id: added[token_id] if token_id in added else spell(token_id)


def _byte_level_alphabet() -> dict[int, str]:
    """The printable character that stands for each byte in a byte-level BPE vocabulary (GPT-2)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {
        byte: chr(256 + index) for index, byte in enumerate(others)
    }


def _readable(data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
