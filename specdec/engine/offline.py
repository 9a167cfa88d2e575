"""Offline generation: prompts in, results out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from specdec.core.errors import CapacityError, InputError
from specdec.core.ids import RequestId
from specdec.core.outputs import FinishReason, RequestOutput, RequestStats, TokenLogprobs
from specdec.core.request import Request
from specdec.core.sampling_params import SamplingParams
from specdec.engine.best_of import best_choices
from specdec.sampling.noise import choice_seed, mint_seed

if TYPE_CHECKING:
    from specdec.engine.engine import Engine

Prompt = str | Sequence[int]
"""A text, or token ids."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One generated continuation."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] | None
    finish_reason: FinishReason
    stop_reason: str | int | None
    error: str | None
    """What went wrong, with finish reason "error"."""
    stats: RequestStats


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationResult:
    """What came of one prompt."""

    prompt: Prompt
    prompt_token_ids: tuple[int, ...]
    choices: tuple[Choice, ...]
    """`params.n` of them; with `best_of`, the best one first, and those that failed last."""
    prompt_logprobs: tuple[TokenLogprobs, ...] | None
    """Of the prompt's second token and all behind it, with `params.prompt_logprobs`."""

    @property
    def text(self) -> str:
        """Text of the first choice."""
        return self.choices[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Tokens of the first choice."""
        return self.choices[0].token_ids


@dataclass(slots=True)
class _Collected:
    """Outputs of one choice so far."""

    token_ids: list[int] = field(default_factory=list)
    text: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
    last: RequestOutput | None = None

    def add(self, output: RequestOutput) -> None:
        self.token_ids.extend(output.token_ids)
        self.text.append(output.text)
        self.logprobs.extend(output.logprobs or ())
        if output.prompt_logprobs is not None:
            self.prompt_logprobs = output.prompt_logprobs
        self.last = output

    @property
    def ranked_by(self) -> Sequence[TokenLogprobs]:
        """What tells how good the choice is; nothing, where it failed, however good it was until then."""
        assert self.last is not None
        return () if self.last.finish_reason == "error" else self.logprobs

    def choice(self, index: int, *, with_logprobs: bool) -> Choice:
        last = self.last
        assert last is not None
        assert last.finish_reason is not None
        assert last.stats is not None
        return Choice(
            index=index,
            text="".join(self.text),
            token_ids=tuple(self.token_ids),
            logprobs=tuple(self.logprobs) if with_logprobs else None,
            finish_reason=last.finish_reason,
            stop_reason=last.stop_reason,
            error=last.error,
            stats=last.stats,
        )


def choice_requests(
    prompt_token_ids: tuple[int, ...], params: SamplingParams, request_id: str
) -> list[Request]:
    """Return one request per choice of a prompt; a seed is minted where none is given.

    The prompt is scored for the first one alone. (Without tokens to generate there is nothing else to do.)
    """
    seed = mint_seed() if params.seed is None else params.seed
    if params.num_streams > params.n and params.logprobs is None:
        params = msgspec.structs.replace(params, logprobs=0, logprobs_mode="raw")  # to tell the best
    unscored = params if params.max_tokens == 0 else msgspec.structs.replace(params, prompt_logprobs=None)
    return [
        Request(
            request_id=RequestId(f"{request_id}-{index}"),
            prompt_token_ids=prompt_token_ids,
            params=params if index == 0 else unscored,
            seed=choice_seed(seed, index),
        )
        for index in range(params.num_streams)
    ]


def generate(
    engine: Engine,
    prompts: Prompt | Sequence[Prompt],
    params: SamplingParams | Sequence[SamplingParams] | None,
    progress: Callable[[int, int], None] | None,
) -> list[GenerationResult]:
    """Generate for all prompts on an engine that has nothing else to do; see `Engine.generate`."""
    if engine.has_work:
        raise InputError("generate() needs an engine without requests of its own", param=None)
    batch = _as_batch(prompts)
    if params is None:
        params = engine.description.sampling_defaults.params()
    groups: list[tuple[Prompt, SamplingParams, list[Request]]] = []
    for index, (prompt, one) in enumerate(zip(batch, _one_each(params, len(batch)), strict=True)):
        one.checked()
        token_ids = tuple(engine.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt)
        requests = choice_requests(token_ids, one, f"offline-{index}")
        engine.check_request(requests[0])
        groups.append((prompt, one, requests))
    collected = _run(engine, [request for _, _, requests in groups for request in requests], progress)
    return [
        _result(prompt, one, requests[0].prompt_token_ids, [collected[each.request_id] for each in requests])
        for prompt, one, requests in groups
    ]


def _result(
    prompt: Prompt, params: SamplingParams, prompt_token_ids: tuple[int, ...], streams: list[_Collected]
) -> GenerationResult:
    best = best_choices([stream.ranked_by for stream in streams], params.n)
    return GenerationResult(
        prompt=prompt,
        prompt_token_ids=prompt_token_ids,
        choices=tuple(
            streams[number].choice(index, with_logprobs=params.logprobs is not None)
            for index, number in enumerate(best)
        ),
        prompt_logprobs=streams[0].prompt_logprobs,
    )


def _run(
    engine: Engine, requests: list[Request], progress: Callable[[int, int], None] | None
) -> dict[RequestId, _Collected]:
    collected = {request.request_id: _Collected() for request in requests}
    try:
        for num_finished in _finishes(engine, requests, collected):
            if progress is not None:
                progress(num_finished, len(requests))
    finally:
        if engine.has_work:  # interrupted: leave the engine as it was
            for request in requests:
                engine.abort(request.request_id)
            engine.step()
    return collected


def _finishes(
    engine: Engine, requests: list[Request], collected: dict[RequestId, _Collected]
) -> Iterator[int]:
    """Run all requests; yield the number of finished ones whenever it grows."""
    to_add = list(reversed(requests))
    num_finished = 0
    while to_add or engine.has_work:
        while to_add and _was_added(engine, to_add[-1]):
            to_add.pop()
        for output in engine.step():
            collected[output.request_id].add(output)
            if output.finish_reason is not None:
                num_finished += 1
                yield num_finished


def _was_added(engine: Engine, request: Request) -> bool:
    """Add a request unless the queue is full: then it waits here."""
    try:
        engine.add_request(request)
    except CapacityError:
        if not engine.has_work:
            raise
        return False
    return True


def _as_batch(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    batch: list[Prompt] = []
    single: list[int] = []
    for item in prompts:
        if isinstance(item, int):
            single.append(item)
        else:
            batch.append(item)
    if single and batch:
        raise InputError("prompts mixes token ids with whole prompts", param="prompts")
    return [single] if single else batch


def _one_each(
    params: SamplingParams | Sequence[SamplingParams], num_prompts: int
) -> Sequence[SamplingParams]:
    if isinstance(params, SamplingParams):
        return [params] * num_prompts
    if len(params) != num_prompts:
        raise InputError(f"{len(params)} sampling parameters for {num_prompts} prompts", param="params")
    return params
