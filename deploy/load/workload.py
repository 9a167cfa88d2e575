"""What is asked: bodies for completions or chat, with made-up prompts or those of a file."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from deploy.load.arrivals import Arrival, Length

Endpoint = Literal["completions", "chat"]
PATHS: Mapping[Endpoint, str] = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
_LIMITS: Mapping[Endpoint, str] = {"completions": "max_tokens", "chat": "max_completion_tokens"}
"""Fields that bound an answer. Some servers refuse chats with the other one."""
_FREQUENT_WORDS = """
the of and to in is that for it as was with be by on not he his but at are this have from or had an
they which one you were her all she there would their we him been has when who will more no if out so
said what up its about into than them can only other new some could time these two may then do first any
my now such like our over man me even most made after also did many before must through back years where
"""
"""About a token each with vocabularies of English text."""
_WORDS = _FREQUENT_WORDS.split()
_FIRST_TOKEN_ID = 16
"""Below that are special tokens, as a rule."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedRequest:
    """One request to be sent."""

    at_s: float
    """Seconds after the start."""
    body: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """How requests are made."""

    endpoint: Endpoint
    model: str
    prompts: Sequence[str] = ()
    """Taken in turn; empty: made up."""
    prompt_length: Length
    """Of made-up prompts: words, or tokens with `vocab_size`."""
    output_length: Length
    """Most tokens of each answer."""
    vocab_size: int | None = None
    """Made-up prompts are random token ids below this, so that their length is exact."""
    seed: int = 0
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Further fields of every body. A bound on answers among them takes the place of `output_length`."""

    def plan(self, arrivals: Sequence[Arrival]) -> list[PlannedRequest]:
        """Return the requests: the same arrivals and seed give the same."""
        return [
            PlannedRequest(at_s=arrival.at_s, body=self._body(index, arrival))
            for index, arrival in enumerate(arrivals)
        ]

    def _body(self, index: int, arrival: Arrival) -> dict[str, Any]:
        # A generator of its own: what one request is does not depend on how many there are.
        generator = random.Random(f"request {self.seed} {index}")
        prompt_length = arrival.prompt_length or self.prompt_length(generator)
        output_length = arrival.output_length or self.output_length(generator)
        prompt = self._prompt(index, prompt_length, generator)
        content = (
            {"prompt": prompt}
            if self.endpoint == "completions"
            else {"messages": [{"role": "user", "content": prompt}]}
        )
        is_bounded = not self.extra.keys().isdisjoint(_LIMITS.values())
        return {
            "model": self.model,
            **content,
            **({} if is_bounded else {_LIMITS[self.endpoint]: output_length}),
            "seed": self.seed + index,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self.extra,
        }

    def _prompt(self, index: int, length: int, generator: random.Random) -> str | list[int]:
        if self.prompts:
            return self.prompts[index % len(self.prompts)]
        if self.vocab_size is not None:
            return [generator.randrange(_FIRST_TOKEN_ID, self.vocab_size) for _ in range(length)]
        return " ".join(generator.choices(_WORDS, k=length))
