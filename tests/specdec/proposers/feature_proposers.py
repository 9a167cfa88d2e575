"""Random EAGLE, EAGLE-3 and MTP as proposers over made-up hidden states, and what they say over rows."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
from transformers import AutoModelForCausalLM

from specdec.attention.sdpa import SdpaAttention
from specdec.drafters.attention import CausalRows, RowAttention
from specdec.drafters.base import FeatureDrafter, TargetParts
from specdec.drafters.eagle import Eagle
from specdec.drafters.eagle3 import Eagle3, Eagle3Settings
from specdec.drafters.mtp import Mtp
from specdec.drafters.vocabulary import DraftVocabulary
from specdec.proposers.draft_choice import DraftChoice
from specdec.proposers.draft_loop import NativeDraftLoop
from specdec.proposers.draft_model import DraftModelProposer
from specdec.proposers.draft_sequences import DraftReading
from specdec.proposers.draft_trees import TreeDraftProposer
from specdec.proposers.feature_runner import FeatureRunner
from specdec.proposers.hidden import PrefixStates
from specdec.proposers.module_runner import ModuleRunner
from specdec.proposers.tree_config import DynamicTreeConfig, StaticTreeConfig, tree_shape
from specdec.sampling.sampler import Sampler
from tests.specdec.drafters.conftest import randomize, tiny_config
from tests.specdec.proposers.made_up_states import VOCAB, made_up_row
from tests.specdec.proposers.proposer_setup import USUAL, ProposerSetup

KNOWN = torch.tensor([1, 2, 3, 5, 6, 8, 9, 11, 14, 15, 16, 20, 23])
"""What EAGLE-3 has of the vocabulary."""
STATIC = tree_shape(StaticTreeConfig(shape="static", widths=(3, 2, 1)))
DYNAMIC = tree_shape(DynamicTreeConfig(shape="dynamic", top_k=3, depth=3))


@cache
def make_drafter(kind: str) -> FeatureDrafter:
    model = AutoModelForCausalLM.from_config(tiny_config(vocab_size=VOCAB))
    randomize(model, seed=1)
    target = TargetParts.of(model)
    made: FeatureDrafter
    if kind == "eagle":
        made = Eagle(target, tiny_config(num_hidden_layers=2))
    elif kind.startswith("mtp"):
        made = Mtp(target, num_modules=3 if kind == "mtp of three" else 1)
    else:
        settings = Eagle3Settings(
            config=tiny_config(num_hidden_layers=1, hidden_size=24),
            fused_layers=(-1,),
            has_embeddings=True,
            fc_norm=kind == "eagle3.1",
            norm_output=kind == "eagle3.1",
        )
        made = Eagle3(target, settings, DraftVocabulary.of_ids(KNOWN, VOCAB))
    randomize(made, seed=5)
    return made.eval()


def make(kind: str, setup: ProposerSetup = USUAL) -> DraftModelProposer:
    drafter, sampler = make_drafter(kind), setup.sampler or Sampler()
    runner = (FeatureRunner if drafter.num_modules == 1 else ModuleRunner)(
        drafter,
        setup.cache,
        max_num_seqs=8,
        max_model_len=setup.max_model_len,
        backend=SdpaAttention(),
        num_kept=drafter.num_modules,
        max_held_tokens=setup.max_held_tokens,
    )
    idle_work = () if setup.how is None else (runner.compile(setup.how),)
    states = PrefixStates(setup.source, drafter.hidden_layers)
    choice = DraftChoice(sampler=sampler, vocab_size=VOCAB, sampling=setup.sampling)
    reading = DraftReading(max_read_tokens=setup.max_read_tokens, prefix_caching=False, window=setup.window)
    if setup.shape is not None:
        return TreeDraftProposer(
            runner,
            choice,
            setup.shape,
            reading=reading,
            idle_work=idle_work,
            name=kind,
            states=states,
            generating=runner,
        )
    return DraftModelProposer(
        runner,
        choice,
        reading=reading,
        fused_loop=NativeDraftLoop(runner, sampler, VOCAB, setup.sampling.noise_stream),
        idle_work=idle_work,
        name=kind,
        states=states,
    )


@torch.no_grad()
def logits_behind(
    drafter: FeatureDrafter,
    token_ids: Sequence[int],
    path: Sequence[int],
    attention: RowAttention | None = None,
) -> torch.Tensor:
    """What the drafter says behind committed tokens and a path of drafts, [V]: whole rows, no cache.

    A later module reads later tokens behind the same states; the last one goes on behind its own features.
    """
    last = drafter.num_modules - 1
    states = torch.stack([made_up_row(token_ids[: at + 1]) for at in range(len(token_ids) - 1)])
    features = drafter.fuse(states[None])
    for depth in range(len(path) + 1):
        read = torch.tensor([[*token_ids, *path[:depth]]])[:, 1 + min(depth, last) :]
        positions = torch.arange(read.shape[1])[None]
        step = drafter.step(drafter.embed(read), features, positions, attention or CausalRows(), depth)
        again = torch.cat([features, step.features[:, -1:]], dim=1)
        features = step.features if depth < last else again
    logits = drafter.logits(step.outputs[0, -1])
    return logits if drafter.vocabulary is None else drafter.vocabulary.expand(logits)
