"""The command line: one thin function per command; what they do is imported when they run."""

from __future__ import annotations

import math
import sys
from importlib import metadata
from pathlib import Path
from typing import Annotated, Literal

import typer

from deploy.cli.border import DebugOption, leave_at_once, readable_errors
from deploy.cli.merge import merge
from deploy.cli.train import train
from workers.logs import mute_imports

DEFAULT_CONFIG = Path("configs/demo.yaml")
DEFAULT_URL = "http://127.0.0.1:8000"
app = typer.Typer(
    name="drafthouse",
    help="Exact speculative decoding on a Ray cluster, behind an OpenAI-compatible endpoint.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
)
config_app = typer.Typer(name="config", help="Check and describe configuration files.", no_args_is_help=True)
bench_app = typer.Typer(name="bench", help="Measure.", no_args_is_help=True)
dashboards_app = typer.Typer(name="dashboards", help="Grafana dashboards.", no_args_is_help=True)
rules_app = typer.Typer(name="rules", help="Prometheus rules and alerts.", no_args_is_help=True)
app.add_typer(config_app)
app.add_typer(bench_app)
app.add_typer(dashboards_app)
app.add_typer(rules_app)
app.command()(readable_errors(train))
app.command()(readable_errors(merge))


def _print_version(is_asked: bool) -> None:
    if is_asked:
        typer.echo(f"drafthouse {metadata.version('drafthouse')}")
        raise typer.Exit


@app.callback()
def _common(
    version: Annotated[
        bool,
        typer.Option("--version", help="Print the version and exit.", callback=_print_version, is_eager=True),
    ] = False,
) -> None:
    mute_imports()


ModelOption = Annotated[
    Path | None, typer.Option("--model", help="Target model folder, instead of a configuration.")
]
DraftOption = Annotated[Path | None, typer.Option("--draft", help="Draft model folder, beside --model.")]
ConfigOption = Annotated[Path | None, typer.Option("--config", "-c", help="Configuration file.")]
InsecureOption = Annotated[
    bool, typer.Option("--insecure", help="Take a certificate that cannot be verified, as at a port-forward.")
]
DtypeOption = Annotated[
    Literal["auto", "float32", "bfloat16", "float16"] | None,
    typer.Option("--dtype", help="Numbers that the models run in, instead of the configuration's."),
]
DraftTokensOption = Annotated[
    int | None,
    typer.Option("--num-speculative-tokens", "-k", min=0, max=64, help="Draft tokens; 0: plain decoding."),
]


@app.command()
@readable_errors
def serve(
    config: Annotated[
        Path | None, typer.Argument(help=f"Configuration file; without one, {DEFAULT_CONFIG}.")
    ] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on, instead of http.host.")] = None,
    port: Annotated[
        int | None, typer.Option(min=1, max=65535, help="Port to listen on, instead of http.port.")
    ] = None,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Allow an address that others reach without API keys.")
    ] = False,
    num_cpus: Annotated[
        int | None, typer.Option(min=1, help="CPUs of the local Ray cluster; without it, all of the machine.")
    ] = None,
    address: Annotated[
        str | None,
        typer.Option(help="A running Ray cluster (`auto` or HOST:PORT), instead of a local one."),
    ] = None,
    logs: Annotated[bool, typer.Option("--logs", help="Show the log lines of all processes.")] = False,
    debug: DebugOption = False,
) -> None:
    """Serve a model on a Ray cluster, until Ctrl-C.

    Examples:

        drafthouse serve

        drafthouse serve configs/demo-bf16.yaml --port 8123

        drafthouse serve my.yaml --host 0.0.0.0   (needs http.api_keys_file)

        drafthouse serve my.yaml --address auto
    """
    from deploy.cli.serve import ServeOptions, serve_until_stopped

    serve_until_stopped(
        ServeOptions(
            config=config or DEFAULT_CONFIG,
            host=host,
            port=port,
            is_insecure_allowed=insecure,
            num_cpus=num_cpus,
            address=address,
            show_logs=logs,
        )
    )


