"""A real Prometheus beside a real cluster under load: what the dashboards show of it."""

from __future__ import annotations

import contextlib
import math
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

import pytest

from deploy.api_keys import line_of, new_api_key
from deploy.monitoring.alerts import availability_alerts
from deploy.monitoring.dashboards import ALL_DASHBOARDS
from deploy.monitoring.objectives import DEFAULT_OBJECTIVES
from deploy.monitoring.promql import PREFIX
from deploy.monitoring.rules import rules_yaml
from tests.architectures import save_model
from tests.deploy.monitoring.expressions import filled
from tests.deploy.monitoring.live_faults import has_fired, kill, load, quickened
from tests.deploy.monitoring.prometheus import Prometheus, needs_prometheus, running_prometheus
from tests.deploy.serve_process import Server, launch, start
from tests.ports import free_port
from tests.training.online.domains import QUICK

pytestmark = [pytest.mark.ray, pytest.mark.full, pytest.mark.timeout(600), needs_prometheus]
WINDOW = "30s"
BUSY = frozenset(
    {
        ("Turned away and out of time", "turned away"),
        ("Turned away and out of time", "API key at a limit"),
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
        ("Drafters at work", "without a pool: share of time, last ten seconds"),
    }
)
"""Queries that need more load than the queues or a key's limits hold, several target groups, several
drafters, or no pool."""
OF_LEARNERS = frozenset(
    {
        ("Tokens that drafts attend to", "{{job}}"),
        ("Acceptance on what was held back", "served"),
        ("Acceptance on what was held back", "tried"),
    }
)
"""Others, that need a draft model that learns, and attends to a part of a text."""


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
                # Nothing is said of the pool before five seconds have been looked at.
                prometheus.wait_for(f"{PREFIX}speculation_pool_worth >= 0")
                silent = silent_queries(prometheus)
                (target,) = (one for one in server.processes() if "ray::TargetWorker" in one.cmdline()[0])
                target.kill()
                prometheus.wait_for(f"increase({PREFIX}target_losses_total[5m]) > 0")
                prometheus.wait_for(f"increase({PREFIX}replays_total[5m]) > 0")
            assert silent.keys() <= OF_LEARNERS | BUSY, "\n".join(map(str, sorted(silent.items())))
            groups = prometheus.get("rules")["groups"]
            assert not [rule for group in groups for rule in group["rules"] if rule["health"] == "err"]
            alerts = {alert.name: alert for alert in availability_alerts(DEFAULT_OBJECTIVES)}
            absent = alerts["DrafthouseMetricsAbsent"].expression
            assert not prometheus.values(absent)
            server.process.terminate()
            prometheus.wait_for(absent)
    finally:
        server.clean_up()


