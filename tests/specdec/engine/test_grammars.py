"""Outputs that keep to grammars: always, and the same ones under speculation."""

from __future__ import annotations

import errno
import json
import random
import re
import shutil
import subprocess
import sys
import threading
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import pytest

from specdec.core.errors import InputError
from specdec.core.sampling_params import Grammar, GrammarKind, SamplingParams
from specdec.engine.config import EngineConfig
from specdec.engine.engine import Engine
from specdec.engine.offline import choice_requests
from specdec.sampling.config import GrammarConfig
from specdec.sampling.grammar import Constrained, ConstrainedTree, GrammarCompiler, GrammarState
from specdec.sampling.grammar_library import compile_matcher
from tests.specdec.engine.grammar_models import (
    EOS,
    VOCAB_SIZE,
    GrammarModels,
    models,
    save_byte_level_model,
    token_of,
)
from tests.specdec.engine.grammars_of_all_kinds import GRAMMARS, PROMPTS, SCHEMA, params_of, streams
from tests.specdec.engine.toy_engines import tokens_of

__all__ = ["models"]
LLTokenizer = pytest.importorskip("llguidance").LLTokenizer
DEEP_RULES = "start: r0\n" + "\n".join(f"r{i}: r{i + 1}" for i in range(4000)) + '\nr4000: "a"'
"""Compiling it overflows the stack."""


def is_right(kind: str, text: str) -> bool:
    """Whether an output that ended by itself is what its grammar says, by other means than llguidance."""
    if kind == "schema":
        jsonschema.validate(json.loads(text), SCHEMA)
        return True
    if kind == "choice":
        return text in json.loads(GRAMMARS[kind].text)
    patterns = {
        "regex": GRAMMARS["regex"].text,
        "gbnf": "x([a-c]|[a-c][a-c][0-9])y",
        "lark": r"[0-9]{1,3}|\(.*\)",
    }
    if kind == "lark":
        while (shorter := re.sub(r"\([0-9]{1,3}[-+*][0-9]{1,3}\)", "1", text)) != text:
            text = shorter
    return re.fullmatch(patterns[kind], text) is not None


COVER = [
    ("schema", "ngram", 4, {}),
    ("schema", "same model", 3, {"temperature": 0.7, "repetition_penalty": 1.2}),
    ("schema", "other model", 7, {"temperature": 1.5, "top_p": 0.9}),
    ("schema", "none", 4, {"temperature": 0.0}),
    ("regex", "ngram", 8, {}),
    ("regex", "same model", 5, {"temperature": 0.0}),
    ("choice", "ngram", 2, {"top_k": 50}),
    ("choice", "other model", 4, {"frequency_penalty": 0.5}),
    ("lark", "ngram", 1, {"min_p": 0.01}),
    ("lark", "same model", 6, {}),
    ("gbnf", "ngram", 5, {}),
    ("schema", "forgetful model", 4, {"temperature": 0.8}),
    ("regex", "forgetful model", 3, {}),
    ("gbnf", "other model", 3, {"logit_bias": ((50, 3.0),)}),
]


@pytest.mark.cover(1, "kind", "drafter")
@pytest.mark.parametrize(("kind", "drafter", "num_draft_tokens", "fields"), COVER)
def test_same_tokens_under_speculation(
    models: GrammarModels, kind: str, drafter: str, num_draft_tokens: int, fields: dict[str, Any]
) -> None:
    params = params_of(kind, **fields)
    with models.engine("none", 0) as engine:
        expected = streams([engine.generate([prompt], params)[0] for prompt in PROMPTS])
    with models.engine(drafter, num_draft_tokens) as engine:
        results = engine.generate(PROMPTS, params)
        engine.check_integrity()
    assert streams(results) == expected
    for _, text, finish_reason in expected:
        assert finish_reason != "error"
        assert finish_reason == "length" or is_right(kind, text), text
    assert any(finish_reason == "stop" for _, _, finish_reason in expected)


@pytest.mark.full
@pytest.mark.parametrize("kind", GRAMMARS)
@pytest.mark.parametrize("drafter", ["none", "ngram", "same model", "other model", "forgetful model"])
@pytest.mark.parametrize("num_draft_tokens", range(1, 9))
def test_same_tokens_under_speculation_in_every_setting(
    models: GrammarModels, kind: str, drafter: str, num_draft_tokens: int
) -> None:
    test_same_tokens_under_speculation(models, kind, drafter, num_draft_tokens, {})


