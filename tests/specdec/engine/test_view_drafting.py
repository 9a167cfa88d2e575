"""A view of the target drafts on the target's K/V: whatever it says, the target says what it says alone.

That drafts are those of the view is seen in drafts themselves, beside what transformers makes of the same
weights; that nothing of them stays, in the K/V after a round.
"""

from __future__ import annotations

import copy
from typing import Any

import pydantic
import pytest
import torch
import transformers

from specdec.core.errors import ConfigError
from specdec.engine.config import EngineConfig
from specdec.engine.engine import Engine
from specdec.engine.profiling.plan import ProfilePlan
from specdec.engine.profiling.rounds import measure_profile
from specdec.kv.config import CacheConfig
from specdec.kv.selection import KvSelectionConfig
from specdec.model.config import CompileConfig, ModelConfig
from specdec.model.loader import load_model
from specdec.model.quantized_linear import QuantizedLinear, QuantizedWeight
from specdec.proposers.config import SpeculativeConfig
from specdec.proposers.self_speculation import SelfSpeculation
from tests.architectures import ARCHITECTURES, with_layers
from tests.specdec.engine.sampling_kinds import KINDS
from tests.specdec.engine.self_drafting import (
    FULL,
    Streams,
    check,
    selecting,
    streaming,
)
from tests.specdec.engine.target_alone import LONG, Rounds, draft_behind
from tests.specdec.engine.tiny_models import PROMPTS, Models, SharpModels
from tests.specdec.engine.view_settings import ViewSetting, view_of

