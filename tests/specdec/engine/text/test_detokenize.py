"""Text as it comes equals text as a whole, whatever the tokenizer; stop strings cross token borders."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import pairwise
from typing import ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec.engine.text.detokenize import Detokenizer, StopMatch, StopScanner
from specdec.engine.text.tokenizer import HuggingFaceTokenizer, Tokenizer
from tests.specdec.engine.tokenizers_of_all_kinds import KINDS, byte_level, sentencepiece_like

TEXTS = [
    "the cats",
    "the \u00e9t\u00e9",
    "\U0001f600\U0001f600 \u4f60\u597d!",
    "a  a   a",
    "",
    "\ufffd?",
    "e\u0301",
]


def pieces(tokenizer: Tokenizer, token_ids: Sequence[int], prompt: Sequence[int] = ()) -> list[str]:
    detokenizer = Detokenizer(tokenizer, prompt)
    return [*(detokenizer.feed(token_id) for token_id in token_ids), detokenizer.flush()]


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("kind", ["byte_level", "sentencepiece_like"])
def test_text_survives(kind: str, text: str) -> None:
    tokenizer = KINDS[kind]()
    token_ids = tokenizer.encode(text)
    streamed = pieces(tokenizer, token_ids)
    assert "".join(streamed) == tokenizer.decode(token_ids)
    if "\ufffd" not in text:
        assert "\ufffd" not in "".join(streamed)


def test_character_is_never_split() -> None:
    tokenizer = byte_level()
    token_ids = tokenizer.encode("\U0001f600")
    assert len(token_ids) > 1
    assert pieces(tokenizer, token_ids) == [""] * (len(token_ids) - 1) + ["\U0001f600", ""]


def test_unfinished_character_comes_with_the_flush() -> None:
    tokenizer = byte_level()
    token_ids = tokenizer.encode("\U0001f600")[:-1]
    assert "".join(pieces(tokenizer, token_ids)[:-1]) == ""
    assert pieces(tokenizer, token_ids)[-1] == tokenizer.decode(token_ids)


@pytest.mark.parametrize("seed", range(30))
def test_random_bytes_equal_full_decode(seed: int) -> None:
    """Mostly no UTF-8 at all: long stretches without a character border."""
    generator = random.Random(seed)
    tokenizer = byte_level()
    high = [token for token in range(1, 257) if tokenizer.decode([token]) == "\ufffd"]
    alphabet = high if seed % 2 else list(range(1, 260))
    token_ids = generator.choices(alphabet, k=200)
    assert "".join(pieces(tokenizer, token_ids)) == tokenizer.decode(token_ids)


def test_cost_per_token_is_bounded() -> None:
    """Even without any character border: the longest decode of a step does not grow with the text."""
    inner = byte_level()

    class Counting:
        special_ids = inner.special_ids
        longest = 0

        def encode(self, text: str) -> list[int]:
            return inner.encode(text)

        def decode(self, token_ids: Sequence[int]) -> str:
            self.longest = max(self.longest, len(token_ids))
            return inner.decode(token_ids)

    for text in ("the cats " * 100, "\u4f60\u597d" * 200):
        counting = Counting()
        pieces(counting, inner.encode(text))
        assert counting.longest <= 16
    counting = Counting()
    lead_byte = next(token for token in range(1, 257) if inner.decode([token, token]) == "\ufffd\ufffd")
    pieces(counting, [lead_byte] * 1000)
    assert counting.longest <= 40


@pytest.mark.parametrize("kind", sorted(KINDS))
@pytest.mark.parametrize("seed", range(5))
def test_random_words_equal_full_decode_behind_a_prompt(kind: str, seed: int) -> None:
    generator = random.Random(seed)
    tokenizer = KINDS[kind]()
    words = {"byte_level": range(257, 263), "sentencepiece_like": range(257, 268), "word_piece": range(2, 10)}
    token_ids = generator.choices(words[kind], k=60)
    for split in (0, 1, 7):
        prompt, generated = token_ids[:split], token_ids[split:]
        if kind == "byte_level":
            expected = tokenizer.decode(generated)
        else:
            expected = tokenizer.decode(token_ids)[len(tokenizer.decode(prompt)) :]
        assert "".join(pieces(tokenizer, generated, prompt)) == expected


def test_first_word_keeps_its_space_behind_a_prompt() -> None:
    tokenizer = sentencepiece_like()
    dog = tokenizer.encode("dog")[:1]
    assert "".join(pieces(tokenizer, [*dog], tokenizer.encode("the"))).startswith(" ")


@pytest.mark.parametrize(
    "prompt",
    ["\u4f60", "\u4f60\u597d", "\u4f60\u597d\u4f60", "the \u4f60\u597d", "\ufffd", "a\ufffd", "\u4f60\ufffd"],
)
def test_first_word_keeps_its_space_behind_characters_of_several_tokens(prompt: str) -> None:
    """The last four tokens begin inside a character, which leaves none of their bytes one."""
    tokenizer = sentencepiece_like()
    before, dog = tokenizer.encode(prompt), 262
    assert tokenizer.decode([*before, dog]) == f"{tokenizer.decode(before)} dog"
    assert "".join(pieces(tokenizer, [dog], before)) == " dog"


def test_prompt_that_ends_inside_a_character() -> None:
    """The first word keeps its space, and a byte of that character is one character that is none."""
    tokenizer = sentencepiece_like()
    *cut, last_byte = tokenizer.encode("\u4f60\u597d")
    dog = 262
    assert "".join(pieces(tokenizer, [dog], cut)) == " dog"
    assert "".join(pieces(tokenizer, [last_byte, dog], cut)) == "\ufffd dog"


def test_special_tokens_do_not_show() -> None:
    tokenizer = sentencepiece_like()
    the, cat = 257, 260
    assert "".join(pieces(tokenizer, [the, 0, cat, the, 0, 0, the])) == "thecat the the"


def test_special_tokens_that_only_the_backend_knows_do_not_show() -> None:
    tokenizer = sentencepiece_like(declares_special_ids=False)
    assert tokenizer.special_ids == {0}
    assert "".join(pieces(tokenizer, [257, 0, 257])) == "the the"


class _Python:
    """A tokenizer without Rust behind it, which has 40 of its model's ids, as SentencePiece's do."""

    all_special_ids: ClassVar = [39]
    added_tokens_decoder: ClassVar = {39: "<end>"}

    def get_vocab(self) -> dict[str, int]:
        return {f"t{token_id}": token_id for token_id in range(39)}

    def decode(self, token_ids: Sequence[int], **options: bool) -> str:
        assert options == {"skip_special_tokens": True, "clean_up_tokenization_spaces": False}
        if not all(token_id < 40 for token_id in token_ids):
            raise IndexError("piece id is out of range")
        return "".join(f"t{one}" for one in token_ids if one != 39)


def test_ids_that_a_tokenizer_without_backend_has_not_do_not_show() -> None:
    """Models often have more, and sample them; in Rust they have no text either."""
    tokenizer = HuggingFaceTokenizer(_Python())
    assert tokenizer.decode([100]) == ""
    assert tokenizer.decode([5, 100, 39, 6]) == "t5t6"
    assert pieces(tokenizer, [7, 99, 8], prompt=[5, 100]) == ["t7", "", "t8", ""]


def test_bytes_of_a_fallback_run_form_characters() -> None:
    tokenizer = sentencepiece_like()
    token_ids = [1 + byte for byte in "\u4f60\u597d".encode()]
    assert pieces(tokenizer, token_ids) == ["", "", "\u4f60", "", "", "\u597d", ""]


def scan(scanner: StopScanner, texts: Sequence[str]) -> tuple[list[str], StopMatch | None]:
    released = []
    for text in texts:
        result = scanner.feed(text, look=True)
        if isinstance(result, StopMatch):
            return released, result
        released.append(result)
    return [*released, scanner.flush()], None


def test_stop_string_across_borders_is_held_back() -> None:
    released, match = scan(StopScanner(["STOP"], include_stop=False), ["say S", "TO", "P now"])
    assert released == ["say ", ""]
    assert match == StopMatch("STOP", "")


def test_false_alarm_is_released() -> None:
    released, match = scan(StopScanner(["STOP"], include_stop=False), ["S", "TO", "RE", "S"])
    assert released == ["", "", "STORE", "", "S"]
    assert match is None


def test_stop_string_may_be_included() -> None:
    assert scan(StopScanner(["b"], include_stop=True), ["ab", "c"]) == ([], StopMatch("b", "ab"))


def test_first_stop_string_in_the_text_wins() -> None:
    assert scan(StopScanner(["y", "xx"], include_stop=False), ["axxby"])[1] == StopMatch("xx", "a")


def test_text_that_is_held_for_a_longer_stop_string_stays_ordinary() -> None:
    """Before min_tokens a stop string was complete; another must not bring it back."""
    for then, found in (("x", "abx"), ("c", StopMatch("abc", "")), ("b", StopMatch("b", "ab"))):
        scanner = StopScanner(["abc", "b"], include_stop=False)
        assert scanner.feed("ab", look=False) == ""
        assert scanner.feed(then, look=True) == found


def test_complete_stop_string_is_ordinary_text_before_min_tokens() -> None:
    scanner = StopScanner(["ab"], include_stop=False)
    assert scanner.feed("ab", look=False) == "ab"
    assert scanner.feed("xa", look=False) == "x"
    assert scanner.feed("b", look=True) == StopMatch("ab", "")


@given(
    text=st.text(alphabet="abc", max_size=60),
    stops=st.lists(st.text(alphabet="abc", min_size=1, max_size=4), min_size=1, max_size=3),
    cuts=st.lists(st.integers(0, 60), max_size=20),
)
def test_scanner_agrees_with_searching_the_whole(text: str, stops: list[str], cuts: list[int]) -> None:
    """Fed one character at a time, the match that ends first wins; grouping only moves releases."""
    released, match = scan(StopScanner(stops, include_stop=False), list(text))
    ends = [
        (end, text.rindex(stop, 0, end))
        for end in range(len(text) + 1)
        for stop in stops
        if text[:end].endswith(stop)
    ]
    if ends:
        first_end = min(end for end, _ in ends)
        start = min(start for end, start in ends if end == first_end)
        assert match is not None
        assert "".join(released) + match.text == text[:start]
    else:
        assert match is None
        assert "".join(released) == text
    borders = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    groups = [text[low:high] for low, high in pairwise(borders)]
    if not ends:
        assert "".join(scan(StopScanner(stops, include_stop=False), groups)[0]) == text
