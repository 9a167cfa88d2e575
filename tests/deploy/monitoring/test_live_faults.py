"""Alerts of a real Prometheus at the faults that they are for: load, models, files and processes that go
wrong at clusters that run, on the demo models. Processes that are killed: test_live_cluster.py."""

from __future__ import annotations

import itertools
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil
import pytest
import torch
import transformers

from deploy.monitoring.promql import PREFIX
from deploy.monitoring.rules import rules_yaml
from tests.deploy.certificates import make_certificate
from tests.deploy.monitoring.live_faults import (
    has_fired,
    kill,
    load,
    quickened,
    ray_processes,
    stuttering,
)
from tests.deploy.monitoring.prometheus import Prometheus, needs_prometheus, running_prometheus
from tests.deploy.serve_process import Server, launch
from tests.ports import free_port

pytestmark = [pytest.mark.ray, pytest.mark.full, pytest.mark.timeout(900), needs_prometheus]
FAMILY = Path(__file__).resolve().parents[3] / "models" / "demo"
WINDOW = "15s"
CODE = "def count_lines(path):\n    lines = open(path).read().splitlines()\n"
PATIENCE_S = 120.0
TRIAL = "specdec.sampling.grammar_trial"
"""The program in which grammars are tried."""


@dataclass(frozen=True, slots=True)
class World:
    """A server whose models lie in `folder`, and a Prometheus that looks at it."""

    folder: Path
    server: Server
    prometheus: Prometheus

    def process(self, title: str) -> psutil.Process:
        """The one of Ray's processes that is called so."""
        (found,) = ray_processes(self.server, title)
        return found


@dataclass(frozen=True, slots=True)
class Fault:
    """What goes wrong while `make` is open, and the alerts that fire for it and have not fired before."""

    what: str
    make: Callable[[World], AbstractContextManager[None]]
    alerts: frozenset[str]


def fired(prometheus: Prometheus, faults: Iterable[Fault]) -> list[str]:
    """Return which alerts of these faults have fired."""
    return [alert for fault in faults for alert in fault.alerts if prometheus.values(has_fired(alert))]


def prove(world: World, faults: Sequence[Fault]) -> None:
    """Make one fault after the other, each until all of its alerts have fired, and none too early."""
    for fault in faults:
        early = fired(world.prometheus, [fault])
        assert not early, f"before {fault.what}: {early}"
        with fault.make(world):
            for alert in sorted(fault.alerts):
                world.prometheus.wait_for(has_fired(alert), PATIENCE_S)


def save_random(folder: Path, like: Path, *, vocab_size: int | None = None) -> None:
    """Save a model of the same shape that has learnt nothing, and the same tokenizer.

    `vocab_size`: of one that knows of more tokens.
    """
    torch.manual_seed(7)
    config = transformers.AutoConfig.from_pretrained(like)
    config.vocab_size = vocab_size or config.vocab_size
    config.tie_word_embeddings = False  # else what comes next would be what came last
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    transformers.AutoTokenizer.from_pretrained(like).save_pretrained(folder)


def put_in_place(folder: Path, other: Path) -> None:
    """Let another folder stand in its place; who has files of it open keeps them."""
    folder.rename(folder.with_name(f"{folder.name}-before-{other.name}"))
    other.rename(folder)


# ------------------------------------------------------------------------- processes and models that falter


def start_well(folder: Path) -> Server:
    """Start a server with a trained draft model in a draft worker.

    Workers compile only while nobody asks for anything.
    """
    for name in ("target", "draft"):
        shutil.copytree(FAMILY / name, folder / name)
    text = f"""\
target: {{model: target, dtype: float32, device: cpu, num_threads: 1, compile: {{startup_seconds: 0}}}}
speculative_config:
  method: draft_model
  model: draft
  num_speculative_tokens: 3
  controller: fixed
  num_threads: 1
  compile: {{mode: "off"}}
cache: {{num_blocks: 128}}
cluster:
  drain_timeout_s: 3
  membership: {{lease_s: 3, renew_s: 0.5}}
  health_checks: {{period_s: 1, timeout_s: 10}}
  target_groups: {{bundle: {{num_cpus: 0.5}}}}
  draft_pool: {{bundle: {{num_cpus: 0.5}}, deadlines: {{min_deadline_s: 0.2}}}}
http: {{port: {free_port()}, served_model_name: tiny}}
"""
    return launch(folder, text, Path(tempfile.mkdtemp(prefix="dh-", dir="/tmp")))


