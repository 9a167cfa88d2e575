"""An engine whose draft model learns while it drafts: tokens stay what they are, acceptance rises."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from specdec.core.errors import CheckpointError, ConfigError
from specdec.core.idle_work import state_of
from specdec.core.request import Request
from specdec.engine.config import EngineConfig
from specdec.engine.engine import Engine
from specdec.kv.config import CacheConfig
from specdec.model.config import CompileConfig, ModelConfig
from specdec.proposers.base import Proposer
from specdec.proposers.config import SpeculativeConfig
from specdec.proposers.draft_model import DraftModelProposer
from specdec.scheduling.config import SchedulerConfig
from tests.architectures import save_model
from tests.training.online.domain_requests import Tokens, plain_tokens, requests
from tests.training.online.domains import FORMER, LATTER, QUICK, heard, model_of, save
from training.online.in_process import LearningProposer, learning_engine
from training.online.load import load_trainer
from training.online.pace import PacedTrainer


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    """A target that knows two domains, a draft model that knows the former."""
    folder = tmp_path_factory.mktemp("models")
    target = save(model_of([FORMER, LATTER], num_layers=2, num_steps=100), folder / "target")
    draft = save(model_of([FORMER]), folder / "draft")
    eager = CompileConfig(mode="off")
    return EngineConfig(
        target=ModelConfig(model=str(target), dtype="float32", num_threads=1, compile=eager),
        speculative_config=SpeculativeConfig(
            method="draft_model",
            model=str(draft),
            num_speculative_tokens=3,
            controller="fixed",
            num_threads=1,
            compile=eager,
            online=QUICK,
        ),
        cache=CacheConfig(num_blocks=256, block_size=4),
        scheduler=SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=64),
    )


class Learning:
    """An engine, and its trainer, which works when it is told to."""

    def __init__(self, config: EngineConfig) -> None:
        online = config.speculative_config.online
        assert online is not None
        trainer = load_trainer(config)
        self.trainer = trainer

        def learning(drafter: Proposer) -> Proposer:
            assert isinstance(drafter, DraftModelProposer)
            self.drafter = drafter
            self.proposer = LearningProposer(drafter, trainer, online)
            return self.proposer

        self.engine = Engine(config, around_drafter=learning)
        self.paced = PacedTrainer(trainer, 1.0, wait=lambda seconds: None)

    def serve(self, wanted: list[Request], *, is_learning: bool = False) -> tuple[Tokens, float]:
        """Return tokens and acceptance; if `is_learning`, pieces of training lie between the rounds."""
        before = self.engine.metrics().num_accepted_tokens, self.engine.metrics().num_draft_tokens
        tokens: Tokens = {request.request_id: [] for request in wanted}
        for request in wanted:
            self.engine.add_request(request)
        while self.engine.has_work:
            for output in self.engine.step():
                tokens[output.request_id].extend(output.token_ids)
            self.engine.check_integrity()
            self.drafter.check_integrity()
            if is_learning:
                self.proposer.learn(self.paced)
        now = self.engine.metrics().num_accepted_tokens, self.engine.metrics().num_draft_tokens
        return tokens, (now[0] - before[0]) / (now[1] - before[1])


@pytest.fixture
def learning(config: EngineConfig) -> Iterator[Learning]:
    made = Learning(config)
    yield made
    made.engine.close()


def test_acceptance_rises_after_a_shift_and_tokens_stay(config: EngineConfig, learning: Learning) -> None:
    """Weights are exchanged in the middle of texts, whose K/V go on being those of the former weights."""
    _, of_the_former = learning.serve(requests(FORMER, 8, "former"))
    first, during, last = (requests(LATTER, number, str(number)) for number in (8, 24, 9))
    tokens, before = learning.serve(first)
    learning.serve(requests(LATTER, 24, "learnt"))
    learning.proposer.catch_up()
    num_tried = learning.proposer.counters["online_versions_tried"]
    learning.serve(requests(LATTER, 32, "more"))
    for _ in range(18 * QUICK.batch_texts):  # a version is nearly done
        learning.proposer.learn(learning.paced)
        assert learning.proposer.counters["online_versions_tried"] > num_tried
    num_taken = learning.proposer.counters["online_versions_taken"]
    tokens |= learning.serve(during, is_learning=True)[0]
    assert learning.proposer.counters["online_versions_taken"] > num_taken
    those, after = learning.serve(last)
    tokens |= those
    assert of_the_former > 0.7
    assert before < 0.4
    assert after > before + 0.3
    assert tokens == plain_tokens(config, [*first, *during, *last])


@pytest.mark.full
def test_a_thread_learns_beside_an_engine(config: EngineConfig) -> None:
    wanted = [one for batch in range(12) for one in requests(LATTER, 16, f"beside{batch}")]
    tokens: Tokens = {request.request_id: [] for request in wanted}
    with learning_engine(config) as engine:
        while wanted or engine.has_work:
            while wanted and engine.metrics().num_waiting < 8:
                engine.add_request(wanted.pop())
            for output in engine.step():
                tokens[output.request_id].extend(output.token_ids)
    assert all(len(one) == 20 for one in tokens.values())


def compiled(config: EngineConfig) -> EngineConfig:
    """As it is without settings: the draft model's forward is compiled while nobody waits."""
    speculative = config.speculative_config.model_copy(update={"compile": CompileConfig()})
    return config.model_copy(update={"speculative_config": speculative})


