"""EAGLE, EAGLE-3 and MTP by configuration: a folder as it is published, drafting beside the target."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Glm4MoeConfig

from specdec.core.errors import ConfigError
from specdec.core.sampling_params import SamplingParams
from specdec.drafters.attention import CausalRows
from specdec.drafters.base import FeatureDrafter, TargetParts
from specdec.drafters.checkpoints.mtp import save_mtp
from specdec.drafters.mtp import Mtp
from specdec.engine.config import EngineConfig
from specdec.engine.engine import Engine
from specdec.proposers.config import SpeculativeConfig
from tests.architectures import EOS_TOKEN_ID, VOCAB_SIZE, make_tokenizer
from tests.rank_pool import Failure, Pools
from tests.specdec.drafters.conftest import randomize
from tests.specdec.engine.configured_heads import config_of, refusal, serve
from tests.specdec.engine.drafter_bench import Bench
from tests.specdec.engine.fitted_drafters import FittedDrafters, fit
from tests.specdec.engine.linear_heads import hidden_of
from tests.specdec.engine.lookup_watch import LookupWatch
from tests.specdec.engine.sampling_kinds import GREEDY, KINDS
from tests.specdec.engine.tiny_models import PROMPTS, Models

pytestmark = pytest.mark.usefixtures("one_thread")
METHODS = ["eagle", "eagle3", "eagle3 of a part", "mtp", "mtp of three"]
"""What is fitted; the first word is the method of the configuration."""
Fitted = Callable[[str], FeatureDrafter]


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(Models(tmp_path_factory.mktemp("models")))


@pytest.fixture(scope="module")
def drafters(bench: Bench, tmp_path_factory: pytest.TempPathFactory) -> FittedDrafters:
    return FittedDrafters(bench, tmp_path_factory)


@pytest.fixture(scope="module")
def fitted(drafters: FittedDrafters) -> Fitted:
    return drafters.fitted


@pytest.fixture(scope="module")
def folder_of(drafters: FittedDrafters) -> Callable[[str], Path]:
    return drafters.folder_of


@torch.no_grad()
def drafted(drafter: FeatureDrafter, states: torch.Tensor, token_ids: Sequence[int], num: int) -> list[int]:
    """Return the greedy chain behind tokens, whose states before the last are `states`: no cache."""
    features = drafter.fuse(states[None])
    if isinstance(drafter, Mtp) and drafter.num_modules > 1:
        return drafted_by_modules(drafter, features, token_ids, num)
    path: list[int] = []
    while len(path) < num:
        read = torch.tensor([[*token_ids, *path]])[:, 1:]
        step = drafter.step(drafter.embed(read), features, torch.arange(read.shape[1])[None], CausalRows())
        path.append(best(drafter, step.outputs[0, -1]))
        features = torch.cat([features, step.features[:, -1:]], dim=1)
    return path


def best(drafter: FeatureDrafter, outputs: torch.Tensor) -> int:
    """Return the target's id of the likeliest token."""
    chosen = drafter.logits(outputs).argmax()
    return int(chosen if drafter.vocabulary is None else drafter.vocabulary.to_target(chosen))


def drafted_by_modules(drafter: Mtp, features: torch.Tensor, token_ids: Sequence[int], num: int) -> list[int]:
    """The same of several modules: module m over rows whose tokens are those of m places later."""
    path: list[int] = []
    for depth in range(num):
        # The last module is used again: behind its own depth its rows are those that it has drafted itself.
        read = torch.tensor([[*token_ids, *path]])[:, 1 + min(depth, drafter.num_modules - 1) :]
        positions = torch.arange(read.shape[1])[None]
        step = drafter.step(drafter.embed(read), features, positions, CausalRows(), depth)
        path.append(best(drafter, step.outputs[0, -1]))
        if depth < drafter.num_modules - 1:
            features = step.features
        else:
            features = torch.cat([features, step.features[:, -1:]], dim=1)
    return path


