"""Lowering small made-up forwards: every operation against PyTorch, every layout, every refusal."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
import transformers
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from specdec.attention.cpu import CpuPagedAttention
from specdec.attention.native import NativeUnavailable
from specdec.drafters.vocabulary import DraftVocabulary
from specdec.model.experts import recorded_experts
from specdec.model.lowering import (
    Elementwise,
    ExpertsDown,
    ExpertsUp,
    Largest,
    LinearLayer,
    Mean,
    Norm,
    Rotary,
    Softmax,
    Spread,
)
from specdec.model.recording import CannotLower, record
from tests.specdec.model.lowered_models import NUM_POSITIONS, VOCAB, WIDTH, Body, Model, Native, lowered

pytestmark = pytest.mark.usefixtures("one_thread_each")


@pytest.fixture(scope="module", autouse=True)
def _compiler() -> None:
    try:
        CpuPagedAttention()
    except NativeUnavailable as error:
        pytest.skip(f"nothing can be lowered here: {error}")


def make_model(body: Body, dtype: torch.dtype = torch.float32) -> Model:
    return Model(body, (torch.randn(VOCAB, WIDTH) * 2).to(dtype))


def check(
    body: Body, dtype: torch.dtype = torch.float32, *, fused: bool = True, tolerance: float = 1e-6
) -> Native:
    """Compare native and eager results on batches smaller and larger than those recorded."""
    model = make_model(body, dtype)
    native = lowered(model, fused=fused)
    compare(model, native, tolerance)
    return native


def compare(model: Model, native: Native, tolerance: float) -> None:
    for count, start in ((1, 0), (2, 5), (7, 3), (33, 7)):
        input_ids = torch.randint(0, VOCAB, (1, count))
        rows = torch.tensor([0, count - 1])
        with torch.inference_mode():
            expected = model(input_ids, torch.arange(start, start + count)[None], rows, None).float()
        logits = native(input_ids, start, rows)
        scale = float(expected.abs().nan_to_num().max())
        torch.testing.assert_close(logits, expected, rtol=0, atol=tolerance * scale, equal_nan=True)


ELEMENTWISE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "add": lambda x: x + 0.3,
    "sub": lambda x: x - x * 0.3,
    "div": lambda x: x / 7,
    "div by a row": lambda x: (
        x / (x.abs_value if hasattr(x, "abs_value") else (x * x).mean(-1, keepdim=True))
    ),
    "neg": lambda x: -x,
    "square": torch.square,
    "pow 2": lambda x: x**2,
    "pow 3": lambda x: x.pow(3.0),
    "sqrt": lambda x: (x * x).sqrt(),
    "rsqrt": lambda x: torch.rsqrt(x * x + 0.1),
    "reciprocal": lambda x: torch.reciprocal(x * x + 0.1),
    "exp": torch.exp,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "silu": F.silu,
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu tanh": lambda x: F.gelu(x, approximate="tanh"),
    "clamp": lambda x: x.clamp(-1.0, 0.5),
    "clamp from below": lambda x: torch.clamp(x, min=0.1),
    "widened": lambda x: (x.float() * 3).to(x.dtype),
}


@pytest.mark.parametrize("name", ELEMENTWISE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_elementwise_arithmetic(name: str, dtype: torch.dtype) -> None:
    # In bf16 a result that lies between two numbers may be rounded to either.
    tolerance = 1e-6 if dtype is torch.float32 else 8e-3
    check(lambda x, _: ELEMENTWISE[name](x), dtype, tolerance=tolerance)


@pytest.mark.parametrize("name", ["relu", "clamp", "silu", "gelu", "exp", "tanh", "sqrt", "add", "pow 3"])
def test_nan_stays_nan(name: str) -> None:
    check(lambda x, _: ELEMENTWISE[name]((x - 100).sqrt() + x))


def test_layouts() -> None:
    def body(x: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        heads = x.view(1, x.shape[1], 4, 12).transpose(1, 2)  # [1, 4, T, 12]
        low, high = heads.chunk(2, dim=-1)
        turned = torch.cat([-high, low], dim=-1) * heads
        even = torch.stack([turned[..., ::2], turned[..., 1::2]], dim=-1).flatten(-2)
        merged = (turned + even).transpose(1, 2).reshape(1, x.shape[1], -1)
        return torch.cat([merged, merged[..., 5:17].contiguous() + 1.0], dim=-1)

    check(body)


def test_position_ids_become_tables() -> None:
    frequencies = torch.rand(12)
    learned = torch.randn(NUM_POSITIONS, WIDTH)

    def body(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        angles = positions[..., None].float() * frequencies
        cosines = torch.cat([angles, angles], dim=-1).cos()[:, None]
        heads = x.view(1, x.shape[1], 2, 24).transpose(1, 2) * cosines
        return heads.transpose(1, 2).reshape(1, x.shape[1], -1) + F.embedding(positions, learned)

    check(body)


def rotary_body(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    angles = positions[..., None].float() * torch.linspace(0.1, 1, 12)
    angles = torch.cat([angles, angles], dim=-1)[:, None]
    heads = x.view(1, x.shape[1], 2, 24).transpose(1, 2)
    turned = torch.cat([-heads[..., 12:], heads[..., :12]], dim=-1)
    rotated = heads * angles.cos().to(x.dtype) + turned * angles.sin().to(x.dtype)
    return rotated.transpose(1, 2).reshape(1, x.shape[1], -1)


def llama_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    wide = x.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)
    return weight.to(x.dtype) * normed.to(x.dtype)


def gemma_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5) * (1.0 + weight)).type_as(x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("fused", [True, False], ids=["fused", "separate"])
def test_fused_runs_keep_every_rounding(dtype: torch.dtype, fused: bool) -> None:
    """In bf16 the results are equal bit for bit, but for sums that end next to a rounding boundary."""
    weight = torch.randn(WIDTH)
    tolerance = 1e-6 if dtype is torch.float32 else 4e-3
    for norm in (llama_norm, gemma_norm):
        native = check(lambda x, _, norm=norm: norm(x, weight), dtype, fused=fused, tolerance=tolerance)
        assert (native.count(Norm), native.count(Mean)) == ((1, 0) if fused else (0, 1))
    native = check(rotary_body, dtype, fused=fused, tolerance=1e-7)
    assert native.count(Rotary) == (1 if fused else 0)


def test_what_only_looks_like_a_norm_is_not_fused() -> None:
    weight = torch.randn(WIDTH)

    def used_twice(x: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)
        return weight * (x * scale) + scale

    def of_another(x: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        other = x + 1.0
        return weight * (x * torch.rsqrt(other.pow(2).mean(-1, keepdim=True) + 1e-5))

    def of_a_sum(x: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        return weight * (x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + 1e-5))

    for body in (used_twice, of_another, of_a_sum):
        assert check(body).count(Norm) == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("columns", [1, 16, 40, 64, 100, 128, 130])
def test_linear_layers_of_any_width(dtype: torch.dtype, columns: int) -> None:
    weight, bias = torch.randn(columns, WIDTH).to(dtype), torch.randn(columns).to(dtype)
    tolerance = 3e-6 if dtype is torch.float32 else 8e-3
    for body in (
        lambda x, _: F.linear(x, weight, bias),
        lambda x, _: F.linear(x, weight),
        lambda x, _: x @ weight.t().contiguous(),
        lambda x, _: torch.addmm(bias, x.view(-1, WIDTH), weight.t().contiguous()).view(1, -1, columns),
    ):
        check(body, dtype, tolerance=tolerance)


def test_arithmetic_after_a_linear_layer_needs_no_waiting() -> None:
    gate, up, down = torch.randn(64, WIDTH), torch.randn(64, WIDTH), torch.randn(WIDTH, 64)

    def body(x: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        return x + F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)

    native = check(body, tolerance=1e-5)
    assert native.count(LinearLayer) == 3
    waits = [step for step in native.steps if step.sync]
    assert all(not isinstance(step.operation, Elementwise) for step in waits), "silu, product and sum"


def test_layer_and_rms_norm_of_pytorch() -> None:
    weight, bias = torch.randn(WIDTH), torch.randn(WIDTH)
    check(lambda x, _: F.layer_norm(x, (WIDTH,), weight, bias, 1e-5))
    check(lambda x, _: F.layer_norm(x, (WIDTH,)))
    check(lambda x, _: F.rms_norm(x, (WIDTH,), weight, 1e-5))
    check(lambda x, _: F.rms_norm(x, (WIDTH,)))


def test_softmax_largest_and_sum() -> None:
    def body(x: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        shares = F.softmax(x * 3, dim=-1, dtype=torch.float32)
        largest, _ = shares.topk(5, dim=-1)
        largest /= largest.sum(dim=-1, keepdim=True)
        return torch.cat([shares, largest, largest[..., :1] * x.float()], dim=-1)

    native = check(body)
    assert (native.count(Softmax), native.count(Largest)) == (1, 2)
    check(body, torch.bfloat16, tolerance=4e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_known", [5, WIDTH])
def test_a_part_of_a_vocabulary_is_spread_over_all_of_it(dtype: torch.dtype, num_known: int) -> None:
    """Behind a linear layer, which is shared out by columns; what is not known is -inf."""
    known = torch.randperm(50)[:num_known]
    vocabulary = DraftVocabulary.of_ids(known, 50)
    weight = torch.randn(num_known, WIDTH).to(dtype)
    native = check(lambda x, _: vocabulary.expand(F.linear(x, weight)), dtype, tolerance=1e-2)
    assert native.count(Spread) == 1


def test_of_equal_elements_the_first_is_the_largest() -> None:
    """Which of two equal experts is chosen decides what a row gets."""
    mixture = Mixture(torch.float32, 6, 2, "silu")
    mixture.router[3] = mixture.router[1] = mixture.router[4] = 0.0
    mixture.router[[0, 2, 5]] = -1.0

    def body(x: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        return mixture(x.square().sqrt())

    with recorded_experts(mixture):
        recordings = record(make_model(body))
    native = lowered(make_model(body), recordings=recordings)
    input_ids = torch.arange(1, 8)[None]
    logits = native(input_ids, 0, torch.arange(7)).clone()
    rows = F.embedding(input_ids, recordings[0].calls[0].args[0]).abs()[0]
    shares = F.softmax(F.linear(rows, mixture.router), dim=-1)
    first_two = torch.tensor([[1, 3]] * 7)
    expected = mixture.experts(rows, first_two, shares.gather(1, first_two))
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5 * float(expected.abs().max()))


def test_what_is_changed_in_place_is_a_new_value() -> None:
    def body(x: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        total = x * 2
        half = total[..., :24]
        total += x
        total.mul_(0.5)
        return torch.cat([half, total[..., 24:]], dim=-1) + total

    check(body)


def test_copies_that_merge_distant_dimensions() -> None:
    def body(x: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        groups = x.view(1, x.shape[1], 2, 4, 6)
        queries = groups[:, :, :, :-2].flatten(2, 3).transpose(1, 2)  # [1, 4, T, 6]
        keys = groups[:, :, :, -2].reshape(1, x.shape[1], -1)
        return torch.cat([queries.transpose(1, 2).reshape(1, x.shape[1], -1) * 2, keys], dim=-1)

    check(body)


class Mixture(torch.nn.Module):
    """A router and transformers' experts."""

    def __init__(self, dtype: torch.dtype, num_experts: int, num_chosen: int, activation: str) -> None:
        super().__init__()
        config = transformers.Qwen3MoeConfig(
            hidden_size=WIDTH,
            moe_intermediate_size=40,
            num_experts=num_experts,
            num_experts_per_tok=num_chosen,
            hidden_act=activation,
        )
        self.experts = Qwen3MoeExperts(config)
        self.router = torch.nn.Parameter(torch.randn(num_experts, WIDTH))
        for weight in (self.experts.gate_up_proj, self.experts.down_proj):
            torch.nn.init.normal_(weight, std=0.2)
        self.num_chosen = num_chosen
        self.to(dtype).requires_grad_(requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.view(-1, WIDTH)
        shares = F.softmax(F.linear(rows, self.router), dim=-1, dtype=torch.float32)
        weights, chosen = shares.topk(self.num_chosen, dim=-1)
        return self.experts(rows, chosen, weights).view(x.shape)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(
    ("num_experts", "num_chosen", "activation"),
    [(4, 2, "silu"), (7, 1, "gelu"), (16, 5, "gelu_pytorch_tanh")],
)
@pytest.mark.parametrize("max_bytes", [1 << 30, 20_000], ids=["packed", "in place"])
def test_experts(
    dtype: torch.dtype, num_experts: int, num_chosen: int, activation: str, max_bytes: int
) -> None:
    mixture = Mixture(dtype, num_experts, num_chosen, activation)
    with recorded_experts(mixture):
        recordings = record(make_model(lambda x, _: mixture(x), dtype))
    model = Model(lambda x, _: mixture(x), recordings[0].calls[0].args[0])
    native = lowered(model, max_bytes=max_bytes, recordings=recordings)
    assert native.count(ExpertsUp) == native.count(ExpertsDown) == 1
    tolerance = 1e-5 if dtype is torch.float32 else 2e-2
    compare(model, native, tolerance)


def test_experts_of_another_kind_are_refused() -> None:
    mixture = Mixture(torch.float32, 4, 2, "tanh")
    with recorded_experts(mixture), pytest.raises(CannotLower, match="activation Tanh"):
        record(make_model(lambda x, _: mixture(x)))
    mixture = Mixture(torch.float32, 4, 2, "silu")
    mixture.experts.has_bias = True
    with recorded_experts(mixture), pytest.raises(CannotLower, match="Qwen3MoeExperts"):
        record(make_model(lambda x, _: mixture(x)))


PARAMETER = torch.ones(WIDTH)
REFUSED: dict[str, tuple[Body, str]] = {
    "sort": (lambda x, _: x.sort(-1).values, "sort"),
    "softmax over the batch": (lambda x, _: x.softmax(1), "softmax"),
    "sum over rows": (lambda x, _: x - x.mean(1, keepdim=True), r"mean\.dim does not give one row per token"),
    "reversed rows": (lambda x, _: x.flip(1), "flip"),
    "two activations": (lambda x, _: x @ x[0, :1].T, "depends on the batch|rows|matrix product|matmul"),
    "number of rows": (lambda x, _: x / x.shape[1], "number that depends on the batch"),
    "in place in a part": (lambda x, _: x[..., :4].add_(1.0), "in place"),
    "in place in a parameter": (lambda x, _: PARAMETER.add_(1.0) + x, "in place"),
    "smallest": (lambda x, _: x.topk(3, largest=False).values, "smallest"),
    "largest of heads": (lambda x, _: x.view(1, -1, 4, 12).topk(3).values, "several dimensions"),
    "arange": (
        lambda x, _: x + torch.arange(x.shape[1])[None, :, None],
        r"arange\.default does not give one row",
    ),
    "data": (lambda x, _: x if x.shape[1] < 4 else -x, "depends on its input"),
    "integers": (lambda x, _: x + x.long(), "int64"),
    "other exponent": (lambda x, _: (x * x).pow(0.3), "exponent 0.3"),
    "least position": (lambda x, p: x + (p - p.min())[..., None].float(), r"min\.default does not give"),
    "sum of positions": (lambda x, p: x + p.cumsum(-1)[..., None].float(), "depends on the other positions"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals_name_the_cause(name: str) -> None:
    body, reason = REFUSED[name]
    with pytest.raises(CannotLower, match=reason):
        lowered(make_model(body))