def slow_target(world: World) -> AbstractContextManager[None]:
    return stuttering(world.process("TargetWorkerProcess"), stopped_s=0.8, running_s=0.03)


def slow_draft_worker(world: World) -> AbstractContextManager[None]:
    return stuttering(world.process("DraftWorkerProcess"), stopped_s=0.6, running_s=0.2)


@contextmanager
def no_memory_for_grammars(world: World) -> Iterator[None]:
    """Ask for texts of ever new grammars. What tries these for the draft worker is killed as soon as it is
    there, as by a node that is short of memory.
    """
    worker, over = world.process("DraftWorkerProcess"), threading.Event()

    def ask() -> None:
        for number in itertools.count(40):
            if over.is_set():
                return
            body = {"model": "tiny", "prompt": CODE, "max_tokens": 64, "guided_regex": f"[a-z ]{{{number}}}"}
            httpx.post(f"{world.server.url}/v1/completions", json=body, timeout=120).raise_for_status()

    def kill_trials() -> None:
        while not over.wait(0.02):
            for child in worker.children():
                with suppress(psutil.Error):
                    if TRIAL in child.cmdline():
                        child.kill()

    threads = [threading.Thread(target=one) for one in (ask, kill_trials)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        over.set()
        for thread in threads:
            thread.join()


@contextmanager
def ingress_of_another_version(world: World) -> Iterator[None]:
    """An ingress of the next version joins."""
    (raylet,) = (process for process in world.server.processes() if process.name() == "raylet")
    option = "--gcs-address="
    (address,) = (word for word in raylet.cmdline() if word.startswith(option))
    with subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("newer_ingress.py")), address.removeprefix(option)],
        env=raylet.environ(),
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield
        finally:
            try:
                _, errors = process.communicate(timeout=60)
            finally:
                process.kill()
    assert process.returncode == 0, errors


@contextmanager
def hung_directory(world: World) -> Iterator[None]:
    """What is on the head node does not answer."""
    process = world.process("DirectoryProcess")
    process.suspend()
    try:
        yield
    finally:
        process.resume()


@contextmanager
def reloading_target(world: World) -> Iterator[None]:
    """The target worker is killed; the next one is asked from its first moment on, and never idle."""
    kill(world.server, "TargetWorkerProcess")
    yield


@contextmanager
def other_draft_model(world: World) -> Iterator[None]:
    """A draft model that does not belong to the target is rolled out, and the draft worker starts anew."""
    save_random(world.folder / "untrained", FAMILY / "draft")
    put_in_place(world.folder / "draft", world.folder / "untrained")
    kill(world.server, "DraftWorkerProcess")
    yield


@contextmanager
def other_vocabulary(world: World) -> Iterator[None]:
    """Target and draft model are replaced by some of another tokenizer, and the draft worker alone starts
    anew."""
    for name in ("target", "draft"):
        other = world.folder / f"other-{name}"
        save_random(other, FAMILY / name, vocab_size=8192)
        put_in_place(world.folder / name, other)
    kill(world.server, "DraftWorkerProcess")
    yield


FALTERING = (
    Fault("a slow target", slow_target, frozenset({"TokensSlow"})),
    Fault("a slow draft worker", slow_draft_worker, frozenset({"DraftsLate"})),
    Fault("no memory for grammars", no_memory_for_grammars, frozenset({"GrammarsNotKnown"})),
    Fault("another version", ingress_of_another_version, frozenset({"MessagesDropped"})),
    Fault("a head that does not answer", hung_directory, frozenset({"HeadAway"})),
    Fault("no time to compile", reloading_target, frozenset({"CompilePending"})),
    Fault("another draft model", other_draft_model, frozenset({"AcceptanceFell"})),
    Fault("another vocabulary", other_vocabulary, frozenset({"InvalidDrafts"})),
)


# -------------------------------------------------------------------------------- too little of everything