@app.command()
@readable_errors
def status(
    url: Annotated[str, typer.Argument(help="Where the server is, as `serve` printed it.")] = DEFAULT_URL,
    json: Annotated[bool, typer.Option("--json", help="Print the server's own JSON, one line.")] = False,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Look again and again, until Ctrl-C.")] = False,
    interval: Annotated[float, typer.Option(min=0.1, help="Seconds between two looks, with --watch.")] = 2.0,
    api_key: Annotated[
        str | None,
        typer.Option(envvar="DRAFTHOUSE_API_KEY", help="Where the server has keys (http.api_keys_file)."),
    ] = None,
    insecure: InsecureOption = False,
    debug: DebugOption = False,
) -> None:
    """Show what a running server is doing, and why.

    Target groups and draft workers, requests, and of each target group what its speculation controller has
    chosen: mode, k, tokens per second expected and measured, acceptance, T_draft and T_verify, and whether
    the draft pool is worth its devices.

    Examples:

        drafthouse status

        drafthouse status http://127.0.0.1:8123 --watch

        drafthouse status https://127.0.0.1:8000 --insecure

        drafthouse status --json | jq .target_groups[].choice
    """
    from deploy.cli.status import StatusOptions, show_status

    show_status(
        StatusOptions(
            url=url,
            api_key=api_key,
            is_any_certificate_taken=insecure,
            as_json=json,
            interval_s=interval if watch else None,
        )
    )


@app.command()
@readable_errors
def generate(
    prompt: Annotated[str, typer.Argument(help="The text to continue; - reads standard input.")],
    config: ConfigOption = None,
    model: ModelOption = None,
    draft: DraftOption = None,
    dtype: DtypeOption = None,
    num_speculative_tokens: DraftTokensOption = None,
    max_tokens: Annotated[int, typer.Option(help="Most tokens to generate.")] = 128,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Mass of the most likely tokens to keep.")] = None,
    top_k: Annotated[
        int | None, typer.Option(help="Number of most likely tokens to keep; 0: all of them.")
    ] = None,
    min_p: Annotated[
        float | None, typer.Option(help="Least probability to keep, as a part of the largest.")
    ] = None,
    repetition_penalty: Annotated[
        float | None, typer.Option(help="Divides logits of tokens that occurred; 1: none.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="The same seed gives the same text.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="Text that ends the generation; repeatable.")] = None,
    debug: DebugOption = False,
) -> None:
    """Continue a text in this process, without Ray.

    The text goes to standard output as it comes; a line with tokens, speed and mean acceptance length goes
    to standard error at the end.

    What is not said of sampling is as the checkpoint's generation_config.json has it, as over HTTP (not with
    `http.generation_config: none`); where that says nothing, decoding is greedy.

    Examples:

        drafthouse generate "def quicksort("

        drafthouse generate "import os" --temperature 0.8 --seed 7 --config configs/demo-bf16.yaml

        drafthouse generate "class A:" --model models/demo/target --draft models/demo/draft -k 6
    """
    from deploy.cli.generate import generate_text, sampling_params
    from deploy.cli.inputs import engine_config, takes_sampling_defaults

    engine = engine_config(config, model, draft, dtype, num_speculative_tokens, DEFAULT_CONFIG)
    given = {
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "min_p": min_p,
        "repetition_penalty": repetition_penalty,
    }
    said = {name: value for name, value in given.items() if value is not None}
    all_tokens = {"top_k": None} if top_k == 0 else {}
    params = sampling_params(
        engine.target,
        {**said, **all_tokens, "seed": seed, "max_tokens": max_tokens, "stop": tuple(stop or ())},
        takes_defaults=takes_sampling_defaults(config, model, DEFAULT_CONFIG),
    )
    generate_text(prompt, engine, params)


