"""Files that are whole or not there, and what is said of those that are damaged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from specdec.core.errors import ConfigError, ResourceError
from training.checkpointing import load_checkpoint, replace_file, save_checkpoint
from training.optimization import ORDINARY, make_optimizers
from training.run import RunOptions, Schedule, TrainingRun


@pytest.mark.parametrize(
    "error", [OSError(28, "No space left on device"), RuntimeError("PytorchStreamWriter failed writing file")]
)
def test_a_file_that_cannot_be_written_leaves_the_one_before(tmp_path: Path, error: Exception) -> None:
    def fails(temporary: Path) -> None:
        temporary.write_bytes(b"half of it")
        raise error

    file = tmp_path / "checkpoint.pt"
    file.write_bytes(b"before")
    with pytest.raises(ResourceError, match=r"checkpoint\.pt cannot be written \(.*\); .* GB are free there"):
        replace_file(file, fails)
    assert file.read_bytes() == b"before"
    assert list(tmp_path.iterdir()) == [file], "what was half written takes no space"


def test_a_damaged_checkpoint_is_named(tmp_path: Path) -> None:
    file = tmp_path / "checkpoint.pt"
    module, generator = nn.Linear(2, 2), torch.Generator()
    save_checkpoint(file, step=3, elapsed_s=1.0, modules={"one": module}, optimizers=[], generator=generator)

    def loaded() -> tuple[int, float]:
        return load_checkpoint(file, modules={"one": module}, optimizers=[], generator=generator)

    assert loaded() == (3, 1.0)
    whole = file.read_bytes()
    for damaged in (whole[: len(whole) // 2], b"", b"abc"):
        file.write_bytes(damaged)
        with pytest.raises(ConfigError, match=r"checkpoint\.pt is damaged"):
            loaded()


def test_a_checkpoint_that_cannot_be_read_is_not_called_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To remove it would cost what was trained."""
    file = tmp_path / "checkpoint.pt"
    module, generator = nn.Linear(2, 2), torch.Generator()

    def loaded() -> tuple[int, float]:
        return load_checkpoint(file, modules={"one": module}, optimizers=[], generator=generator)

    save_checkpoint(file, step=3, elapsed_s=1.0, modules={"one": module}, optimizers=[], generator=generator)
    for error, raised in (
        (OSError(5, "Input/output error"), ResourceError),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), RuntimeError),
    ):

        def fails(*_: Any, error: Exception = error, **__: Any) -> Any:
            raise error

        with monkeypatch.context() as patched:
            patched.setattr(torch, "load", fails)
            with pytest.raises(raised) as found:
                loaded()
        assert str(error) in str(found.value)
        assert "remove" not in str(found.value)
    assert loaded() == (3, 1.0)


def test_a_run_goes_on_where_there_is_no_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a checkpoint holds of a GPU is read to the host, and from there to where the run is."""
    file = tmp_path / "checkpoint.pt"
    on_device, on_host = nn.Linear(3, 3), nn.Linear(3, 3)
    optimizers = make_optimizers([(on_device, ORDINARY)], muon_lr=0.1, adamw_lr=0.1, weight_decay=0.0)
    on_device(torch.ones(1, 3)).sum().backward()
    for optimizer in optimizers:
        optimizer.step()
    generator = torch.Generator().manual_seed(3)
    # Saved as tensors of a GPU are, as far as that can be told without one.
    monkeypatch.setattr(torch.serialization, "location_tag", lambda storage: "cuda:0")
    save_checkpoint(
        file,
        step=1,
        elapsed_s=1.0,
        modules={"one": on_device},
        optimizers=optimizers,
        generator=generator,
    )
    monkeypatch.undo()
    with pytest.raises(RuntimeError, match="deserialize object on a CUDA device"):
        torch.load(file, weights_only=True)  # noqa: TID251 - our own file
    drawn = torch.rand(4, generator=generator)
    others = make_optimizers([(on_host, ORDINARY)], muon_lr=0.1, adamw_lr=0.1, weight_decay=0.0)
    other_generator = torch.Generator()
    found = load_checkpoint(file, modules={"one": on_host}, optimizers=others, generator=other_generator)
    assert found == (1, 1.0)
    assert torch.equal(on_host.weight, on_device.weight)
    assert torch.equal(torch.rand(4, generator=other_generator), drawn)
    for module, both in ((on_device, optimizers), (on_host, others)):
        module.zero_grad()
        module(torch.ones(1, 3)).square().sum().backward()
        for optimizer in both:
            optimizer.step()
    assert torch.equal(on_host.weight, on_device.weight)
    assert torch.equal(on_host.bias, on_device.bias)


def test_gradients_that_are_not_finite_end_a_run(tmp_path: Path) -> None:
    """Weights and checkpoint stay as they were: nothing could be learnt with what would come of it."""
    module = nn.Linear(2, 2)
    recipe = Schedule(
        steps=3, muon_lr=0.1, adamw_lr=0.1, weight_decay=0.0, warmup_steps=1, constant_share=1.0, seed=0
    )
    run = TrainingRun("one", recipe, {"one": module}, RunOptions(work_folder=tmp_path, compiled=False))
    before = module.weight.detach().clone()
    with pytest.raises(ConfigError, match="gradients of step 2 are not finite"):
        run.optimize(module(torch.full((1, 2), float("inf"))).sum(), 1)
    assert torch.equal(module.weight, before)
    assert not (tmp_path / "checkpoint.pt").exists()
