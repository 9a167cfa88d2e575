"""OUT and WORK of a run of ``drafthouse train``: whose they are, and what goes on there."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from specdec.core.errors import ConfigError
from training.checkpointing import replace_file
from training.drafters.options import TrainOptions
from training.drafters.recipe import DrafterRecipe, flag_of

_RUN_FILE = "run.json"
_OUT_FILE = "out.json"
_LOCK_FILE = "lock"
_OF_DRAFTERS = (".json", ".safetensors", ".pt", ".bin")
_END_BYTES = 1 << 20
_NOT_OPTIONS = {
    "rows": "other texts: what --data names, or what is in it, is not what it was",
    "target": "another --target: config.json or tensors of the folder are not what they were",
    "target_weights": "another --target: the weights in the folder are not what they were",
    "start_from_files": "another --start-from: configuration or weights in the folder are not what they were",
}
"""What a run is told apart by that is no value of an option, and what to say where it differs."""
_FLAGS = {"keep_hidden": "--keep-hidden or --hidden-folder"}
"""Options that decide what a run is told apart by, where they are not one of its name."""


def require_free(options: TrainOptions) -> None:
    """What lies in OUT may be of the run that WORK holds; nothing else is written over."""
    out = options.out
    if out.exists() and not out.is_dir():
        raise ConfigError(f"--out {out} is a file: give a folder")
    others = [one for one in out.iterdir() if not _is_work(one, options)] if out.is_dir() else []
    if others and not _is_of_this_run(options):
        raise ConfigError(
            f"--out {out} holds files, and {options.work} no run that they could be of: give another --out, "
            "or remove them"
        )


def _is_work(one: Path, options: TrainOptions) -> bool:
    """Whether something in OUT is WORK, which may lie there, or be the same folder."""
    work = options.work.resolve()
    return work.is_relative_to(one.resolve()) or one.resolve() == work / _LOCK_FILE


def _is_of_this_run(options: TrainOptions) -> bool:
    """Whether an earlier start of the run in WORK may have written OUT."""
    if not (options.work / _RUN_FILE).exists():
        return False
    file = options.work / _OUT_FILE
    # Runs that were begun by earlier versions do not say where they write.
    return not file.exists() or _out_from_work(options) in _read_note(file)


def _out_from_work(options: TrainOptions) -> str:
    """OUT seen from WORK: the same when both are moved."""
    return os.path.relpath(options.out.resolve(), options.work.resolve())


def described_run(
    recipe: DrafterRecipe, options: TrainOptions, outline: str, fingerprint: str, *, is_mixed: bool
) -> dict[str, Any]:
    """What decides the weights of a run, but for its rows; ``is_mixed``: products are of bfloat16."""
    return {
        **asdict(recipe),
        "target": outline,
        "target_weights": fingerprint,
        "start_from": None if options.start_from is None else str(options.start_from),
        "start_from_files": None if options.start_from is None else _fingerprint(options.start_from),
        "samples": options.samples,
        "sample_temperature": options.sample_temperature if options.samples else None,
        "dtype": "bfloat16" if is_mixed else "float32",
        "keep_hidden": options.rounds_states,
    }


def _fingerprint(folder: Path) -> str:
    """A hash of what a drafter's folder holds: of large files both ends, and their sizes."""
    digest = hashlib.sha256()
    for file in sorted(folder.iterdir()) if folder.is_dir() else ():
        if not file.is_file() or file.suffix not in _OF_DRAFTERS:
            continue
        size = file.stat().st_size
        digest.update(f"{file.name}\0{size}\0".encode())
        digest.update(ends_of(file))
    return digest.hexdigest()[:32]


def ends_of(file: Path) -> bytes:
    """Return the beginning of a file, and its end: of weights that says whether they are others."""
    with file.open("rb") as stream:
        beginning = stream.read(_END_BYTES)
        stream.seek(max(0, file.stat().st_size - _END_BYTES))
        return beginning + stream.read(_END_BYTES)


def require_same_run(work: Path, described: dict[str, Any]) -> None:
    """A checkpoint of something else in ``work`` is not gone on from."""
    file = work / _RUN_FILE
    before = _read_note(file) if file.exists() else {}
    for name, value in json.loads(json.dumps(described)).items():
        # What is not there was no setting yet when the run began.
        if before.get(name, value) == value:
            continue
        what = _NOT_OPTIONS.get(name)
        if what is None:
            flag = _FLAGS.get(name, flag_of(name))
            named = name if flag.removeprefix("--").replace("-", "_") == name else f"{name} ({flag})"
            what = f"{named} {before[name]!r}, not {value!r}"
        raise ConfigError(
            f"{work} holds a run with {what}: give another --work, or remove the folder to start anew"
        )


def note_run(options: TrainOptions, described: dict[str, Any]) -> None:
    """Note what is trained in WORK, and that this run writes OUT."""
    file = options.work / _RUN_FILE
    if not file.exists():
        _write_note(file, described)
    outs = options.work / _OUT_FILE
    known: list[str] = _read_note(outs) if outs.exists() else []
    if _out_from_work(options) not in known:
        _write_note(outs, [*known, _out_from_work(options)])


def _write_note(file: Path, content: Any) -> None:
    text = json.dumps(content, indent=2) + "\n"
    replace_file(file, lambda temporary: temporary.write_text(text))


def _read_note(file: Path) -> Any:
    try:
        return json.loads(file.read_text())
    except ValueError as error:
        raise ConfigError(
            f"{file} is damaged ({error}): what run {file.parent} holds is not known; give another --work, "
            "or remove the folder to start anew"
        ) from error


@contextmanager
def alone_in(work: Path) -> Iterator[None]:
    """Inside, no other process trains in ``work``: two would write the same checkpoint by turns.

    Raises:
        ConfigError: one does.
    """
    work.mkdir(parents=True, exist_ok=True)
    with (work / _LOCK_FILE).open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigError(
                f"another process trains in {work}: wait for it, or give another --work"
            ) from error
        except OSError:
            pass  # some file systems of networks have no locks; there nobody is warned
        yield