def test_what_the_grammar_forces_is_drafted(models: GrammarModels) -> None:
    """Without any drafter, the keys of an object come several tokens at a time."""
    grammar = Grammar("regex", "one two three four five six seven eight nine ten (a|b)")
    params = SamplingParams(grammar=grammar, max_tokens=60, temperature=0.0)
    with models.engine("none", 0) as engine:
        expected = engine.generate(PROMPTS, params)
    with models.engine("ngram", 4) as engine:
        results = engine.generate(PROMPTS, params)
        metrics = engine.metrics()
    assert streams(results) == streams(expected)
    assert metrics.num_accepted_tokens > 0


def test_local_draft_model_keeps_to_the_grammar(models: GrammarModels) -> None:
    with models.engine("same model", 4) as engine:
        engine.generate(PROMPTS, params_of("schema"))
        metrics = engine.metrics()
    assert metrics.num_accepted_tokens > 0.9 * metrics.num_draft_tokens > 0


def test_one_of_thousands_of_choices(models: GrammarModels) -> None:
    choices = [f"item {number}" for number in range(4000)]
    params = SamplingParams(grammar=Grammar("choice", json.dumps(choices)), max_tokens=20, seed=2)
    with models.engine("ngram") as engine:
        for result in engine.generate(PROMPTS, params):
            assert result.choices[0].finish_reason == "stop"
            assert result.text in choices


@pytest.mark.parametrize("drafter", ["none", "ngram"])
def test_replay_goes_on_in_the_grammar(models: GrammarModels, drafter: str) -> None:
    params = params_of("schema")
    with models.engine() as engine:
        whole = engine.generate([PROMPTS[0]], params)[0].token_ids
    (request,) = choice_requests(tuple(PROMPTS[0]), params, "replayed")
    with models.engine(drafter) as engine:
        for cut in (1, 4, len(whole) - 2):
            engine.add_request(msgspec.structs.replace(request, delivered_token_ids=whole[:cut]))
            outputs = []
            while engine.has_work:
                outputs += engine.step()
            assert (*whole[:cut], *tokens_of(outputs)) == whole


def test_preemption_does_not_show(models: GrammarModels) -> None:
    params = params_of("schema", temperature=1.3)
    prompts = [*PROMPTS, *([token, token + 1] for token in range(500, 505))]
    with models.engine() as engine:
        expected = streams([engine.generate([prompt], params)[0] for prompt in prompts])
    with models.engine("ngram", 3, num_blocks=24) as engine:
        assert streams(engine.generate(prompts, params)) == expected
        assert engine.metrics().num_preemptions > 0


