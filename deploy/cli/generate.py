"""`drafthouse generate`: one request in this process, printed as it comes."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from time import perf_counter
from typing import Any

import typer
from rich.console import Console

from deploy.cli.progress import as_typed, shown
from specdec.core.errors import InputError, RequestFailed
from specdec.core.outputs import RequestOutput
from specdec.core.sampling_params import NO_SAMPLING_DEFAULTS, SamplingParams
from specdec.engine.config import EngineConfig
from specdec.model.config import ModelConfig
from specdec.model.sampling_defaults import sampling_defaults_of


def sampling_params(target: ModelConfig, said: Mapping[str, Any], *, takes_defaults: bool) -> SamplingParams:
    """Return the parameters of a request that says this much.

    With `takes_defaults`, what it leaves out is as the target's checkpoint has it, as over HTTP. Where that
    says nothing, it is greedy.

    Raises:
        UserError: a parameter is wrong, or the checkpoint's file.
    """
    defaults = sampling_defaults_of(Path(target.model)) if takes_defaults else NO_SAMPLING_DEFAULTS
    return defaults.params(**{"temperature": 0.0, **defaults.given(), **said}).checked()


def generate_text(prompt: str, config: EngineConfig, params: SamplingParams) -> None:
    """Print a continuation of `prompt` to standard output, and a summary line to standard error.

    Raises:
        UserError: a model folder is wrong.
        RequestFailed: the engine gave up on the request.
    """
    text = _checked_text(sys.stdin.read() if prompt == "-" else prompt)
    with shown(Console(stderr=True), f"loading {as_typed(config.target.model)}") as show:
        from specdec.engine.engine import Engine
        from specdec.engine.offline import choice_requests

        engine = Engine(config)
        show("compiling the forward (the first time takes half a minute)")
        engine.warm_up()
    with engine:
        token_ids = tuple(engine.tokenizer.encode(text))
        (request,) = choice_requests(token_ids, params, "generate")
        start_s = perf_counter()
        engine.add_request(request)
        while True:
            for output in engine.step():
                typer.echo(output.text, nl=False)
                sys.stdout.flush()
                if output.finish_reason is not None:
                    typer.echo()
                    _summarize(output, perf_counter() - start_s)
                    return


def _checked_text(text: str) -> str:
    if not text:
        raise InputError("PROMPT must not be empty", param="prompt")
    try:
        text.encode()
    except UnicodeEncodeError as error:  # bytes that were no text have become surrogates
        raise InputError(f"PROMPT is not UTF-8 text (character {error.start})", param="prompt") from None
    return text


def _summarize(output: RequestOutput, seconds: float) -> None:
    if output.finish_reason in ("error", "abort"):
        raise RequestFailed(output.error or "aborted", code=output.error_code or "aborted")
    assert output.stats is not None
    num_tokens, speculation = output.num_generated_tokens, output.stats.speculation
    drafted = (
        f"mean acceptance length {speculation.mean_acceptance_length:.2f}"
        if speculation.num_drafts
        else "nothing drafted"
    )
    typer.secho(
        f"{num_tokens} tokens in {seconds:.2f} s ({num_tokens / seconds:.1f} tokens/s), {drafted}, "
        f"ended by {output.finish_reason}",
        dim=True,
        err=True,
    )
