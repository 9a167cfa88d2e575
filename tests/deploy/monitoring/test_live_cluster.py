"""A real Prometheus beside a real cluster under load: what the dashboards show of it."""

from __future__ import annotations

import math
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
from tests.deploy.monitoring.expressions import filled
from tests.deploy.monitoring.prometheus import Prometheus, needs_prometheus, running_prometheus
from tests.deploy.test_serve import start

pytestmark = [pytest.mark.ray, pytest.mark.full, pytest.mark.timeout(600), needs_prometheus]
WINDOW = "30s"
NEEDS_MORE = {
    ("Drafts dropped", "{{reason}}"): "a reason, once there is one",
    ("Turned away and out of time", "turned away"): "more load than the queue holds",
    ("How requests ended", "refused: {{reason}}"): "the same",
    ("Why a group was chosen", "{{reason}}"): "several target groups",
    ("Tokens that drafts attend to", "{{job}}"): "speculative_config.kv.budget",
}
"""Queries that show nothing of a cluster that is well and drafts with all K/V, and what they wait for."""


@contextmanager
def load(url: str) -> Iterator[None]:
    """Ask for completions, four at a time, until the block ends."""
    over = threading.Event()
    body = {"model": "tiny", "prompt": [2, 3, 4, 5] * 8, "max_tokens": 48, "ignore_eos": True}

    def ask() -> None:
        with httpx.Client(timeout=120) as client:
            while not over.is_set():
                client.post(f"{url}/v1/completions", json=body).raise_for_status()

    threads = [threading.Thread(target=ask) for _ in range(4)]
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
            with load(server.url):
                prometheus.wait_for(f"rate({PREFIX}generation_tokens_total[{WINDOW}]) > 0")
                silent = silent_queries(prometheus)
                (target,) = (one for one in server.processes() if "ray::TargetWorker" in one.cmdline()[0])
                target.kill()
                prometheus.wait_for(f"increase({PREFIX}target_losses_total[5m]) > 0")
                prometheus.wait_for(f"increase({PREFIX}replays_total[5m]) > 0")
            assert silent.keys() <= NEEDS_MORE.keys(), "\n".join(map(str, sorted(silent.items())))
            groups = prometheus.get("rules")["groups"]
            assert not [rule for group in groups for rule in group["rules"] if rule["health"] == "err"]
            alerts = {alert.name: alert for alert in availability_alerts(DEFAULT_OBJECTIVES)}
            absent = alerts["DrafthouseMetricsAbsent"].expression
            assert not prometheus.values(absent)
            server.process.terminate()
            prometheus.wait_for(absent)
    finally:
        server.clean_up()
