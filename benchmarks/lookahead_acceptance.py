"""How many tokens a target pass brings with Lookahead decoding, by window, kind of text and temperature.

    python -m benchmarks.lookahead_acceptance --json benchmarks/results/lookahead-acceptance.json
    python -m benchmarks.lookahead_acceptance --quick

The demo target in fp32 continues held-out prompts, with the engine as it is served and k fixed at the largest
tree. Each verification of a request is a pass; tokens are counted per pass over all requests of a class of
text, errors are standard errors over prompts. `rows` is what a pass computes beside the draft. For
comparison, method `ngram` on the same prompts, which has the text alone. Nothing is timed.
"""

from __future__ import annotations

import json
import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.in_process import batch_requests
from benchmarks.plain_tool import PlainTool
from benchmarks.report import progress_bar
from specdec.core.ids import RequestId
from specdec.core.plan import TargetResult, TargetStep
from specdec.core.sampling_params import SamplingParams
from specdec.engine.build_target import build_target
from specdec.engine.config import EngineConfig
from specdec.engine.engine import Engine
from specdec.engine.targets.target import Target
from specdec.engine.text.tokenizer import build_tokenizer
from specdec.proposers.config import SpeculativeConfig
from specdec.proposers.registry import create_proposer
from specdec.proposers.target_facts import TargetFacts
from specdec.scheduling.speculation.controller import FixedController


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is measured."""

    temperatures: tuple[float, ...] = (0.0, 0.7)
    prompts_per_class: int = 12
    num_tokens: int = 48
    num_threads: int = 1


FULL = Plan()
QUICK = Plan(prompts_per_class=4, num_tokens=32)


def lookahead(
    window_size: int, ngram_size: int, verification_set_size: int, **keys: Any
) -> SpeculativeConfig:
    """Return the configuration of a window, with the largest trees that it can propose."""
    block = {
        "window_size": window_size,
        "ngram_size": ngram_size,
        "verification_set_size": verification_set_size,
    }
    return SpeculativeConfig.model_validate(
        {
            "method": "lookahead",
            "controller": "fixed",
            "num_speculative_tokens": verification_set_size * (ngram_size - 1),
            "lookahead": {**block, **keys},
        }
    )


SETTINGS: Mapping[str, SpeculativeConfig] = {
    "W 3, N 3, G 4": lookahead(3, 3, 4),
    "W 5, N 4, G 5": lookahead(5, 4, 5),
    "W 5, N 4, G 5, window alone": lookahead(5, 4, 5, reads_text=False),
    "W 7, N 5, G 7": lookahead(7, 5, 7),
    "ngram, k 4": SpeculativeConfig(method="ngram", controller="fixed", num_speculative_tokens=4),
}


class PassCounter:
    """Implements `engine.target.Target` around another, and counts the passes of each request."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self.description = target.description
        self.passes: Counter[RequestId] = Counter()

    @property
    def is_elsewhere(self) -> bool:
        """As the other one is."""
        return self._target.is_elsewhere

    def submit(self, step: TargetStep) -> None:
        """Hand a step on."""
        self.passes.update(work.request_id for work in step.works if work.num_sampled_rows)
        self._target.submit(step)

    def collect(self) -> TargetResult:
        """Return the answer."""
        return self._target.collect()

    def close(self) -> None:
        """Leave the target as it is: others measure with it."""


def summarise(num_tokens: Sequence[int], num_passes: Sequence[int]) -> dict[str, float]:
    """Return tokens per pass over all requests, with its standard error over requests."""
    each = [tokens / passes for tokens, passes in zip(num_tokens, num_passes, strict=True)]
    return {
        "tokens_per_pass": sum(num_tokens) / sum(num_passes),
        "error": statistics.stdev(each) / math.sqrt(len(each)) if len(each) > 1 else math.inf,
        "num_passes": sum(num_passes),
    }


def prompts_by_class(path: Path, number: int) -> dict[str, list[str]]:
    """Return so many prompts of each class."""
    found: dict[str, list[str]] = defaultdict(list)
    for line in path.read_text().splitlines():
        one = json.loads(line)
        if len(found[one["class"]]) < number:
            found[one["class"]].append(one["prompt"])
    return found


def measure(
    config: EngineConfig, target: Target, texts: Sequence[str], plan: Plan, temperature: float
) -> dict[str, float]:
    """Return what one setting brings on one class of text."""
    counter = PassCounter(target)
    description = target.description
    facts = TargetFacts(
        vocab_size=description.vocab_size, dtype=description.dtype, max_num_seqs=config.scheduler.max_num_seqs
    )
    speculative = config.speculative_config
    params = SamplingParams(temperature=temperature, max_tokens=plan.num_tokens, ignore_eos=True)
    with Engine.from_parts(
        target=counter,
        proposer=create_proposer(speculative, facts),
        tokenizer=build_tokenizer(config),
        scheduler=config.scheduler,
        controller=FixedController(speculative.num_speculative_tokens),
    ) as engine:
        prompts = [tuple(engine.tokenizer.encode(text)) for text in texts]
        tokens: Counter[RequestId] = Counter()
        for request in batch_requests(prompts, params, None, "lookahead"):
            engine.add_request(request)
        while engine.has_work:
            for output in engine.step():
                tokens[output.request_id] += len(output.token_ids)
    names = sorted(tokens)
    return summarise([tokens[name] for name in names], [counter.passes[name] for name in names])


def run(plan: Plan, models: Path) -> dict[str, Any]:
    """Measure every setting, class and temperature."""
    torch.set_num_threads(plan.num_threads)
    base = EngineConfig.model_validate(
        {
            "target": {"model": str(models / "target"), "dtype": "float32", "max_model_len": 1024},
            "speculative_config": {"method": "none"},
            "cache": {"memory_bytes": 512 << 20},
            "scheduler": {"max_num_seqs": 8, "max_num_batched_tokens": 1024},
        }
    )
    texts = prompts_by_class(models / "prompts.jsonl", plan.prompts_per_class)
    target = build_target(base)
    cells: list[dict[str, Any]] = []
    with progress_bar() as progress:
        task = progress.add_task("cells", total=len(plan.temperatures) * len(texts) * len(SETTINGS))
        for temperature in plan.temperatures:
            for name, prompts in texts.items():
                for setting, speculative in SETTINGS.items():
                    config = base.model_copy(update={"speculative_config": speculative})
                    cells.append(
                        {
                            "temperature": temperature,
                            "class": name,
                            "setting": setting,
                            "rows": speculative.num_rows_beside,
                            **measure(config, target, prompts, plan, temperature),
                        }
                    )
                    progress.advance(task)
    target.close()
    return {
        "plan": plan,
        "settings": {name: one.model_dump() for name, one in SETTINGS.items()},
        "cells": cells,
    }


def headlines(results: Mapping[str, Any]) -> dict[str, float]:
    """Tokens per pass by setting, class and temperature."""
    return {
        f"tokens_per_pass_{_plain(cell['setting'])}_{cell['class']}_t{cell['temperature']:g}": cell[
            "tokens_per_pass"
        ]
        for cell in results["cells"]
    }


def _plain(setting: str) -> str:
    return setting.replace(",", "").replace(" ", "_").lower()


TOOL = PlainTool(
    module="lookahead_acceptance",
    summary="Measure how many tokens a target pass brings with Lookahead decoding.",
    full=FULL,
    quick=QUICK,
    run=run,
    headlines=headlines,
)


if __name__ == "__main__":
    TOOL.main()