def predicted(bench: Bench, drafter: FeatureDrafter, k: int) -> tuple[int, int]:
    """Return how many tokens are drafted and accepted, by the module alone on what transformers computes."""
    num_drafted = num_accepted = 0
    for prompt, stream in zip(PROMPTS, bench.alone("llama", "greedy"), strict=True):
        text = [*prompt, *stream]
        states = hidden_of(bench.models.reference("llama"), text, drafter.hidden_layers)
        length = len(prompt) + 1
        while length < len(text):
            budget = min(k, len(text) - length - 1)
            chain = drafted(drafter, states[: length - 1], text[:length], budget)
            stands = 0
            while stands < budget and chain[stands] == text[length + stands]:
                stands += 1
            num_drafted += budget
            num_accepted += stands
            length += stands + 1
    return num_drafted, num_accepted


@pytest.mark.parametrize("method", METHODS)
def test_acceptance_is_what_the_module_predicts(
    bench: Bench, fitted: Fitted, folder_of: Callable[[str], Path], method: str
) -> None:
    """Chunked prompts, alone and in company: a state, position or K/V of elsewhere would cost acceptance."""
    num_drafted, num_accepted = predicted(bench, fitted(method), 4)
    assert num_accepted > 0.3 * num_drafted, "not fitted"
    config = config_of(bench, folder_of(method), method.split(maxsplit=1)[0], num_speculative_tokens=4)
    with Engine(config) as engine:
        alone = [engine.generate([one], GREEDY)[0].token_ids for one in PROMPTS]
        metrics = engine.metrics()
        counted = metrics.num_draft_tokens, metrics.num_accepted_tokens
        results = engine.generate(PROMPTS, GREEDY)
        metrics = engine.metrics()
        engine.check_integrity()
    assert alone == [one.token_ids for one in results] == bench.alone("llama", "greedy")
    assert counted == (num_drafted, num_accepted)
    # Where a step is full of other requests' tokens, fewer are drafted.
    share = (metrics.num_accepted_tokens - num_accepted) / (metrics.num_draft_tokens - num_drafted)
    assert share > 0.93 * num_accepted / num_drafted


@pytest.mark.parametrize("method", ["eagle", pytest.param("eagle3", marks=pytest.mark.full), "mtp"])
def test_behind_lookups_the_module_drafts_as_well_as_ever(
    bench: Bench,
    fitted: Fitted,
    folder_of: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
    method: str,
) -> None:
    """It has read what others have drafted: a gap in its K/V would cost acceptance."""
    num_drafted, num_accepted = predicted(bench, fitted(method), 4)
    config = config_of(bench, folder_of(method), method, num_speculative_tokens=4, lookup_first=2)
    watch = LookupWatch()
    watch.begin(monkeypatch)
    with Engine(config) as engine:
        results = [engine.generate([one], GREEDY)[0].token_ids for one in PROMPTS]
        together = [one.token_ids for one in engine.generate(PROMPTS, KINDS["plain"])]
        engine.check_integrity()
    assert results == bench.alone("llama", "greedy")
    assert together == bench.alone("llama", "plain")
    assert len(watch.looked_up) > 10
    assert sum(watch.at_target) > 20
    assert sum(watch.accepted_at_target) > 0.7 * num_accepted / num_drafted * sum(watch.at_target)


