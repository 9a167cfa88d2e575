"""A real Prometheus beside a real cluster under load: what the dashboards show of it."""

from __future__ import annotations

import math
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from deploy.monitoring.alerts import availability_alerts
from deploy.monitoring.dashboards import ALL_DASHBOARDS
from deploy.monitoring.objectives import DEFAULT_OBJECTIVES
from deploy.monitoring.promql import PREFIX
from deploy.monitoring.rules import rules_yaml
from tests.architectures import save_model
from tests.deploy.monitoring.expressions import filled
from tests.deploy.monitoring.prometheus import Prometheus, needs_prometheus, running_prometheus
from tests.deploy.test_serve import Server, launch, start
from tests.ports import free_port

pytestmark = [pytest.mark.ray, pytest.mark.full, pytest.mark.timeout(600), needs_prometheus]
WINDOW = "30s"
BUSY = frozenset(
    {
        ("Turned away and out of time", "turned away"),
        ("How requests ended", "refused: {{reason}}"),
        ("Why a group was chosen", "{{reason}}"),
        ("Requests by drafter", "{{drafter}}"),
        *(
            (f"{title}, by drafter", legend)
            for title in ("Tokens per proposal", "Accepted draft tokens", "Requests drafted for")
            for legend in ("{{drafter}}", "{{drafter}} (shadow)")
        ),
        ("Time of each drafter", "{{drafter}}"),
        ("Time of each drafter", "{{drafter}} (shadow)"),
    }
)
"""Queries that need more load than the queues hold, several target groups, or several drafters."""
NEEDS_MORE = {
    ("Drafts dropped", "{{reason}}"): "a draft that is late or stale",
    ("Tokens that drafts attend to", "{{job}}"): "speculative_config.kv.budget",
    ("Acceptance on what was held back", "served"): "speculative_config.online, for minutes",
    ("Acceptance on what was held back", "tried"): "the same",
}
"""Others that show nothing of either cluster here, and what they wait for."""


@contextmanager
def load(url: str, *, num_clients: int = 4, **parameters: object) -> Iterator[None]:
    """Ask for completions, so many at a time, until the block ends. Who is turned away asks again."""
    over = threading.Event()
    body = {
        "model": "tiny",
        "prompt": [2, 3, 4, 5] * 8,
        "max_tokens": 48,
        "ignore_eos": True,
        **parameters,
    }

    def ask() -> None:
        with httpx.Client(timeout=120) as client:
            while not over.is_set():
                answer = client.post(f"{url}/v1/completions", json=body)
                if answer.status_code == 429:
                    over.wait(0.2)
                else:
                    answer.raise_for_status()

    threads = [threading.Thread(target=ask) for _ in range(num_clients)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        over.set()
        for thread in threads:
            thread.join(120)


def silent_queries(prometheus: Prometheus) -> dict[tuple[str, str], list[float]]:
    """Return what shows nothing: panel, legend and its values."""
    return {
        (panel.title, query.legend): values
        for page in ALL_DASHBOARDS
        for panel in page.panels
        for query in panel.queries
        if not any(map(math.isfinite, values := prometheus.values(filled(query.expression, WINDOW))))
    }


def test_every_panel_shows_something_and_losses_are_noticed(tmp_path: Path) -> None:
    server = start(tmp_path, controller="goodput")
    try:
        with running_prometheus(tmp_path, server.url.removeprefix("http://"), rules_yaml()) as prometheus:
            # On a busy machine the controller may well leave drafts out: some clients ask for them.
            asked_for = {"num_speculative_tokens": 3}
            with load(server.url), load(server.url, num_clients=2, speculation=asked_for):
                for name in ("generation_tokens", "spec_decode_num_accepted_tokens"):
                    prometheus.wait_for(f"rate({PREFIX}{name}_total[{WINDOW}]) > 0")
                silent = silent_queries(prometheus)
                (target,) = (one for one in server.processes() if "ray::TargetWorker" in one.cmdline()[0])
                target.kill()
                prometheus.wait_for(f"increase({PREFIX}target_losses_total[5m]) > 0")
                prometheus.wait_for(f"increase({PREFIX}replays_total[5m]) > 0")
            assert silent.keys() <= NEEDS_MORE.keys() | BUSY, "\n".join(map(str, sorted(silent.items())))
            groups = prometheus.get("rules")["groups"]
            assert not [rule for group in groups for rule in group["rules"] if rule["health"] == "err"]
            alerts = {alert.name: alert for alert in availability_alerts(DEFAULT_OBJECTIVES)}
            absent = alerts["DrafthouseMetricsAbsent"].expression
            assert not prometheus.values(absent)
            server.process.terminate()
            prometheus.wait_for(absent)
    finally:
        server.clean_up()


def start_busy(folder: Path) -> Server:
    """Start a server with two target groups, which take one request at a time, and several drafters."""
    save_model(folder / "target", seed=1)
    text = f"""\
target: {{model: target, dtype: float32, device: cpu, num_threads: 1, compile: {{mode: "off"}}}}
speculative_config:
  method: several
  num_speculative_tokens: 3
  controller: fixed
  drafters:
    - {{name: lookup, method: ngram}}
    - {{name: tail, method: suffix, share: 0.5}}
    - {{name: next, method: suffix, shadow: 0.5}}
scheduler: {{max_num_seqs: 1, max_num_waiting: 1}}
cache: {{num_blocks: 128, block_size: 8}}
cluster: {{drain_timeout_s: 3, target_groups: {{num_groups: 2, bundle: {{num_cpus: 1}}}}}}
http: {{port: {free_port()}, served_model_name: tiny}}
"""
    return launch(folder, text, Path(tempfile.mkdtemp(prefix="dh-", dir="/tmp")))


def test_what_more_load_groups_and_drafters_show(tmp_path: Path) -> None:
    server = start_busy(tmp_path)
    try:
        with (
            running_prometheus(tmp_path, server.url.removeprefix("http://"), rules_yaml()) as prometheus,
            load(server.url, num_clients=8, temperature=0.0),
        ):
            for name in ("shadow_num_accepted_tokens", "drafter_num_accepted_tokens", "requests_refused"):
                prometheus.wait_for(f"rate({PREFIX}{name}_total[{WINDOW}]) > 0")
            prometheus.wait_for('ALERTS{alertname="DrafthouseTurnsAway"}')
            silent = silent_queries(prometheus)
        assert not BUSY & silent.keys(), sorted(BUSY & silent.keys())
    finally:
        server.clean_up()
