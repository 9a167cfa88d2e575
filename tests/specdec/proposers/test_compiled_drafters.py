"""Drafters as native calls against the same drafters run eagerly, and what may keep them from being used."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from specdec.attention.cpu import CpuPagedAttention
from specdec.attention.native import NativeUnavailable
from specdec.attention.sdpa import SdpaAttention
from specdec.core.idle_work import idle_work_of
from specdec.drafters.base import HeadsDrafter
from specdec.kv.config import CacheConfig
from specdec.model import compile_work, native_compile
from specdec.model.config import CompileConfig
from specdec.model.lowering import Norm, Operation
from specdec.model.native_forward import load_forward_library
from specdec.model.packed_weights import PackedWeights, panel_bytes
from specdec.model.trace import Value
from specdec.proposers import compiled_drafters
from specdec.proposers.base import Proposer
from specdec.proposers.compiled_drafters import CompiledHeads
from specdec.proposers.draft_sampling import SHARED_NOISE, DraftSampling
from specdec.proposers.feature_runner import FeatureRunner
from specdec.tree.growth import TreeShape
from specdec.verification.registry import capabilities_of
from tests.specdec.proposers import feature_proposers, head_proposers
from tests.specdec.proposers.compiled_proposers import HOW, compiled, warm_sampler
from tests.specdec.proposers.proposer_setup import ProposerSetup
from tests.specdec.proposers.proposing_rounds import PARAMS, SHAPED, drafted

pytestmark = pytest.mark.usefixtures("one_thread")
HEADS = ["medusa", "hydra", "hydra++", "parallel_heads"]
FEATURES = ["eagle", "eagle3", "eagle3.1", "mtp"]
SHAPES: Mapping[str, TreeShape | None] = {
    "chain": None,
    "static": feature_proposers.STATIC,
    "dynamic": feature_proposers.DYNAMIC,
}


@pytest.fixture(scope="module", autouse=True)
def _can_be_compiled() -> None:
    try:
        CpuPagedAttention()
    except NativeUnavailable as error:
        pytest.skip(f"nothing can be compiled here: {error}")


def make(kind: str, shape: str = "chain", sampling: DraftSampling = SHARED_NOISE, **more: Any) -> Proposer:
    made = head_proposers.make if kind in HEADS else feature_proposers.make
    setup = ProposerSetup(sampling=sampling, shape=SHAPES[shape], sampler=warm_sampler(), **more)
    return made(kind, setup)


def module_of(kind: str) -> torch.nn.Module:
    return head_proposers.make_heads(kind) if kind in HEADS else feature_proposers.make_drafter(kind)


def refuse(*_: Any, **__: Any) -> Any:
    raise AssertionError("run eagerly")


@pytest.mark.cover(1, "kind")
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", [*HEADS, *FEATURES])
def test_drafts_are_those_of_the_eager_module(kind: str, shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ragged batches, several tokens to catch up on, mixed budgets and parameters; nothing runs eagerly."""
    expected = drafted(make(kind, shape), seed=1)
    proposer = compiled(make(kind, shape, how=HOW))
    for name in ("head", "prepare", "fuse", "step"):
        if hasattr(module_of(kind), name):
            monkeypatch.setattr(module_of(kind), name, refuse)
    assert drafted(proposer, seed=1) == expected
    num_tokens = [one.num_tokens for proposals in expected for one in proposals.values()]
    assert max(num_tokens) > 2


