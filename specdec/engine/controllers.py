"""From a configuration to the controller of an engine, with measured costs where it needs them."""

from __future__ import annotations

import platform
from collections.abc import Callable, Collection, Sequence
from importlib import metadata
from pathlib import Path

import msgspec

from specdec.core.clock import MonotonicClock
from specdec.core.control_groups import usable_cpus
from specdec.core.description import TargetDescription
from specdec.core.errors import ConfigError
from specdec.engine.config import EngineConfig
from specdec.engine.profiling.plan import ProfilePlan
from specdec.engine.profiling.rounds import ProfileProgress, drafts_anything, measure_profile
from specdec.engine.targets.target import Target
from specdec.proposers.base import Proposer, ProposerCapabilities
from specdec.proposers.config import SpeculativeConfig
from specdec.proposers.tree_config import tree_shape
from specdec.scheduling.speculation.controller import FixedController, SpeculationController
from specdec.scheduling.speculation.cost import assumed_profile
from specdec.scheduling.speculation.cost_profile import CostProfile, ProfileStore, profile_key
from specdec.scheduling.speculation.drafter_shares import DrafterSet
from specdec.scheduling.speculation.goodput_controller import GoodputController
from specdec.scheduling.speculation.modes import OverlapMode
from specdec.scheduling.speculation.settings import ControllerSettings
from specdec.tree.growth import levels_of


def drafters_of(config: SpeculativeConfig) -> DrafterSet | None:
    """Return the drafters that requests of an engine may get; None: there is but one."""
    if config.method != "several":
        return None
    choices = [one for one in config.drafters if one.shadow is None]
    return DrafterSet(
        names=tuple(one.name for one in choices), shares=tuple(one.share or 0.0 for one in choices)
    )


def build_controller(
    config: EngineConfig,
    target: Target,
    proposer: Proposer,
    *,
    modes: Sequence[OverlapMode] = ("lockstep",),
    draft_devices: Callable[[], Collection[str]] = tuple,
    progress: ProfileProgress | None = None,
) -> SpeculationController:
    """Return the controller that a configuration asks for, with measured costs where it needs them.

    Neither side may have any sequence yet; see `profiling.measure_profile`.

    Args:
        config: of the engine.
        target: what will verify.
        proposer: what will draft.
        modes: the overlaps that are possible with these two.
        draft_devices: says what drafters run on, as far as it is known; see `cost_profile_of`.
        progress: hears how far the measurements are, where there are any.

    Raises:
        ConfigError: `overlap` asks for one that is not possible.
        TransportError: the target is lost.
    """
    speculative = config.speculative_config
    if speculative.method == "none" or speculative.controller == "fixed":
        return controller_for(config, assumed_profile(), modes, is_target_elsewhere=target.is_elsewhere)
    costs = cost_profile_of(config, target, proposer, draft_devices=draft_devices, progress=progress)
    return controller_for(config, costs, modes, is_target_elsewhere=target.is_elsewhere)


def modes_of(proposer: ProposerCapabilities) -> tuple[OverlapMode, ...]:
    """Return how rounds can be run with a proposer: what drafts in this process cannot be overlapped, nor
    can what has to hear of the target first.
    """
    if not proposer.remote or proposer.hidden_layers:  # a target that is busy sends no hidden states
        return ("lockstep",)
    return ("lockstep", "ping_pong", "draft_ahead") if proposer.looks_ahead else ("lockstep", "ping_pong")


def controller_for(
    config: EngineConfig,
    profile: CostProfile,
    modes: Sequence[OverlapMode] = ("lockstep",),
    *,
    is_target_elsewhere: bool = False,
) -> SpeculationController:
    """Return the controller that a configuration asks for, given costs and the overlaps that are possible.

    `is_target_elsewhere`: whether the target's steps run beside what is done in this process.

    Raises:
        ConfigError: `overlap` asks for one that is not.
    """
    speculative = config.speculative_config
    overlap = speculative.overlap
    if overlap != "auto" and overlap not in modes:
        raise ConfigError(
            f"speculative_config.overlap: {overlap} is not possible here, only {' and '.join(modes)}: "
            "it takes a draft model in a process of its own"
        )
    allowed = tuple(modes) if overlap == "auto" else (overlap,)
    if speculative.method == "none":
        return FixedController(0)
    drafter_caps: tuple[int, ...] = ()
    if speculative.method == "several":
        drafter_caps = tuple(one.num_speculative_tokens for one in speculative.choices)
    if speculative.controller == "fixed":
        return FixedController(
            speculative.num_speculative_tokens,
            "lockstep" if overlap == "auto" else overlap,
            drafter_caps=drafter_caps,
        )
    place = speculative.budgeted_choice
    budgeted = None if place is None else speculative.choices[place]
    settings = ControllerSettings(
        max_draft_tokens=max(drafter_caps, default=speculative.num_speculative_tokens),
        modes=allowed,
        is_target_elsewhere=is_target_elsewhere,
        num_rows_beside=speculative.num_rows_beside,
        max_branches=speculative.max_branches,
        caps_by_batch=speculative.num_speculative_tokens_per_batch_size,
        max_rows=config.scheduler.max_num_batched_tokens,
        max_sequences=config.scheduler.max_num_seqs,
        drafter_caps=drafter_caps,
        budgeted_drafter=place,
        tree_levels=tuple(levels_of(tree_shape(one.tree)) for one in speculative.choices),
        looks_first=speculative.lookup_first is not None,
        kv_budgets=() if budgeted is None else budgeted.kv.budgets,
        keeps_kv_budgets=budgeted is not None and not budgeted.is_self_drafting,
    )
    return GoodputController(settings, profile, MonotonicClock())