@pytest.mark.parametrize(
    ("method", "kind", "more"),
    [
        pytest.param("eagle", "plain", {}, marks=pytest.mark.full),
        ("mtp", "penalties", {}),
        (
            "eagle3",
            "cut",
            {"tree": {"shape": "dynamic", "top_k": 3, "depth": 4}, "num_speculative_tokens": 10},
        ),
        ("eagle", "greedy", {"tree": {"shape": "static", "widths": [3, 2]}, "num_speculative_tokens": 9}),
        ("mtp", "plain", {"tree": {"shape": "dynamic", "top_k": 2, "depth": 4}, "num_speculative_tokens": 8}),
        ("eagle3", "greedy", {"cache_blocks": 12}),
        ("eagle", "plain", {"tree": {"shape": "entropy"}, "num_speculative_tokens": 8}),
        ("mtp of three", "plain", {"cache_blocks": 40, "num_speculative_tokens": 5}),
        (
            "mtp of three",
            "cut",
            {"tree": {"shape": "dynamic", "top_k": 2, "depth": 4}, "num_speculative_tokens": 8},
        ),
        pytest.param("mtp of three", "penalties", {}, marks=pytest.mark.full),
    ],
)
def test_nothing_of_it_shows(
    bench: Bench, folder_of: Callable[[str], Path], method: str, kind: str, more: dict[str, Any]
) -> None:
    """With preemptions of the target; and with a cache of the drafter's that does not hold all requests."""
    more = dict(more)
    cache = {"block_size": 4, "num_blocks": more.pop("cache_blocks", 200)}
    folder, method = folder_of(method), method.split(maxsplit=1)[0]
    speculative = config_of(bench, folder, method, **more).speculative_config.model_dump()
    speculative["cache"] = cache
    config = config_of(bench, folder, method, cache={"block_size": 4, "num_blocks": 20}).model_copy(
        update={"speculative_config": SpeculativeConfig.model_validate(speculative)}
    )
    with Engine(config) as engine:
        results = engine.generate(PROMPTS, KINDS[kind])
        metrics = engine.metrics()
        engine.check_integrity()
    assert [one.token_ids for one in results] == bench.alone("llama", kind)
    assert metrics.num_preemptions > 0
    assert metrics.num_accepted_tokens > 10


@pytest.mark.cover(1)
@pytest.mark.parametrize("method", ["eagle", "eagle3", "mtp"])
@pytest.mark.parametrize(
    "more", [{}, {"tree": {"shape": "dynamic", "top_k": 3, "depth": 4}, "num_speculative_tokens": 10}]
)
def test_compiled_they_draft_what_they_draft_eagerly(
    bench: Bench, folder_of: Callable[[str], Path], method: str, more: dict[str, Any]
) -> None:
    counted: list[tuple[int, int]] = []
    for mode in ("off", "auto"):
        config = config_of(bench, folder_of(method), method, compile={"mode": mode}, **more)
        with Engine(config) as engine:
            engine.warm_up()
            assert [one.state for one in engine.idle_work] == ["off", "off" if mode == "off" else "ready"]
            for kind in ("greedy", "plain"):
                results = engine.generate(PROMPTS, KINDS[kind])
                assert [one.token_ids for one in results] == bench.alone("llama", kind)
            metrics = engine.metrics()
            counted.append((metrics.num_draft_tokens, metrics.num_accepted_tokens))
    assert counted[0] == counted[1]
    assert counted[0][1] > 20


def test_a_cached_prefix_is_read_from_its_rows(bench: Bench, folder_of: Callable[[str], Path]) -> None:
    """The target computes nothing of it, and the drafter drafts as behind a prefix that was computed."""
    with Engine(config_of(bench, folder_of("eagle"), "eagle", num_speculative_tokens=4)) as engine:
        prompt = PROMPTS[6]
        engine.generate([prompt], GREEDY)
        before = engine.metrics()
        num_hits, num_accepted = before.prefix_cache_hits, before.num_accepted_tokens
        engine.generate([prompt], GREEDY)
        after = engine.metrics()
    assert after.prefix_cache_hits > num_hits
    # Only the token behind the cached blocks is computed, and drafted behind at once: rounds begin elsewhere.
    assert after.num_accepted_tokens - num_accepted > 0.8 * num_accepted > 0


@pytest.mark.parametrize(
    "rule", ["rejection", *(pytest.param(one, marks=pytest.mark.full) for one in ("block", "multi_round"))]
)
def test_rules_that_look_at_probabilities_get_them(
    bench: Bench, folder_of: Callable[[str], Path], rule: str
) -> None:
    with Engine(config_of(bench, folder_of("eagle"), "eagle", rejection_sample_method=rule)) as engine:
        results = engine.generate(PROMPTS, GREEDY)
        assert [one.token_ids for one in results] == bench.alone("llama", "greedy")
        before = engine.metrics().num_accepted_tokens
        engine.generate(PROMPTS, SamplingParams(temperature=0.8, max_tokens=16, seed=3))
        assert engine.metrics().num_accepted_tokens > before