@app.command()
@readable_errors
def batch(
    requests: Annotated[Path, typer.Argument(metavar="IN.JSONL", help="Requests in OpenAI's batch format.")],
    results: Annotated[Path, typer.Argument(metavar="OUT.JSONL", help="Where results are added.")],
    url: Annotated[
        str | None, typer.Option(help=f"The server; without --config and --model too: {DEFAULT_URL}.")
    ] = None,
    config: ConfigOption = None,
    model: ModelOption = None,
    draft: DraftOption = None,
    dtype: DtypeOption = None,
    num_speculative_tokens: DraftTokensOption = None,
    concurrency: Annotated[int, typer.Option("--concurrency", "-j", min=1, help="Requests at once.")] = 32,
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds that one request may take.")] = 3600.0,
    patience: Annotated[
        float, typer.Option(min=0, help="Seconds to wait for a server that is away or full.")
    ] = 600.0,
    retry_failed: Annotated[
        bool, typer.Option("--retry-failed", help="Try again what failed in an earlier run.")
    ] = False,
    api_key: Annotated[
        str | None, typer.Option(envvar="DRAFTHOUSE_API_KEY", help="Where the server has keys.")
    ] = None,
    insecure: InsecureOption = False,
    debug: DebugOption = False,
) -> None:
    """Answer a file of requests, on a server or in this process.

    One request per line: `{"custom_id": "1", "method": "POST", "url": "/v1/completions", "body": {...}}`.
    Results come in the order in which they are ready. What is in OUT.JSONL already is not asked for again, so
    the same command goes on after Ctrl-C or a crash. Exit code 1 if any request has failed.

    Examples:

        drafthouse batch in.jsonl out.jsonl

        drafthouse batch in.jsonl out.jsonl --url http://10.0.0.7:8000 -j 128

        drafthouse batch in.jsonl out.jsonl --config configs/offline-batch.yaml
    """
    from deploy.batch.runner import BatchOptions
    from deploy.cli.batch import BatchCommand, run_batch
    from deploy.cli.inputs import engine_config
    from deploy.config import HttpConfig
    from deploy.config_file import load_config
    from specdec.core.errors import ConfigError

    is_here = config is not None or model is not None
    if is_here and url is not None:
        raise ConfigError("give either --url, or --config or --model, not both")
    if is_here and insecure:
        raise ConfigError("--insecure is for a server: leave it out, or --config and --model")
    here = {"--draft": draft, "--dtype": dtype, "--num-speculative-tokens": num_speculative_tokens}
    given = [option for option, value in here.items() if value is not None]
    if given and not is_here:
        raise ConfigError(f"{given[0]} is for an engine in this process: give --config or --model, too")
    _require_finite("--timeout", "seconds", timeout)
    engine = (
        engine_config(config, model, draft, dtype, num_speculative_tokens, DEFAULT_CONFIG)
        if is_here
        else None
    )
    run_batch(
        BatchCommand(
            requests=requests,
            results=results,
            url=None if is_here else url or DEFAULT_URL,
            engine=engine,
            http=HttpConfig() if config is None else load_config(config).http,
            api_key=api_key,
            is_any_certificate_taken=insecure,
            options=BatchOptions(concurrency=concurrency, patience_s=patience),
            timeout_s=timeout,
            are_failures_retried=retry_failed,
        )
    )


keys_app = typer.Typer(name="keys", help="API keys for http.api_keys_file.", no_args_is_help=True)
app.add_typer(keys_app)


@keys_app.command()
@readable_errors
def new(
    name: Annotated[str, typer.Argument(help="Whose it is: shown in metrics and logs.")],
    max_concurrency: Annotated[
        int | None, typer.Option(min=1, help="Choices (prompts times n) generated at once.")
    ] = None,
    tokens_per_minute: Annotated[
        int | None, typer.Option(min=1, help="Tokens of prompts and of what is generated.")
    ] = None,
    min_priority: Annotated[
        int,
        typer.Option(
            min=-1000, max=1000, help="Most urgent `priority` (smallest number) that its requests may have."
        ),
    ] = 0,
    file: Annotated[
        Path | None, typer.Option("--file", help="Add the line to this file, and print the key alone.")
    ] = None,
    debug: DebugOption = False,
) -> None:
    """Make an API key, shown this once, and the line of http.api_keys_file that lets a server accept it.

    The line holds the key's SHA-256, not the key, which has no place in the file. With --file the line is
    added to that file, made for you alone (0600) where there is none; without, it is printed after the key.
    Servers that run read the file again when it changes.

    Examples:

        drafthouse keys new alice --file keys.txt

        drafthouse keys new jobs --file keys.txt --max-concurrency 16 --tokens-per-minute 200000

        drafthouse keys new bob --min-priority 10
    """
    from deploy.cli.keys import print_new_key

    print_new_key(name, max_concurrency, tokens_per_minute, min_priority, file)


