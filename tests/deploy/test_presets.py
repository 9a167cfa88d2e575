"""The shipped configurations run: each serves the demo model, and says what the target says alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from deploy.config_file import load_config
from specdec.core.sampling_params import SamplingParams
from specdec.engine.config import EngineConfig
from specdec.engine.engine import Engine
from specdec.engine.metrics.engine_metrics import EngineMetrics
from specdec.model.config import CompileConfig
from specdec.proposers.config import SpeculativeConfig

pytestmark = pytest.mark.usefixtures("one_thread_each")
CONFIGS = Path(__file__).parents[2] / "configs"
SCENARIOS = (
    "magicdec-long-context",
    "chat-latency",
    "high-qps",
    "offline-batch",
    "edge-cpu",
    "specialised-domain",
)
EAGER = CompileConfig(mode="off")
NUM_TOKENS = 12


def engine_config(name: str) -> EngineConfig:
    """A preset, in float32 and eager, where tokens are the same to the bit, always drafting, and small."""
    config = load_config(CONFIGS / f"{name}.yaml").engine()
    drafter = config.speculative_config.model_copy(update={"controller": "fixed", "compile": EAGER})
    target = config.target.model_copy(update={"dtype": "float32", "compile": EAGER})
    cache = config.cache.model_copy(update={"memory_bytes": 64 << 20})
    return config.model_copy(update={"speculative_config": drafter, "target": target, "cache": cache})


def serve(config: EngineConfig) -> tuple[list[tuple[int, ...]], EngineMetrics]:
    """Answer a text that is longer than any window of the presets, and a short one, greedily and sampled."""
    line = "    def test_{0}(self):\n        self.assertEqual(add({0}, 1), {0} + 1)\n\n"
    prompts = ["".join(line.format(number) for number in range(40)), "import os\n"]
    with Engine(config) as engine:
        assert len(engine.tokenizer.encode(prompts[0])) > 800
        tokens: list[tuple[int, ...]] = []
        for temperature in (0.0, 1.0):
            params = SamplingParams(temperature=temperature, seed=3, max_tokens=NUM_TOKENS, ignore_eos=True)
            tokens += [tuple(output.token_ids) for output in engine.generate(prompts, params)]
        return tokens, engine.metrics()


def test_every_scenario_has_a_preset() -> None:
    assert {file.stem for file in CONFIGS.glob("*.yaml")} == {*SCENARIOS, "demo", "demo-bf16", "demo-none"}


@pytest.mark.parametrize(
    "name",
    [
        SCENARIOS[0],
        *(pytest.param(name, marks=pytest.mark.full) for name in SCENARIOS[1:]),
    ],
)
def test_a_preset_serves_what_the_target_says_alone(name: str) -> None:
    config = engine_config(name)
    alone = config.model_copy(update={"speculative_config": SpeculativeConfig(method="none")})
    expected, _ = serve(alone)
    tokens, metrics = serve(config)
    assert tokens == expected
    assert all(len(of_one) == NUM_TOKENS for of_one in tokens)
    assert metrics.num_draft_tokens > 0, "nothing was drafted: nothing was tested"
    if config.speculative_config.method == "self":
        assert metrics.num_accepted_tokens > metrics.num_draft_tokens // 4