def test_control_masks_that_ignore_the_draft_are_noticed(
    models: GrammarModels, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = params_of("schema")
    with models.engine() as engine:
        expected = streams(engine.generate(PROMPTS, params))
    constrain = GrammarState.constrain

    def forgetful(self: GrammarState, drafted: Any, room: int, **how: bool) -> Any:
        kept = constrain(self, drafted, room, **how)
        return kept._replace(masks=kept.masks[:1] * len(kept.masks))

    monkeypatch.setattr(GrammarState, "constrain", forgetful)
    with models.engine("same model", 4) as engine:
        results = []
        for prompt in PROMPTS:
            results += engine.generate([prompt], params)
    assert streams(results) != expected


def test_without_a_grammar_the_text_is_another(models: GrammarModels) -> None:
    """The control: what the masks do shows."""
    with models.engine() as engine:
        (result,) = engine.generate(PROMPTS[:1], SamplingParams(max_tokens=40, seed=3))
    with pytest.raises(json.JSONDecodeError):
        json.loads(result.text)


# ---- grammars that cannot be ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("grammar", "words"),
    [
        (Grammar("json_schema", '{"type": "texts"}', "response_format"), "Invalid type"),
        (Grammar("json_schema", '{"not": {"type": "string"}}', "response_format"), "not"),
        (Grammar("json_schema", '{"$ref": "#/nowhere"}', "response_format"), "does not exist"),
        (
            Grammar("json_schema", '{"type": "integer", "minimum": 3, "maximum": 2}', "response_format"),
            "Unsat",
        ),
        (
            Grammar("json_schema", '{"uniqueItems": true, "x-guidance": {"lenient": true}}', "a"),
            "uniqueItems",
        ),
        (Grammar("json_schema", "{", "response_format"), "response_format"),
        (Grammar("json_schema", "false", "response_format"), "response_format"),
        (Grammar("json_schema", '{"$ref": "#"}', "response_format"), "no text satisfies"),
        (Grammar("regex", "(a|b", "guided_regex"), "unclosed"),
        (Grammar("regex", r"[^\x00-\U0010ffff]x", "guided_regex"), "no text satisfies"),
        (Grammar("regex", "a(?=b)", "guided_regex"), "look-around"),
        (Grammar("grammar", "start: nothing", "guided_grammar"), "unknown name"),
        (Grammar("grammar", "root ::= (", "guided_grammar"), "guided_grammar"),
        (Grammar("grammar", 'root ::= "a" nothing', "guided_grammar"), "nothing"),
        (Grammar("grammar", f"root ::= {'(' * 9000}a{')' * 9000}", "guided_grammar"), "recursion"),
        (Grammar("grammar", DEEP_RULES, "guided_grammar"), "nested too deeply"),
        (Grammar("regex", "(((a{100}){100}){100}){100}", "guided_regex"), "too complex"),
    ],
)
def test_malformed_grammar_ends_its_request_alone(
    models: GrammarModels, grammar: Grammar, words: str
) -> None:
    plain = SamplingParams(max_tokens=8, seed=1)
    with models.engine() as engine:
        results = engine.generate(PROMPTS, [plain, SamplingParams(grammar=grammar, max_tokens=8), plain])
        alone = engine.generate(PROMPTS[:1], plain)
    assert results[0].token_ids == alone[0].token_ids
    assert results[1].choices[0].finish_reason == "error"
    error = results[1].choices[0].error
    assert error is not None
    assert error.startswith(grammar.param)
    assert words in error
    assert "\n" not in error


@pytest.mark.parametrize(
    ("kind", "text", "words"),
    [
        ("regex", "a" * 12_000 + r"\b", "lookarounds not supported"),
        ("regex", r'"\n/' * 3_000 + r"\b", "lookarounds not supported"),
        ("grammar", "start: " + "x" * 12_000, "unknown name"),
    ],
)
def test_a_refusal_repeats_little_of_a_long_grammar(kind: GrammarKind, text: str, words: str) -> None:
    with pytest.raises(InputError, match=words) as caught:
        compile_matcher(LLTokenizer("byte"), Grammar(kind, text, "guided"), 100_000)
    assert len(str(caught.value)) < 400


def test_grammar_that_becomes_impossible_ends_its_request_alone(models: GrammarModels) -> None:
    """The grammar wants a b, which the request forbids."""
    (token_b,) = models.tokenizer.encode("b")
    others = tuple(
        token
        for token in range(4096)
        if models.tokenizer.decode([token]).startswith("b") and token != token_b
    )
    impossible = SamplingParams(
        grammar=Grammar("regex", "ab"),
        bad_words=tuple((token,) for token in (token_b, *others)),
        max_tokens=9,
    )
    plain = SamplingParams(max_tokens=8, seed=1)
    with models.engine("ngram") as engine:
        results = engine.generate(PROMPTS, [plain, impossible, plain])
        alone = engine.generate(PROMPTS[:1], plain)
    assert results[0].token_ids == alone[0].token_ids
    if results[1].text != "ab":  # there is a token for both letters
        assert results[1].choices[0].finish_reason == "error"
        assert results[1].text == "a"