@bench_app.command()
@readable_errors
def offline(
    config: ConfigOption = None,
    model: ModelOption = None,
    draft: DraftOption = None,
    dtype: DtypeOption = None,
    num_speculative_tokens: DraftTokensOption = None,
    prompts: Annotated[
        Path | None,
        typer.Option(help='Prompts: a text file with one per line, or JSON lines with a "prompt".'),
    ] = None,
    batch_size: Annotated[
        list[int] | None, typer.Option("--batch-size", "-b", min=1, help="Requests at once; repeatable.")
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens per request.")] = 128,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Seed of the first request; the next ones count up.")] = 0,
    repeats: Annotated[int, typer.Option(min=1, help="Measurements of each; the median is reported.")] = 3,
    plain: Annotated[
        bool, typer.Option("--plain/--no-plain", help="Measure plain decoding in the same run.")
    ] = True,
    json: Annotated[
        Path | None, typer.Option("--json", help="Write the results there too; - : only.")
    ] = None,
    debug: DebugOption = False,
) -> None:
    """Measure an engine in this process: tokens per second, plain and speculative.

    Texts that fall into a loop are counted apart, because they are accepted too easily.

    Examples:

        drafthouse bench offline

        drafthouse bench offline -c configs/demo-bf16.yaml -b 1 -b 8 -b 32 --json results.json

        drafthouse bench offline --model models/demo/target --prompts prompts.txt --temperature 0.7
    """
    from deploy.cli.bench import run_offline
    from deploy.cli.inputs import engine_config, read_prompts

    run_offline(
        engine_config(config, model, draft, dtype, num_speculative_tokens, DEFAULT_CONFIG),
        read_prompts(prompts),
        batch_sizes=batch_size or [1, 8],
        max_tokens=max_tokens,
        temperature=temperature,
        seed=seed,
        repeats=repeats,
        is_plain_measured=plain,
        json_file=json,
    )


