"""Whatever part of its K/V a draft is made with, a request gets what the target says alone.

Every two of: who drafts, policy and budget, positions, lengths in the batch, k, sampling, prefix cache,
preemption, chunks of prompts, how positions enter the model, compiled or not, in fp32 or in bf16 with
`batch_invariant`. Models and drafters are loaded
as a configuration says.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from specdec.core.sampling_params import SamplingParams
from specdec.engine.config import EngineConfig
from specdec.engine.engine import Engine
from specdec.kv.config import CacheConfig
from specdec.model.config import CompileConfig, ModelConfig
from specdec.model.parallel.group import RankGroup
from specdec.proposers.config import SpeculativeConfig
from specdec.scheduling.config import SchedulerConfig
from tests.architectures import VOCAB_SIZE, save_model
from tests.pairwise import Case, pairwise_cover
from tests.rank_pool import Pools
from tests.specdec.engine.ranked_engines import lead

pytestmark = pytest.mark.usefixtures("one_thread")
NUM_TOKENS = 16
POSITIONS = 48
"""Given to the draft model with positions in cache; fewer where K/V depend on the length sooner."""

Folders = Callable[[str, int], Path]

PARAMS = {
    "greedy": SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True),
    "plain": SamplingParams(temperature=1.0, max_tokens=NUM_TOKENS, ignore_eos=True, seed=11),
    "cut": SamplingParams(
        temperature=0.8, top_k=40, top_p=0.95, max_tokens=NUM_TOKENS, ignore_eos=True, seed=7
    ),
}
LENGTHS = {"short": (1, 3, 12), "long": (100, 90, 105), "mixed": (2, 100, 9, 50, 70)}
POLICIES: dict[str, dict[str, Any]] = {
    "full": {"policy": "full"},
    "budget": {"policy": "streaming", "budget": 12},
    "no sink": {"policy": "streaming", "budget": 10, "sink_tokens": 0},
    "share": {"policy": "streaming", "budget": 0.3, "floor": 11, "sink_tokens": 5},
    "ample": {"policy": "streaming", "budget": 400},
    "snapkv": {"policy": "snapkv", "budget": 16, "rescore_every": 5},
    "verified": {"policy": "verified", "budget": 0.25, "floor": 16},
}
ARCHITECTURES = (
    "llama",
    "llama_linear_rope",
    "llama_dynamic_ntk",
    "llama_yarn",
    "llama3_rope",
    "phi3_longrope",
    "mistral",
    "gemma3",
    "gpt2",
)
AXES: dict[str, tuple[Any, ...]] = {
    "drafter": ("self", "same model", "other model"),
    "policy": tuple(POLICIES),
    "positions": ("absolute", "in_cache"),
    "lengths": tuple(LENGTHS),
    "k": (1, 3, 5),
    "params": tuple(PARAMS),
    "prefix_caching": (False, True),
    "preempts": (False, True),
    "chunk": (16, 64),
    "architecture": ARCHITECTURES,
    "compiled": (False, True),
    "invariant": (False, True),
}


SCORED = ("snapkv", "verified")


def may_be(case: Case) -> bool:
    if case["drafter"] == "self":
        return case["positions"] == "absolute"
    is_window = case["policy"] not in ("full", "ample", *SCORED)
    return is_window or (case["positions"] == "absolute" and case["policy"] not in SCORED)


COVER = pairwise_cover(AXES, may_be)
FEWER = [
    {**case, "architecture": architecture}
    for case, architecture in zip(
        pairwise_cover({name: AXES[name] for name in AXES if name != "architecture"}, may_be),
        itertools.cycle(ARCHITECTURES),
        strict=False,
    )
]
"""Fewer than half: each architecture with some of what there is; all else meets in pairs."""


def drawn_cases() -> Iterator[Case]:
    """The product of what decides about drafts; the rest is drawn."""
    rng = random.Random(1)
    decisive = ("drafter", "policy", "positions", "lengths", "k", "params")
    for values in itertools.product(*(AXES[name] for name in decisive)):
        case = {name: rng.choice(choices) for name, choices in AXES.items()}
        case |= dict(zip(decisive, values, strict=True))
        if may_be(case):
            yield case


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    @cache
    def make(architecture: str, seed: int) -> Path:
        folder = tmp_path_factory.mktemp(f"{architecture}-{seed}")
        save_model(folder, architecture, seed)
        return folder

    return make


def prompts_of(lengths: str) -> list[tuple[int, ...]]:
    generator = random.Random(lengths)
    return [tuple(generator.choices(range(2, VOCAB_SIZE), k=length)) for length in LENGTHS[lengths]]


def config_of(folder: Path, speculative: dict[str, Any], case: Case, num_ranks: int = 1) -> EngineConfig:
    return EngineConfig(
        target=ModelConfig(
            model=str(folder),
            dtype="bfloat16" if case["invariant"] else "float32",
            batch_invariant=bool(case["invariant"]),
            tensor_parallel_size=num_ranks,
            compile=CompileConfig(mode="auto" if case["compiled"] else "off"),
        ),
        speculative_config=SpeculativeConfig.model_validate({"controller": "fixed", **speculative}),
        cache=CacheConfig(
            block_size=4,
            num_blocks=51 if case["preempts"] else 300,
            enable_prefix_caching=case["prefix_caching"],
        ),
        scheduler=SchedulerConfig(max_num_seqs=6, max_num_batched_tokens=case["chunk"]),
    )


def speculative_of(case: Case, folders: Folders) -> dict[str, Any]:
    kv = POLICIES[str(case["policy"])] | {"positions": case["positions"]}
    common = {"num_speculative_tokens": case["k"], "kv": kv}
    if case["drafter"] == "self":
        return {"method": "self", **common}
    return {
        "method": "draft_model",
        "model": str(folders(str(case["architecture"]), int(case["drafter"] == "other model"))),
        "max_model_len": POSITIONS if case["positions"] == "in_cache" else None,
        "cache": {
            "block_size": 4,
            "num_blocks": 120,
            "enable_prefix_caching": case["prefix_caching"],
        },
        "compile": {"mode": "auto" if case["compiled"] else "off"},
        **common,
    }


ALONE: Case = {"preempts": False, "prefix_caching": False, "chunk": 64, "compiled": False}


@pytest.fixture(scope="module")
def alone(folders: Folders) -> Alone:
    """What the target says to each prompt by itself."""

    @cache
    def streams(
        architecture: str, lengths: str, params: str, invariant: bool = False
    ) -> list[tuple[int, ...]]:
        case = ALONE | {"invariant": invariant}
        config = config_of(folders(architecture, 0), {"method": "none"}, case)
        with Engine(config) as engine:
            return [engine.generate([one], PARAMS[params])[0].token_ids for one in prompts_of(lengths)]

    return streams


Alone = Callable[..., list[tuple[int, ...]]]


def check(case: Case, folders: Folders, alone: Alone) -> None:
    expected = alone(*(case[name] for name in ("architecture", "lengths", "params", "invariant")))
    prompts, params = prompts_of(str(case["lengths"])), PARAMS[str(case["params"])]
    folder = folders(str(case["architecture"]), 0)
    with Engine(config_of(folder, speculative_of(case, folders), case)) as engine:
        for _ in range(1 + bool(case["prefix_caching"])):
            results = engine.generate(prompts, params)
            engine.check_integrity()
            assert [result.token_ids for result in results] == expected
        metrics, counters = engine.metrics(), engine.draft_counters
    assert metrics.num_draft_tokens > 0
    if case["preempts"] and case["lengths"] == "long":
        assert metrics.num_preemptions > 0
    if case["prefix_caching"] and case["lengths"] != "short" and not case["preempts"]:
        assert metrics.prefix_cache_hits > 0
    if case["positions"] == "in_cache" and case["lengths"] != "short":
        assert counters["draft_windows_reread"] > 0
    if case["policy"] in ("full", "ample") and case["drafter"] == "self":
        assert metrics.num_accepted_tokens == metrics.num_draft_tokens


def name_of(case: Case) -> str:
    return "-".join(
        f"{name} {case[name]}" if isinstance(case[name], int) else str(case[name]) for name in AXES
    )


@pytest.mark.cover(1)
@pytest.mark.parametrize("case", FEWER, ids=name_of)
def test_says_what_it_says_alone_in_few_settings(case: Case, folders: Folders, alone: Alone) -> None:
    check(case, folders, alone)


@pytest.mark.full
@pytest.mark.parametrize("case", COVER, ids=name_of)
def test_says_what_it_says_alone(case: Case, folders: Folders, alone: Alone) -> None:
    check(case, folders, alone)


@pytest.mark.full
@pytest.mark.parametrize("case", list(drawn_cases()), ids=name_of)
def test_says_what_it_says_alone_in_every_setting(case: Case, folders: Folders, alone: Alone) -> None:
    check(case, folders, alone)


def test_the_cover_is_one() -> None:
    """Every two values meet that may; and not by trying everything."""
    met = {
        frozenset(pair)
        for case in COVER
        for pair in itertools.combinations(((name, case[name]) for name in AXES), 2)
    }
    for one, other in itertools.combinations(AXES, 2):
        for first, second in itertools.product(AXES[one], AXES[other]):
            pair = {one: first, other: second}
            is_moved, drafter = pair.get("positions") == "in_cache", pair.get("drafter")
            cannot = is_moved and (drafter == "self" or pair.get("policy") in ("full", "ample", *SCORED))
            cannot = cannot or (drafter not in (None, "self") and pair.get("policy") in SCORED)
            assert (frozenset(pair.items()) in met) != cannot, pair
    assert all(map(may_be, COVER))
    assert len(COVER) < 70


def serve(group: RankGroup, config: EngineConfig, prompts: Any, params: Any) -> Any:
    """Rank 0: streams of two waves, accepted tokens, preemptions; the others follow."""

    def use(engine: Engine) -> Any:
        waves = [
            [result.token_ids for one in params for result in engine.generate(prompts, one)] for _ in range(2)
        ]
        metrics = engine.metrics()
        return waves, metrics.num_accepted_tokens, metrics.num_preemptions

    return lead(group, config, use)


@pytest.mark.parametrize(
    ("drafter", "policy", "positions", "architecture"),
    [
        pytest.param("self", "budget", "absolute", "llama", marks=pytest.mark.full),
        pytest.param("self", "share", "absolute", "llama_yarn", marks=pytest.mark.full),
        pytest.param("self", "verified", "absolute", "llama3_rope", marks=pytest.mark.full),
        pytest.param("self", "snapkv", "absolute", "mistral", marks=pytest.mark.full),
        pytest.param("same model", "share", "absolute", "llama_linear_rope", marks=pytest.mark.full),
        ("same model", "budget", "in_cache", "llama"),
        pytest.param("other model", "no sink", "in_cache", "llama_dynamic_ntk", marks=pytest.mark.full),
    ],
)
def test_over_two_ranks(
    rank_pool: Pools,
    folders: Folders,
    alone: Alone,
    drafter: str,
    policy: str,
    positions: str,
    architecture: str,
) -> None:
    """Over ranks sums have another order: these models and prompts are clear enough for it not to show."""
    case: Case = {
        "drafter": drafter,
        "policy": policy,
        "positions": positions,
        "architecture": architecture,
        "k": 3,
        "prefix_caching": True,
        "preempts": True,
        "chunk": 24,
        "compiled": False,
        "invariant": False,
    }
    config = config_of(folders(architecture, 0), speculative_of(case, folders), case, num_ranks=2)
    kinds = ("greedy", "plain")
    expected = [one for kind in kinds for one in alone(architecture, "long", kind)]
    params = [PARAMS[kind] for kind in kinds]
    waves, num_accepted, num_preemptions = rank_pool(2).run(serve, config, prompts_of("long"), params)[0]
    assert waves == [expected, expected]
    assert num_preemptions > 0
    if drafter != "other model":
        assert num_accepted > 0


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.parametrize("positions", ["absolute", "in_cache"])
def test_a_draft_model_of_two_ranks_with_bounded_memory(
    folders: Folders, alone: Alone, positions: str
) -> None:
    """Ranks that the engine starts: each keeps, frees and reads again what the others do."""
    case: Case = {
        **{name: values[0] for name, values in AXES.items()},
        "drafter": "same model",
        "policy": "budget",
        "positions": positions,
        "k": 3,
    }
    speculative = speculative_of(case, folders) | {"draft_tensor_parallel_size": 2}
    with Engine(config_of(folders("llama", 0), speculative, case)) as engine:
        results = engine.generate(prompts_of("mixed"), PARAMS["plain"])
        assert engine.metrics().num_accepted_tokens > 0
    assert [result.token_ids for result in results] == alone("llama", "mixed", "plain")


@pytest.mark.parametrize(("drafter", "positions"), [("self", "absolute"), ("same model", "in_cache")])
def test_with_costs_measured_and_k_chosen(
    folders: Folders, alone: Alone, tmp_path: Path, drafter: str, positions: str
) -> None:
    """Costs are measured at lengths for which the draft model has no positions of the text."""
    case: Case = {
        **{name: values[0] for name, values in AXES.items()},
        "drafter": drafter,
        "policy": "share",
        "positions": positions,
        "k": 5,
    }
    speculative = speculative_of(case, folders) | {
        "controller": "goodput",
        "profile_seconds": 0.5,
        "profile_dir": str(tmp_path),
    }
    with Engine(config_of(folders("llama", 0), speculative, case)) as engine:
        results = engine.generate(prompts_of("mixed"), PARAMS["cut"])
        engine.check_integrity()
    assert [result.token_ids for result in results] == alone("llama", "mixed", "cut")
    assert list(tmp_path.iterdir())


@pytest.mark.parametrize("drafter", ["self", "same model"])
def test_control_a_window_shows_in_what_is_drafted(folders: Folders, drafter: str) -> None:
    """What is compared above are streams of drafts that are not all right."""
    case: Case = {
        **{name: values[0] for name, values in AXES.items()},
        "drafter": drafter,
        "lengths": "long",
        "policy": "budget",
        "k": 5,
    }
    accepted = []
    for policy in ("full", "budget"):
        speculative = speculative_of({**case, "policy": policy}, folders)
        with Engine(config_of(folders("llama", 0), speculative, case)) as engine:
            engine.generate(prompts_of("long"), PARAMS["plain"])
            metrics = engine.metrics()
            accepted.append(metrics.num_accepted_tokens / metrics.num_draft_tokens)
    assert accepted[0] == 1.0
    assert accepted[1] < 0.9
