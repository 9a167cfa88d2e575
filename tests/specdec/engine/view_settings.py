"""Engines and targets for which a view of the target drafts."""

from __future__ import annotations

from dataclasses import dataclass

from specdec.engine.engine import Engine
from specdec.engine.targets.local_target import LocalTarget
from specdec.engine.text.tokenizer import HuggingFaceTokenizer
from specdec.model.config import CompileConfig
from specdec.model.graphs import CompiledForward
from specdec.model.loader import LoadedModel
from specdec.model.resumed_forward import ResumedForward
from specdec.model.views import early_exit, exit_tap, with_fewer_bits
from specdec.proposers.self_speculation import SelfSpeculation
from specdec.scheduling.config import SchedulerConfig
from specdec.scheduling.speculation.controller import FixedController
from tests.architectures import make_tokenizer
from tests.specdec.engine.self_drafting import BLOCK_SIZE, SelfSetting
from tests.specdec.engine.tiny_models import Models


@dataclass(frozen=True)
class ViewSetting(SelfSetting):
    view: str = "exit 2"
    resumes: bool = True
    """Whether verification goes on from drafts, where it can."""

    def engine(self, models: Models, architecture: str) -> Engine:
        return Engine.from_parts(
            target=self.target(models.load(architecture)),
            proposer=SelfSpeculation("layerskip" if self.view.startswith("exit") else "quantized"),
            tokenizer=HuggingFaceTokenizer(make_tokenizer()),
            scheduler=SchedulerConfig(
                max_num_seqs=min(self.batch, self.chunk), max_num_batched_tokens=self.chunk
            ),
            controller=FixedController(self.num_draft_tokens),
        )

    def target(self, loaded: LoadedModel) -> LocalTarget:
        runner = self.runner(loaded, self.num_blocks)
        is_exact = self.compiled and self.view.startswith("exit") and self.kv.policy == "full"
        resumes = self.resumes and is_exact
        tap = exit_tap(loaded, exit_layer_of(self.view)) if resumes else None
        view = runner.of_view(view_of(loaded, self.view), tap)
        resumed = None
        if self.compiled:
            assert isinstance(runner.graphs, CompiledForward)
            view.graphs = forward = CompiledForward(view, CompileConfig(), like=runner.graphs)
            assert forward.warm_up() == "ready"
        if resumes:
            resumed = ResumedForward(runner, view, CompileConfig())
            assert resumed.warm_up() == "ready"
            resumed.fewest_rows = 0
        selection = self.kv.make(BLOCK_SIZE)
        return LocalTarget(runner, self.sampler(), self_drafting=selection, view=view, resumed=resumed)


def view_of(loaded: LoadedModel, name: str) -> LoadedModel:
    if name.startswith("exit"):
        return early_exit(loaded, exit_layer_of(name))
    return with_fewer_bits(loaded, "int4" if name == "int4" else "int8")


def exit_layer_of(name: str) -> int:
    return int(name.removeprefix("exit "))