def test_a_version_waits_until_the_forward_is_compiled(config: EngineConfig) -> None:
    """The trainer gives each but once."""
    learning = Learning(compiled(config))
    with learning.engine:
        assert state_of(learning.drafter.idle_work) == "pending"
        learning.serve(requests(LATTER, 32, "learnt"))
        learning.proposer.catch_up()
        assert learning.proposer.counters["online_versions_served"] == 1
        _, before = learning.serve(requests(LATTER, 8, "pending"))
        assert learning.proposer.counters["online_versions_taken"] == 0
        learning.engine.warm_up()
        assert state_of(learning.drafter.idle_work) == "ready"
        learning.proposer.catch_up()
        _, after = learning.serve(requests(LATTER, 8, "ready"))
        assert learning.proposer.counters["online_versions_taken"] == 1
    assert after > before + 0.2


def test_a_version_that_was_staged_before_the_forward_was_compiled_is_staged_again(
    config: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    learning = Learning(compiled(config))
    with learning.engine, monkeypatch.context() as patched:
        learning.serve(requests(LATTER, 32, "learnt"))
        patched.setattr("training.online.in_process.state_of", lambda works: "ready")
        learning.proposer.catch_up()
        patched.undo()
        learning.engine.warm_up()
        learning.serve(requests(LATTER, 1, "refused"))
        assert learning.proposer.counters["online_versions_taken"] == 0
        learning.proposer.catch_up()
        learning.serve(requests(LATTER, 1, "taken"))
        learning.proposer.catch_up()
        learning.serve(requests(LATTER, 1, "once"))
        assert learning.proposer.counters["online_versions_served"] == 1
        assert learning.proposer.counters["online_versions_taken"] == 1


def test_an_engine_that_learns_is_warmed_up(config: EngineConfig) -> None:
    with learning_engine(compiled(config)) as engine:
        assert "pending" not in {work.state for work in engine.idle_work}


def test_a_draft_model_that_takes_no_other_weights_learns_no_more(
    config: EngineConfig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its engine goes on."""

    def refuses(self: LearningProposer, paced: PacedTrainer) -> None:
        raise CheckpointError("draft cannot be given other weights, unless compile.mode is off")

    monkeypatch.setattr(LearningProposer, "learn", refuses)
    with learning_engine(config) as engine:
        (wanted,) = requests(LATTER, 1, "alone")
        engine.add_request(wanted)
        while engine.has_work:
            engine.step()
    assert "learns no more: it takes no other weights: draft cannot be given other weights" in caplog.text


def test_who_learns_has_to_say_from_what(config: EngineConfig) -> None:
    speculative = config.speculative_config.model_copy(update={"online": None})
    silent = config.model_copy(update={"speculative_config": speculative})
    with pytest.raises(ConfigError, match="nothing says what to learn from"), learning_engine(silent):
        pass


def test_a_draft_model_that_lacks_weights_does_not_learn(config: EngineConfig, tmp_path: Path) -> None:
    """transformers would draw them by chance."""
    folder = shutil.copytree(str(config.speculative_config.model), tmp_path / "draft")
    weights = load_file(folder / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    speculative = config.speculative_config.model_copy(update={"model": str(folder)})
    with pytest.raises(CheckpointError, match=r"lacks 1 tensors .* first model\.norm\.weight"):
        load_trainer(config.model_copy(update={"speculative_config": speculative}))


def test_a_draft_model_learns_with_the_attention_that_its_kind_has(
    config: EngineConfig, tmp_path: Path
) -> None:
    """Scores of Gemma 2 are capped, which PyTorch's fused one does not do."""
    save_model(tmp_path, "gemma2")
    speculative = config.speculative_config.model_copy(update={"model": str(tmp_path)})
    trainer = load_trainer(config.model_copy(update={"speculative_config": speculative}))
    trainer.hear(heard(LATTER, 40))
    assert trainer.run_next()
