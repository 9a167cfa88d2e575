"""Other engines for CPUs and ours on one checkpoint, as ratio to transformers, in turn on the same cores.

    taskset -c 0,1 python -m benchmarks.peers --json benchmarks/results/peers.json   # about ten minutes
    taskset -c 0,1 python -m benchmarks.peers --quick                                # about three minutes
    python -m benchmarks.peers --prepare                                             # only install the peers

The model has the shape of the demo target with as many layers as make 26 million parameters, in bfloat16.
The layers that come on top get random weights of their own and next to no influence, so that the text stays
a text: copies of one layer, which `benchmarks.inflate` makes, OpenVINO would store once. Everybody gets the
same token ids, chooses greedily, ignores the end of the text, and writes as many tokens as asked. Decoding
is measured from the prompts to the last token, as in `benchmarks.engine`; prefill is one new token; every
round has other prompts, and prefix caches are off. Peers run in environments and processes of their own
(`benchmarks.peer_environments`) and measure themselves, so that pipes do not count. A peer that cannot be
had is named, and skipped.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import Progress
from safetensors.torch import load_file, save_file

from benchmarks.huggingface import HuggingFaceGenerator
from benchmarks.in_process import InProcess, engine_config
from benchmarks.inflate import inflate, layers_for_parameters
from benchmarks.peer_environments import RECIPES, PeerUnavailableError, ensure
from benchmarks.peer_process import PeerProcess
from benchmarks.peer_workers.session import Setup
from benchmarks.report import Paired, progress_bar, report_headlines, run_in_turn, write_results
from benchmarks.workload import read_prompts, window
from specdec.model.layer_map import CONFIG_KEY

HUGGING_FACE = "huggingface"
OURS = "drafthouse"
_SETTLE_S = 0.3
"""Before every run: threads of the one before stop spinning."""
_QUIET_STD = 1e-3
_LEAST_AGREEMENT = 0.8
"""Share of first tokens equal to those of transformers, below which a model was converted wrongly."""

Tokens = list[list[int]]
System = Callable[[list[tuple[int, ...]], int], tuple[float, Tokens]]
"""Prompts and number of new tokens in; seconds and new tokens out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """One kind of batch."""

    batch: int
    prompt_tokens: int
    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is measured."""

    decode: tuple[Shape, ...]
    prefill: tuple[Shape, ...]
    rounds: int
    num_parameters: float = 26e6
    num_threads: int = 2

    @property
    def shapes(self) -> tuple[Shape, ...]:
        """All of them."""
        return self.decode + self.prefill


def _decode(batch: int) -> Shape:
    return Shape(batch=batch, prompt_tokens=64, num_tokens=128)


def _prefill(batch: int, length: int) -> Shape:
    return Shape(batch=batch, prompt_tokens=length, num_tokens=1)


FULL = Plan(
    decode=(_decode(1), _decode(8), _decode(32)),
    prefill=(_prefill(1, 512), _prefill(8, 512), _prefill(1, 2048)),
    rounds=7,
)
QUICK = Plan(decode=(_decode(1), _decode(8)), prefill=(_prefill(8, 512),), rounds=3)


def make_checkpoint(source: Path, destination: Path, num_layers: int) -> None:
    """Inflate `source`, with random weights of small effect in the layers that come on top."""
    with torch.inference_mode():
        inflate(source, destination, num_layers)
    config = json.loads((destination / "config.json").read_text())
    originals = set(config.pop(CONFIG_KEY))
    config.pop("num_nextn_predict_layers", None)
    (destination / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    (destination / "mtp.safetensors").unlink(missing_ok=True)  # nobody reads it, and vLLM does not expect it
    file = destination / "model.safetensors"
    generator = torch.Generator().manual_seed(0)
    tensors = load_file(file)
    for name, tensor in tensors.items():
        parts = name.split(".")
        if parts[1] == "layers" and int(parts[2]) not in originals and tensor.ndim == 2:
            scale = float(tensor.float().std()) or _QUIET_STD
            tensors[name] = (torch.randn(tensor.shape, generator=generator) * scale).to(tensor.dtype)
    save_file(tensors, file, metadata={"format": "pt"})


def agreement(reference: Sequence[Sequence[int]], texts: Sequence[Sequence[int]]) -> dict[str, float]:
    """Shares of texts whose first token is the reference's, and of tokens before the first that is not."""
    first, common, total = 0, 0, 0
    for expected, text in zip(reference, texts, strict=True):
        pairs = zip(expected, text, strict=True)
        length = next((index for index, (a, b) in enumerate(pairs) if a != b), len(expected))
        first += length > 0
        common += length
        total += len(expected)
    return {"first_tokens": first / len(reference), "tokens_before_a_difference": common / total}


