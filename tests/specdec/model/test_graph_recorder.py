"""What is refused before CUDA has to, and what is put right where CUDA refused; without a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from specdec.core.sampling_params import SamplingParams
from specdec.model import graph_recorder
from specdec.model.graph_recorder import CannotRecord, CudaRecorder, NoHostWaits
from specdec.sampling.rows import RowSpec, SamplingRows
from specdec.sampling.sampler import sample_eager

CPU = torch.device("cpu")
META = torch.device("meta")
Work = Callable[[torch.Tensor], object]

WAITING: dict[str, Work] = {
    "item": lambda x: x.sum().item(),
    "condition": lambda x: bool((x > 0).all()),
    "nonzero": lambda x: x.nonzero(),
    "where": lambda x: torch.where(x > 0),
    "masked select": lambda x: x.masked_select(x > 0),
    "mask": lambda x: x[x > 0],
    "repeats": lambda x: torch.repeat_interleave(x, torch.ones(4, dtype=torch.long)),
    "unique": torch.unique,
    "equal": lambda x: torch.equal(x, x + 1),
    "away": lambda x: x.to(META),
    "away, another dtype": lambda x: x.to(META, torch.float64),
    "written elsewhere": lambda x: torch.empty(4, device=META).copy_(x),
}
STAYING: dict[str, Work] = {
    "arithmetic": lambda x: (x + 1).softmax(-1),
    "another dtype": lambda x: x.to(torch.float64),
    "the same place": lambda x: x.to(CPU),
    "indices": lambda x: x[torch.tensor([1, 2])],
    "filled": lambda x: x.masked_fill(x > 0, 0.0),
    "chosen": lambda x: torch.where(x > 0, x, -1.0),
    "copied": lambda x: torch.empty(4).copy_(x),
    "a known number of repeats": lambda x: torch.repeat_interleave(
        x, torch.ones(4, dtype=torch.long), output_size=4
    ),
}


@pytest.mark.parametrize("name", WAITING)
def test_what_waits_for_the_device_is_refused(name: str) -> None:
    x = torch.arange(4.0)
    with torch.inference_mode(), NoHostWaits(CPU), pytest.raises(CannotRecord, match="waits for the device"):
        WAITING[name](x)


@pytest.mark.parametrize("name", STAYING)
def test_what_does_not_wait_is_run(name: str) -> None:
    x = torch.arange(4.0)
    with torch.inference_mode():
        expected = STAYING[name](x)
        with NoHostWaits(CPU):
            got = STAYING[name](x)
    assert isinstance(got, torch.Tensor)
    assert isinstance(expected, torch.Tensor)
    assert torch.equal(got, expected)


def test_numbers_on_other_devices_may_be_read() -> None:
    with NoHostWaits(META):
        assert torch.arange(4.0).sum().item() == 6.0


def test_the_token_function_does_not_wait() -> None:
    """It is recorded with every draft loop."""
    params = SamplingParams(temperature=0.7, top_k=20, top_p=0.9, min_p=0.01)
    rows = SamplingRows.build([RowSpec(SamplingParams(temperature=0.0), 1, 5, 1), RowSpec(params, 2, 9, 2)])
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        expected = sample_eager(logits, rows, "target")
        with NoHostWaits(CPU):
            got = sample_eager(logits, rows, "target")
    assert all(map(torch.equal, got, expected))


class Cuda:
    """Stands for `torch.cuda` where a recording fails: what PyTorch 2.11 leaves behind, what is undone."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, ends_by_itself: bool) -> None:
        self.current = SimpleNamespace(device_index=0, wait_stream=lambda other: None)
        self.underway: list[object] = []
        self.is_generator_recording = False
        self.num_captures = 0
        self._ends_by_itself = ends_by_itself
        self.first = self.current
        for name in ("current_stream", "set_stream", "graph"):
            monkeypatch.setattr(torch.cuda, name, getattr(self, name))
        stream = SimpleNamespace(wait_stream=lambda other: None)
        monkeypatch.setattr(torch.cuda, "Stream", lambda device: stream)
        monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 1))
        monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: SimpleNamespace(replay=lambda: None))
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
        for name in ("device", "stream"):
            monkeypatch.setattr(torch.cuda, name, lambda _: nullcontext())
        monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", self.end_allocate)
        monkeypatch.setattr(graph_recorder, "_abandoned", [])

    def current_stream(self) -> Any:
        return self.current

    def set_stream(self, stream: Any) -> None:
        self.current = stream

    def end_allocate(self, device: int, pool: object) -> None:
        assert device == 0
        if pool not in self.underway:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
        self.underway.remove(pool)

    @contextmanager
    def graph(
        self, graph: object, *, pool: object = None, stream: object = None, capture_error_mode: str
    ) -> Iterator[None]:
        assert capture_error_mode == "thread_local"
        if self.underway:
            raise RuntimeError("captures_underway.empty() INTERNAL ASSERT FAILED")
        self.underway.append(pool)
        self.is_generator_recording = True
        self.num_captures += 1
        before, self.current = self.current, SimpleNamespace()
        try:
            yield
        except BaseException:
            if self._ends_by_itself:
                self.underway.remove(pool)
            raise
        self.underway.remove(pool)
        self.is_generator_recording = False
        self.current = before


@pytest.mark.parametrize("ends_by_itself", [False, True], ids=["torch 2.11", "later ones"])
def test_a_recording_that_fails_leaves_nothing_behind(
    monkeypatch: pytest.MonkeyPatch, ends_by_itself: bool
) -> None:
    cuda = Cuda(monkeypatch, ends_by_itself=ends_by_itself)
    recorder = CudaRecorder(CPU)
    runs: list[int] = []

    def run() -> None:
        runs.append(cuda.num_captures)
        if cuda.num_captures == 1:
            raise RuntimeError("operation not permitted when stream is capturing")

    with pytest.raises(RuntimeError, match="not permitted"):
        recorder.record(run)
    assert runs == [0, 0, 1], "two runs come before the recording"
    assert cuda.current is cuda.first
    assert not cuda.underway
    assert not cuda.is_generator_recording
    assert len(graph_recorder._abandoned) == 1
    recorder.record(run)()
    assert runs[3:] == [2, 2, 3]


def test_what_waits_is_refused_before_the_recording(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = Cuda(monkeypatch, ends_by_itself=False)
    with pytest.raises(CannotRecord, match="waits for the device"):
        CudaRecorder(CPU).record(lambda: torch.ones(2).sum().item())  # type: ignore[arg-type, return-value]
    assert cuda.num_captures == 0
    assert cuda.current is cuda.first