@pytest.mark.parametrize("kind", ["hydra++", "eagle3"])
def test_logits_are_native_where_something_is_done_with_them(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Penalties, and rules that ask what a token was drawn from: q differs in its last bits at most."""
    shaped = drafted(make(kind), seed=2, params=(SHAPED, *PARAMS))
    sampling = DraftSampling.under(capabilities_of("rejection"))
    told = drafted(make(kind, sampling=sampling), seed=3)
    proposers = [compiled(make(kind, how=HOW)), compiled(make(kind, sampling=sampling, how=HOW))]
    for name in ("head", "step"):
        if hasattr(module_of(kind), name):
            monkeypatch.setattr(module_of(kind), name, refuse)
    assert drafted(proposers[0], seed=2, params=(SHAPED, *PARAMS)) == shaped
    for ours, theirs in zip(drafted(proposers[1], seed=3), told, strict=True):
        assert {name: one.token_ids for name, one in ours.items()} == {
            name: one.token_ids for name, one in theirs.items()
        }
        assert any(one.q_rows for one in ours.values())


def test_before_it_is_ready_and_without_compilation_all_is_eager() -> None:
    expected = drafted(make("eagle"), seed=4)
    assert drafted(make("eagle", how=HOW), seed=4) == expected, "pending"
    off = make("eagle", how=replace(HOW, config=CompileConfig(mode="off")))
    (work,) = idle_work_of(off)
    assert (work.state, work.pending()) == ("off", False)
    assert drafted(off, seed=4) == expected


@pytest.mark.parametrize("kind", ["medusa", "mtp"])
def test_progress_comes_to_its_end(kind: str) -> None:
    (work,) = idle_work_of(make(kind, how=HOW))
    done: list[int] = []
    while work.pending():
        work.run_next()
        done.append(work.progress().done)
        assert work.progress().done < work.progress().total
    assert done == sorted(done)
    assert done[-1] + 1 == work.progress().total, "the build counts"


@pytest.mark.parametrize("kind", ["hydra++", "eagle3"])
def test_a_wrong_form_is_not_used(
    kind: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fuse = native_compile.fuse

    def spoiled(operations: Sequence[Operation], results: Sequence[Value]) -> list[Operation]:
        return [
            replace(operation, epsilon=0.5) if isinstance(operation, Norm) else operation
            for operation in fuse(operations, results)
        ]

    expected = drafted(make(kind), seed=5)
    monkeypatch.setattr(native_compile, "fuse", spoiled)
    proposer = make(kind, how=HOW)
    (work,) = idle_work_of(proposer)
    with caplog.at_level(logging.WARNING):
        while work.pending():
            work.run_next()
    assert work.state == "failed"
    (record,) = [entry for entry in caplog.records if entry.name == compile_work.__name__]
    assert "heads runs eagerly, which is slower: its" in record.getMessage()
    assert "differ from the eager ones" in record.getMessage()
    assert drafted(proposer, seed=5) == expected


def test_a_head_that_cannot_be_lowered_stays_eager(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    expected = drafted(make("medusa"), seed=6)
    head = HeadsDrafter.head

    def with_sine(self: Any, depth: int, inputs: torch.Tensor) -> torch.Tensor:
        return torch.sin(head_of_medusa(self, depth, inputs))

    head_of_medusa = type(module_of("medusa")).head
    assert head_of_medusa is not head
    monkeypatch.setattr(type(module_of("medusa")), "head", with_sine)
    proposer = make("medusa", how=HOW)
    (work,) = idle_work_of(proposer)
    with caplog.at_level(logging.WARNING):
        while work.pending():
            work.run_next()
    assert work.state == "failed"
    assert "sin.default has no native form" in caplog.text
    monkeypatch.undo()
    assert drafted(proposer, seed=6) == expected


@pytest.mark.parametrize("kind", ["eagle", "parallel_heads"])
def test_what_the_target_has_packed_is_not_packed_again(kind: str) -> None:
    target = module_of(kind).target
    weight = target.head.weight  # type: ignore[union-attr]
    packed = PackedWeights(load_forward_library(compile_work.resolve_cache_dir(None)), 1 << 20)
    packed.pack(weight)  # type: ignore[arg-type]
    works = []
    for of_target in (lambda: None, lambda: packed):
        proposer = make(kind, how=replace(HOW, of_target=of_target))
        (work,) = idle_work_of(compiled(proposer))
        works.append(work)
    alone, beside = (work.num_packed_bytes for work in works)  # type: ignore[attr-defined]
    assert alone - beside == panel_bytes(weight)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["hydra++", "eagle3"])
def test_bf16_is_compiled_too(kind: str) -> None:
    """The self-check compares it with the module."""
    module = head_proposers.make_heads.__wrapped__(kind) if kind in HEADS else None
    drafter = feature_proposers.make_drafter.__wrapped__(kind) if module is None else None
    cache_config = CacheConfig(block_size=4, num_blocks=20)
    limits = {"max_num_seqs": 2, "max_model_len": 32, "backend": SdpaAttention()}
    work: Any
    if module is not None:
        module = module.to(torch.bfloat16)
        pool = compiled_drafters.DrafterPool(module, module.attention_layers, cache_config, **limits)
        work = CompiledHeads(module, HOW, pool)
    else:
        assert drafter is not None
        drafter = drafter.to(torch.bfloat16)
        drafter.target.embeddings.to(torch.bfloat16)
        work = FeatureRunner(drafter, cache_config, **limits).compile(HOW)
    assert work.warm_up() == "ready"
