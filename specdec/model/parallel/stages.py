"""Which layers a stage of a pipeline holds, told from a model on the meta device before weights are read.

A model can be cut between its layers when its forward is: something before the layers, the layers one after
another on the hidden states, something behind them. That is looked at, not believed: one forward is run on
the meta device with the layers replaced by ones that only watch. It also tells which modules with weights run
before the layers (the first stage's) and which behind them (the last stage's).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from specdec.attention.hf import ATTENTION_NAME
from specdec.model.parallel.plan import UnsupportedParallelism

_NUM_TOKENS = 3
"""Of the forward on paper; told apart from other dimensions by nothing but where it stands."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePlan:
    """How a model is divided over the stages of a pipeline."""

    stack: str
    """Name of the list of layers."""
    starts: tuple[int, ...]
    """First layer of each stage, and the number of layers."""
    before: Mapping[str, int]
    """Modules with weights of their own that run before the layers, and the width of what they return."""
    behind: frozenset[str]
    """Modules with weights of their own that run behind the layers."""
    idle: frozenset[str]
    """Modules outside the layers, with all that is in them, that text does not run through (eyes, say)."""
    returns_tuple: bool
    """Whether a layer returns a tuple whose first part is the hidden states, or only these."""
    hidden_size: int
    """Width of the hidden states between layers."""
    vocab_size: int
    """Width of the logits."""

    @property
    def num_stages(self) -> int:
        """Number of stages."""
        return len(self.starts) - 1

    def layers(self, stage: int) -> range:
        """Layers of one stage."""
        return range(self.starts[stage], self.starts[stage + 1])


def plan_stages(model: torch.nn.Module, num_stages: int) -> StagePlan:
    """Divide a whole model on the meta device over stages.

    Its configuration is changed: give it one of its own. The model is left as it was.

    Raises:
        UnsupportedParallelism: it cannot be divided so.
    """
    name, stack = layer_stack(model)
    if num_stages > len(stack):
        raise UnsupportedParallelism(f"its {len(stack)} layers cannot be divided over {num_stages} stages")
    layer_sizes = [_num_elements(layer) for layer in stack]
    walk = _walk(model, stack)
    behind = sum(_num_elements(model.get_submodule(one)) for one in walk.behind)
    return StagePlan(
        stack=name,
        starts=divide(layer_sizes, behind, num_stages),
        before=walk.before,
        behind=frozenset(walk.behind),
        idle=frozenset(walk.idle),
        returns_tuple=walk.returns_tuple,
        hidden_size=walk.hidden_size,
        vocab_size=walk.vocab_size,
    )


def divide(layer_sizes: Sequence[int], size_behind: int, num_stages: int) -> tuple[int, ...]:
    """Return the first layer of each stage, and the number of layers.

    Stages get as equal shares as can be (least sum of squares) of the weights that a step reads: the last one
    has its layers and what is behind them; an embedding is only looked up in.
    """
    num_layers = len(layer_sizes)
    # best[end] = (cost, starts) of dividing layers 0 .. end - 1 over the stages so far.
    best: dict[int, tuple[int, tuple[int, ...]]] = {0: (0, ())}
    for stage in range(num_stages):
        is_last = stage == num_stages - 1
        ends = [num_layers] if is_last else range(stage + 1, num_layers - num_stages + stage + 2)
        extra = size_behind if is_last else 0
        best = {
            end: min(
                (cost + (sum(layer_sizes[start:end]) + extra) ** 2, (*starts, start))
                for start, (cost, starts) in best.items()
                if start < end
            )
            for end in ends
        }
    return (*best[num_layers][1], num_layers)


def layer_stack(model: torch.nn.Module) -> tuple[str, torch.nn.ModuleList]:
    """Return the list that holds the decoder layers, and its name.

    Raises:
        UnsupportedParallelism: they are not in one list.
    """
    hf_model: Any = model
    num_layers = int(hf_model.config.get_text_config().num_hidden_layers)
    found: dict[str, torch.nn.ModuleList] = {}
    decoder = hf_model.get_decoder()
    decoder_name = next((name for name, module in model.named_modules() if module is decoder), "")
    for name, module in decoder.named_modules(prefix=decoder_name):
        is_inside = any(name.startswith(f"{outer}.") for outer in found)
        if isinstance(module, torch.nn.ModuleList) and len(module) == num_layers and not is_inside:
            found[name] = module
    if len(found) != 1:
        raise UnsupportedParallelism(
            f"its {num_layers} layers are not in one list"
            + (f", but in {' and '.join(sorted(found))}" if found else "")
        )
    return next(iter(found.items()))