@pytest.mark.parametrize("way", ["no descriptors", "dead child", "no thread", "broken library"])
def test_a_compiler_that_fails_ends_one_request_alone(
    models: GrammarModels, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    plain = SamplingParams(max_tokens=8, seed=1)
    wanting = SamplingParams(grammar=GRAMMARS["regex"], max_tokens=8)

    def fail(*_: object, **__: object) -> Any:
        raise {
            "no descriptors": OSError(errno.EMFILE, "Too many open files"),
            "no thread": RuntimeError("can't start new thread"),
        }.get(way, ZeroDivisionError(way))

    with models.engine() as engine:
        with monkeypatch.context() as patch:
            if way == "no descriptors":
                patch.setattr(subprocess, "Popen", fail)
            elif way == "dead child":
                patch.setattr(sys, "executable", shutil.which("false"))
            elif way == "no thread":
                patch.setattr(threading.Thread, "start", fail)
            else:
                patch.setattr("specdec.sampling.grammar.compile_matcher", fail)
            results = engine.generate(PROMPTS, [plain, wanting, plain])
        alone = engine.generate(PROMPTS[:1], plain)
        afterwards = engine.generate(PROMPTS[:1], wanting)
    assert results[0].token_ids == alone[0].token_ids
    assert results[1].choices[0].finish_reason == "error"
    assert "could not be compiled now" in str(results[1].choices[0].error)
    assert afterwards[0].choices[0].finish_reason != "error", "another child is tried"


def test_bounds_are_kept(models: GrammarModels) -> None:
    with models.engine(grammar=GrammarConfig(max_bytes=20)) as engine:
        with pytest.raises(InputError, match="at most 20") as caught:
            engine.generate([[1, 2]], SamplingParams(grammar=Grammar("regex", "a" * 21, "guided_regex")))
        assert caught.value.param == "guided_regex"
    slow = Grammar("regex", "a{1000}{500}")
    bounds = [
        ({"compile_timeout_s": 0.05}, "too long to compile"),
        ({"max_memory_bytes": 1 << 25, "compile_timeout_s": 60.0}, "too much memory"),
        ({"mask_timeout_s": 1e-9, "max_memory_bytes": 1 << 31}, "finding the allowed tokens"),
    ]
    for bound, words in bounds:
        with models.engine(grammar=GrammarConfig.model_validate(bound)) as engine:
            error = engine.generate([[1, 2]], SamplingParams(grammar=slow))[0].choices[0].error
            assert error is not None
            assert words in error
            fast = SamplingParams(grammar=Grammar("choice", '["a"]'), max_tokens=9)  # needs no trial
            if "mask_timeout_s" in bound:
                error = engine.generate([[1, 2]], fast)[0].choices[0].error
                assert error is not None
                assert "finding the allowed tokens" in error
            else:
                assert engine.generate([[1, 2]], fast)[0].text == "a"


def test_a_grammar_that_fails_leaves_the_prompt_for_others_to_find(models: GrammarModels) -> None:
    """Nothing is wrong with the K/V."""
    prompt = tuple(range(40, 57))
    never = SamplingParams(grammar=Grammar("choice", '["a"]'), max_tokens=9)
    with models.engine(grammar=GrammarConfig(mask_timeout_s=1e-9)) as engine:
        for params, num_found in ((SamplingParams(max_tokens=2), 0), (never, 16), (never, 16)):
            (request,) = choice_requests(prompt, params, "one")
            engine.add_request(request)
            outputs = []
            while engine.has_work:
                outputs += engine.step()
            assert outputs[-1].error_code == ("grammar_failed" if params is never else None)
            assert outputs[-1].stats is not None
            assert outputs[-1].stats.num_cached_prompt_tokens == num_found


def test_a_busy_machine_ends_no_request() -> None:
    """A mask that comes late because the process did not run is no grammar's fault."""

    class Starved:
        def compute_bitmask(self) -> bytes:
            time.sleep(0.05)
            return b"\xff"

        def is_error(self) -> bool:
            return False

        def is_accepting(self) -> bool:
            return True

    matcher: Any = Starved()
    state = GrammarState(Grammar("choice", '["a"]'), matcher, (), 8, mask_timeout_s=0.02)
    assert state.allowed_after(()) == b"\xff"
    assert state.failure is None


class Walker:
    """A matcher that allows everything but token 0, with a fault or a slow mask behind so many tokens."""

    cpu_s = 0.0
    """What all masks have taken."""

    def __init__(self, *, fails_at: int = -1, slow_at: int = -1, num_walked: int = 0) -> None:
        self.fails_at, self.slow_at, self.num_walked = fails_at, slow_at, num_walked

    def deep_copy(self) -> Walker:
        return Walker(fails_at=self.fails_at, slow_at=self.slow_at, num_walked=self.num_walked)

    def try_consume_tokens(self, token_ids: list[int]) -> int:
        num_allowed = len(token_ids) if 0 not in token_ids else token_ids.index(0)
        self.num_walked += num_allowed
        return num_allowed

    def compute_bitmask(self) -> bytes:
        Walker.cpu_s += 0.3 if self.num_walked == self.slow_at else 0.001
        return b"\xfe"

    def compute_ff_tokens(self) -> list[int]:
        return [self.num_walked]

    def is_error(self) -> bool:
        return self.num_walked == self.fails_at

    def get_error(self) -> str:
        return "too large" if self.is_error() else ""

    def is_accepting(self) -> bool:
        return True


def state_over(walker: Any, mask_timeout_s: float = 10.0, vocab_size: int = 8) -> GrammarState:
    return GrammarState(Grammar("choice", '["a"]'), walker, (), vocab_size, mask_timeout_s)


def test_nothing_is_forced_behind_a_token_that_was_not_kept() -> None:
    """The mask behind the second token cannot be had: what is forced behind it is not behind the first."""
    state = state_over(Walker(fails_at=2))
    assert state.constrain([7, 6, 5], 5).token_ids == (7,)
    assert state.constrain([7], 5).token_ids == (7,), "the second cannot be kept, forced or drafted"
    assert state.failure is None


def test_what_the_model_has_no_row_for_is_not_forced() -> None:
    """A tokenizer may know more tokens than the model."""
    for vocab_size, expected in ((3, (1, 1, 2)), (2, (1, 1))):
        assert state_over(Walker(), vocab_size=vocab_size).constrain([1, 1], 3).token_ids == expected


def test_a_vocabulary_smaller_than_the_tokenizers_ends_a_request_at_most(tmp_path: Path) -> None:
    """One of 300 tokens, all bytes among them, whose grammar forces a word that is one of the others."""
    save_byte_level_model(tmp_path, vocab_size=300)
    config = {"target": {"model": str(tmp_path)}, "speculative_config": {"controller": "fixed"}}
    params = SamplingParams(max_tokens=8, seed=1)
    with Engine(EngineConfig.model_validate({**config, "cache": {"num_blocks": 16}})) as engine:
        expected = engine.generate([[7, 8, 9]], params)[0]
        words = Grammar("choice", '["1 return value", "2 return value"]')
        forced = msgspec.structs.replace(params, grammar=words)
        (choice,) = engine.generate([[7, 8, 9]], forced)[0].choices
        assert choice.text in ("1", "2")
        assert choice.error is not None
        assert "forbids every token" in choice.error
        assert engine.generate([[7, 8, 9]], params)[0].token_ids == expected.token_ids


def test_what_was_sampled_is_not_followed_by_anything_at_all() -> None:
    """A token that the rule may accept has the grammar's mask behind it, or the request ends."""
    chain, tree = (state_over(Walker(fails_at=2)) for _ in range(2))
    assert chain.constrain([7, 6, 5], 5, is_sampled=True) == Constrained((), (b"\x00",))
    assert tree.constrain_tree([7, 6, 5], [-1, 0, -1], is_sampled=True) == ConstrainedTree((), (b"\x00",))
    assert chain.failure == tree.failure == "too large"
    forbidden = state_over(Walker(fails_at=9)).constrain([7, 0, 5], 5, is_sampled=True)
    assert forbidden == Constrained((7, 0), (b"\xfe", b"\xfe", b"\xff")), "never reached: p is 0"


@pytest.mark.parametrize("is_sampled", [False, True])
def test_slow_masks_behind_drafts_end_no_request(is_sampled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """One state is slow: plain decoding asks once and is forgiven, so that drafting may not ask it away."""
    monkeypatch.setattr("specdec.sampling.grammar.time.thread_time", lambda: Walker.cpu_s)
    plain, drafting = (state_over(Walker(slow_at=2), 0.25) for _ in range(2))
    for token_id in (7, 6, 5):
        plain.constrain([], 0)
        plain.commit([token_id])
    assert drafting.allowed_after([7, 6]) == b"\xfe"
    found = drafting.constrain([7, 6, 5], 3, is_sampled=is_sampled)
    assert found == Constrained((7, 6, 5), (b"\xfe",) * 4), "masks that were slow are masks"
    for token_id in (7, 6, 5):
        drafting.commit([token_id])
        drafting.constrain([], 0)
        drafting.allowed_after(())
    assert plain.failure is drafting.failure is None


def test_drafts_that_cost_too_much_are_left_out_from_the_next_round_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("specdec.sampling.grammar.time.thread_time", lambda: Walker.cpu_s)
    state = state_over(Walker(slow_at=3), 0.25)
    for _ in range(3):
        assert state.constrain([7, 6, 5], 3, is_sampled=True).token_ids == (7, 6, 5)
    state.commit([7])
    assert state.constrain([6, 5], 3) == Constrained((), (b"\xfe",))
    assert state.constrain_tree([6, 5], [-1, 0]) == ConstrainedTree((), (b"\xfe",))
    assert state.allowed_after([6]) is None
    assert state.allowed_after(()) == b"\xfe"
    assert state.failure is None


def test_masks_are_not_those_of_a_draft_that_was_left(models: GrammarModels) -> None:
    """As many tokens ago another draft was walked: its last mask must not be taken for that of this one."""
    none_or_full = {"type": "array", "prefixItems": [{"type": "null"}], "items": False, "minItems": 1}
    schema = {
        "type": "object",
        "properties": {"own": none_or_full, "part": {"type": "array", "items": {"type": "null"}}},
        "additionalProperties": False,
    }
    grammar = Grammar("json_schema", json.dumps(schema))
    opening, own, part = [[token_of(models, text) for text in texts] for texts in WALKS]
    tokenizer_json, eos = models.tokenizer.to_json, (EOS,)
    with closing(GrammarCompiler(tokenizer_json, vocab_size=VOCAB_SIZE, eos_token_ids=eos)) as compiler:
        state, fresh = (compiler.begin(grammar, opening).result() for _ in range(2))
        assert state.constrain(part, 4).token_ids == tuple(part)
        state.commit(own[:2])
        expected = fresh.constrain(own, 4)
        assert expected.token_ids == tuple(own)
        assert state.allowed_after(own[2:]) == expected.masks[-1]
        assert state.constrain(own[2:], 2).masks[-1] == expected.masks[-1]
        other = compiler.begin(grammar, opening).result().constrain(part, 4)
        assert other.masks[-1] != expected.masks[-1], "only one of them may be empty"


WALKS = (["{"], ['"', "ow", "n", '":'], ['"', "par", "t", '":'])


def test_rounds_go_on_while_a_grammar_is_compiled(models: GrammarModels) -> None:
    slow = SamplingParams(grammar=Grammar("regex", "a{1000}{900}"), max_tokens=2)
    plain = SamplingParams(max_tokens=10, seed=1)
    with models.engine(grammar=GrammarConfig(compile_timeout_s=60.0, mask_timeout_s=60.0)) as engine:
        (first,) = choice_requests((1, 2), slow, "slow")
        (second,) = choice_requests((1, 2), plain, "plain")
        engine.add_request(first)
        engine.add_request(second)
        assert engine.metrics().num_waiting == 2
        finished = []
        while engine.has_work:
            finished += [one.request_id for one in engine.step() if one.finish_reason is not None]
    assert finished == ["plain-0", "slow-0"]


def test_abort_while_compiling(models: GrammarModels) -> None:
    with models.engine() as engine:
        (request,) = choice_requests((1, 2), params_of("schema"), "gone")
        engine.add_request(request)
        engine.abort(request.request_id)
        (output,) = engine.step()
        assert output.finish_reason == "abort"
        assert not engine.has_work


def test_ignore_eos_contradicts_a_grammar() -> None:
    with pytest.raises(InputError) as caught:
        SamplingParams(grammar=Grammar("regex", "a", "guided_regex"), ignore_eos=True).checked()
    assert caught.value.param == "ignore_eos"


# ---- random schemas ------------------------------------------------------------------------------


def random_value_schema(generator: random.Random) -> dict[str, Any]:
    """Of values without parts, bounded: a random model does not end an unbounded string by itself."""
    low = generator.randrange(-500, 500)
    return generator.choice(
        [
            {"type": "integer", "minimum": low, "maximum": low + generator.randrange(0, 2000)},
            {"type": "number", "exclusiveMinimum": -1.5, "maximum": generator.randrange(1, 50)},
            {"type": "integer", "minimum": low, "exclusiveMaximum": low + 100, "multipleOf": 7},
            {"type": "string", "minLength": generator.randrange(3), "maxLength": generator.randrange(3, 9)},
            {"type": "string", "pattern": generator.choice(["^[a-c]{2,5}$", "^(x|yy)-[0-9]{1,3}$"])},
            {
                "type": "string",
                "pattern": generator.choice(["[a-c]{2}", "^a|b$", r'^\\?"\d$']),
                "maxLength": 6,
            },
            {"type": ["string", "null"], "maxLength": 3},
            {"type": "string", "format": generator.choice(["date", "uuid", "ipv4"])},
            {"type": generator.choice(["boolean", "null"])},
            {"enum": generator.sample(["a", "b c", 1, -2.5, None, True, '\u00fc"\\', ["x"], {"y": 1}], 3)},
            {"const": generator.choice([0, "fixed", None, {"k": [1, 2]}])},
        ]
    )


def random_object_schema(generator: random.Random, depth: int) -> dict[str, Any]:
    names = generator.sample(["id", "name", "a b", "\u00e4", 'x\\"1', "$ref", ""], generator.randrange(1, 4))
    return {
        "type": "object",
        "properties": {name: random_schema(generator, depth + 1) for name in names},
        "required": generator.sample(names, generator.randrange(len(names) + 1)),
        "additionalProperties": False,
    }


def random_schema(generator: random.Random, depth: int = 0) -> dict[str, Any]:
    """A bounded schema."""
    kinds = ["value", "object", "array", "tuple", "anyOf", "oneOf"]
    match "value" if depth == 3 else generator.choice(kinds):
        case "object":
            return random_object_schema(generator, depth)
        case "array":
            low = generator.randrange(3)
            items = random_schema(generator, depth + 1)
            return {
                "type": "array",
                "items": items,
                "minItems": low,
                "maxItems": low + generator.randrange(3),
            }
        case "tuple":
            parts = [random_schema(generator, depth + 1) for _ in range(generator.randrange(1, 3))]
            return {"type": "array", "prefixItems": parts, "items": False, "minItems": len(parts)}
        case "anyOf":
            return {"anyOf": [random_schema(generator, depth + 1) for _ in range(2)]}
        case "oneOf":
            return {"oneOf": [{"type": "integer", "minimum": 0, "maximum": 9}, {"enum": ["a", None]}]}
        case _:
            return random_value_schema(generator)


def random_document(generator: random.Random) -> dict[str, Any]:
    """A whole schema; some have a part that others refer to."""
    schema = random_schema(generator)
    if generator.random() < 0.2:
        part = {"type": "array", "items": {"$ref": "#/$defs/part"}, "maxItems": 1}
        schema = {
            "$defs": {"part": part if generator.random() < 0.5 else random_value_schema(generator)},
            "type": "object",
            "properties": {"own": schema, "part": {"$ref": "#/$defs/part"}},
            "required": ["part"],
            "additionalProperties": False,
        }
    return schema


def check_random_schemas(models: GrammarModels, first: int, count: int, drafter: str, seeds: int) -> int:
    """Return how many outputs ended by themselves; all those must be valid, by jsonschema."""
    generator = random.Random(first)
    schemas = [random_document(generator) for _ in range(count)]
    params = [
        SamplingParams(
            grammar=Grammar("json_schema", json.dumps(schema)),
            temperature=generator.choice([0.0, 0.7, 1.0, 1.5, 3.0]),
            max_tokens=300,
            seed=seed,
        )
        for schema in schemas
        for seed in range(seeds)
    ]
    prompts = [[generator.randrange(5, 4000) for _ in range(3)] for _ in params]
    with models.engine(drafter, 4) as engine:
        results = engine.generate(prompts, params)
        engine.check_integrity()
    num_stopped = 0
    for index, result in enumerate(results):
        (choice,) = result.choices
        assert choice.finish_reason in ("stop", "length"), (choice.error, schemas[index // seeds])
        if choice.finish_reason == "stop":
            num_stopped += 1
            value = json.loads(choice.text)
            jsonschema.Draft202012Validator(schemas[index // seeds]).validate(value)
    assert num_stopped > 0.8 * len(results), "numbers of any length may go on; everything else ends"
    return num_stopped


@pytest.mark.slow
@pytest.mark.parametrize(
    ("first", "drafter"),
    [
        (0, "ngram"),
        *(pytest.param(*one, marks=pytest.mark.full) for one in ((1, "other model"), (2, "none"))),
    ],
)
def test_every_output_is_valid_for_random_schemas(models: GrammarModels, first: int, drafter: str) -> None:
    check_random_schemas(models, first, 25, drafter, 2)


@pytest.mark.full
@pytest.mark.parametrize("first", [0, 1, 2, *range(10, 20)])
@pytest.mark.parametrize("drafter", ["ngram", "same model", "other model"])
def test_every_output_is_valid_for_hundreds_of_schemas(
    models: GrammarModels, first: int, drafter: str
) -> None:
    check_random_schemas(models, first, 100, drafter, 2)
