"""From an HTTP body to engine requests: parse, tokenize, check, mint ids and seeds."""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import math
import secrets
import time
from codecs import BOM_UTF8
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeVar

import msgspec
from msgspec import UNSET
from pydantic import ValidationError
from pydantic_core import from_json

from deploy.openai.bodies import Lossy
from deploy.openai.errors import ApiError, input_error_of, shown, too_many_logprobs
from deploy.openai.protocol import ChatBody, CompletionBody, GenerationBody
from deploy.openai.settings import DoorSettings
from deploy.openai.tokenization import DoorTokenizer
from specdec.core.description import TargetDescription
from specdec.core.errors import InputError
from specdec.core.ids import Epoch, RequestId
from specdec.core.request import OTHER_CLASS, LatencyTarget, Request
from specdec.core.sampling_params import LEAST_TEMPERATURE, SamplingParams
from specdec.sampling.noise import choice_seed
from specdec.verification.registry import capabilities_of

BodyT = TypeVar("BodyT", bound=GenerationBody)

TIMEOUT_HEADER = "X-Request-Timeout"
"""Longest time for a request in seconds, as `timeout_s` in its body."""
ENCODING_HEADER = "Content-Encoding"
_MOST_TOLD = 2**63 - 1
"""A larger number is told as this one: Python writes none of more than 4300 digits, and clients send such."""
_LEAST_TIME_S = 1e-3
_TIME_DIGITS = 8
_RANDOM_BYTES = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseIdentity:
    """Which response it is. What is drawn by lot for it follows from its id, so that it can be repeated."""

    response_id: str
    created_s: int
    """Unix time."""

    @classmethod
    def mint(cls, prefix: str) -> ResponseIdentity:
        """Return that of a new response."""
        created_s = int(time.time())
        return cls(
            response_id=f"{prefix}-{created_s:0{_TIME_DIGITS}x}{secrets.token_hex(_RANDOM_BYTES)}",
            created_s=created_s,
        )

    @classmethod
    def of(cls, response_id: str) -> ResponseIdentity:
        """Return that of a response whose id was minted here."""
        _, _, digits = response_id.partition("-")
        return cls(response_id=response_id, created_s=int(digits[:_TIME_DIGITS], 16))

    def seed(self, prompt_index: int) -> int:
        """Return the seed of a prompt whose client has given none."""
        text = f"{self.response_id} {prompt_index}".encode()
        return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedRequest:
    """One HTTP request, ready to run: `body.num_streams` requests per prompt.

    Without `best_of`, choice i of the response is `requests[i]`.
    """

    response_id: str
    created_s: int
    """Unix time."""
    model: str
    system_fingerprint: str
    lossy: Lossy
    body: CompletionBody | ChatBody
    requests: tuple[Request, ...]
    timeout_s: float | None = None
    """Longest time for all of it, from now on; None: no limit."""
    limit_s: float | None = None
    """The same from its arrival on, as the client knows it."""
    prompt_texts: tuple[str, ...] = ()
    """What `echo` puts in front of the texts, by prompt."""
    proof: bytes = b""
    """Digest of whose request it is and what it asks for."""
    has_event_ids: bool = False
    """Whether events of its stream have ids, behind which it can be resumed."""

    def prompt_text(self, index: int) -> str:
        """What is put in front of the text of request `index`."""
        return self.prompt_texts[index // self.body.num_streams] if self.prompt_texts else ""

    @property
    def num_prompt_tokens(self) -> int:
        """Prompt tokens as OpenAI counts them: each prompt once, however many choices it has."""
        return sum(len(request.prompt_token_ids) for request in self.requests[:: self.body.num_streams])


def parse_body(data: bytes, body_type: type[BodyT]) -> BodyT:
    """Parse a request body.

    Raises:
        InputError: naming the field at fault.
        ApiError: the body is not JSON.
    """
    try:
        text = data.removeprefix(BOM_UTF8).decode()
    except UnicodeDecodeError as error:
        raise ApiError(
            400, f"The body is not UTF-8: byte {error.start} is wrong.", code="invalid_utf8"
        ) from None
    try:
        parsed = from_json(text)
    except ValueError as error:
        raise ApiError(400, f"The body is not valid JSON: {error}.", code="invalid_json") from None
    try:
        return body_type.model_validate(parsed)
    except ValidationError as error:
        raise input_error_of(error) from None


async def prepare_completion(
    body: CompletionBody,
    description: TargetDescription,
    tokenizer: DoorTokenizer,
    settings: DoorSettings,
    identity: ResponseIdentity | None = None,
) -> PreparedRequest:
    """Turn a completions body into engine requests, prompt by prompt, `n` choices each.

    `identity` is that of the response which the client wants to go on with; None: a new one.

    Raises:
        ApiError, InputError: the request cannot be served; nothing has been started.
    """
    _check_model(body, description, settings)
    prompts = await _tokenize_prompts(body, tokenizer, settings)
    params = _sampling_params(body, description, settings, await _bad_words(body, tokenizer))
    identity = identity or ResponseIdentity.mint("cmpl")
    prepared = _prepared(identity, body, prompts, params, description, settings)
    if not body.echo:
        return prepared
    return dataclasses.replace(prepared, prompt_texts=await _prompt_texts(body, prompts, tokenizer))


async def prepare_chat(
    body: ChatBody,
    description: TargetDescription,
    tokenizer: DoorTokenizer,
    settings: DoorSettings,
    identity: ResponseIdentity | None = None,
) -> PreparedRequest:
    """Turn a chat body into `n` engine requests; `identity` as in `prepare_completion`.

    Raises:
        ApiError, InputError: the request cannot be served; nothing has been started.
    """
    _check_model(body, description, settings)
    prompt = await tokenizer.encode_chat(
        [message.for_template() for message in body.messages],
        add_generation_prompt=body.add_generation_prompt,
        tools=body.template_tools,
        variables=body.chat_template_kwargs,
    )
    params = _sampling_params(body, description, settings, await _bad_words(body, tokenizer))
    identity = identity or ResponseIdentity.mint("chatcmpl")
    return _prepared(identity, body, [prompt], params, description, settings)


def owned(
    prepared: PreparedRequest, api_key_digest: bytes, *, shares_prefixes: bool, min_priority: int
) -> PreparedRequest:
    """Say whose the requests are: keys take turns in the queue, among those of one priority.

    None is more urgent than its key allows. Unless they share prefixes, cached prompts of different keys are
    kept apart, within whatever salt the body names.
    """
    owner = api_key_digest.hex()

    def of_owner(request: Request) -> Request:
        salt = request.cache_salt if shares_prefixes else f"{owner} {request.cache_salt or ''}"
        priority = max(request.priority, min_priority)
        return msgspec.structs.replace(request, owner=owner, cache_salt=salt, priority=priority)

    return dataclasses.replace(prepared, requests=tuple(map(of_owner, prepared.requests)))


def traced(requests: Iterable[Request]) -> tuple[Request, ...]:
    """Have engines time their rounds one by one."""
    return tuple(msgspec.structs.replace(request, is_traced=True) for request in requests)


def time_limit(body: GenerationBody, header: str | None, longest_s: float | None) -> float | None:
    """Return how much time the body, the header `X-Request-Timeout` (seconds) and the server all allow.

    Raises:
        InputError: the header is no positive number.
    """
    limits = (body.timeout_s, _seconds(header), longest_s)
    return min((limit for limit in limits if limit is not None), default=None)


def limited(prepared: PreparedRequest, limit_s: float | None, spent_s: float) -> PreparedRequest:
    """Give it so much time, of which some was spent before it was prepared, as of that to its first token."""
    if prepared.body.slo is not None:
        in_time = tuple(_in_time(request, spent_s) for request in prepared.requests)
        prepared = dataclasses.replace(prepared, requests=in_time)
    if limit_s is None:
        return prepared
    # Of what has run out something is left, for the engine's sake; it ends the request at once.
    timeout_s = max(limit_s - spent_s, _LEAST_TIME_S)
    return dataclasses.replace(
        prepared,
        limit_s=limit_s,
        timeout_s=timeout_s,
        requests=tuple(
            msgspec.structs.replace(request, timeout_s=timeout_s) for request in prepared.requests
        ),
    )


def _in_time(request: Request, spent_s: float) -> Request:
    """Leave of the time to its first token what has not been spent."""
    slo = request.slo
    if slo is None or slo.ttft_ms is None:
        return request
    left_ms = max(slo.ttft_ms - 1e3 * spent_s, 1e3 * _LEAST_TIME_S)
    return msgspec.structs.replace(request, slo=LatencyTarget(ttft_ms=left_ms, itl_ms=slo.itl_ms))


def _seconds(header: str | None) -> float | None:
    if header is None:
        return None
    try:
        seconds = float(header)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise InputError(
            f"{TIMEOUT_HEADER} must be a positive number of seconds, got {header[:80]!r}",
            param=TIMEOUT_HEADER,
        )
    return seconds


def _check_model(body: GenerationBody, description: TargetDescription, settings: DoorSettings) -> None:
    served = settings.model_name(description)
    if body.model is not None and body.model != served:
        raise model_not_found(body.model, served)


def check_encoding(encodings: Iterable[str]) -> None:
    """Check the `Content-Encoding` of a body: all of those that were given leave it as it is.

    Raises:
        ApiError: 415: one does not, and nothing here undoes it.
    """
    for encoding in (one.strip() for value in encodings for one in value.split(",")):
        if encoding.lower() not in ("", "identity"):
            raise ApiError(
                415,
                f"{ENCODING_HEADER} {shown(encoding)} is not supported: send the body as it is.",
                param=ENCODING_HEADER,
                code="unsupported_encoding",
            )


def model_not_found(asked: str, *served: str) -> ApiError:
    """Return the 404 for a model that is not loaded."""
    return ApiError(
        404,
        f"The model {asked!r} does not exist here; this server serves {', '.join(map(repr, served))}.",
        param="model",
        code="model_not_found",
    )


async def _tokenize_prompts(
    body: CompletionBody, tokenizer: DoorTokenizer, settings: DoorSettings
) -> list[tuple[int, ...]]:
    prompt = body.prompt
    is_single = isinstance(prompt, str) or (bool(prompt) and isinstance(prompt[0], int))
    items = [prompt] if is_single else list(prompt)
    if not items:
        raise InputError("prompt must not be empty", param="prompt")
    _check_num_choices(len(items) * body.num_streams, body, settings)
    token_ids = []
    for index, item in enumerate(items):
        param = "prompt" if is_single else f"prompt[{index}]"
        if isinstance(item, str):
            token_ids.append(await tokenizer.encode(item, add_special_tokens=body.add_special_tokens))
            await asyncio.sleep(0)  # short ones are encoded in the event loop, and there may be many
        else:
            token_ids.append(tuple(item))  # type: ignore[arg-type]  # the protocol checked the shapes
        if not token_ids[-1]:  # of a text without characters there may be what begins every text
            raise InputError(f"{param} must not be empty: it has no tokens", param=param)
    return token_ids


async def _prompt_texts(
    body: CompletionBody, prompts: list[tuple[int, ...]], tokenizer: DoorTokenizer
) -> tuple[str, ...]:
    given = [body.prompt] if isinstance(body.prompt, str) else body.prompt
    if isinstance(given[0], str):
        return tuple(map(str, given))
    texts: list[str] = []
    for token_ids in prompts:
        texts.append(await tokenizer.decode_prompt(token_ids))
        await asyncio.sleep(0)  # as they were encoded
    return tuple(texts)


def param_of_choices(body: GenerationBody) -> str:
    """Return the field by which a request with too many choices has so many of each prompt, or of prompts."""
    if body.num_streams == 1:
        return "prompt"
    return "n" if body.num_streams == body.n else "best_of"


def _check_num_choices(num_choices: int, body: GenerationBody, settings: DoorSettings) -> None:
    if num_choices <= settings.max_choices:
        return
    num_choices = min(num_choices, _MOST_TOLD)
    if param_of_choices(body) == "prompt":
        raise InputError(
            f"prompt must hold at most {settings.max_choices} prompts, got {num_choices}", param="prompt"
        )
    param = param_of_choices(body)
    raise InputError(
        f"{param} times the number of prompts must be at most {settings.max_choices}, got {num_choices}",
        param=param,
    )


def _prepared(
    identity: ResponseIdentity,
    body: CompletionBody | ChatBody,
    prompts: list[tuple[int, ...]],
    params: SamplingParams,
    description: TargetDescription,
    settings: DoorSettings,
) -> PreparedRequest:
    _check_num_choices(len(prompts) * body.num_streams, body, settings)
    prompt_param = "prompt" if isinstance(body, CompletionBody) else "messages"
    for prompt in prompts:
        _check_prompt(prompt, params, description, prompt_param)
    requests = _requests(identity, body, prompts, params, settings)
    _check_logprobs(requests, body, settings)
    return PreparedRequest(
        response_id=identity.response_id,
        created_s=identity.created_s,
        model=settings.model_name(description),
        system_fingerprint=settings.system_fingerprint(description),
        lossy=_lossy(body, params, description),
        body=body,
        requests=requests,
    )


def _check_logprobs(
    requests: Iterable[Request], body: CompletionBody | ChatBody, settings: DoorSettings
) -> None:
    """Check those of prompts: of what is generated nobody knows yet how much there will be."""
    num_logprobs = sum(
        len(request.prompt_token_ids) * (1 + request.params.prompt_logprobs)
        for request in requests
        if request.params.prompt_logprobs is not None
    )
    if num_logprobs > settings.max_logprobs:
        param = "echo" if body.prompt_logprobs is None else "prompt_logprobs"
        raise too_many_logprobs(num_logprobs, settings.max_logprobs, param)


def _lossy(body: GenerationBody, params: SamplingParams, description: TargetDescription) -> Lossy:
    """Return True where drafts are verified by a rule that does not keep the target's distribution.

    At temperature 0 every rule keeps the target's own choice.
    """
    speculates = body.speculation is None or body.speculation.num_speculative_tokens != 0
    if capabilities_of(description.rule).exact or params.is_greedy or not speculates:
        return UNSET
    return True


def _requests(
    identity: ResponseIdentity,
    body: GenerationBody,
    prompts: list[tuple[int, ...]],
    params: SamplingParams,
    settings: DoorSettings,
) -> tuple[Request, ...]:
    class_name = body.metadata.get("class", OTHER_CLASS)
    if class_name not in settings.request_classes:
        class_name = OTHER_CLASS
    slo = None if body.slo is None else LatencyTarget(ttft_ms=body.slo.ttft_ms, itl_ms=body.slo.itl_ms)
    speculation = body.speculation
    # A prompt is scored for its first choice. In a stream each choice echoes with the scores of its own:
    # none waits for another. (Without tokens to generate there is nothing to do but to score.)
    is_scored_once = not body.stream and params.max_tokens != 0
    unscored = msgspec.structs.replace(params, prompt_logprobs=None) if is_scored_once else params
    requests: list[Request] = []
    for prompt_index, prompt in enumerate(prompts):
        # With a seed a prompt gives the same tokens alone and in a list; without one, each prompt its own.
        seed = identity.seed(prompt_index) if body.seed is None else body.seed
        for choice in range(body.num_streams):
            requests.append(
                Request(
                    request_id=RequestId(f"{identity.response_id}-{len(requests)}"),
                    prompt_token_ids=prompt,
                    params=params if choice == 0 else unscored,
                    seed=choice_seed(seed, choice),
                    epoch=Epoch(0),
                    num_draft_tokens=None if speculation is None else speculation.num_speculative_tokens,
                    kv_budget=None if speculation is None else speculation.kv_budget,
                    drafter=None if speculation is None else speculation.drafter,
                    cache_salt=body.cache_salt,
                    priority=body.priority,
                    class_name=class_name,
                    slo=slo,
                )
            )
    return tuple(requests)


async def _bad_words(body: GenerationBody, tokenizer: DoorTokenizer) -> tuple[tuple[int, ...], ...]:
    """Return the token sequences that the texts in `bad_words` are, at the start of a word and within one."""
    sequences: dict[tuple[int, ...], None] = {}
    for word in body.bad_words:
        if isinstance(word, tuple):
            sequences[word] = None
            continue
        for text in (word, f" {word.lstrip()}"):
            token_ids = await tokenizer.encode(text, add_special_tokens=False)
            if token_ids:
                sequences[token_ids] = None
        await asyncio.sleep(0)  # short ones are encoded in the event loop, and there may be many
    return tuple(sequences)


def _sampling_params(
    body: CompletionBody | ChatBody,
    description: TargetDescription,
    settings: DoorSettings,
    bad_words: tuple[tuple[int, ...], ...],
) -> SamplingParams:
    max_tokens, max_tokens_param = _max_tokens(body)
    if settings.takes_model_defaults:
        defaults = description.sampling_defaults.given()
        body = body.model_copy(
            update={name: value for name, value in defaults.items() if name not in body.model_fields_set}
        )
    temperature, top_k, top_p = _choice_of_tokens(body)
    params = SamplingParams(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=body.min_p,
        repetition_penalty=body.repetition_penalty,
        presence_penalty=body.presence_penalty,
        frequency_penalty=body.frequency_penalty,
        logit_bias=body.logit_bias,
        bad_words=bad_words,
        allowed_token_ids=body.allowed_token_ids,
        grammar=body.grammar,
        seed=body.seed,
        n=body.n,
        best_of=body.num_streams if body.num_streams > body.n else None,
        max_tokens=max_tokens,
        min_tokens=body.min_tokens,
        stop=body.stop,
        stop_token_ids=body.stop_token_ids,
        include_stop_str_in_output=body.include_stop_str_in_output,
        ignore_eos=body.ignore_eos,
        # The best are found by their log-probabilities, raw ones.
        logprobs=0 if body.num_streams > body.n and body.num_logprobs is None else body.num_logprobs,
        logprobs_mode="raw" if body.num_logprobs is None else body.logprobs_mode,
        prompt_logprobs=body.num_prompt_logprobs,
    )
    try:
        params.checked()
    except InputError as error:
        if error.param == "max_tokens":
            raise InputError(str(error), param=max_tokens_param) from None
        raise
    params.check_vocabulary(description.vocab_size)
    if params.grammar is not None and settings.max_grammar_bytes is not None:
        params.grammar.check_length(settings.max_grammar_bytes)
    # What follows is per choice: the request's own seed is the noise key. A top_k that keeps everything is
    # no top_k (and any number of digits fits the wire then).
    top_k = None if params.top_k is not None and params.top_k >= description.vocab_size else params.top_k
    return msgspec.structs.replace(params, n=1, best_of=None, seed=None, top_k=top_k)


def _choice_of_tokens(body: GenerationBody) -> tuple[float, int | None, float]:
    """Return temperature, top_k and top_p, with what is as good as greedy in the engine's words for it.

    Clients of other servers write it so: a temperature too small to divide by, or the set of tokens with no
    mass at all, which is the most likely one.
    """
    temperature = 0.0 if 0 < body.temperature < LEAST_TEMPERATURE else body.temperature
    if body.top_p != 0:
        return temperature, body.top_k, body.top_p
    # One that is not right stays, to be refused.
    return temperature, 1 if body.top_k is None else min(body.top_k, 1), 1.0


def _max_tokens(body: CompletionBody | ChatBody) -> tuple[int | None, str]:
    """Return the limit and the name of the field that the client gave it in."""
    if isinstance(body, ChatBody) and body.max_completion_tokens is not None:
        return body.max_completion_tokens, "max_completion_tokens"
    return body.max_tokens, "max_tokens"


def _check_prompt(
    prompt: tuple[int, ...], params: SamplingParams, description: TargetDescription, param: str
) -> None:
    if not prompt:
        raise InputError(f"{param} must not be empty: it has no tokens", param=param)
    limit = description.max_model_len
    wanted = max(1, params.min_tokens) if params.max_tokens is None else params.max_tokens
    wanted = min(wanted, _MOST_TOLD)
    if len(prompt) + wanted > limit:
        raise ApiError(
            400,
            f"This model's maximum context length is {limit} tokens. However, you requested "
            f"{len(prompt) + wanted} tokens ({len(prompt)} in the {param}, {wanted} in the completion). "
            f"Please reduce the length of the {param} or of the completion.",
            param=param,
            code="context_length_exceeded",
        )
    if min(prompt) < 0 or max(prompt) >= description.vocab_size:
        token_id = next(one for one in prompt if not 0 <= one < description.vocab_size)
        raise InputError(
            f"{param}: token id {token_id} is not in this model's vocabulary, "
            f"which ends at {description.vocab_size - 1}",
            param=param,
        )