def _num_elements(module: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


# ----------------------------------------------------------------------------------- the walk on paper


@dataclass(slots=True)
class _Walk:
    returns_tuple: bool
    before: dict[str, int] = field(default_factory=dict)
    behind: set[str] = field(default_factory=set)
    idle: set[str] = field(default_factory=set)
    hidden_size: int = 0
    vocab_size: int = 0


def _walk(model: torch.nn.Module, stack: torch.nn.ModuleList) -> _Walk:
    """Run one forward on paper; layers return the hidden states alone or as part of a tuple.

    Of two failures the one tells why that came later: with the wrong kind of result the second layer fails.
    """
    failures: list[tuple[int, UnsupportedParallelism]] = []
    for returns_tuple in (False, True):
        walker = _Walker(model, stack, returns_tuple=returns_tuple)
        try:
            return walker.walk()
        except UnsupportedParallelism as refusal:
            failures.append((walker.num_layers_passed, refusal))
        except (RuntimeError, TypeError, ValueError, LookupError, AttributeError) as error:
            unclear = UnsupportedParallelism(f"its forward cannot be followed: {error}")
            failures.append((walker.num_layers_passed, unclear))
    raise max(failures, key=lambda failure: failure[0])[1]


def _with_weights(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    """Modules that have weights of their own, but for the whole model."""
    for name, module in model.named_modules():
        if name and next(module.parameters(recurse=False), None) is not None:
            yield name, module


def _whole_parts(idle: set[str], weighted: Sequence[str]) -> set[str]:
    """Return the outermost modules in which everything that has weights is idle."""
    others = [name for name in weighted if name not in idle]
    parts: set[str] = set()
    for name in idle:
        path = name.split(".")
        ancestors = (".".join(path[:length]) for length in range(1, len(path) + 1))
        parts.add(next(one for one in ancestors if not any(other.startswith(f"{one}.") for other in others)))
    return parts


class _Walker:
    """One forward in which the layers only watch what they are handed."""

    def __init__(self, model: torch.nn.Module, stack: torch.nn.ModuleList, *, returns_tuple: bool) -> None:
        self._model: Any = model
        self._stack = stack
        self._walk = _Walk(returns_tuple)
        self._taint = _Taint()
        self.num_layers_passed = 0
        self._hidden: torch.Tensor | None = None

    def walk(self) -> _Walk:
        for config in (self._model.config, self._model.config.get_text_config()):
            # No masks are built for our attention, and no ids are looked at for padding.
            config._attn_implementation_internal = ATTENTION_NAME
            config.pad_token_id = None
        tokens = torch.zeros((1, _NUM_TOKENS), dtype=torch.long, device="meta")
        positions = torch.zeros_like(tokens)
        self._taint.mark(tokens)
        with self._watching(), self._taint:
            logits = self._model(input_ids=tokens, position_ids=positions, use_cache=False).logits
        if self.num_layers_passed != len(self._stack):
            raise UnsupportedParallelism("its layers do not all run in a forward")
        self._require_clean(logits)
        self._walk.vocab_size = int(logits.shape[-1])
        self._walk.idle = _whole_parts(self._idle_modules(), [name for name, _ in _with_weights(self._model)])
        return self._walk

    def _idle_modules(self) -> set[str]:
        ran = {*self._walk.before, *self._walk.behind}
        inside = {id(module) for layer in self._stack for module in layer.modules()}
        idle = {
            name
            for name, module in _with_weights(self._model)
            if name not in ran and id(module) not in inside
        }
        weights = {
            id(weight) for name in ran for weight in self._model.get_submodule(name).parameters(recurse=False)
        }
        for name in idle:
            for weight in self._model.get_submodule(name).parameters(recurse=False):
                if id(weight) not in weights and self._taint.was_used(weight):
                    raise UnsupportedParallelism(f"its forward takes weights of {name} without calling it")
        return idle

    @contextmanager
    def _watching(self) -> Iterator[None]:
        layers = list(self._stack)
        for index, layer in enumerate(layers):
            self._stack[index] = StandIn(layer, self._layer_called)
        hooks = []
        for name, module in _with_weights(self._model):
            hooks.append(module.register_forward_hook(self._hook(name)))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
            for index, layer in enumerate(layers):
                self._stack[index] = layer

    def _hook(self, name: str) -> Any:
        def called(module: torch.nn.Module, inputs: Any, output: Any) -> None:
            if self.num_layers_passed:
                self._require_clean(inputs)
                self._walk.behind.add(name)
            else:
                self._taint.mark(output)
                self._walk.before[name] = int(output.shape[-1])

        return called

    def _layer_called(self, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if self._hidden is None:
            self._walk.hidden_size = int(hidden.shape[-1])
        elif hidden is not self._hidden:
            raise UnsupportedParallelism("its layers do not follow one another on the hidden states")
        if self._taint.is_on((args, kwargs)):
            raise UnsupportedParallelism(
                "its layers are handed more of what comes before them than the hidden states"
            )
        self.num_layers_passed += 1
        self._hidden = torch.empty_like(hidden)
        return (self._hidden, None) if self._walk.returns_tuple else self._hidden

    def _require_clean(self, value: Any) -> None:
        if self._taint.is_on(value):
            raise UnsupportedParallelism(
                "what comes behind its layers is handed more of what comes before them than the hidden states"
            )


class _Taint(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Follows what is computed from marked tensors. What only takes their shape is not."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._marked: dict[int, torch.Tensor] = {}
        self._used: set[int] = set()

    def mark(self, value: Any) -> None:
        self._marked.update((id(leaf), leaf) for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor))

    def was_used(self, weight: torch.Tensor) -> bool:
        """Whether something was computed from a weight."""
        return id(weight) in self._used

    def is_on(self, value: Any) -> bool:
        return any(id(leaf) in self._marked for leaf in tree_leaves(value))

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        self._used.update(
            id(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.nn.Parameter)
        )
        name = str(func.overloadpacket.__name__)
        if self.is_on((args, kwargs)) and not name.endswith("_like") and not name.startswith("new_"):
            self.mark(result)
        return result


class StandIn(torch.nn.Module):
    """Stands where a module was: has what the model's forward may ask it for, but no weights."""

    def __init__(self, whole: torch.nn.Module, forward: Any) -> None:
        """Do `forward` in the place of `whole`."""
        super().__init__()
        for name, value in vars(whole).items():
            if isinstance(value, str | int | float | None) and not name.startswith("_"):
                setattr(self, name, value)
        self.train(whole.training)
        anything: Any = self
        anything.forward = forward
