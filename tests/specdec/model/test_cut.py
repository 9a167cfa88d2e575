"""A lowered forward is cut behind hidden states, where nothing else crosses the cut."""

from __future__ import annotations

import pytest
import torch

from specdec.model.cut import behind_hidden
from specdec.model.lowering import ADD, COPY, Elementwise, Lowered, Operation
from specdec.model.recording import CannotLower
from specdec.model.trace import Ref, Value

WIDTH = 4


def value() -> Ref:
    """All of a fresh row value."""
    tensor = torch.empty(3, WIDTH)
    return Ref(Value("row", "rows", (3, WIDTH), 0, tensor.dtype, tensor), 0, WIDTH, ((1, 0), (WIDTH, 1)), 0)


def constant() -> Ref:
    tensor = torch.ones(WIDTH)
    return Ref(Value("constant", None, (WIDTH,), None, tensor.dtype, tensor), 0, 0, ((WIDTH, 1),), None)


def added(*inputs: Ref, out: Ref | None = None) -> Elementwise:
    return Elementwise(out=value() if out is None else out, inputs=inputs, op=ADD)


def lowered(operations: list[Operation], hidden: Operation) -> Lowered:
    return Lowered(operations, operations[-1].out, hidden.out)


def test_keeps_what_follows_on_the_states() -> None:
    embedded = added(constant(), constant())
    hidden = added(embedded.out, constant())
    layer = added(hidden.out, constant())
    end = added(layer.out, hidden.out)
    cut = behind_hidden(lowered([embedded, hidden, layer, end], hidden))
    assert cut.incoming is hidden.out.value
    assert cut.lowered.operations == [layer, end]
    assert cut.lowered.output is end.out
    assert cut.lowered.hidden is None


def test_layers_that_read_more_than_the_states_are_not_cut_off() -> None:
    embedded = added(constant(), constant())
    hidden = added(embedded.out, constant())
    end = added(hidden.out, embedded.out)
    with pytest.raises(CannotLower, match="read more of those before it"):
        behind_hidden(lowered([embedded, hidden, end], hidden))


def test_a_value_that_is_written_on_both_sides_is_not_cut() -> None:
    embedded = added(constant(), constant())
    hidden = added(embedded.out, constant())
    end = added(hidden.out, constant())
    beside = Elementwise(out=end.out, inputs=(embedded.out,), op=COPY)
    with pytest.raises(CannotLower, match="does not follow on its hidden states alone"):
        behind_hidden(lowered([embedded, hidden, beside, end], hidden))


def test_an_output_that_does_not_follow_on_the_states_is_refused() -> None:
    hidden, end = added(constant(), constant()), added(constant(), constant())
    with pytest.raises(CannotLower, match="does not follow on its hidden states alone"):
        behind_hidden(lowered([hidden, end], hidden))