def cost_profile_of(
    config: EngineConfig,
    target: Target,
    proposer: Proposer,
    *,
    draft_devices: Callable[[], Collection[str]] = tuple,
    progress: ProfileProgress | None = None,
    await_drafters: Callable[[], None] = lambda: None,
) -> CostProfile:
    """Return what rounds cost here: as it was measured before, or measured now, or assumed.

    What drafts cost on other devices than `draft_devices`, where these are known, is of no use. Where drafts
    are to be measured, `await_drafters` is called first: it may bring devices that were not known before.

    Raises:
        TransportError: the target is lost.
    """
    speculative = config.speculative_config
    if speculative.profile_seconds == 0.0:
        return assumed_profile()
    place = speculative.budgeted_choice
    plan = ProfilePlan(
        key=_profile_key(config, target.description),
        max_num_seqs=config.scheduler.max_num_seqs,
        max_num_batched_tokens=config.scheduler.max_num_batched_tokens,
        max_draft_tokens=speculative.num_speculative_tokens,
        budget_s=speculative.profile_seconds,
        kv_budget=None if place is None else speculative.choices[place].kv.largest,
        budgeted_drafter=place or 0,
    )
    store = ProfileStore(speculative.profile_dir)
    known = store.load(plan.key)
    known = _of_devices(known, _named(draft_devices()))
    if known is not None and (known.has_all_drafts or not drafts_anything(proposer, plan)):
        return known
    await_drafters()
    devices = _named(draft_devices())
    known = _of_devices(known, devices)
    # What is missing of drafts is measured at the next start: draft workers may not be there yet, or be late.
    profile = measure_profile(target, proposer, plan, known=known, progress=progress)
    if any(profile.drafts):
        known_devices = () if known is None else known.draft_devices
        profile = msgspec.structs.replace(profile, draft_devices=devices or known_devices)
    if profile != known:
        store.save(profile)
    return profile


def _named(devices: Collection[str]) -> tuple[str, ...]:
    return tuple(sorted({one for one in devices if one}))


def _of_devices(known: CostProfile | None, devices: tuple[str, ...]) -> CostProfile | None:
    """Return what is known, without drafts of other devices than these, where these are known."""
    if known is None or not devices or known.draft_devices == devices:
        return known
    return msgspec.structs.replace(known, draft=(), other_drafts=(), draft_devices=())


def _profile_key(config: EngineConfig, description: TargetDescription) -> str:
    """Name everything that costs depend on, as far as it can be known without asking the workers."""
    target, draft = config.target, config.speculative_config
    return profile_key(
        target=description.revision,
        dtype=description.dtype,
        device=description.device,
        invariant=description.batch_invariant,
        blocks=f"{description.num_blocks}x{description.block_size}",
        target_setup=target.model_dump_json(exclude={"model"}),
        draft_setup=draft.model_dump_json(
            exclude={
                "profile_seconds": True,
                "profile_dir": True,
                "overlap": True,
                "controller": True,
                "fallback": True,
                "lookup_first": True,
                "online": True,
                "drafters": {"__all__": {"name", "share"}},
            }
        ),
        draft=[_folder_state(one.model) for one in draft.choices if one.model is not None] or None,
        scheduler=config.scheduler.model_dump_json(),
        # Not the machine's name: a pod that is replaced has another, and `device` says what computes.
        machine=f"{platform.machine()} {usable_cpus()}",
        versions=" ".join(f"{name} {metadata.version(name)}" for name in ("drafthouse", "torch")),
    )


def _folder_state(folder: str) -> str:
    """Say which files a folder holds, by size and time: hashing weights would take longer than measuring."""
    files = sorted(path for path in Path(folder).expanduser().glob("*") if path.is_file())
    return ",".join(f"{path.name}:{path.stat().st_size}:{path.stat().st_mtime_ns}" for path in files)