pytestmark = pytest.mark.usefixtures("one_thread", "quantizer")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return SharpModels(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def streams(models: Models) -> Streams:
    return Streams(models)


COVER = [
    ("greedy", ViewSetting(view="exit 1", num_draft_tokens=1, batch=1)),
    ("greedy", ViewSetting(view="exit 2", num_draft_tokens=4, batch=8, chunk=16, num_blocks=18)),
    (
        "greedy",
        ViewSetting(view="exit 2", num_draft_tokens=4, batch=8, chunk=16, num_blocks=18, compiled=True),
    ),
    ("greedy", ViewSetting(view="int4", num_draft_tokens=7, batch=5, chunk=9, compiled=True)),
    ("plain", ViewSetting(view="exit 1", num_draft_tokens=3, batch=5, chunk=9, compiled=True)),
    ("plain", ViewSetting(view="exit 1", num_draft_tokens=4, batch=8, chunk=9, num_blocks=18)),
    ("plain", ViewSetting(view="int8", num_draft_tokens=4, batch=8, chunk=16, num_blocks=18)),
    ("plain", ViewSetting(view="exit 2", num_draft_tokens=5, batch=5, kv=streaming(12), compiled=True)),
    ("cut", ViewSetting(view="int4", num_draft_tokens=3, batch=5, kv=streaming(0.5))),
    ("hot", ViewSetting(view="exit 2", num_draft_tokens=4, batch=8, kv=selecting("verified"), compiled=True)),
    ("penalties", ViewSetting(view="exit 2", num_draft_tokens=4, batch=8, chunk=16, num_blocks=18)),
    ("bad words", ViewSetting(view="int4", num_draft_tokens=6, batch=5, compiled=True)),
]


@pytest.mark.cover(1, "kind", "setting.compiled", "setting.view", "setting.num_blocks")
@pytest.mark.parametrize(("kind", "setting"), COVER, ids=str)
def test_says_what_it_says_alone(models: Models, streams: Streams, kind: str, setting: ViewSetting) -> None:
    metrics = check(models, streams, setting, kind)
    assert metrics.num_draft_tokens > 0
    assert metrics.method == ("layerskip" if setting.view.startswith("exit") else "quantized")
    if setting.num_blocks == 18 and setting.chunk == 16:
        assert metrics.num_preemptions > 0


@pytest.mark.full
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("view", ["exit 1", "exit 2", "int8", "int4"])
@pytest.mark.parametrize("kv", [FULL, streaming(12), selecting("verified")], ids=str)
@pytest.mark.parametrize(("batch", "chunk", "num_blocks"), [(1, 512, 200), (8, 16, 18), (5, 9, 200)])
@pytest.mark.parametrize("compiled", [False, True])
def test_says_what_it_says_alone_in_every_setting(
    models: Models,
    streams: Streams,
    kind: str,
    view: str,
    kv: KvSelectionConfig,
    batch: int,
    chunk: int,
    num_blocks: int,
    compiled: bool,
) -> None:
    setting = ViewSetting(
        num_draft_tokens=4,
        batch=batch,
        chunk=chunk,
        num_blocks=num_blocks,
        compiled=compiled,
        kv=kv,
        view=view,
    )
    check(models, streams, setting, kind)


# ------------------------------------------------------------------------------- drafts are the view's


def reference_draft(models: Models, view: str, num_tokens: int) -> tuple[int, ...]:
    """The same by transformers: K/V of the text are the whole model's, what follows is the view's."""
    whole = copy.deepcopy(models.reference("llama"))
    loaded = models.load("llama")
    if view.startswith("exit"):
        config = with_layers(ARCHITECTURES["llama"](), int(view.removeprefix("exit ")))
        drafter: Any = transformers.AutoModelForCausalLM.from_config(config).eval()
        assert not drafter.load_state_dict(whole.state_dict(), strict=False).missing_keys
    else:
        drafter = copy.deepcopy(whole)
        for name, module in view_of(loaded, view).model.named_modules():
            if isinstance(module, QuantizedLinear):
                drafter.get_submodule(name).weight = torch.nn.Parameter(dequantized(module))
    with torch.inference_mode():
        past = whole(torch.tensor([LONG[:-1]]), use_cache=True).past_key_values
        tokens = [LONG[-1]]
        for _ in range(num_tokens):
            output = drafter(torch.tensor([tokens[-1:]]), past_key_values=past, use_cache=True)
            tokens.append(int(output.logits[0, -1].argmax()))
    return tuple(tokens[1:])


def dequantized(layer: QuantizedLinear) -> torch.Tensor:
    weight = QuantizedWeight(
        bits=layer.bits, num_columns=layer.out_features, panels=layer.panels, scales=layer.scales
    )
    values, scales = weight.rows(0, layer.panels.shape[0])
    grouped = values.view(*scales.shape, -1).float() * scales.float()[..., None]
    return grouped.view(values.shape)[: layer.out_features]


@pytest.mark.cover(1)
@pytest.mark.parametrize("view", ["exit 1", "exit 2", "int8", "int4"])
@pytest.mark.parametrize("compiled", [False, True])
def test_drafts_are_what_the_view_says_behind_the_targets_own_text(
    models: Models, view: str, compiled: bool
) -> None:
    setting = ViewSetting(view=view, compiled=compiled)
    drafted = draft_behind(setting.target(models.load("llama")), 8)
    assert drafted == reference_draft(models, view, 8)


def test_control_each_view_says_something_else(models: Models) -> None:
    assert len({reference_draft(models, view, 8) for view in ("exit 1", "exit 2", "int4")}) == 3


# --------------------------------------------------------------------------------- nothing of it stays


@pytest.mark.cover(1)
@pytest.mark.parametrize("view", ["exit 2", "int4"])
@pytest.mark.parametrize("how", ["compiled", "invariant", "invariant bf16"])
def test_kv_after_verification_are_bitwise_those_of_plain_decoding(
    models: Models, view: str, how: str
) -> None:
    """Round by round, drafts that are wrong included, against one token after the other."""
    loaded = models.load("llama")
    if how != "compiled":
        dtype: Any = "bfloat16" if "bf16" in how else "float32"
        loaded = load_model(ModelConfig(model=str(loaded.path), dtype=dtype, batch_invariant=True))
    setting = ViewSetting(view=view, compiled=True)
    drafting, plain = (Rounds(setting.target(loaded)) for _ in range(2))
    drafting.run(24, 5)
    plain.run(24, 0)
    assert drafting.tokens[: len(LONG) + 24] == plain.tokens[: len(LONG) + 24]
    for mine, expected in zip(drafting.kept(23), plain.kept(23), strict=True):
        assert torch.equal(mine, expected)


# ------------------------------------------------------------------------------------------- as built


@pytest.mark.parametrize(
    "speculative",
    [
        {"method": "layerskip", "exit_layer": 2},
        {"method": "quantized", "quantization": "int4", "kv": {"policy": "streaming", "budget": 16}},
    ],
    ids=["layerskip", "quantized"],
)
def test_an_engine_from_a_configuration(models: Models, speculative: dict[str, Any]) -> None:
    """Costs of drafts are measured, the goodput controller goes by them, and the text stays the same."""
    folder = models.load("llama").path
    profiles = {"profile_seconds": 0.5, "profile_dir": str(folder.parent / "profiles")}
    texts = []
    for block in ({"method": "none"}, {**speculative, **profiles}):
        config = EngineConfig(
            target=ModelConfig(model=str(folder), dtype="float32", compile=CompileConfig(mode="off")),
            speculative_config=SpeculativeConfig.model_validate(block),
            cache=CacheConfig(block_size=4, num_blocks=60),
        )
        with Engine(config) as engine:
            texts.append([result.token_ids for result in engine.generate(PROMPTS, KINDS["cut"])])
            assert engine.description.drafts_itself == (block["method"] != "none")
    assert texts[0] == texts[1]


def test_drafts_are_measured(models: Models) -> None:
    """A view's are those of the view: an exit after one of three layers costs less than the target's own."""
    loaded = models.load("llama")
    plan = ProfilePlan(key="k", max_num_seqs=4, max_num_batched_tokens=8, max_draft_tokens=5, budget_s=1.0)
    profile = measure_profile(ViewSetting(view="exit 1").target(loaded), SelfSpeculation("layerskip"), plan)
    assert profile.fault() is None
    assert all(point.seconds > 1e-6 for point in profile.draft)


@pytest.mark.parametrize(
    ("block", "message"),
    [
        ({"method": "layerskip"}, "method layerskip needs `exit_layer`"),
        ({"method": "layerskip", "exit_layer": 0}, "exit_layer"),
        ({"method": "self", "exit_layer": 2}, "no other method takes it"),
        ({"method": "quantized"}, "method quantized needs `quantization`"),
        ({"method": "self", "quantization": "int8"}, "method self has no weights to quantize"),
        (
            {"method": "layerskip", "exit_layer": 2, "rejection_sample_method": "block"},
            "block does not go with method layerskip",
        ),
        (
            {"method": "quantized", "quantization": "int8", "model": "draft"},
            "method quantized takes no `model`",
        ),
    ],
)
def test_settings_that_cannot_be(block: dict[str, object], message: str) -> None:
    with pytest.raises(pydantic.ValidationError, match=message):
        SpeculativeConfig.model_validate(block)


@pytest.mark.parametrize(
    ("block", "target", "message"),
    [
        (
            {"method": "layerskip", "exit_layer": 2},
            {"pipeline_parallel_size": 2},
            "layerskip .*pipeline_para",
        ),
        (
            {"method": "quantized", "quantization": "int8"},
            {"pipeline_parallel_size": 2},
            "quantized .*pipeline_para.*or use tensor_parallel_size",
        ),
        ({"method": "quantized", "quantization": "int4"}, {"quantization": "int8"}, "leave one of them out"),
    ],
)
def test_targets_that_a_view_does_not_go_with(
    block: dict[str, object], target: dict[str, object], message: str
) -> None:
    with pytest.raises(pydantic.ValidationError, match=message):
        EngineConfig.model_validate({"target": {"model": "m", **target}, "speculative_config": block})


def test_an_exit_behind_the_last_layer_is_refused_by_name(models: Models) -> None:
    config = EngineConfig(
        target=ModelConfig(model=str(models.load("llama").path)),
        speculative_config=SpeculativeConfig(method="layerskip", exit_layer=3),
        cache=CacheConfig(block_size=4, num_blocks=60),
    )
    with pytest.raises(ConfigError, match=r"speculative_config.exit_layer: 3 .* write 1 to 2"):
        Engine(config)
