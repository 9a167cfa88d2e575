"""What this project asks of the library llguidance: from a request's grammar to a matcher, and its errors.

Nothing here imports llguidance before a request needs it.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Sequence
from itertools import islice
from typing import TYPE_CHECKING, Final

from specdec.core.errors import InputError
from specdec.core.sampling_params import Grammar
from specdec.sampling.json_schema import without_annotations

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

JSON_WHITESPACE = r"[\x20\x0A\x0D\x09]{0,16}"
"""Between the parts of a JSON text: unbounded whitespace would let a model that is unsure of itself go on
with it for ever."""
_LONG_QUOTE = re.compile(r'("(?:[^"\\]|\\.){80})(?:[^"\\]|\\.)+"')
_LONG_REGEX = re.compile(r"( in regex /.{80}).+")
"""Where the library repeats what the client has sent: the beginning will do."""
_PLACE = re.compile(r"at (\d+)\(\d+\): ")
"""Line and column in a grammar."""
STANDS_FOR: Final = "//@ "
"""A comment that tells what a line of a grammar was made of, for messages."""
logger = logging.getLogger(__name__)


def require_library(grammar: Grammar) -> None:
    """Check that grammars are to be had at all.

    Raises:
        InputError: llguidance is not installed.
    """
    try:
        import llguidance  # noqa: F401
    except ImportError:
        raise InputError(
            f"{grammar.param} needs llguidance on the server: pip install llguidance",
            param=grammar.param,
        ) from None


def load_tokenizer(tokenizer_json: str, vocab_size: int, eos_token_ids: Sequence[int]) -> LLTokenizer:
    """Return the vocabulary as the library wants it.

    Raises:
        ValueError: the library does not understand tokenizers of this kind.
    """
    from llguidance import LLTokenizer

    made = LLTokenizer(tokenizer_json, eos_token=list(eos_token_ids))
    if made.vocab_size >= vocab_size:
        return made
    # Padded embeddings have tokens without text.
    return LLTokenizer(tokenizer_json, n_vocab=vocab_size, eos_token=list(eos_token_ids))


def compile_matcher(tokenizer: LLTokenizer, grammar: Grammar, max_size: int) -> LLMatcher:
    """Return a matcher that has found its first mask already: that is most of the work.

    Raises:
        InputError: the grammar is malformed, larger than `max_size` symbols, or allows nothing.
    """
    from llguidance import LLMatcher, LLParserLimits

    limits = LLParserLimits(max_grammar_size=max_size, precompute_large_lexemes=False)
    try:
        matcher = LLMatcher(tokenizer, _written(grammar), log_level=0, limits=limits)
    except InputError:
        raise
    except Exception as error:  # noqa: BLE001 - a library's parsers over whatever a client has sent
        logger.info("a grammar made its compiler raise %s", type(error).__name__)
        raise InputError(f"{grammar.param}: {error}", param=grammar.param) from None
    _refuse_error(matcher, grammar)
    matcher.compute_bitmask()
    _refuse_error(matcher, grammar)
    return matcher


def reason_of(matcher: LLMatcher) -> str:
    """Return in one line why a matcher is in error, and no more than the beginning of what it is of."""
    lines = [line.strip() for line in matcher.get_error().splitlines() if line.strip()]
    errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    first = (errors or lines or ["it cannot be used"])[0]
    first = _LONG_REGEX.sub(r"\1.../", _LONG_QUOTE.sub(r'\1..."', first))
    return "no text satisfies it" if first == "NoExtensionBias" else first


def _in_words(reason: str, grammar: Grammar) -> str:
    """Return a reason with what a line stands for in place of its number, where the line says so."""
    place = _PLACE.match(reason)
    if place is None or grammar.kind != "grammar":
        return reason
    line = next(islice(grammar.text.splitlines(), int(place[1]) - 1, None), "")
    _, mark, meaning = line.rpartition(STANDS_FOR)
    return f"{meaning.strip()}: {reason[place.end() :]}" if mark else reason


def _refuse_error(matcher: LLMatcher, grammar: Grammar) -> None:
    if matcher.is_error():
        raise InputError(f"{grammar.param}: {_in_words(reason_of(matcher), grammar)}", param=grammar.param)


def _written(grammar: Grammar) -> str:
    """Return the grammar in the library's own form."""
    from llguidance import LLMatcher

    match grammar.kind:
        case "json_object":
            return _json_grammar('{"type": "object"}')
        case "json_schema":
            return _json_grammar(_schema_of(grammar.text))
        case "regex":
            return LLMatcher.grammar_from_regex(grammar.text)
        case "choice":
            choices: list[str] = json.loads(grammar.text)
            texts = " | ".join(json.dumps(choice, ensure_ascii=False) for choice in choices)
            # One lexeme (capitals): as rules of a grammar no more than 2000 would go.
            return LLMatcher.grammar_from_lark(f"start: CHOICE\nCHOICE: {texts}")
        case "grammar":
            return LLMatcher.grammar_from_lark(_lark(grammar))


def _schema_of(text: str) -> str:
    try:
        return json.dumps(without_annotations(json.loads(text)))
    except (ValueError, RecursionError):  # whose words are the compiler's
        return text


def _json_grammar(schema: str) -> str:
    from llguidance import LLMatcher

    # Last of all, so that a schema's own "x-guidance" cannot ask for keywords to be ignored.
    return LLMatcher.grammar_from_json_schema(
        schema,
        overrides={"lenient": False, "whitespace_flexible": True, "whitespace_pattern": JSON_WHITESPACE},
    )


def _lark(grammar: Grammar) -> str:
    """Return a grammar as Lark; GBNF (`root ::= ...`) is translated."""
    if "::=" not in grammar.text:
        return grammar.text
    from llguidance.gbnf_to_lark import any_to_lark

    return any_to_lark(grammar.text)