def check_lengths(name: str, texts: Sequence[Sequence[int]], shape: Shape) -> None:
    """Raise unless there are as many new tokens as were asked for."""
    if [len(text) for text in texts] != [shape.num_tokens] * shape.batch:
        raise RuntimeError(f"{name} wrote {[len(text) for text in texts]} tokens instead of {shape}")


class Bench:
    """Runs a plan over the systems that there are."""

    def __init__(
        self, plan: Plan, systems: Mapping[str, System], text: list[int], progress: Progress
    ) -> None:
        self._plan = plan
        self._systems = systems
        self._text = text
        self._progress = progress

    def cell(self, shape: Shape) -> dict[str, Any]:
        """All systems at one shape."""
        rounds = self._plan.rounds
        batches = [
            window(self._text, shape.batch, shape.prompt_tokens, number) for number in range(rounds + 1)
        ]
        texts: dict[str, list[Tokens]] = {name: [] for name in self._systems}

        def run(name: str) -> float:
            time.sleep(_SETTLE_S)
            seconds, tokens = self._systems[name](batches[len(texts[name])], shape.num_tokens)
            check_lengths(name, tokens, shape)
            texts[name].append(tokens)
            return seconds

        label = f"{shape.batch} x {shape.prompt_tokens} + {shape.num_tokens}"
        task = self._progress.add_task(label, total=len(self._systems) * (rounds + 1))
        variants = {name: partial(run, name) for name in self._systems}
        paired = run_in_turn(variants, rounds, lambda: self._progress.advance(task))
        flat = {name: [text for batch in batches for text in batch] for name, batches in texts.items()}
        return {
            "batch": shape.batch,
            "prompt_tokens": shape.prompt_tokens,
            "num_tokens": shape.num_tokens,
            **summarise(paired, shape),
            "agreement": {name: agreement(flat[HUGGING_FACE], flat[name]) for name in self._systems},
        }


def summarise(paired: Paired, shape: Shape) -> dict[str, Any]:
    """Speeds and ratios: of new tokens where several are written, else of those read."""
    tokens = shape.batch * (shape.num_tokens if shape.num_tokens > 1 else shape.prompt_tokens)
    others = [name for name in paired.seconds if name != HUGGING_FACE]
    return {
        "tokens_per_s": {name: tokens / paired.spread(name).median for name in paired.seconds},
        "seconds": paired,
        "vs_hf": {name: paired.ratio(HUGGING_FACE, name) for name in others},
        "ours_vs": {name: paired.ratio(name, OURS) for name in others if name != OURS},
    }


def headlines(results: Mapping[str, Any]) -> dict[str, float]:
    """The numbers to watch: prefill over all shapes, decoding at each batch size."""
    numbers = {}
    for name in results["systems"]:
        ratios = [cell["vs_hf"][name].median for cell in results["prefill"]]
        numbers[f"prefill_vs_hf_{name}"] = statistics.median(ratios)
    for cell in results["decode"]:
        for name in results["systems"]:
            numbers[f"decode_vs_hf_{name}_b{cell['batch']}"] = cell["vs_hf"][name].median
    return numbers


def check_agreement(cells: Sequence[Mapping[str, Any]], name: str) -> None:
    """Raise if a system's model is not the one that transformers runs.

    Later tokens may differ: bfloat16 sums in another order, and a near tie falls the other way.
    """
    share = statistics.mean(cell["agreement"][name]["first_tokens"] for cell in cells)
    if share < _LEAST_AGREEMENT:
        raise RuntimeError(
            f"{name}: {share:.0%} of the first tokens are those of transformers; its model is not the same"
        )


def start_peers(
    names: Sequence[str], environments: Path, setup: Setup, stack: ExitStack, say: Callable[[str], None]
) -> tuple[dict[str, System], dict[str, dict[str, str]], dict[str, str]]:
    """Start every peer that can be had; return them, their versions, and why the others are missing."""
    systems: dict[str, System] = {}
    versions: dict[str, dict[str, str]] = {}
    skipped: dict[str, str] = {}
    for name in names:
        try:
            python = ensure(name, RECIPES[name], environments, say)
            say(f"{name}: converting and compiling the model")
            process = stack.enter_context(closing(PeerProcess(RECIPES[name], python, setup)))
            versions[name] = process.wait_ready()
            systems[name] = process.generate
        except PeerUnavailableError as error:
            skipped[name] = str(error)
            say(f"{name}: skipped: {error}")
    return systems, versions, skipped


