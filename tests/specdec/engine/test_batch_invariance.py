"""Guarantee B in bf16, over everything that serves: what a request gets is the same bits.

Log-probabilities too. One request at a time without speculation is what all settings are compared with:
other company, other numbers of draft tokens, trees of them, prompts in other chunks, shared prefixes,
preemption; eager and compiled; over ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
import torch

from specdec.attention.native import NativeUnavailable
from specdec.core.outputs import TokenLogprobs
from specdec.core.sampling_params import SamplingParams
from specdec.engine.config import EngineConfig
from specdec.engine.engine import Engine
from specdec.model.config import CompileConfig, ModelConfig
from specdec.model.invariance.native import NativeOperations
from specdec.model.parallel.group import RankGroup
from specdec.scheduling.config import SchedulerConfig
from tests.architectures import save_model, save_wide_model
from tests.rank_pool import Pools
from tests.specdec.engine.ranked_engines import PROMPTS as PROMPTS_OF_RANKS
from tests.specdec.engine.ranked_engines import config_of, drafting, lead
from tests.specdec.engine.tiny_models import ragged_prompts

pytestmark = pytest.mark.usefixtures("one_thread_each")
NUM_TOKENS = 12
PROMPTS = ragged_prompts(4, seed=1)
PARAMS = {
    "greedy": SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True),
    "sampled": SamplingParams(temperature=0.9, top_p=0.95, max_tokens=NUM_TOKENS, ignore_eos=True, seed=3),
    "scored": SamplingParams(
        temperature=1.0, min_p=0.01, logprobs=5, max_tokens=NUM_TOKENS, ignore_eos=True, seed=4
    ),
    "shaped": SamplingParams(
        temperature=0.8,
        repetition_penalty=1.3,
        frequency_penalty=0.4,
        logprobs=3,
        logprobs_mode="processed",
        max_tokens=NUM_TOKENS,
        ignore_eos=True,
        seed=5,
    ),
}
COMPILE = {"eager": {"mode": "off"}, "compiled": {"mode": "auto"}}


class Said(NamedTuple):
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] | None


class Setting(NamedTuple):
    """What must not show."""

    method: str = "none"
    num_draft_tokens: int = 4
    chunk: int = 512
    num_blocks: int = 200
    together: bool = True
    shares_prefixes: bool = False
    widths: tuple[int, ...] = ()
    """Of a tree, level by level; none: chains."""


ALONE = Setting(together=False)
SETTINGS = [
    Setting(),
    Setting(chunk=16, num_blocks=15),
    Setting("ngram", num_draft_tokens=3, chunk=9),
    Setting("ngram", num_draft_tokens=8, shares_prefixes=True),
    Setting("other model", num_draft_tokens=2, chunk=16, num_blocks=15),
    Setting("same model", num_draft_tokens=5, together=False),
    Setting("same model", num_draft_tokens=4, chunk=24, shares_prefixes=True),
]
TREES = [
    Setting("same model", num_draft_tokens=15, widths=(3, 2, 1)),
    Setting("other model", num_draft_tokens=21, widths=(3, 2, 2), chunk=64, num_blocks=60),
    Setting("lookahead", num_draft_tokens=4, together=False),
]


class Folders(NamedTuple):
    target: Path
    other: Path


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    try:
        NativeOperations()
    except NativeUnavailable as error:
        pytest.skip(f"no C++ kernels here: {error}")
    found = Folders(tmp_path_factory.mktemp("target"), tmp_path_factory.mktemp("other"))
    save_wide_model(found.target)
    save_model(found.other)
    return found


def engine_of(folders: Folders, setting: Setting, target: dict[str, Any]) -> Engine:
    speculative: dict[str, Any] = {"method": setting.method}
    if setting.method.endswith("model"):
        folder = folders.target if setting.method == "same model" else folders.other
        cache = {"num_blocks": setting.num_blocks, "block_size": 4}
        speculative = {"method": "draft_model", "model": str(folder), "cache": cache}
        if setting.widths:
            speculative["tree"] = {"shape": "static", "widths": list(setting.widths)}
    if setting.method == "ngram":
        speculative["prompt_lookup_min"] = 1
    config = {
        "target": {"model": str(folders.target), "dtype": "bfloat16", **target},
        "speculative_config": {
            "controller": "fixed",
            "num_speculative_tokens": setting.num_draft_tokens,
            **speculative,
        },
        "cache": {
            "num_blocks": setting.num_blocks,
            "block_size": 4,
            "enable_prefix_caching": setting.shares_prefixes,
        },
        "scheduler": {
            "max_num_seqs": min(8, setting.chunk) if setting.together else 1,
            "max_num_batched_tokens": setting.chunk,
        },
    }
    engine = Engine(EngineConfig.model_validate(config))
    if setting.method.endswith("model"):
        engine.warm_up()  # what drafts is faster so, and may be anything
    return engine


def said(engine: Engine, setting: Setting, params: SamplingParams) -> list[Said]:
    prompts = [*PROMPTS]
    if setting.shares_prefixes:
        engine.generate(prompts, params)  # their blocks are found again
    results = engine.generate(prompts, params)
    return [Said(result.token_ids, result.choices[0].logprobs) for result in results]


@pytest.mark.parametrize(
    ("form", "settings"),
    [
        pytest.param("eager", SETTINGS[1:4:2], id="eager"),
        pytest.param("compiled", SETTINGS[4::2], id="compiled"),
        pytest.param("eager", [*SETTINGS[::2], SETTINGS[5]], id="eager, the others", marks=pytest.mark.full),
        pytest.param(
            "compiled", [*SETTINGS[:4:2], *SETTINGS[1::2]], id="compiled, the others", marks=pytest.mark.full
        ),
    ],
)
def test_same_bits_however_it_is_served(folders: Folders, form: str, settings: Sequence[Setting]) -> None:
    check_same_bits(folders, settings, {"batch_invariant": True, "compile": COMPILE[form]})


@pytest.mark.parametrize("form", COMPILE)
def test_trees_change_no_bit(folders: Folders, form: str) -> None:
    """In fp32, whose log-probabilities show every one; bf16 rounds most of them away."""
    target = {"batch_invariant": True, "compile": COMPILE[form], "dtype": "float32"}
    check_same_bits(folders, TREES, target)


def check_same_bits(folders: Folders, settings: Sequence[Setting], target: dict[str, Any]) -> None:
    with engine_of(folders, ALONE, target) as engine:
        expected = {kind: said(engine, ALONE, params) for kind, params in PARAMS.items()}
    for setting in settings:
        with engine_of(folders, setting, target) as engine:
            for kind, params in PARAMS.items():
                assert said(engine, setting, params) == expected[kind], (kind, setting)
            metrics = engine.metrics()
            engine.check_integrity()
        if setting.num_blocks < 40:
            assert metrics.num_preemptions > 0
        if setting.method in ("ngram", "same model"):
            assert metrics.num_accepted_tokens > 0
        if setting.shares_prefixes:
            assert metrics.prefix_cache_hits > 0


def test_control_without_the_flag_bits_differ(folders: Folders) -> None:
    """The comparison above sees what eager PyTorch makes of other batches; in fp32, where it always does."""
    found = []
    for setting in (ALONE, SETTINGS[0]):
        with engine_of(folders, setting, {"compile": COMPILE["eager"], "dtype": "float32"}) as engine:
            found.append(said(engine, setting, PARAMS["scored"]))
    assert found[0] != found[1]


def test_control_sums_that_follow_the_batch_in_bf16(
    folders: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sums of a single row that are added up in two halves show in bf16."""
    whole = NativeOperations.linear

    def in_halves(
        self: NativeOperations, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        if x.numel() > x.shape[-1]:
            return whole(self, x, weight, bias)
        half = x.shape[-1] // 2
        return whole(self, x[..., :half], weight[:, :half], bias) + whole(
            self, x[..., half:], weight[:, half:]
        )

    monkeypatch.setattr(NativeOperations, "linear", in_halves)
    found = []
    for setting in (ALONE, SETTINGS[0]):
        with engine_of(folders, setting, {"batch_invariant": True, "compile": COMPILE["eager"]}) as engine:
            found.append(said(engine, setting, PARAMS["scored"]))
    assert found[0] != found[1]


def test_a_request_never_sees_two_forwards(folders: Folders) -> None:
    """Without the flag, a worker is eager until it has compiled; with it, it is not ready before."""
    for promised in (False, True):
        target = {"batch_invariant": promised, "compile": {"mode": "auto"}}
        with engine_of(folders, ALONE, target) as engine:
            assert any(work.pending() for work in engine.idle_work) is not promised


def ranks_config(folder: Path, compiled: bool, size: int, stages: int, method: str) -> EngineConfig:
    config = config_of(folder, size, stages=stages, **drafting(method, folder))
    changes = {
        "dtype": "bfloat16",
        "batch_invariant": True,
        "compile": CompileConfig(mode="auto" if compiled else "off"),
    }
    target = ModelConfig.model_validate({**config.target.model_dump(), **changes})
    return config.model_copy(update={"target": target})


def serve_in_two_ways(group: RankGroup, config: EngineConfig) -> Any:
    """Rank 0: what is said to prompts one at a time in small chunks, and to all together."""

    def use(engine: Engine) -> list[list[Said]]:
        everyone = []
        for params in PARAMS.values():
            plain = msgspec.structs.replace(params, max_tokens=8)
            singly = [_said(engine, [prompt], plain)[0] for prompt in PROMPTS_OF_RANKS]
            everyone.append([singly, _said(engine, PROMPTS_OF_RANKS, plain)])
        return everyone  # type: ignore[return-value]

    return lead(group, config, use)


def _said(engine: Engine, prompts: Sequence[Sequence[int]], params: SamplingParams) -> list[Said]:
    return [Said(one.token_ids, one.choices[0].logprobs) for one in engine.generate(prompts, params)]


@pytest.mark.parametrize(
    ("compiled", "size", "stages", "method"),
    [
        pytest.param(True, 2, 1, "ngram", id="tp2-compiled"),
        pytest.param(False, 2, 1, "none", id="tp2", marks=pytest.mark.full),
        pytest.param(False, 4, 1, "draft_model", id="tp4", marks=pytest.mark.full),
        pytest.param(False, 2, 2, "ngram", id="pp2", marks=pytest.mark.full),
        pytest.param(True, 2, 2, "none", id="pp2-compiled", marks=pytest.mark.full),
        pytest.param(False, 4, 2, "none", id="tp2-pp2", marks=pytest.mark.full),
    ],
)
def test_same_bits_over_ranks(
    rank_pool: Pools,
    tmp_path: Path,
    compiled: bool,
    size: int,
    stages: int,
    method: str,
) -> None:
    save_model(tmp_path, num_layers=4)
    config = ranks_config(tmp_path, compiled, size, stages, method)
    narrow = SchedulerConfig(max_num_seqs=2, max_num_batched_tokens=5)
    pool = rank_pool(size)
    ways = [
        pool.run(serve_in_two_ways, one)[0]
        for one in (config, config.model_copy(update={"scheduler": narrow}))
    ]
    for kind, wide, cut in zip(PARAMS, *ways, strict=True):
        singly = wide[0]
        for other in (wide[1], *cut):
            assert other == singly, kind
