"""A mode in which a model's own forward runs row by row, whatever the number of rows.

PyTorch chooses matrix products by the number of rows, adds up in an order that follows the shape, and
computes what does not fill a vector with other functions than what does. Under this mode every operation that
may depend on its surroundings is replaced by one of ours (`native`, `on_gpu`); the model's code stays as it
is. What is neither replaced nor known to look at one element (or one row) at a time is refused by name.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from specdec.model.recording import active_recorder

Replacement = Callable[..., Any]
"""Called as the operation is."""
Product = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

_EXACT = frozenset(
    {
        *("add", "sub", "mul", "div", "neg", "abs", "reciprocal", "sqrt", "relu", "sign", "square"),
        *("floor_divide", "remainder", "floor", "ceil", "round", "clamp", "clamp_min", "clamp_max"),
        *("maximum", "minimum", "where", "masked_fill", "eq", "ne", "lt", "le", "gt", "ge", "isfinite"),
        *("greater", "greater_equal", "less", "less_equal", "not_equal", "multiply", "subtract", "divide"),
        *("true_divide", "negative", "absolute", "clip", "rsub"),
        *("logical_and", "logical_or", "logical_not", "bitwise_and", "bitwise_or", "bitwise_not"),
        *("__and__", "__or__", "__xor__", "bitwise_xor", "logical_xor"),
    }
)
"""One rounding (or none) per element: IEEE arithmetic says what the result is."""
_MOVES = frozenset(
    {
        *("embedding", "index", "index_select", "index_put", "gather", "scatter", "take_along_dim"),
        *("cat", "stack", "repeat", "repeat_interleave", "clone", "copy", "contiguous", "detach"),
        *("_to_copy", "to", "type_as", "empty", "empty_like", "new_empty", "zeros", "zeros_like"),
        *("new_zeros", "ones", "ones_like", "new_ones", "full", "full_like", "fill", "zero", "arange"),
        *("topk", "sort", "argsort", "argmax", "amax", "amin", "nonzero", "one_hot", "scalar_tensor"),
        *("_local_scalar_dense", "item", "is_nonzero", "any", "all", "unique_consecutive", "flip"),
    }
)
"""Numbers are looked up, moved, compared or counted, not computed."""
_ROW_BY_ROW = frozenset({"index_add"})
"""Adds whole rows, one after the other (a row that is an expert's is in its list but once)."""
_SAFE = _EXACT | _MOVES | _ROW_BY_ROW


class UnsupportedInvariance(Exception):
    """What a forward computes may depend on its number of rows, and has no form that does not."""


class InvariantOperations(ABC):
    """Replacements on one kind of device."""

    @abstractmethod
    def replacements(self) -> Mapping[Any, Replacement | None]:
        """Return what is called instead, by overload (`torch.ops.aten.linear.default`); None: it may stay."""

    @abstractmethod
    def adopt(self, model: torch.nn.Module) -> None:
        """Take note of a loaded model: its parameters never change."""

    @abstractmethod
    def prepare(self, max_bytes: int) -> None:
        """This is how the model is going to run: take up to `max_bytes` to make it faster."""

    @abstractmethod
    def linear(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """x [..., inner], weight [columns, inner], bias [columns] -> [..., columns], all of one dtype."""

    @abstractmethod
    def add_up(self, x: torch.Tensor, divisor: float) -> torch.Tensor:
        """Sums over the last dimension, which stays, divided by `divisor`: [..., inner] -> [..., 1]."""

    def matmul(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """As `torch.matmul`, of at least two dimensions each."""
        return product(self.linear, a, b)

    def addmm(self, bias: torch.Tensor, a: torch.Tensor, b: torch.Tensor, **_: Any) -> torch.Tensor:
        """As `torch.addmm` without factors."""
        if bias.dim() == 1:
            return self.linear(a, b.t(), bias)
        return self.matmul(a, b) + bias

    def mean(
        self, x: torch.Tensor, dim: Any, keepdim: bool = False, *, dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """As `torch.mean`, over the last dimension."""
        return self._reduced("mean", x.to(dtype or x.dtype), dim, keepdim, float(x.shape[-1]))

    def sum(
        self, x: torch.Tensor, dim: Any, keepdim: bool = False, *, dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """As `torch.sum`, over the last dimension; of integers any."""
        if not (dtype or x.dtype).is_floating_point:
            return torch.sum(x, dim, keepdim, dtype=dtype)
        return self._reduced("sum", x.to(dtype or x.dtype), dim, keepdim, 1.0)

    def _reduced(self, name: str, x: torch.Tensor, dim: Any, keepdim: bool, divisor: float) -> torch.Tensor:
        last_dimension(name, x, dim)
        out = self.add_up(x.contiguous(), divisor)
        return out if keepdim else out.squeeze(-1)


class InvariantForward(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While entered, operations are replaced. One thread at a time."""

    def __init__(self, operations: InvariantOperations) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations = operations
        self._known: dict[Any, Replacement | None] = dict(operations.replacements())

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run the operation, or ours."""
        kwargs = kwargs or {}
        replacement = self._replacement(func, kwargs)
        return func(*args, **kwargs) if replacement is None else replacement(*args, **kwargs)

    def around(self, model: Callable[..., Any]) -> Callable[..., Any]:
        """Return `model`, run under this mode; but for recordings of it, which are of the model as it is."""

        def run(**inputs: Any) -> Any:
            if active_recorder() is not None:
                return model(**inputs)
            with self:
                return model(**inputs)

        return run

    def on_paper(self) -> TorchDispatchMode:
        """Return a mode that refuses what this one refuses, and replaces nothing: for the meta device."""
        return _OnPaper(self)

    def _replacement(self, func: Any, kwargs: Mapping[str, Any]) -> Replacement | None:
        """Raises UnsupportedInvariance."""
        try:
            replacement = self._known[func]
        except KeyError:
            if not _is_safe(func):
                raise UnsupportedInvariance(
                    f"{func} has no form that is the same for any number of rows"
                ) from None
            replacement = self._known[func] = None
        if kwargs and (kwargs.get("alpha", 1) != 1 or kwargs.get("beta", 1) != 1):
            raise UnsupportedInvariance(f"{func} with {dict(kwargs)}")
        return replacement


class _OnPaper(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, forward: InvariantForward) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._forward = forward

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        self._forward._replacement(func, kwargs or {})
        return func(*args, **kwargs or {})


def _is_safe(func: Any) -> bool:
    name = func._schema.name.removeprefix("aten::")
    return bool(func.is_view) or name in _SAFE or name.removesuffix("_") in _SAFE


def product(linear: Product, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return `torch.matmul(a, b)`, from `linear(x, weight)` = x weight^T of two matrices."""
    if a.shape[-1] == 1 and a.dim() >= 2 and b.dim() >= 2:
        return a * b  # angles of rotary embeddings: nothing is added
    if b.dim() == 2:
        rows = linear(a.reshape(-1, a.shape[-1]), b.t())
        return rows.view(*a.shape[:-1], b.shape[1])
    if a.dim() < 2 or b.dim() < 2:
        raise UnsupportedInvariance(f"a product of {a.dim()} with {b.dim()} dimensions")
    batch: Any = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])  # type: ignore[no-untyped-call]
    a, b = a.expand(*batch, *a.shape[-2:]), b.expand(*batch, *b.shape[-2:])
    parts = [
        linear(one, other.t())
        for one, other in zip(a.reshape(-1, *a.shape[-2:]), b.reshape(-1, *b.shape[-2:]), strict=True)
    ]
    return torch.stack(parts).view(*batch, a.shape[-2], b.shape[-1])


def last_dimension(func: str, x: torch.Tensor, dims: int | Sequence[int] | None) -> None:
    """Check that `func` goes along the last dimension alone.

    Raises:
        UnsupportedInvariance: it does not.
    """
    listed = (dims,) if isinstance(dims, int) else tuple(dims or ())
    if listed not in ((-1,), (x.dim() - 1,)):
        raise UnsupportedInvariance(f"{func} over other dimensions than the last")
