"""Layers behind an early exit, run on states that the exit has left: bit for bit what the whole gives."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from specdec.model.batch import SequenceSlice
from specdec.model.config import CompileConfig, ModelConfig
from specdec.model.exit_states import ExitStates
from specdec.model.graphs import CompiledForward
from specdec.model.layer_map import CONFIG_KEY
from specdec.model.loader import LoadedModel, load_model
from specdec.model.native_forward import NativeForward
from specdec.model.resumed_forward import ResumedForward
from specdec.model.runner import ModelRunner
from specdec.model.views import early_exit, exit_tap
from tests.architectures import ARCHITECTURES, save_model
from tests.pairwise import mostly_full
from tests.quantizer import some_quantizer
from tests.specdec.model.compiled_runners import compiled_runner, make_batches

pytestmark = pytest.mark.usefixtures("one_thread_each")
LoadedOf = Callable[..., LoadedModel]
NUM_LAYERS = 4
EXIT = 2


@pytest.fixture(autouse=True)
def _quantizer() -> Iterator[None]:
    with some_quantizer():
        yield


@pytest.fixture(scope="module")
def loaded_of(tmp_path_factory: pytest.TempPathFactory) -> LoadedOf:
    folder = tmp_path_factory.mktemp("models")

    @cache
    def saved(architecture: str) -> str:
        save_model(folder / architecture, architecture, num_layers=NUM_LAYERS)
        return str(folder / architecture)

    def load(architecture: str, **settings: Any) -> LoadedModel:
        return load_model(
            ModelConfig.model_validate({"model": saved(architecture), "dtype": "float32", **settings})
        )

    return load


class Resuming:
    """A model, its early exit, and what goes on behind that."""

    def __init__(self, loaded: LoadedModel, exit_layer: int = EXIT) -> None:
        self.whole = compiled_runner(loaded)
        self.view = self.whole.of_view(early_exit(loaded, exit_layer), exit_tap(loaded, exit_layer))
        self.view.graphs = graphs = CompiledForward(self.view, CompileConfig(), like=self._graphs)
        assert graphs.warm_up() == "ready"
        self.forward = ResumedForward(self.whole, self.view, CompileConfig())
        self.state = self.forward.warm_up()

    @property
    def _graphs(self) -> CompiledForward:
        assert isinstance(self.whole.graphs, CompiledForward)
        return self.whole.graphs

    def run(self, batch: list[SequenceSlice]) -> torch.Tensor:
        """Run a batch of which the exit has read some before: of every other slice all rows but the last."""
        with self.forward.collecting(self.forward.fewest_rows) as states:
            assert states is not None
            begun = [without_last(piece) for piece in batch[::2] if len(piece.token_ids) > 1]
            if begun:
                self.view.forward(begun)
        logits = self.forward.try_run(batch, states)
        assert logits is not None
        return logits.clone()


def without_last(piece: SequenceSlice) -> SequenceSlice:
    return replace(piece, token_ids=piece.token_ids[:-1], num_logit_rows=0)


def assert_same_bits(resuming: Resuming, whole: ModelRunner) -> None:
    for batch in make_batches(whole):
        assert torch.equal(resuming.run(batch), whole.forward(batch))
    for mine, expected in (
        (resuming.whole.pool.keys, whole.pool.keys),
        (resuming.whole.pool.values, whole.pool.values),
    ):
        assert all(map(torch.equal, mine, expected))


@pytest.mark.parametrize(
    "architecture", mostly_full(tuple(ARCHITECTURES), ("llama", "gemma3", "gpt2", "mixtral"))
)
def test_same_bits_as_the_whole(loaded_of: LoadedOf, architecture: str) -> None:
    loaded = loaded_of(architecture)
    resuming = Resuming(loaded)
    assert resuming.state == "ready", resuming.forward.failure
    assert_same_bits(resuming, compiled_runner(loaded))


@pytest.mark.parametrize(
    "settings", [{"dtype": "bfloat16"}, {"quantization": "int8"}, {"batch_invariant": True}], ids=str
)
def test_same_bits_in_every_form(loaded_of: LoadedOf, settings: dict[str, Any]) -> None:
    loaded = loaded_of("llama", **settings)
    resuming = Resuming(loaded)
    assert resuming.state == "ready", resuming.forward.failure
    assert_same_bits(resuming, compiled_runner(loaded))


def test_layers_of_inflated_checkpoints_are_the_original_ones(loaded_of: LoadedOf) -> None:
    loaded = copy.copy(loaded_of("llama"))
    config = copy.deepcopy(loaded.config)
    setattr(config, CONFIG_KEY, [0, 3])
    object.__setattr__(loaded, "config", config)
    resuming = Resuming(loaded, 1)
    assert resuming.state == "ready"
    assert_same_bits(resuming, compiled_runner(loaded))


def test_packs_nothing_again(loaded_of: LoadedOf) -> None:
    resuming = Resuming(loaded_of("llama"))
    before = resuming._graphs.num_packed_bytes
    assert ResumedForward(resuming.whole, resuming.view, CompileConfig()).warm_up() == "ready"
    assert resuming._graphs.num_packed_bytes == before > 0


def test_control_a_wrong_state_is_noticed(loaded_of: LoadedOf, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded, of = loaded_of("llama"), ExitStates.of

    def wrong(states: ExitStates, slices: list[SequenceSlice]) -> torch.Tensor:
        rows = of(states, slices)
        rows[0, 0] = torch.nextafter(rows[0, 0], torch.tensor(torch.inf))
        return rows

    monkeypatch.setattr(ExitStates, "of", wrong)
    with pytest.raises(AssertionError):
        assert_same_bits(Resuming(loaded), compiled_runner(loaded))


def test_what_is_not_the_same_bits_is_not_used(
    loaded_of: LoadedOf, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The check before it is used runs both ways: a state that is off by anything is found there."""
    hidden = NativeForward.hidden
    monkeypatch.setattr(NativeForward, "hidden", lambda forward, rows: hidden(forward, rows) * 1.0001)
    caplog.set_level(logging.INFO)
    resuming = Resuming(loaded_of("llama"))
    assert resuming.state == "ready"
    assert "verifies drafts from its first layer on: what follows on its first layers'" in caplog.text
    with resuming.forward.collecting(10**9) as states:
        assert states is None


def test_waits_for_both_forwards(loaded_of: LoadedOf) -> None:
    loaded = loaded_of("llama")
    whole = compiled_runner(loaded)
    view = whole.of_view(early_exit(loaded, EXIT), exit_tap(loaded, EXIT))
    view.graphs = CompiledForward(view, CompileConfig(mode="off"))
    resumed = ResumedForward(whole, view, CompileConfig())
    assert resumed.warm_up() == "ready"
    assert "is not compiled" in resumed.failure


@pytest.mark.parametrize("settings", [{}, {"quantization": "int8"}], ids=str)
def test_few_rows_are_not_worth_it(loaded_of: LoadedOf, settings: dict[str, Any]) -> None:
    """How many are is counted in products with the weights that they are spared."""
    forward = Resuming(loaded_of("llama", **settings)).forward
    heads, kv_heads, hidden, inner = 4, 2, 32, 64
    per_row = EXIT * ((2 * heads + 2 * kv_heads) * hidden * hidden // heads + 3 * hidden * inner)
    assert forward.fewest_rows == -(-(1 << 24) // per_row)
    for num_rows, is_worth_it in ((forward.fewest_rows - 1, False), (forward.fewest_rows, True)):
        with forward.collecting(num_rows) as states:
            assert (states is not None) == is_worth_it
