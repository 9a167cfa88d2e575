"""Beginning with the weights of another drafter (``--start-from``), and with what else decides its drafts."""

from __future__ import annotations

from pathlib import Path

import torch

from specdec.core.errors import ConfigError
from specdec.drafters.base import Drafter
from specdec.drafters.checkpoints.registry import DRAFTERS, load_drafter
from specdec.drafters.eagle import Eagle
from specdec.drafters.eagle3 import Eagle3
from specdec.drafters.hydra import Hydra
from specdec.drafters.medusa import Medusa
from specdec.drafters.mtp import Mtp
from specdec.drafters.parallel_heads import ParallelHeads
from training.drafters.methods import Training

Options = dict[str, str | bool]


def start_from(training: Training, folder: Path, *, allow_pickled: bool) -> None:
    """Have the drafter of a folder trained, on the host.

    Settings of its that no option says come with it (``norm_before_residual``, the kind of its layers).

    Raises:
        ConfigError: it is of another kind, made with other options, or not put together as those that are
            trained here.
        CheckpointError: the folder cannot be read.
    """
    drafter = training.drafter
    kind = next(kind for kind, its_type in DRAFTERS.items() if its_type is type(drafter))
    other = load_drafter(folder, drafter.target, torch.float32, kind=kind, allow_pickled=allow_pickled)
    require_alike(drafter, other, folder)
    for tensor in (*other.parameters(), *other.buffers()):
        tensor.data = tensor.data.clone()  # until then it is the file's memory: who writes there changes it
    try:
        training.go_on_with(other)
    except ConfigError as error:
        raise ConfigError(f"--start-from {folder}: {error}") from error


def require_alike(drafter: Drafter, other: Drafter, folder: Path) -> None:
    """Check that the drafter of ``folder`` is put together as the one that is made here.

    Raises:
        ConfigError: naming the option or the tensor that differs.
    """
    if type(other) is not type(drafter):
        raise ConfigError(
            f"--start-from {folder} holds {type(other).__name__}, not {type(drafter).__name__}: leave it out"
        )
    _require_same_options(drafter, other, folder)
    _require_same_shapes(drafter, other, folder)


def options_of(drafter: Drafter) -> Options:
    """The options that a drafter is made with, by flag."""
    match drafter:
        case Medusa():
            return {"--depth": str(drafter.max_depth), "--num-layers": str(drafter.num_layers)}
        case Hydra():
            return {
                "--depth": str(drafter.max_depth),
                "--num-layers": str(drafter.num_layers),
                "--prefix-layer": drafter.prefix is not None,
            }
        case Eagle():
            return {"--num-layers": str(len(drafter.layers))}
        case Eagle3():
            return {
                "--fused-layers": ",".join(map(str, drafter.settings.fused_layers)),
                "--draft-vocab-size": str(drafter.num_logits),
                "--v31": drafter.settings.fc_norm,
            }
        case Mtp():
            return {"--num-modules": str(drafter.num_modules)}
        case ParallelHeads():
            return {"--depth": str(drafter.max_depth)}
    raise AssertionError(f"{type(drafter).__name__} is not trained")


def _require_same_options(drafter: Drafter, other: Drafter, folder: Path) -> None:
    here = options_of(drafter)
    for flag, there in options_of(other).items():
        if here[flag] == there:
            continue
        if isinstance(there, bool):
            made, do = ("with", "give it") if there else ("without", "leave it out")
            raise ConfigError(f"--start-from {folder} was made {made} {flag}: {do}")
        raise ConfigError(f"--start-from {folder} was made with {flag} {there}, not {here[flag]}: give that")


def _require_same_shapes(drafter: Drafter, other: Drafter, folder: Path) -> None:
    """What is left now is what published drafters have and those made here have not, or the other way."""
    wanted, found = (
        {name: tuple(tensor.shape) for name, tensor in one.state_dict().items()} for one in (drafter, other)
    )
    for name in sorted(wanted.keys() | found.keys()):
        if wanted.get(name) != found.get(name):
            raise ConfigError(
                f"--start-from {folder}: {name} is {found.get(name, 'not there')}, and "
                f"{wanted.get(name, 'not there')} in those that are trained here: leave it out"
            )
