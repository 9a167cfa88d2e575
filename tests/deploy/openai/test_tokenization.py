"""The door's tokenizer: token texts of each kind of vocabulary, and no waiting in the loop."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from deploy.openai import tokenization
from deploy.openai.tokenization import INLINE_CHARACTERS, INLINE_TOKENS, HuggingFaceTokenizer
from specdec.core.errors import CapacityError, InputError
from tests.architectures import make_tokenizer


def byte_level() -> PreTrainedTokenizerFast:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<eos>")


def sentence_piece() -> PreTrainedTokenizerFast:
    tokens = ["\u2581the", "\u2581", "a", *(f"<0x{byte:02X}>" for byte in range(256))]
    vocab = {token: index for index, token in enumerate(tokens)}
    core = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    core.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<eos>")


def encode(tokenizer: HuggingFaceTokenizer, text: str) -> tuple[int, ...]:
    return asyncio.run(tokenizer.encode(text, add_special_tokens=False))


def test_every_byte_of_a_byte_level_vocabulary_is_told() -> None:
    tokenizer = HuggingFaceTokenizer(byte_level())
    text = "a \n\u00e9\u4e16\U0001f680"
    tokens = [tokenizer.token_text(token_id) for token_id in encode(tokenizer, text)]
    assert bytes(byte for token in tokens for byte in token.data) == text.encode()
    assert [token.text for token in tokens[:5]] == ["a", " ", "\n", "bytes:\\xc3", "bytes:\\xa9"]


def test_sentence_piece_tokens() -> None:
    tokenizer = HuggingFaceTokenizer(sentence_piece())
    assert tokenizer.token_text(0).text == " the"
    assert tokenizer.token_text(3 + 0xE9).data == (0xE9,)
    assert tokenizer.token_text(3 + 0x41).text == "A"


def test_added_tokens_are_their_own_text() -> None:
    plain = byte_level()
    tokenizer = HuggingFaceTokenizer(plain)
    assert plain.eos_token_id is not None
    assert tokenizer.token_text(plain.eos_token_id).text == "<eos>"


def test_long_text_is_tokenized_like_short_text() -> None:
    tokenizer = HuggingFaceTokenizer(byte_level())
    text = "abc " * INLINE_CHARACTERS
    assert encode(tokenizer, text) == encode(tokenizer, "abc ") * INLINE_CHARACTERS


@pytest.mark.parametrize("num_tokens", [1, INLINE_TOKENS, INLINE_TOKENS + 1])
def test_a_prompt_is_decoded_as_other_tokens_are(num_tokens: int) -> None:
    plain = byte_level()
    assert plain.eos_token_id is not None
    tokenizer = HuggingFaceTokenizer(plain)
    token_ids = (*encode(tokenizer, "a " * INLINE_TOKENS)[: num_tokens - 1], plain.eos_token_id)
    text = asyncio.run(tokenizer.decode_prompt(token_ids))
    assert text == tokenizer.decode(token_ids)
    assert len(text) == num_tokens - 1, "special tokens never show"


def test_the_loop_goes_on_while_a_long_text_is_tokenized() -> None:
    tokenizer = HuggingFaceTokenizer(byte_level())

    async def turns_while_encoding() -> int:
        encoding = asyncio.create_task(tokenizer.encode("abc " * 200_000, add_special_tokens=False))
        turns, until_s = 0, time.monotonic() + 30
        while not encoding.done() and time.monotonic() < until_s:
            await asyncio.sleep(0.001)
            turns += 1
        assert len(await encoding) == 800_000
        return turns

    # Three turns would do it if the text were tokenized in the loop, or under the interpreter's lock.
    assert asyncio.run(turns_while_encoding()) > 10


def test_model_without_chat_template() -> None:
    tokenizer = HuggingFaceTokenizer(make_tokenizer())
    with pytest.raises(InputError, match="no chat template"):
        asyncio.run(tokenizer.encode_chat([{"role": "user", "content": "x"}], add_generation_prompt=True))


def test_no_more_waits_for_the_tokenizer_than_it_can_read_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    size = INLINE_CHARACTERS + 1
    monkeypatch.setattr(tokenization, "MAX_WAITING_CHARACTERS", 3 * size)
    tokenizer = HuggingFaceTokenizer(byte_level())
    go_on = threading.Event()
    read: list[str] = []

    def encode_slowly(text: str, add_special_tokens: bool) -> tuple[int, ...]:
        assert go_on.wait(20)
        read.append(text)
        return (len(text),)

    async def run() -> None:
        def ask(text: str) -> asyncio.Task[tuple[int, ...]]:
            return asyncio.create_task(tokenizer.encode(text, add_special_tokens=False))

        first = ask("a" * 10 * size)  # too much, but nothing waits
        await asyncio.sleep(0)
        with pytest.raises(CapacityError) as refused:
            await ask("b" * size)
        with pytest.raises(CapacityError):
            await tokenizer.decode_prompt([5] * (INLINE_TOKENS + 1))
        assert refused.value.retry_after_s > 0
        go_on.set()
        assert await first == (10 * size,)
        go_on.clear()
        tasks = [ask(letter * size) for letter in "cde"]
        await asyncio.sleep(0)
        with pytest.raises(CapacityError):
            await ask("f" * size)
        tasks[1].cancel()  # its client has left, or its time is up: its place is free, and it is not read
        await asyncio.gather(tasks[1], return_exceptions=True)
        last = ask("g" * size)
        await asyncio.sleep(0)
        go_on.set()
        await asyncio.gather(tasks[0], tasks[2], last)

    with monkeypatch.context() as patch:
        patch.setattr(tokenizer, "_encode", encode_slowly)
        asyncio.run(run())
    assert [text[0] for text in read] == ["a", "c", "e", "g"]
    assert len(encode(tokenizer, "a" * size)) == size


@pytest.mark.parametrize("field", ["content", "name", "tool_call_id"])
def test_all_that_a_template_may_write_counts_as_text(field: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = HuggingFaceTokenizer(byte_level())
    tokenizer._tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{{ m.name }}{% endfor %}"
    waited: list[int] = []

    async def in_turn(size: int, *_: object) -> tuple[int, ...]:
        waited.append(size)
        return ()

    monkeypatch.setattr(tokenizer, "_in_turn", in_turn)
    message = {"role": "user", "content": "", field: "x" * 5000}
    asyncio.run(tokenizer.encode_chat([message], add_generation_prompt=True))
    assert waited
    assert waited[0] >= 5000


def test_templates_find_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = make_tokenizer()
    plain.chat_template = "{{ messages[0].content }}{% if think is defined %} {{ think }}{% endif %}"
    tokenizer = HuggingFaceTokenizer(plain)

    def prompt(variables: dict[str, object] | None) -> str:
        messages = [{"role": "user", "content": "a"}]
        chat = tokenizer.encode_chat(messages, add_generation_prompt=True, variables=variables)
        return tokenizer.decode(asyncio.run(chat))

    assert prompt(None) == prompt({}) == prompt({"other": 1}) == "a"
    assert prompt({"think": "b"}) == prompt({"think": "b", "other": [1]}) == "a b"
    for name in ("messages", "tools", "tokenize", "chat_template", "conversation", "self", "eos_token"):
        with pytest.raises(InputError, match=f"chat_template_kwargs: '{name}' is not for clients") as refused:
            prompt({"think": 1, name: "x"})
        assert refused.value.param == "chat_template_kwargs"
    with pytest.raises(InputError, match="chat_template_kwargs takes at most 1024 characters"):
        prompt({"think": "x" * 1024})
    plain.chat_template = "{{ 10 // think }}{{ range(think) }}{{ 'x' | center(think) }}"
    for value in (0, 10**9, "x", [], None):
        with pytest.raises(InputError, match="the model's chat template refuses these messages"):
            prompt({"think": value})


def test_tools_count_as_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenization, "MAX_WAITING_CHARACTERS", 10_000)
    plain = make_tokenizer()
    plain.chat_template = "{{ tools }}"
    tokenizer = HuggingFaceTokenizer(plain)
    tools = [{"name": "x" * 9_000}]

    async def run() -> list[object]:
        asked = (
            tokenizer.encode_chat([{"role": "user", "content": "a"}], add_generation_prompt=True, tools=tools)
            for _ in range(3)
        )
        return await asyncio.gather(*asked, return_exceptions=True)

    first, *others = asyncio.run(run())
    assert isinstance(first, tuple)
    assert all(isinstance(other, CapacityError) for other in others)


def test_a_text_is_neither_cut_nor_filled_up() -> None:
    """Whatever the tokenizer's file says, as those of embedding models and of fine-tuned ones do."""
    plain = byte_level()
    plain.backend_tokenizer.enable_truncation(4)
    plain.backend_tokenizer.enable_padding(length=64)
    plain.chat_template = "{{ messages[0].content }}"
    tokenizer = HuggingFaceTokenizer(plain)
    for text in ("ab", "abcdefgh", "abc " * INLINE_CHARACTERS):
        assert len(encode(tokenizer, text)) == len(text)
        chat = tokenizer.encode_chat([{"role": "user", "content": text}], add_generation_prompt=True)
        assert len(asyncio.run(chat)) == len(text)