def start_busy(folder: Path) -> tuple[Server, str, str]:
    """Start a server with two target groups, which take one request at a time, and several drafters.

    Return it and two API keys, of which the second may have one request open.
    """
    save_model(folder / "target", seed=1)
    free, of_free = new_api_key("free", max_concurrency=None, tokens_per_minute=None)
    bounded, of_bounded = new_api_key("bounded", max_concurrency=1, tokens_per_minute=None)
    (folder / "keys").write_text(f"{line_of(of_free)}\n{line_of(of_bounded)}\n")
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
http: {{port: {free_port()}, served_model_name: tiny, api_keys_file: {folder / "keys"}}}
"""
    return launch(folder, text, Path(tempfile.mkdtemp(prefix="dh-", dir="/tmp"))), free, bounded


def test_what_more_load_groups_and_drafters_show(tmp_path: Path) -> None:
    server, free, bounded = start_busy(tmp_path)
    try:
        with (
            running_prometheus(tmp_path, server.url.removeprefix("http://"), rules_yaml()) as prometheus,
            load(server.url, num_clients=8, api_key=free, temperature=0.0),
            load(server.url, num_clients=2, api_key=bounded, temperature=0.0),
        ):
            for name in (
                "shadow_num_accepted_tokens",
                "drafter_num_accepted_tokens",
                "requests_refused",
                "api_key_refusals",
            ):
                prometheus.wait_for(f"rate({PREFIX}{name}_total[{WINDOW}]) > 0")
            prometheus.wait_for('ALERTS{alertname="DrafthouseTurnsAway"}')
            silent = silent_queries(prometheus)
        assert not BUSY & silent.keys(), sorted(BUSY & silent.keys())
    finally:
        server.clean_up()


def test_what_a_learner_with_a_window_shows(tmp_path: Path) -> None:
    own = f"kv: {{policy: streaming, budget: 24}}\nonline: {QUICK.model_dump_json()}"
    server = start(tmp_path, of_drafts=own)
    expressions = {
        (panel.title, query.legend): filled(query.expression, WINDOW)
        for page in ALL_DASHBOARDS
        for panel in page.panels
        for query in panel.queries
        if (panel.title, query.legend) in OF_LEARNERS
    }
    assert expressions.keys() == OF_LEARNERS
    try:
        # Which texts are held back goes by their prompts.
        prompts = [[2 + number, 3, 4 + number] * 8 for number in range(8)]
        with contextlib.ExitStack() as stack:
            address = server.url.removeprefix("http://")
            prometheus = stack.enter_context(running_prometheus(tmp_path, address, rules_yaml()))
            for prompt in prompts:
                stack.enter_context(load(server.url, num_clients=1, prompt=prompt))
            prometheus.wait_for(f"rate({PREFIX}spec_decode_num_draft_tokens_total[{WINDOW}]) > 0")
            for expression in expressions.values():
                prometheus.wait_for(f"({expression}) >= 0")
    finally:
        server.clean_up()


ALERTS_OF_FAULTS: Mapping[str, tuple[str, int, int, frozenset[str]]] = {
    "a draft worker": ("DraftWorkerProcess", 1, 1, frozenset({"DraftPoolEmpty", "DraftWorkersMissing"})),
    "one of two targets": ("TargetWorkerProcess", 1, 1, frozenset({"TargetGroupsMissing", "Failovers"})),
    "both targets": ("TargetWorkerProcess", 2, 1, frozenset({"NoTargetGroup", "TargetsDie"})),
    "both coordinators": (
        "ServeReplica:drafthouse:Coordinator",
        2,
        1,
        frozenset({"StreamsLost", "ErrorBudgetBurnsFast", "ErrorBudgetBurnsSlowly"}),
    ),
    "the ingress, again and again": ("ServeReplica:drafthouse:Ingress", 1, 3, frozenset({"IngressesDie"})),
}
"""What is killed: whose processes, how many of them, how often, and which alerts are the first to fire for
that."""


def start_redundant(folder: Path) -> Server:
    """Start a server with two target groups that waits for neither long, and one draft worker."""
    for name in ("target", "draft"):
        save_model(folder / name, seed=1)
    text = f"""\
target: {{model: target, dtype: float32, device: cpu, num_threads: 1, compile: {{mode: "off"}}}}
speculative_config:
  method: draft_model
  model: draft
  num_speculative_tokens: 3
  controller: fixed
  num_threads: 1
  compile: {{mode: "off"}}
cache: {{num_blocks: 256, block_size: 8}}
cluster:
  drain_timeout_s: 3
  failover_timeout_s: 1
  membership: {{lease_s: 3, renew_s: 0.5}}
  health_checks: {{period_s: 1, timeout_s: 10}}
  target_groups: {{num_groups: 2, bundle: {{num_cpus: 0.5}}}}
  draft_pool: {{bundle: {{num_cpus: 0.5}}}}
http: {{port: {free_port()}, served_model_name: tiny}}
"""
    return launch(folder, text, Path(tempfile.mkdtemp(prefix="dh-", dir="/tmp")))


def wait_well(server: Server) -> None:
    """Wait until everybody is there."""
    until_s = time.monotonic() + 240
    wanted = {"coordinators": 2.0, "coordinators_with_target": 2.0, "draft_workers": 1.0}
    while (there := {name: server.metric(name) for name in wanted}) != wanted:
        assert time.monotonic() < until_s, there
        time.sleep(0.5)


def test_faults_fire_the_alerts_that_are_for_them(tmp_path: Path) -> None:
    """And what has not happened yet is told by none."""
    server = start_redundant(tmp_path)
    try:
        wait_well(server)
        address = server.url.removeprefix("http://")
        with (
            running_prometheus(tmp_path, address, quickened(rules_yaml())) as prometheus,
            load(server.url, may_fail=True, max_tokens=180),
        ):
            prometheus.wait_for(f"rate({PREFIX}spec_decode_num_accepted_tokens_total[{WINDOW}]) > 0")
            for what, (title, number, times, alerts) in ALERTS_OF_FAULTS.items():
                for _ in range(times):
                    wait_well(server)
                    early = [alert for alert in alerts if prometheus.values(has_fired(alert))]
                    assert not early, f"before {what} died: {early}"
                    kill(server, title, number)
                for alert in alerts:
                    prometheus.wait_for(has_fired(alert))
                wait_well(server)
    finally:
        server.clean_up()
