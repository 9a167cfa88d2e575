"""Engines from a configuration: the five lines of the README, on a tiny model folder."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from specdec.attention.observation import Observation
from specdec.core.errors import CheckpointError, ConfigError, ResourceError
from specdec.core.ids import RequestId
from specdec.core.proposal import AheadOutcome, Proposal
from specdec.core.sampling_params import SamplingParams
from specdec.core.sequence import SequenceView
from specdec.engine.build import draft_bytes
from specdec.engine.build_drafter import build_draft_proposer, longest_draft_message
from specdec.engine.build_target import _observed_bytes, _self_drafting_of, build_target
from specdec.engine.config import EngineConfig
from specdec.engine.controllers import controller_for, cost_profile_of
from specdec.engine.draft_pool.remote_proposer import RemoteProposer
from specdec.engine.engine import Engine
from specdec.engine.profiling.rounds import measure_profile
from specdec.kv.block_scores import MAX_WINDOW, RunningScores
from specdec.model.config import CompileConfig, ModelConfig
from specdec.model.loader import load_model
from specdec.proposers.base import AheadWish, Proposer, ProposerCapabilities
from specdec.proposers.config import SpeculativeConfig
from specdec.scheduling.speculation.controller import FixedController, SpeculationController
from specdec.scheduling.speculation.cost import assumed_profile
from specdec.scheduling.speculation.cost_profile import CostProfile
from specdec.scheduling.speculation.goodput_controller import GoodputController
from specdec.scheduling.speculation.modes import OverlapMode
from specdec.transport.base import MAX_MESSAGE_BYTES, PeerId
from specdec.transport.memory import MemoryNetwork
from tests.architectures import save_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    save_model(path)
    return path


def config(folder: Path, **speculative: Any) -> EngineConfig:
    return EngineConfig.model_validate(
        {
            "target": {"model": str(folder), "dtype": "float32", "compile": {"mode": "off"}},
            "speculative_config": {
                "controller": "fixed",
                "compile": {"mode": "off"},
                "cache": {"num_blocks": 64},
            }
            | speculative,
            "cache": {"num_blocks": 64, "block_size": 4},
            "scheduler": {"max_num_seqs": 4},
        }
    )


def test_every_method_gives_the_same_text(folder: Path) -> None:
    texts = set()
    for method in ("none", "ngram", "suffix", "draft_model"):
        model = {"model": str(folder)} if method == "draft_model" else {}
        with Engine(config(folder, method=method, **model)) as engine:
            params = SamplingParams(temperature=0.9, seed=3, max_tokens=12)
            results = engine.generate(["hello, world", "the"], params)
            texts.add(tuple(result.text for result in results))
            if method == "draft_model":
                assert engine.metrics().num_accepted_tokens > 0
            assert engine.description.model_id == folder.name
            metrics = engine.metrics()
            assert 0 < metrics.target_forward_s + metrics.target_sample_s <= metrics.verify_s
    assert len(texts) == 1


def test_where_the_draft_model_ends_a_lookup_goes_on(folder: Path) -> None:
    """The draft model continues no more than 16 tokens; what stands in for it has no such limit."""
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    drafted = {"method": "draft_model", "model": str(folder), "max_model_len": 16}
    texts = []
    for speculative in ({"method": "none"}, drafted, {**drafted, "fallback": "ngram"}):
        with Engine(config(folder, **speculative)) as engine:
            texts.append(engine.generate([[5, 9, 5, 9, 5, 9, 5]], params)[0].token_ids)
            by_method = engine.metrics().by_method()
            assert ("ngram" in by_method) == ("fallback" in speculative)
            assert ("draft_model" in by_method) == ("model" in speculative)
    assert texts[0] == texts[1] == texts[2]


def test_text_is_the_same_once_everything_is_compiled(folder: Path) -> None:
    compiled = {"compile": {"mode": "auto"}}
    eager = config(folder, method="draft_model", model=str(folder), **compiled)
    target = eager.target.model_copy(update={"compile": CompileConfig()})
    with Engine(eager.model_copy(update={"target": target})) as engine:
        params = SamplingParams(temperature=0.9, seed=3, max_tokens=12)
        before = engine.generate(["hello, world", "the"], params)
        assert all(work.pending() for work in engine.idle_work)
        assert len(engine.idle_work) == 2
        engine.warm_up()
        assert not any(work.pending() for work in engine.idle_work)
        after = engine.generate(["hello, world", "the"], params)
    assert [result.token_ids for result in after] == [result.token_ids for result in before]


def test_a_length_that_was_asked_for_and_does_not_fit_is_an_error(folder: Path) -> None:
    """63 usable blocks of 4 tokens: what the model could do is cut to that, but not what somebody wants."""
    with Engine(config(folder, method="none")) as engine:
        assert engine.max_sequence_len == 252
    data = config(folder, method="none").model_dump()
    data["target"]["max_model_len"] = 252
    Engine(EngineConfig.model_validate(data)).close()
    data["target"]["max_model_len"] = 253
    with pytest.raises(ResourceError, match=r"max_model_len = 253, but the KV cache holds 252 tokens"):
        Engine(EngineConfig.model_validate(data))


def test_without_a_size_the_cache_is_what_all_requests_need(folder: Path) -> None:
    data = config(folder, method="none").model_dump()
    data["cache"] = {"block_size": 4}
    with Engine(EngineConfig.model_validate(data)) as engine:
        assert engine.description.num_blocks == 1 + 4 * 256 // 4


def test_memory_of_a_draft_model_in_this_process_is_reckoned_with(folder: Path) -> None:
    weights = (folder / "model.safetensors").stat().st_size
    sized = {"method": "draft_model", "model": str(folder), "cache": {"memory_bytes": 1 << 20}}
    compiled = SpeculativeConfig.model_validate(sized)
    assert draft_bytes(compiled) == 2 * weights + (1 << 20)
    eager = SpeculativeConfig.model_validate(sized | {"compile": {"mode": "off"}})
    assert draft_bytes(eager) == weights + (1 << 20)
    for method in ("none", "ngram"):
        assert draft_bytes(SpeculativeConfig.model_validate({"method": method})) == 0
    unsized = SpeculativeConfig.model_validate(sized | {"cache": {"block_size": 8}})
    assert unsized.cache.memory_bytes == SpeculativeConfig().cache.memory_bytes == 256 << 20


def test_messages_to_draft_workers_are_bounded_by_what_the_target_serves(folder: Path) -> None:
    short, long = (
        longest_draft_message(
            EngineConfig.model_validate({"target": {"model": str(folder), "max_model_len": length}})
        )
        for length in (32, 64)
    )
    assert short is not None
    assert long is not None
    assert long - short == 5 * 32
    assert long < MAX_MESSAGE_BYTES


def test_missing_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="nowhere"):
        Engine(config(tmp_path / "nowhere"))


def test_a_fixed_number_of_draft_tokens_is_what_the_configuration_says() -> None:
    def chosen(**speculative: Any) -> list[int]:
        controller = made(speculative)
        return list(controller.choose([None, None]))  # type: ignore[list-item]

    assert chosen(method="none") == [0, 0]
    assert chosen(num_speculative_tokens=7, controller="fixed") == [7, 7]


def made(speculative: dict[str, Any], modes: Sequence[OverlapMode] = ("lockstep",)) -> SpeculationController:
    """The controller of a configuration."""
    target = ModelConfig(model="anywhere")
    config = EngineConfig(target=target, speculative_config=SpeculativeConfig.model_validate(speculative))
    return controller_for(config, assumed_profile(), modes)


def test_the_controller_is_that_of_the_configuration() -> None:
    everything: tuple[OverlapMode, ...] = ("lockstep", "ping_pong", "draft_ahead")
    drafter = {"method": "draft_model", "model": "somewhere"}
    assert isinstance(made({}), GoodputController), "who says nothing never pays for speculation"
    assert isinstance(made({"controller": "goodput"}), GoodputController)
    assert isinstance(made({"controller": "fixed"}), FixedController)
    assert isinstance(made({"method": "none"}), FixedController)
    fixed = made(drafter | {"controller": "fixed", "overlap": "draft_ahead"}, everything)
    assert isinstance(fixed, FixedController)
    assert fixed.mode == "draft_ahead"
    assert made(drafter | {"controller": "fixed"}, everything).mode == "lockstep"
    with pytest.raises(ConfigError, match="overlap: ping_pong is not possible here, only lockstep"):
        made(drafter | {"overlap": "ping_pong"})


def test_the_controller_knows_how_many_levels_trees_have() -> None:
    drafter = {"method": "draft_model", "model": "somewhere", "num_speculative_tokens": 16}
    tree, chain = made(drafter | {"tree": {"shape": "dynamic", "top_k": 4, "depth": 5}}), made(drafter)
    assert isinstance(tree, GoodputController)
    assert isinstance(chain, GoodputController)
    tree_s, chain_s = (one._costs.draft.by_steps(np.ones(16), 64)[-1] for one in (tree, chain))
    assert 0.3 * chain_s < tree_s < 0.4 * chain_s, "5 levels, of 16 nodes"


def test_costs_are_measured_once_and_kept(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second start finds them; a configuration that costs depend on, or another folder, does not."""
    measured: list[str] = []

    def measure(*arguments: Any, **options: Any) -> CostProfile:
        measured.append(arguments[2].key)
        return measure_profile(*arguments, **options)

    monkeypatch.setattr("specdec.engine.controllers.measure_profile", measure)

    def start(name: str, max_num_seqs: int = 4) -> None:
        speculative = {"controller": "goodput", "profile_dir": str(tmp_path / name), "profile_seconds": 0.5}
        data = config(folder, method="draft_model", model=str(folder), **speculative).model_dump()
        data["scheduler"]["max_num_seqs"] = max_num_seqs
        with Engine(EngineConfig.model_validate(data)) as engine:
            engine.generate(["hello, world"], SamplingParams(max_tokens=8, seed=1, ignore_eos=True))
            engine.check_integrity()
            snapshot = engine.metrics().snapshot()
            assert snapshot["speculation_goodput_off"] > 0.0

    start("a")
    start("a")
    assert len(measured) == 1
    start("a", max_num_seqs=3)
    start("b")
    assert len(measured) == 3
    assert measured[0] == measured[2] != measured[1]
    monkeypatch.setattr(
        "specdec.engine.targets.local_target.device_name", lambda device: "cuda of another kind"
    )
    start("a")
    start("a")
    assert len(measured) == 4
    assert measured[3] not in measured[:3]


