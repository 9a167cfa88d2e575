"""Whom the death of a child that tries grammars is laid to."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Iterator

import pytest

from specdec.core.errors import InputError
from specdec.core.sampling_params import Grammar
from specdec.sampling.grammar_trial import GrammarTrial, TrialSetup

GRAMMAR = Grammar("regex", "a+")
CHILD = """
import sys
from specdec.sampling.grammar_trial import TrialSetup, _receive, _send, _Verdict
from specdec.core.sampling_params import Grammar
_receive(sys.stdin.buffer, TrialSetup)
while (grammar := _receive(sys.stdin.buffer, Grammar)) is not None and grammar.text != "deadly":
    _send(sys.stdout.buffer, _Verdict())
"""
"""Needs no tokenizer, and dies of one grammar."""


@pytest.fixture
def children(monkeypatch: pytest.MonkeyPatch) -> list[subprocess.Popen[bytes]]:
    """Those that were started."""
    started: list[subprocess.Popen[bytes]] = []

    def start(command: list[str], **pipes: int) -> subprocess.Popen[bytes]:
        started.append(popen([command[0], "-c", CHILD], **pipes))  # type: ignore[call-overload]
        return started[-1]

    popen = subprocess.Popen
    monkeypatch.setattr("specdec.sampling.grammar_trial.subprocess.Popen", start)
    return started


@pytest.fixture
def trial(children: list[subprocess.Popen[bytes]]) -> Iterator[GrammarTrial]:
    setup = TrialSetup(
        tokenizer_json="",
        vocab_size=9,
        eos_token_ids=(),
        max_size=1,
        max_memory_bytes=1,
        compile_timeout_s=1.0,
        mask_timeout_s=1.0,
    )
    trial = GrammarTrial(setup)
    yield trial
    trial.close()


@pytest.mark.parametrize("is_noticed", [True, False])
def test_a_child_that_died_idle_is_no_grammar_s_fault(
    trial: GrammarTrial,
    children: list[subprocess.Popen[bytes]],
    is_noticed: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trial.check(GRAMMAR)
    trial.check(GRAMMAR)
    (first,) = children
    first.send_signal(signal.SIGKILL)
    first.wait()
    if not is_noticed:  # it dies between a look at it and what it is sent
        monkeypatch.setattr(first, "poll", lambda: None)
    trial.check(GRAMMAR)
    assert len(children) == 2


def test_a_child_that_dies_of_a_grammar_is(
    trial: GrammarTrial, children: list[subprocess.Popen[bytes]]
) -> None:
    trial.check(GRAMMAR)
    for _ in range(2):  # of one that was there, and of a new one
        with pytest.raises(InputError, match="is too complex: its trial ended"):
            trial.check(Grammar("regex", "deadly"))
    assert len(children) == 2, "it was tried once each"
    trial.check(GRAMMAR)