@pytest.mark.parametrize(
    ("method", "target"),
    [
        ("eagle", {"tensor_parallel_size": 2}),
        ("mtp", {"pipeline_parallel_size": 2}),
        pytest.param("eagle3", {"tensor_parallel_size": 2}, marks=pytest.mark.full),
        pytest.param("mtp", {"tensor_parallel_size": 2}, marks=pytest.mark.full),
        pytest.param("eagle", {"pipeline_parallel_size": 2}, marks=pytest.mark.full),
        pytest.param("mtp of three", {"tensor_parallel_size": 2}, marks=pytest.mark.full),
    ],
)
def test_they_draft_for_a_target_over_two_ranks(
    bench: Bench, folder_of: Callable[[str], Path], rank_pool: Pools, method: str, target: dict[str, int]
) -> None:
    """What they compute with of the target is read in full where they are."""
    config = config_of(bench, folder_of(method), method.split(maxsplit=1)[0], target=target)
    streams, num_accepted = rank_pool(2).run(serve, config)[0]
    assert streams == bench.alone("llama", "greedy")
    assert num_accepted > 20


@pytest.mark.full
def test_states_of_an_earlier_stage_are_refused_in_all_of_them(
    bench: Bench, folder_of: Callable[[str], Path], rank_pool: Pools
) -> None:
    config = config_of(bench, folder_of("eagle3"), "eagle3", target={"pipeline_parallel_size": 2})
    answers = rank_pool(2).run(refusal, config)
    assert not any(isinstance(one, Failure) for one in answers)
    assert all("which an earlier stage of the pipeline computes" in one for one in answers)


def test_a_mixture_of_glm_drafts_with_the_module_beside_it(tmp_path: Path) -> None:
    """Its layer is of the target's kind: experts, and positions that turn half of a head."""
    torch.manual_seed(0)
    target: Any = AutoModelForCausalLM.from_config(
        Glm4MoeConfig(
            vocab_size=VOCAB_SIZE,
            hidden_size=32,
            intermediate_size=64,
            moe_intermediate_size=24,
            num_hidden_layers=3,
            first_k_dense_replace=1,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            n_routed_experts=4,
            num_experts_per_tok=2,
            max_position_embeddings=256,
            eos_token_id=EOS_TOKEN_ID,
        ),
        attn_implementation="eager",
    ).eval()
    target.save_pretrained(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    streams = [
        target.generate(torch.tensor([one]), max_new_tokens=20, do_sample=False, pad_token_id=0)[0].tolist()
        for one in PROMPTS
    ]
    module = Mtp(TargetParts.of(target.requires_grad_(requires_grad=False)))
    randomize(module, seed=5)  # experts that are made one by one have no weights yet
    fit(module, target, streams)
    save_mtp(module, tmp_path)
    config = EngineConfig.model_validate(
        {
            "target": {"model": str(tmp_path), "dtype": "float32", "compile": {"mode": "off"}},
            "speculative_config": {"method": "mtp", "controller": "fixed", "compile": {"mode": "off"}},
            "cache": {"num_blocks": 60},
        }
    )
    with Engine(config) as engine:
        results = engine.generate(PROMPTS, GREEDY)
        metrics = engine.metrics()
        engine.check_integrity()
    assert [[*one, *got.token_ids] for one, got in zip(PROMPTS, results, strict=True)] == streams
    assert metrics.num_accepted_tokens > 0.3 * metrics.num_draft_tokens


def test_what_cannot_be_drafted_with_is_refused(bench: Bench, folder_of: Callable[[str], Path]) -> None:
    with pytest.raises(ConfigError, match=r"method: eagle3, but .* holds Eagle: write method: eagle"):
        Engine(config_of(bench, folder_of("eagle"), "eagle3"))
    for fields, message in (
        ({"method": "eagle"}, "method eagle needs `model`"),
        ({"method": "eagle", "model": "x", "cache": {"memory_fraction": 0.5}}, "cache.memory_fraction: 0.5"),
        ({"method": "mtp", "device": "cuda"}, "device: heads run in the target's process"),
    ):
        with pytest.raises(ValueError, match=message):
            SpeculativeConfig.model_validate(fields)