@bench_app.command()
@readable_errors
def online(
    url: Annotated[str, typer.Argument(help="Any OpenAI endpoint.")] = DEFAULT_URL,
    endpoint: Annotated[
        Literal["completions", "chat"], typer.Option(help="What is asked for.")
    ] = "completions",
    model: Annotated[str | None, typer.Option(help="As the server calls it; else its first one.")] = None,
    rate: Annotated[float, typer.Option(min=1e-3, help="Requests per second, on average.")] = 1.0,
    burstiness: Annotated[
        float, typer.Option(min=0, max=100, help="1: Poisson arrivals; 0: evenly spaced; more: in bursts.")
    ] = 1.0,
    trace: Annotated[
        Path | None, typer.Option(help="Arrivals instead of --rate: a time or a JSON object per line.")
    ] = None,
    speedup: Annotated[
        float | None, typer.Option(min=1e-6, help="Plays a trace so many times as fast.")
    ] = None,
    num_requests: Annotated[
        int | None, typer.Option("--num-requests", "-n", min=1, help="Without --duration: 100.")
    ] = None,
    duration: Annotated[
        float | None, typer.Option(min=0.001, help="Seconds in which requests arrive.")
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(help='Prompts, in turn: a text file with one per line, or JSON lines with a "prompt".'),
    ] = None,
    prompt_length: Annotated[
        str | None,
        typer.Option(
            help="Words of made-up prompts: N, LOW-HIGH, lognormal:MEDIAN,SIGMA, exponential:MEAN; else 128."
        ),
    ] = None,
    vocab_size: Annotated[
        int | None,
        typer.Option(min=32, help="Make prompts of random token ids below this: --prompt-length in tokens."),
    ] = None,
    output_length: Annotated[str, typer.Option(help="Most tokens of an answer, as --prompt-length.")] = "128",
    extra_body: Annotated[
        str | None, typer.Option(help='More fields of bodies: {"ignore_eos": true, "temperature": 0}.')
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of arrivals, lengths, prompts and answers.")] = 0,
    slo: Annotated[
        list[str] | None,
        typer.Option(help="ttft, tpot, itl (longest) or e2e, then =SECONDS; repeatable. For goodput."),
    ] = None,
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds that a server may say nothing.")] = 600.0,
    api_key: Annotated[
        str | None, typer.Option(envvar="DRAFTHOUSE_API_KEY", help="Where the server has keys.")
    ] = None,
    json: Annotated[Path | None, typer.Option("--json", help="Write all times and results there.")] = None,
    csv: Annotated[Path | None, typer.Option("--csv", help="Write a line per request there.")] = None,
    plot: Annotated[
        Path | None, typer.Option("--plot", help="Draw a picture there: .svg, .png or .pdf.")
    ] = None,
    insecure: InsecureOption = False,
    debug: DebugOption = False,
) -> None:
    """Load an endpoint with streams, and measure what its clients see.

    The load is open: requests arrive when they are due, however the server does, and latencies count from
    then. TTFT, TPOT, time between deliveries (ITL) and end-to-end time as percentiles; goodput under --slo.

    Examples:

        drafthouse bench online --rate 8 -n 500 --slo ttft=0.5 --slo tpot=0.05

        drafthouse bench online http://10.0.0.7:8000 --trace trace.jsonl --speedup 2 --plot run.svg

        drafthouse bench online --endpoint chat --prompts prompts.jsonl --burstiness 4 --duration 60

        drafthouse bench online --prompt-length lognormal:200,0.8 --output-length 16-256 --vocab-size 4096
    """
    from deploy.cli.bench_online import OnlineOptions, Outputs, extra_fields, run_online
    from deploy.cli.inputs import read_prompts
    from deploy.load.arrivals import RandomArrivals, length_of, read_trace, take
    from deploy.load.report import objectives_of
    from specdec.core.errors import ConfigError

    _require_finite("--rate", "requests per second", rate)
    _require_finite("--duration", "seconds", duration)
    _require_finite("--timeout", "seconds", timeout)
    if vocab_size is not None and prompts is not None:
        raise ConfigError("--vocab-size: is for made-up prompts; leave it out, or --prompts")
    if prompt_length is not None and prompts is not None:
        raise ConfigError("--prompt-length: is for made-up prompts; leave it out, or --prompts")
    if speedup is not None and trace is None:
        raise ConfigError("--speedup: plays a --trace faster; leave it out, or set --rate")
    if vocab_size is not None and endpoint == "chat":
        raise ConfigError("--vocab-size: only completions take token ids; leave it out, or --endpoint chat")
    if trace is not None:
        arrivals = read_trace(trace, speedup=speedup or 1.0)[:num_requests]
        arrivals = tuple(arrival for arrival in arrivals if duration is None or arrival.at_s < duration)
    else:
        number = 100 if num_requests is None and duration is None else num_requests
        random_arrivals = RandomArrivals(rate=rate, burstiness=burstiness, seed=seed)
        arrivals = take(random_arrivals, num_requests=number, duration_s=duration)
    if not arrivals:
        raise ConfigError("--duration: no request arrives in that time")
    run_online(
        OnlineOptions(
            url=url,
            api_key=api_key,
            is_any_certificate_taken=insecure,
            endpoint=endpoint,
            model=model,
            arrivals=arrivals,
            prompts=read_prompts(prompts) if prompts is not None else (),
            prompt_length=length_of("128" if prompt_length is None else prompt_length, "--prompt-length"),
            output_length=length_of(output_length, "--output-length"),
            vocab_size=vocab_size,
            seed=seed,
            extra=extra_fields(extra_body),
            objectives=objectives_of(slo or ()),
            timeout_s=timeout,
            outputs=Outputs(json=json, csv=csv, plot=plot),
            described={
                "url": url,
                "endpoint": endpoint,
                "model": model,
                "rate": rate,
                "burstiness": burstiness,
                "trace": str(trace) if trace else None,
                "speedup": speedup or 1.0,
                "num_requests": num_requests,
                "duration": duration,
                "prompts": str(prompts) if prompts else None,
                "prompt_length": None if prompts else prompt_length or "128",
                "vocab_size": vocab_size,
                "output_length": output_length,
                "extra_body": extra_body,
                "seed": seed,
                "slo": slo,
                "timeout": timeout,
                "insecure": insecure,
            },
        )
    )


@config_app.command()
@readable_errors
def validate(
    file: Annotated[Path, typer.Argument(help="Configuration file.")],
    debug: DebugOption = False,
) -> None:
    """Check a configuration file, and what it names: model folders, API keys, certificates.

    Example:

        drafthouse config validate configs/demo.yaml
    """
    from deploy.cli.config import validate_file

    validate_file(file)


@config_app.command()
@readable_errors
def schema(debug: DebugOption = False) -> None:
    """Print the JSON schema of configuration files: every key, its type, default and meaning.

    Example:

        drafthouse config schema > drafthouse.schema.json
    """
    from deploy.cli.config import print_schema

    print_schema()


@dashboards_app.command()
@readable_errors
def push(
    url: Annotated[str, typer.Option(help="Where Grafana is, with its path where it has one.")],
    token_file: Annotated[
        Path, typer.Option(help="File with a token of a service account of role Editor, and nothing else.")
    ],
    folder: Annotated[
        str, typer.Option(help="Grafana's folder, by title; made where there is none.")
    ] = "Drafthouse",
    debug: DebugOption = False,
) -> None:
    """Put the dashboards into a Grafana.

    As often as one likes: what is there already and the same is left alone. Needs the extra `grafana`.

    Examples:

        drafthouse dashboards push --url http://127.0.0.1:3000 --token-file grafana-token

        drafthouse dashboards push --url https://example.com/grafana --token-file token --folder "LLM serving"
    """
    from deploy.cli.monitoring import push as push_all

    push_all(url, token_file, folder)


@dashboards_app.command("write")
@readable_errors
def write_dashboards(
    folder: Annotated[Path, typer.Argument(help="Folder for one JSON file per dashboard.")],
    debug: DebugOption = False,
) -> None:
    """Write the dashboards as JSON files, for Grafana's provisioning or for ConfigMaps.

    Needs the extra `grafana`.

    Example:

        drafthouse dashboards write /etc/grafana/dashboards
    """
    from deploy.cli.monitoring import write_dashboards as write_all

    write_all(folder)


@rules_app.command("write")
@readable_errors
def write_rules(
    file: Annotated[Path, typer.Argument(help="File to write; - is standard output.")],
    first_token: Annotated[
        float, typer.Option(help="Seconds to the first token: a boundary of the histogram.")
    ] = 2.5,
    next_tokens: Annotated[
        float, typer.Option(help="Seconds between deliveries of a stream: a boundary of the histogram.")
    ] = 0.5,
    in_time: Annotated[float, typer.Option(help="Share that has to be within each of these.")] = 0.95,
    answered: Annotated[float, typer.Option(help="Share of requests that must not fail.")] = 0.999,
    runbook: Annotated[
        str, typer.Option(help="URL of docs/operations/alerts.md, for the alerts' links.")
    ] = "docs/operations/alerts.md",
    debug: DebugOption = False,
) -> None:
    """Write recording rules and alerts for Prometheus (`rule_files`).

    Examples:

        drafthouse rules write /etc/prometheus/drafthouse.rules.yaml

        drafthouse rules write - --first-token 1 --in-time 0.99
    """
    from deploy.cli.monitoring import write_rules as write_all
    from deploy.monitoring.objectives import Objectives

    objectives = Objectives(
        first_token_s=first_token,
        next_tokens_s=next_tokens,
        share_in_time=in_time,
        share_answered=answered,
    )
    write_all(file, objectives, runbook)


def _require_finite(option: str, unit: str, number: float | None) -> None:
    """Raise ConfigError for inf and nan, which are numbers to a command line."""
    from specdec.core.errors import ConfigError

    if number is not None and not math.isfinite(number):
        raise ConfigError(f"{option}: give a number of {unit}, got {number}")


def main() -> None:
    """Run the `drafthouse` command."""
    try:
        app()
    except SystemExit as done:
        if "ray" not in sys.modules:
            raise
        # All is closed, but the interpreter would take a second or two to take Ray and torch apart.
        leave_at_once(done)