def own_systems(
    plan: Plan, target: Path, draft: Path, stack: ExitStack
) -> tuple[dict[str, System], InProcess]:
    """Transformers and our engine, in this process."""
    peer = HuggingFaceGenerator(target, torch.bfloat16)
    config = engine_config(
        target,
        draft,
        "bfloat16",
        max_num_seqs=max(shape.batch for shape in plan.shapes),
        num_draft_tokens=4,
        num_threads=plan.num_threads,
        max_model_len=4096,
    )
    engine = stack.enter_context(closing(InProcess(config)))

    def theirs(prompts: list[tuple[int, ...]], num_tokens: int) -> tuple[float, Tokens]:
        started_s = time.perf_counter()
        texts = peer.generate(prompts, num_tokens)
        return time.perf_counter() - started_s, texts

    def ours(prompts: list[tuple[int, ...]], num_tokens: int) -> tuple[float, Tokens]:
        record = engine.run(prompts, num_tokens, 0)
        return record.seconds, [list(text) for text in record.token_ids]

    return {HUGGING_FACE: theirs, OURS: ours}, engine


def setup_for(plan: Plan, target: Path, folder: Path) -> Setup:
    """What the peers are told about a plan."""
    return Setup(
        model=str(target),
        folder=str(folder),
        num_threads=plan.num_threads,
        max_batch=max(shape.batch for shape in plan.shapes),
        max_context=4096,
        max_prompt_tokens=max(shape.batch * shape.prompt_tokens for shape in plan.shapes),
    )


def _measure(
    plan: Plan, names: Sequence[str], environments: Path, models: Path, progress: Progress
) -> dict[str, Any]:
    folder = environments.absolute() / "work"  # a path that stays: vLLM's compiled kernels know it
    target = folder / "target"
    shutil.rmtree(target, ignore_errors=True)
    num_layers = layers_for_parameters(models / "target", plan.num_parameters)
    make_checkpoint(models / "target", target, num_layers)
    say = progress.console.print
    with ExitStack() as stack:
        peers, versions, skipped = start_peers(
            names, environments, setup_for(plan, target, folder), stack, say
        )
        say(f"{OURS}: compiling the model")
        own, engine = own_systems(plan, target, models / "draft", stack)
        tokenizer = engine.engine.tokenizer
        texts = read_prompts(models / "prompts.jsonl")
        tokens = [token for text in texts for token in tokenizer.encode(text)]
        bench = Bench(plan, {**own, **peers}, tokens, progress)
        results: dict[str, Any] = {
            "plan": plan,
            "num_layers": num_layers,
            "systems": [OURS, *peers],
            "versions": versions,
            "skipped": skipped,
            "decode": [bench.cell(shape) for shape in plan.decode],
            "prefill": [bench.cell(shape) for shape in plan.prefill],
        }
    for name in results["systems"]:
        check_agreement([*results["decode"], *results["prefill"]], name)
    return results


def _pin(num_threads: int) -> None:
    """Keep this process, and what it starts, on as many cores as there are threads."""
    cores = sorted(os.sched_getaffinity(0))[:num_threads]
    os.sched_setaffinity(0, cores)
    torch.set_num_threads(num_threads)


def main(
    quick: Annotated[bool, typer.Option(help="Fewer rounds and shapes.")] = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write raw results here.")] = None,
    environments: Annotated[Path, typer.Option(help="Where the peers are, or will be, installed.")] = Path(
        "runs/peers"
    ),
    prepare: Annotated[bool, typer.Option(help="Only install the peers.")] = False,
    peer: Annotated[list[str] | None, typer.Option(help="Only these: vllm, llama_cpp, openvino.")] = None,
    models: Annotated[Path, typer.Option(help="Folder with target/, draft/ and prompts.jsonl.")] = Path(
        "models/demo"
    ),
) -> None:
    """Measure vLLM, llama.cpp, OpenVINO GenAI and this engine beside transformers on two cores.

    Example: python -m benchmarks.peers --quick --peer openvino
    """
    names = tuple(peer or RECIPES)
    if unknown := set(names) - set(RECIPES):
        raise typer.BadParameter(
            f"no such peer: {', '.join(sorted(unknown))}; there are {', '.join(RECIPES)}"
        )
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    if prepare:
        for name in names:
            try:
                ensure(name, RECIPES[name], environments, console.print)
            except PeerUnavailableError as error:
                console.print(f"{name}: not available: {error}")
        return
    plan = QUICK if quick else FULL
    _pin(plan.num_threads)
    with progress_bar(console) as progress:
        results = _measure(plan, names, environments, models, progress)
    numbers = headlines(results)
    write_results(json_file, {**results, "headlines": numbers})
    report_headlines(numbers)


if __name__ == "__main__":
    typer.run(main)