def start_short(folder: Path) -> Server:
    """Start a server that is short of memory, of places, of a compiler and of drafts worth their time.

    Its rule is a lossy one. Its certificate lasts; there is another one that does not.
    """
    save_random(folder / "untrained", FAMILY / "draft")
    certificate, soon = make_certificate(folder, days=90), make_certificate(folder, "soon", days=5)
    trusted = [Path(one.certificate_file).read_text() for one in (certificate, soon)]
    (folder / "trusted.pem").write_text("".join(trusted))
    compiler = folder / "compiler"
    compiler.write_text('#!/bin/sh\necho "the disk is full" >&2\nexit 1\n')
    compiler.chmod(0o755)
    text = f"""\
target:
  model: {FAMILY / "target"}
  dtype: float32
  device: cpu
  num_threads: 1
  compile: {{cache_dir: {folder / "kernels"}}}
speculative_config:
  method: draft_model
  model: untrained
  num_speculative_tokens: 3
  rejection_sample_method: typical
  allow_lossy: true
  num_threads: 1
  compile: {{mode: "off"}}
cache: {{num_blocks: 14, enable_prefix_caching: false}}
scheduler: {{max_num_seqs: 2, refuse_late: false}}
cluster:
  drain_timeout_s: 3
  target_groups: {{bundle: {{num_cpus: 0.5}}}}
  draft_pool: {{bundle: {{num_cpus: 0.5}}, shares: {{max_sequences: 1}}}}
http:
  port: {free_port()}
  served_model_name: tiny
  tls: {{certificate_file: {certificate.certificate_file}, key_file: {certificate.key_file}}}
"""
    return launch(folder, text, Path(tempfile.mkdtemp(prefix="dh-", dir="/tmp")))


@contextmanager
def old_certificate(world: World) -> Iterator[None]:
    """A certificate that ends in five days is put in the place of the one that clients were shown."""
    for name in ("soon.crt", "soon.key"):
        path = world.folder / name
        path.replace(path.with_stem("server"))
    yield


def asking(**parameters: object) -> Callable[[World], AbstractContextManager[None]]:
    """Requests, as `load` has them, which are drafted for whatever the controller thinks of it."""
    drafted = {"speculation": {"num_speculative_tokens": 3}, "may_fail": True, "prompt": CODE}
    return lambda world: load(world.server.url, **(drafted | parameters))


SHORT = (
    Fault("a compiler that fails", lambda world: nullcontext(), frozenset({"CompileFailed"})),
    Fault("an old certificate", old_certificate, frozenset({"CertificateExpires"})),
    Fault(
        "drafts of an untrained model",
        asking(num_clients=1, temperature=0.0, speculation=None),
        frozenset({"DraftPoolNotWorth"}),
    ),
    Fault(
        "more requests than there is room for",
        asking(num_clients=12, temperature=0.0, max_tokens=96),
        frozenset({"QueueLong", "FirstTokenLate", "WorksTwice", "DraftPoolFull"}),
    ),
    Fault(
        "sampling by a lossy rule",
        asking(num_clients=1, temperature=1.0),
        frozenset({"LossyTokens"}),
    ),
    Fault(
        "clients that give little time",
        asking(num_clients=2, max_tokens=180, timeout_s=0.3),
        frozenset({"OutOfTime"}),
    ),
)


def test_too_little_of_everything_fires_the_alerts_that_are_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", str(tmp_path / "compiler"))
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "trusted.pem"))
    server = start_short(tmp_path)
    try:
        rules = quickened(rules_yaml(), window=WINDOW)
        with running_prometheus(tmp_path, server.url, rules) as prometheus:
            prove(World(tmp_path, server, prometheus), SHORT)
    finally:
        server.clean_up()


def wait_compiled(server: Server) -> None:
    """Wait until the target's forward is compiled: nobody asks for anything yet."""
    until_s = time.monotonic() + PATIENCE_S
    ready = re.compile(rf'^{PREFIX}num_workers{{(?=.*part="target")(?=.*compile="ready").*}} 1', re.MULTILINE)
    while not ready.search(httpx.get(f"{server.url}/metrics", timeout=30).text):
        assert time.monotonic() < until_s
        time.sleep(0.5)


def test_what_falters_fires_the_alerts_that_are_for_it(tmp_path: Path) -> None:
    """And nothing fires before: neither those, nor what is for too little of something."""
    server = start_well(tmp_path)
    try:
        wait_compiled(server)
        rules = quickened(rules_yaml(), window=WINDOW)
        with (
            running_prometheus(tmp_path, server.url, rules) as prometheus,
            load(server.url, num_clients=3, may_fail=True, prompt=CODE, temperature=0.0),
        ):
            prometheus.wait_for(f"rate({PREFIX}spec_decode_num_accepted_tokens_total[{WINDOW}]) > 0")
            time.sleep(15)  # as long as rules look back
            early = fired(prometheus, (*FALTERING, *SHORT))
            assert not early, f"while all was well: {early}"
            prove(World(tmp_path, server, prometheus), FALTERING)
    finally:
        server.clean_up()