def test_drafts_are_measured_anew_on_other_devices_and_steps_of_the_target_are_not(
    tmp_path: Path, folder: Path
) -> None:
    speculative = {"controller": "goodput", "profile_dir": str(tmp_path), "profile_seconds": 0.5}
    its_config = config(folder, method="draft_model", model=str(folder), **speculative)
    target, drafter = build_target(its_config), build_draft_proposer(its_config)
    measured = partial(cost_profile_of, its_config, target, drafter)
    first = measured(draft_devices=lambda: ["A", "B", "A"])
    assert first.draft
    assert measured(draft_devices=lambda: ["B", "A"]) == first
    assert measured() == first, "nobody has said yet where drafts are made"
    assert measured(await_drafters=pytest.fail) == first, "nothing is missing: nobody is waited for"
    second = measured(draft_devices=lambda: ["C"])
    assert second.verify == first.verify
    assert second.draft != first.draft
    assert (first.draft_devices, second.draft_devices) == (("A", "B"), ("C",))
    drafter.close()
    target.close()


@pytest.mark.parametrize("policy", ["verified", "snapkv", "streaming"])
def test_what_observed_rounds_take_is_in_the_plan(folder: Path, policy: str) -> None:
    its_config = config(folder, method="self", num_speculative_tokens=3, kv={"policy": policy, "budget": 16})
    loaded = load_model(its_config.target)
    planned = _observed_bytes(its_config, loaded)
    if policy == "streaming":
        assert planned == 0
        return
    limits = its_config.scheduler
    num_rows = min(MAX_WINDOW, limits.max_num_batched_tokens // limits.max_num_seqs)
    largest = Observation.of(
        [num_rows] * limits.max_num_seqs,
        query_lens=[num_rows] * limits.max_num_seqs,
        num_blocks=-(-loaded.max_model_len // 4),
        layers=loaded.layers,
        device=loaded.device,
    )
    assert planned == largest.masses.nbytes, "whose prompts end in one round, by either policy"


@pytest.mark.parametrize(
    ("device", "given", "interval"), [("cpu", None, 1), ("cuda", None, 16), ("cuda", 2, 2)]
)
def test_on_gpus_verification_is_looked_at_now_and_then(
    folder: Path, device: str, given: int | None, interval: int
) -> None:
    kv = {"policy": "verified", "budget": 16, "rescore_every": given}
    its_config = config(folder, method="self", num_speculative_tokens=3, kv=kv)
    loaded = load_model(its_config.target)
    selection = _self_drafting_of(its_config, replace(loaded, device=torch.device(device)))
    assert selection is not None
    scores = selection.make_scores()
    assert isinstance(scores, RunningScores)
    assert scores._interval == interval


def test_drafts_are_kept_with_the_devices_of_those_that_were_waited_for(tmp_path: Path, folder: Path) -> None:
    """Both start at once: who drafts, and on what, is known when it is there."""
    speculative = {"controller": "goodput", "profile_dir": str(tmp_path), "profile_seconds": 0.5}
    its_config = config(folder, method="draft_model", model=str(folder), **speculative)
    target, drafter = build_target(its_config), build_draft_proposer(its_config)
    devices: list[str] = []
    measured = partial(cost_profile_of, its_config, target, drafter, draft_devices=lambda: devices)
    first = measured(await_drafters=lambda: devices.append("A"))
    assert first.draft
    assert first.draft_devices == ("A",)
    assert measured(await_drafters=pytest.fail) == first
    drafter.close()
    target.close()


def test_a_draft_pool_that_comes_later_is_measured_at_the_next_start(tmp_path: Path, folder: Path) -> None:
    """Steps of the target are not measured again."""
    speculative = {"controller": "goodput", "profile_dir": str(tmp_path / "p"), "profile_seconds": 1.0}
    its_config = config(folder, method="draft_model", model=str(folder), **speculative)
    target = build_target(its_config)
    late = RemoteProposer(
        MemoryNetwork().open(PeerId("c")),
        capabilities=ProposerCapabilities(name="draft_model", kv="own", remote=True, looks_ahead=True),
        vocab_size=target.description.vocab_size,
    )
    without = cost_profile_of(its_config, target, late)
    assert without.verify
    assert not without.draft
    there = build_draft_proposer(its_config)
    complete = cost_profile_of(its_config, target, there)
    assert complete.verify == without.verify
    assert complete.draft
    assert cost_profile_of(its_config, target, late) == complete
    late.close()
    there.close()
    target.close()


class FallsSilent:
    """A drafter elsewhere that answers so many times."""

    ready_s: float | None = None

    def __init__(self, inner: Proposer, num_answers: int) -> None:
        self.inner, self.num_answers = inner, num_answers
        self.capabilities = replace(inner.capabilities, remote=True)

    def propose(
        self, sequences: Sequence[SequenceView], num_draft_tokens: Mapping[RequestId, int]
    ) -> dict[RequestId, Proposal]:
        self.num_answers -= 1
        self.ready_s = None if self.num_answers < 0 else 0.001
        return {} if self.num_answers < 0 else self.inner.propose(sequences, num_draft_tokens)

    def look_ahead(self, wishes: Sequence[AheadWish]) -> None: ...

    def take_ahead_outcomes(self) -> Sequence[AheadOutcome]:
        return ()

    def take_drafting_s(self) -> float:
        return 0.0

    def release(self, request_ids: Iterable[RequestId]) -> None:
        self.inner.release(request_ids)

    def close(self) -> None: ...


def test_what_a_silent_drafter_left_out_is_measured_at_the_next_start(tmp_path: Path, folder: Path) -> None:
    """What is on disk says that there is more to measure, and where what it has was measured."""
    speculative = {"controller": "goodput", "profile_dir": str(tmp_path / "p"), "profile_seconds": 60.0}
    its_config = config(folder, method="draft_model", model=str(folder), **speculative)
    target, inner = build_target(its_config), build_draft_proposer(its_config)
    short = cost_profile_of(its_config, target, FallsSilent(inner, 14), draft_devices=lambda: ["A"])
    assert 0 < len(short.draft) < 4
    assert not short.has_all_drafts
    assert cost_profile_of(its_config, target, FallsSilent(inner, 0)) == short
    whole = cost_profile_of(its_config, target, FallsSilent(inner, 9999))
    assert whole.draft[: len(short.draft)] == short.draft
    assert len(whole.draft) == 4
    assert whole.has_all_drafts
    assert whole.draft_devices == ("A",)
    assert cost_profile_of(its_config, target, FallsSilent(inner, 0)) == whole
    inner.close()
    target.close()


def test_nothing_is_measured_where_nothing_depends_on_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("specdec.engine.controllers.measure_profile", None)
    Engine(config(folder, method="none", controller="goodput")).close()
    Engine(config(folder, method="ngram")).close()
    Engine(config(folder, method="ngram", controller="goodput", profile_seconds=0)).close()
