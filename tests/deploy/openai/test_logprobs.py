"""Where tokens begin in a text: `text_offset` indexes what the client sees."""

from __future__ import annotations

import asyncio
import dataclasses

import msgspec
import pytest
from msgspec import UNSET
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from deploy.openai.bodies import CompletionLogprobs, CompletionResponse
from deploy.openai.logprobs import TextCursor, echoed_logprobs
from deploy.openai.protocol import CompletionBody
from deploy.openai.requests import PreparedRequest, prepare_completion
from deploy.openai.responses import ChoiceResult, CompletionChunks, complete_body
from deploy.openai.settings import DoorSettings
from deploy.openai.tokenization import HuggingFaceTokenizer
from specdec.core.ids import Epoch, RequestId
from specdec.core.outputs import RequestOutput, TokenLogprobs
from tests.deploy.openai.fakes import DESCRIPTION

BOS, EOS = "<bos>", "<eos>"
PROMPT, GENERATED = "a\u00e9\u4e16b", "\U0001f680c\u00e9"
PROMPT_OFFSETS = [0, 0, 1, 1, 2, 2, 2, 3]
"""Of a BOS, which is not in the text, and a token for each byte."""
GENERATED_OFFSETS = [4, 4, 4, 4, 5, 6, 6]


def byte_level() -> HuggingFaceTokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    return HuggingFaceTokenizer(PreTrainedTokenizerFast(tokenizer_object=core, eos_token=EOS, bos_token=BOS))


TOKENIZER = byte_level()


def encoded(text: str) -> tuple[int, ...]:
    return asyncio.run(TOKENIZER.encode(text, add_special_tokens=False))


def scores_of(token_ids: tuple[int, ...]) -> tuple[TokenLogprobs, ...]:
    return tuple(TokenLogprobs(token_id, -0.5, ()) for token_id in token_ids)


def prepared(*, stream: bool) -> PreparedRequest:
    body = CompletionBody(prompt=[list(encoded(BOS + PROMPT))], echo=True, logprobs=0, stream=stream)
    described = dataclasses.replace(DESCRIPTION, vocab_size=300)
    return asyncio.run(prepare_completion(body, described, TOKENIZER, DoorSettings()))


def output(token_ids: tuple[int, ...], first_index: int, text: str) -> RequestOutput:
    prompt = scores_of(encoded(BOS + PROMPT)[1:]) if first_index == 0 else None
    return RequestOutput(
        request_id=RequestId("r"),
        epoch=Epoch(0),
        first_index=first_index,
        token_ids=token_ids,
        text=text,
        logprobs=scores_of(token_ids),
        prompt_logprobs=prompt,
    )


def logprobs_of(body: bytes) -> tuple[str, CompletionLogprobs]:
    (choice,) = msgspec.json.decode(body, type=CompletionResponse).choices
    assert choice.logprobs is not None
    return choice.text, choice.logprobs


def require_right(text: str, tokens: list[str], offsets: list[int]) -> None:
    assert text == PROMPT + GENERATED
    assert offsets == PROMPT_OFFSETS + GENERATED_OFFSETS
    for token, offset in zip(tokens, offsets, strict=True):
        assert text[offset:].startswith(token) or token == BOS or token.startswith("bytes:")


def test_offsets_index_a_whole_text() -> None:
    result = ChoiceResult()
    result.add(output(encoded(GENERATED), 0, GENERATED))
    text, logprobs = logprobs_of(complete_body(prepared(stream=False), [result], TOKENIZER))
    require_right(text, logprobs.tokens, logprobs.text_offset)


@pytest.mark.parametrize("num_first", range(1, 7))
def test_offsets_index_a_streamed_text(num_first: int) -> None:
    """Wherever it is divided, within characters too; and where a client comes back behind the first piece."""
    token_ids = encoded(GENERATED)
    first_text = GENERATED[: sum(offset < num_first for offset in (3, 4, 6))]
    chunks, again = (CompletionChunks(prepared(stream=True), TOKENIZER) for _ in range(2))
    second = output(token_ids[num_first:], num_first, GENERATED[len(first_text) :])
    (body,) = chunks.pieces(0, output(token_ids[:num_first], 0, first_text), UNSET)
    text, logprobs = logprobs_of(body)
    (body,) = chunks.pieces(0, second, UNSET)
    rest, rest_logprobs = logprobs_of(body)
    require_right(
        text + rest,
        logprobs.tokens + rest_logprobs.tokens,
        logprobs.text_offset + rest_logprobs.text_offset,
    )
    again.skip(0, token_ids[:num_first], first_text, None)
    assert again.pieces(0, second, UNSET) != []
    assert again._cursors[0].advance(token_ids[0]) == len(PROMPT + GENERATED)


def test_special_tokens_that_a_prompt_names_are_in_its_text() -> None:
    token_ids = encoded(f"a{EOS}b")
    assert len(token_ids) == 3
    shaped = echoed_logprobs(token_ids, scores_of(token_ids[1:]), TOKENIZER, f"a{EOS}b", 0)
    assert shaped.text_offset == [0, 1, 1 + len(EOS)]


def test_generated_special_tokens_take_no_room() -> None:
    cursor = TextCursor(TOKENIZER, offset=7)
    assert [cursor.advance(token_id) for token_id in encoded(f"a{EOS}b")] == [7, 8, 8]


@pytest.mark.parametrize(("text", "expected"), [("the a", [0, 3, 4]), (" the a", [0, 4, 5])])
def test_the_space_that_sentence_piece_puts_before_a_prompt_takes_no_room(
    text: str, expected: list[int]
) -> None:
    tokens = ["\u2581the", "\u2581", "a"]
    core = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=[]))
    core.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback()])
    tokenizer = HuggingFaceTokenizer(PreTrainedTokenizerFast(tokenizer_object=core))
    cursor = TextCursor(tokenizer, text)
    assert [cursor.advance(token_id) for token_id in (0, 1, 2)] == expected
