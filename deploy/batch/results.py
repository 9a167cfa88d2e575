"""The results of a batch: one JSON object per line, in OpenAI's format, in the order in which they came.

The file is all that a batch remembers: what is in it is not asked for again. A line that was cut off when
the process died is taken away, and its request made again. Two runs would take away each other's lines: who
writes holds a lock on the file.

In one respect a line says more than OpenAI's. There, a request that is refused has its response and no error,
and stands in another file; here it stands beside the others, and has an error, too, which tells it from those
that were answered and names line and field.
"""

from __future__ import annotations

import fcntl
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec

from deploy.batch.lines import BadLine, NumberedRequest
from specdec.core.errors import UNDECODABLE, ConfigError

_BEGINNING = b'{"id":"'
_NO_REQUEST = "line-"
"""Begins the `id` of results for lines that were no request; they may have a `custom_id` of another line."""
_IS_IT_OURS = "is it a result of `drafthouse batch`?"


class BatchError(msgspec.Struct, frozen=True, kw_only=True):
    """Why there is no answer, or a refusal."""

    code: str
    message: str
    """Names the line of the request."""


class BatchResponse(msgspec.Struct, frozen=True, kw_only=True):
    """What the server answered."""

    status_code: int
    request_id: str
    body: Any


class BatchResult(msgspec.Struct, frozen=True, kw_only=True):
    """One line."""

    id: str
    custom_id: str | None
    response: BatchResponse | None
    error: BatchError | None

    @property
    def is_failure(self) -> bool:
        """Whether the request was not answered as asked."""
        return self.error is not None or self.response is None or self.response.status_code >= 400


def result_of_bad_line(line: BadLine) -> BatchResult:
    """Return what is written for a line that is no request."""
    return BatchResult(
        id=f"{_NO_REQUEST}{line.number}",
        custom_id=line.custom_id,
        response=None,
        error=BatchError(code="invalid_line", message=line.message),
    )


class ResultsFile:
    """The file of results, open for more of them. A context manager."""

    def __init__(self, file: Path, *, drop_failures: bool = False) -> None:
        """Read what is there, and take a line that was cut off away. It is this run's alone until the end.

        Args:
            file: made if it is not there.
            drop_failures: take failures away as well, so that they are tried again.

        Raises:
            ConfigError: the file cannot be read or written, is being written by another run, or holds
                something else; it stays as it is.
        """
        self._file = file
        self._decoder = msgspec.json.Decoder(BatchResult)
        self._custom_ids: set[str] = set()
        self._line_ids: set[str] = set()
        self.num_failures = 0
        try:
            self._descriptor = self._open()
            try:
                num_bytes = self._scan(drop_failures)
                if drop_failures and self.num_failures:
                    num_bytes = self._rewrite()
                os.ftruncate(self._descriptor, num_bytes)
            except BaseException:
                os.close(self._descriptor)
                raise
        except OSError as error:
            raise ConfigError(f"{file} cannot be written: {error.strerror}") from None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        os.close(self._descriptor)

    @property
    def num_results(self) -> int:
        """How many there are."""
        return len(self._custom_ids) + len(self._line_ids)

    def holds(self, item: NumberedRequest | BadLine) -> bool:
        """Whether a line of the batch has its result."""
        if isinstance(item, BadLine):
            return f"{_NO_REQUEST}{item.number}" in self._line_ids
        return item.request.custom_id in self._custom_ids

    def write(self, result: BatchResult) -> None:
        """Append a result; it is in the system's hands when this returns.

        Raises:
            ConfigError: there is no room for it, say.
        """
        data = memoryview(msgspec.json.encode(result) + b"\n")
        try:
            while data:
                data = data[os.write(self._descriptor, data) :]
        except OSError as error:
            raise ConfigError(f"{self._file} cannot be written: {error.strerror}") from None
        self._count(result)

    def _count(self, result: BatchResult) -> None:
        if result.id.startswith(_NO_REQUEST):
            self._line_ids.add(result.id)
        elif result.custom_id is not None:
            self._custom_ids.add(result.custom_id)
        self.num_failures += result.is_failure

    def _open(self) -> int:
        """Open the file and lock it; another run may just have put another one in its place."""
        while True:
            descriptor = _opened(self._file)
            try:
                self._lock(descriptor)
                if os.path.samestat(os.fstat(descriptor), os.stat(self._file)):
                    return descriptor
            except FileNotFoundError:  # taken away meanwhile: it is made anew
                pass
            except BaseException:
                os.close(descriptor)
                raise
            os.close(descriptor)

    def _lock(self, descriptor: int) -> None:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"{self._file} is being written by another run of `drafthouse batch`: wait for its end, or "
                "give another file"
            ) from None

    def _scan(self, drop_failures: bool) -> int:
        """Count what is there; return where the last whole line ends."""
        end = 0
        for line, result in self._results():
            end += len(line)
            if not (drop_failures and result.is_failure):
                self._count(result)
            else:
                self.num_failures += 1
        return end

    def _results(self) -> Iterator[tuple[bytes, BatchResult]]:
        if not self._file.exists():
            return
        with self._file.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                if not line.endswith(b"\n"):
                    if line[: len(_BEGINNING)] != _BEGINNING[: len(line)]:
                        raise ConfigError(f"{self._file}:{number}: {_IS_IT_OURS}")
                    return
                try:
                    yield line, self._decoder.decode(line)
                except UNDECODABLE as error:
                    raise ConfigError(f"{self._file}:{number}: {_IS_IT_OURS} ({error})") from None

    def _rewrite(self) -> int:
        """Put a file without failures in the place of the one that is there; return its length.

        It is locked before it is there, and the one before until it is not.
        """
        file = self._file.resolve()  # where a link leads to: it stays one
        kept = file.with_name(f"{file.name}.new")
        num_bytes = 0
        descriptor = _opened(kept)
        try:
            self._lock(descriptor)
            os.ftruncate(descriptor, 0)
            os.fchmod(descriptor, stat.S_IMODE(os.fstat(self._descriptor).st_mode))
            with os.fdopen(descriptor, "wb", closefd=False) as new:
                for line, result in self._results():
                    if not result.is_failure:
                        num_bytes += new.write(line)
            os.fsync(descriptor)
            os.replace(kept, file)
        except BaseException:
            os.close(descriptor)
            raise
        os.close(self._descriptor)
        self._descriptor = descriptor
        self.num_failures = 0
        return num_bytes


def _opened(file: Path) -> int:
    # Opening a pipe waits for a reader, and reading what was written to it before for a writer: this one.
    if file.exists() and not (file.is_file() or file.is_dir()):
        raise ConfigError(
            f"{file} is a pipe or a device, and results are read again to go on from them: give a file"
        )
    return os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
