"""Whatever is written to a full disk: nothing is lost, nothing half is left, and the reason is told."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import msgspec
import pytest

from benchmarks.full_disk import filled_up
from deploy.batch.runner import BatchOptions
from specdec.attention.native import NativeUnavailable, load_library
from specdec.core.errors import ConfigError
from specdec.proposers.corpus import open_corpus
from specdec.scheduling.speculation.cost import assumed_profile
from specdec.scheduling.speculation.cost_profile import ProfileStore
from tests.architectures import make_tokenizer
from tests.deploy.batch.batch_runs import request, results_of, run, write
from tests.deploy.openai.fakes import Door
from tests.full_disk import needs_mounts, small_disk
from tests.specdec.proposers.retrieval_configs import config_for

pytestmark = [pytest.mark.full, needs_mounts]


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with small_disk(tmp_path / "disk", "64k") as disk:
        yield disk


def left_on(disk: Path) -> list[str]:
    return sorted(str(path.relative_to(disk)) for path in disk.rglob("*") if path.is_file())


def test_a_cost_profile_is_measured_again_next_time(disk: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = ProfileStore(disk)
    profile = msgspec.structs.replace(assumed_profile(), key="a key")
    with filled_up(disk):
        store.save(profile)
        assert "cannot be kept" in caplog.text
        assert "No space left" in caplog.text
    assert left_on(disk) == []
    store.save(profile)
    assert store.load("a key") == profile


def test_a_corpus_is_indexed_again_next_time(
    disk: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make_tokenizer().save_pretrained(tmp_path / "model")
    text = tmp_path / "corpus.txt"
    text.write_text("hello world")
    config = config_for(text, cache_dir=str(disk / "kept"))
    with filled_up(disk):
        made = open_corpus(config, str(tmp_path / "model"))
        assert "cannot be kept" in caplog.text
    assert left_on(disk) == []
    assert open_corpus(config, str(tmp_path / "model")).suffixes.tolist() == made.suffixes.tolist()
    assert len(left_on(disk)) == 2


def test_a_kernel_that_cannot_be_kept_is_said_to_be_unavailable(disk: Path, tmp_path: Path) -> None:
    """Whoever asks for it then runs without, and says why."""
    source = tmp_path / "small.cpp"
    source.write_text('extern "C" __attribute__((visibility("default"))) int seven() { return 7; }\n')
    with filled_up(disk), pytest.raises(NativeUnavailable, match="No space left"):
        load_library(source, disk)
    assert [name for name in left_on(disk) if not name.endswith(".lock")] == []
    assert load_library(source, disk).seven() == 7


def test_a_batch_stops_with_a_message_and_goes_on_where_it_was(disk: Path, tmp_path: Path) -> None:
    transport = httpx.ASGITransport(Door().app)
    requests = write(tmp_path / "in.jsonl", *(request(f"r{number}") for number in range(40)))
    results = disk / "out.jsonl"
    options = BatchOptions(concurrency=1, patience_s=1.0)
    ballast = disk / "ballast"
    ballast.write_bytes(bytes(60 << 10))  # one page is left, which the first results fill
    with pytest.raises(ConfigError, match=r"out\.jsonl cannot be written: No space left on device"):
        run(transport, requests, results, options=options)
    lines = results.read_text().splitlines()
    num_whole = sum(_is_whole(line) for line in lines)
    assert 0 < num_whole < 40
    ballast.unlink()
    run(transport, requests, results, options=options)
    names = [result["custom_id"] for result in results_of(results)]
    assert names == [f"r{number}" for number in range(40)], "each once, in order, none lost"


def _is_whole(line: str) -> bool:
    try:
        json.loads(line)
    except ValueError:
        return False
    return True
