"""Grammars are tried in a process of their own before the engine touches them.

The library that compiles them works in the engine's process. A hostile or unlucky grammar (rules nested
thousands deep, `(((a{100}){100}){100}){100}`) would overflow its stack, take all memory or never end, and
nothing can be done about that from within. So a child process compiles each grammar first, with less stack,
bounded memory and bounded CPU time, and walks a little through it. If that ends well, the same work ends well
in the engine.
"""

from __future__ import annotations

import contextlib
import os
import random
import resource
import signal
import struct
import subprocess
import sys
import time
from typing import IO, TYPE_CHECKING, TypeVar

import msgspec

from specdec.core.errors import InputError
from specdec.core.sampling_params import Grammar
from specdec.sampling.grammar_library import compile_matcher, load_tokenizer, reason_of
from specdec.sampling.mask_times import MaskTimes

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

STACK_BYTES = 2 << 20
"""Of the child; threads that compile in earnest have several times as much."""
_NUM_STEPS = 48
"""Tokens that are walked at random."""
_FATAL = {
    signal.SIGPROF: "it takes too long to compile",
    signal.SIGSEGV: "it is nested too deeply",
    signal.SIGABRT: "it needs too much memory",
    signal.SIGKILL: "it needs too much memory",
}
_LENGTH = struct.Struct("<Q")
MessageT = TypeVar("MessageT", bound=msgspec.Struct)


class TrialSetup(msgspec.Struct, frozen=True, kw_only=True):
    """What a child is told first."""

    tokenizer_json: str
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    max_size: int
    max_memory_bytes: int
    compile_timeout_s: float
    mask_timeout_s: float


class _Verdict(msgspec.Struct, frozen=True):
    """A child's answer."""

    error: str | None = None


class GrammarTrial:
    """The engine's end: one child, started when it is needed first and again after each that has died."""

    def __init__(self, setup: TrialSetup) -> None:
        """Start nothing yet."""
        self._setup = setup
        self._child: subprocess.Popen[bytes] | None = None

    def check(self, grammar: Grammar) -> None:
        """Wait until the grammar has been tried.

        Raises:
            InputError: it is malformed, too complex, or allows nothing.
            OSError: there is no child, and none can be started; nothing is said of the grammar.
        """
        child = self._hand_over(grammar)
        assert child.stdout is not None
        verdict = _receive(child.stdout, _Verdict)
        if verdict is None:
            self._child = None
            raise InputError(f"{grammar.param} is too complex: {_cause(child)}", param=grammar.param)
        if verdict.error is not None:
            raise InputError(verdict.error, param=grammar.param)

    def close(self) -> None:
        """End the child. Idempotent."""
        child, self._child = self._child, None
        if child is not None:
            child.kill()
            _cause(child)

    def _hand_over(self, grammar: Grammar) -> subprocess.Popen[bytes]:
        """Give the grammar to the child; to a new one where the child has died before it could read it."""
        child = self._child
        if child is not None and child.poll() is None:
            assert child.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                _send(child.stdin, grammar)
                return child
        self.close()
        child = self._start()
        assert child.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # then it has died, and no verdict comes either
            _send(child.stdin, grammar)
        return child

    def _start(self) -> subprocess.Popen[bytes]:
        child = subprocess.Popen(
            [sys.executable, "-m", __name__], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert child.stdin is not None
        try:
            _send(child.stdin, self._setup)
        except BrokenPipeError:
            raise ChildProcessError(f"grammars cannot be tried: {_cause(child)}") from None
        self._child = child
        return child


def _cause(child: subprocess.Popen[bytes]) -> str:
    """Say why a child that has died did."""
    assert child.stdin is not None
    with contextlib.suppress(BrokenPipeError):
        child.stdin.close()
    with child:
        code = child.wait()
    try:
        return _FATAL.get(signal.Signals(-code), f"its trial ended with signal {-code}")
    except ValueError:
        return f"its trial ended with status {code}"


def _send(pipe: IO[bytes], message: msgspec.Struct) -> None:
    payload = msgspec.msgpack.encode(message)
    pipe.write(_LENGTH.pack(len(payload)))
    pipe.write(payload)
    pipe.flush()


def _receive(pipe: IO[bytes], kind: type[MessageT]) -> MessageT | None:
    """Return the next message; None at the end."""
    head = pipe.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        return None
    (length,) = _LENGTH.unpack(head)
    payload = pipe.read(length)
    return None if len(payload) < length else msgspec.msgpack.decode(payload, type=kind)


def main() -> None:
    """Be the child: try one grammar after the other, until standard input ends or one is fatal."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, whose end ends this one
    setup = _receive(sys.stdin.buffer, TrialSetup)
    if setup is None:
        return
    tokenizer = load_tokenizer(setup.tokenizer_json, setup.vocab_size, setup.eos_token_ids)
    _set_bounds(setup.max_memory_bytes)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # the parent says what became of a grammar that is fatal
    while (grammar := _receive(sys.stdin.buffer, Grammar)) is not None:
        # Unlike a limit of the process, this one is for each grammar; unlike a clock, it is fair under load.
        signal.setitimer(signal.ITIMER_PROF, setup.compile_timeout_s)
        error = _try(tokenizer, grammar, setup)
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        _send(sys.stdout.buffer, _Verdict(error))


def _set_bounds(max_memory_bytes: int) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _, hard = resource.getrlimit(resource.RLIMIT_STACK)
    resource.setrlimit(resource.RLIMIT_STACK, (STACK_BYTES, hard))
    if sys.platform != "linux":
        return  # nobody says how much there is so far
    with open("/proc/self/statm", encoding="ascii") as file:
        num_pages = int(file.read().split()[0])
    limit = num_pages * resource.getpagesize() + max_memory_bytes
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _try(tokenizer: LLTokenizer, grammar: Grammar, setup: TrialSetup) -> str | None:
    """Return what is wrong with a grammar."""
    try:
        matcher = compile_matcher(tokenizer, grammar, setup.max_size)
    except InputError as error:
        return str(error)
    except MemoryError:
        return f"{grammar.param} is too complex: it needs too much memory"
    too_long_s = _walk(matcher, setup)
    if too_long_s is not None:
        return f"{grammar.param} is too complex: finding the allowed tokens took {too_long_s:.2f} s"
    if matcher.is_error():
        return f"{grammar.param}: {reason_of(matcher)}"
    return None


def _walk(matcher: LLMatcher, setup: TrialSetup) -> float | None:
    """Take random steps; return how long (CPU seconds) a mask took that ends it, None where none does."""
    generator = random.Random(0)
    times = MaskTimes(setup.mask_timeout_s)
    for _ in range(_NUM_STEPS):
        started_s = time.process_time()
        mask = matcher.compute_bitmask()
        took_s = time.process_time() - started_s
        if times.is_too_long(took_s):
            return took_s
        allowed = [
            8 * index + bit
            for index, byte in enumerate(mask)
            if byte
            for bit in range(8)
            if byte >> bit & 1 and 8 * index + bit not in setup.eos_token_ids
        ]
        if matcher.is_error() or not allowed:
            break
        matcher.try_consume_tokens([generator.choice(allowed)])
    return None


if __name__ == "__main__":
    main()
