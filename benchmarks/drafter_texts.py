"""Prompts of three classes of text, many of each: excerpts of files that no model was trained on.

Greedily the demo target falls into loops on most prompts, where anything is accepted. Of `code` and
`docstring` those prompts are taken whose greedy continuation has not ended in a loop by the length that is
decoded; `repeated` are excerpts that repeat themselves, taken as they are.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

from benchmarks.in_process import batch_requests, run_batch
from specdec.core.errors import UserError
from specdec.core.loops import LOOP_WINDOW, ends_in_loop
from specdec.core.sampling_params import SamplingParams
from specdec.engine.engine import Engine
from specdec.model.tokenizer import load_tokenizer
from training.corpus import load_corpus
from training.prompts import PromptClass, select_prompts

CLASSES: tuple[PromptClass, ...] = get_args(PromptClass)
_REPEATING: PromptClass = "repeated"
_CANDIDATES = 8
"""For each prompt that is wanted; about a fifth of them do not loop."""
AT_ONCE = 32
"""Candidates that are continued together."""

Prompts = Mapping[str, Sequence[tuple[int, ...]]]
"""By class."""


def choose_prompts(engine: Engine, target: Path, number: int, num_tokens: int) -> dict[str, list[list[int]]]:
    """Return token ids of `number` prompts of each class, by what `engine` greedily makes of them.

    Raises:
        UserError: too few prompts of a class do not loop.
    """
    tokenizer: Any = load_tokenizer(str(target))
    candidates = select_prompts(load_corpus().held_out, tokenizer, per_class=_CANDIDATES * number)
    chosen: dict[str, list[list[int]]] = {}
    for name in CLASSES:
        own = [engine.tokenizer.encode(one.prompt) for one in candidates if one.prompt_class == name]
        found = own if name == _REPEATING else _not_looping(engine, name, own, number, num_tokens)
        if len(found) < number:
            raise UserError(f"{len(found)} prompts of class {name}, not {number}: of {len(own)} looked at")
        chosen[name] = [list(prompt) for prompt in found[:number]]
    return chosen


def mixed(prompts: Prompts, number: int) -> list[tuple[int, ...]]:
    """Return prompts of all classes in turn."""
    in_turn = itertools.chain.from_iterable(zip(*prompts.values(), strict=True))
    return list(itertools.islice(itertools.cycle(list(in_turn)), number))


def _not_looping(
    engine: Engine, name: str, prompts: Sequence[Sequence[int]], number: int, num_tokens: int
) -> list[Sequence[int]]:
    """Return at least `number` of the prompts, if so many are found: the first ones."""
    params = SamplingParams(temperature=0.0, max_tokens=max(num_tokens, LOOP_WINDOW), ignore_eos=True)
    found: list[Sequence[int]] = []
    for first in range(0, len(prompts), AT_ONCE):
        if len(found) >= number:
            break
        own = prompts[first : first + AT_ONCE]
        requests = batch_requests([tuple(one) for one in own], params, 0, f"choice-{name}-{first}")
        record = run_batch(engine, requests)
        found += [
            prompt for prompt, tokens in zip(own, record.token_ids, strict=True) if not ends_in_loop(tokens)
        ]
    return found
