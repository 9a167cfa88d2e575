"""Every alert is valid, silent while all is well, fires at its fault, and is explained."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from pathlib import Path

import pytest
import yaml

from cluster.series import CLUSTER_SERIES
from deploy.monitoring.alerts import availability_alerts
from deploy.monitoring.objectives import Objectives
from deploy.monitoring.promql import PREFIX
from deploy.monitoring.rule import Alert
from deploy.monitoring.rules import rule_groups, rules_yaml
from specdec.core.errors import UserError
from tests.deploy.monitoring.exposition import GAUGES, NONE_WHEN_WELL, keys
from tests.deploy.monitoring.prometheus import needs_promtool, promtool, run_scenarios

PAGE = (Path(__file__).resolve().parents[3] / "docs" / "operations" / "alerts.md").read_text()
ALERTS = [rule for group in rule_groups() for rule in group.rules if isinstance(rule, Alert)]
MINUTES = 150
"""Of each history: longer than any alert has to last, shorter than the longest window."""
GROWS, RESTS = f"0+60x{MINUTES}", f"0x{MINUTES}"
ANSWERS = f'{PREFIX}http_requests_total{{job="drafthouse",route="/v1/completions",status="%s"}}'
HEALTH = f'{PREFIX}http_requests_total{{job="drafthouse",route="/health",status="%s"}}'
REFUSED_KEYS = f'{PREFIX}api_key_refusals_total{{job="drafthouse",key="batch",limit="tokens"}}'
CLIENT_TIMEOUTS = f'{PREFIX}http_client_timeouts_total{{job="drafthouse",status="%s"}}'
FAILED_STREAMS = f'{PREFIX}streams_failed_total{{job="drafthouse",code="coordinator_lost"}}'
REFUSED_STREAMS = f'{PREFIX}streams_turned_away_total{{job="drafthouse"}}'
CERTIFICATE_END = (
    f'{PREFIX}tls_certificate_expiry_timestamp_seconds{{job="drafthouse",certificate_file="/tls.crt"}}'
)
"""In promtool's histories time begins in 1970."""
FIRST_TOKENS = f"{PREFIX}time_to_first_token_seconds"
DELIVERIES = f"{PREFIX}inter_token_latency_seconds"
DELIVERED_IN_TIME = f'{DELIVERIES}_bucket{{job="drafthouse",le="{Objectives().next_tokens_bound}"}}'


def series(name: str) -> str:
    """Return a series of the catalogue as Prometheus names it."""
    suffix = "_total" if CLUSTER_SERIES[name].kind == "counter" else ""
    _, _, labels = keys()[name].rstrip("}").partition("{")
    all_labels = ",".join(filter(None, ('job="drafthouse"', labels)))
    return f"{PREFIX}{name}{suffix}{{{all_labels}}}"


def refused_for(reason: str) -> str:
    return series("fallback_requests_by_reason").replace("any", reason)


def workers(state: str) -> str:
    return f'{PREFIX}num_workers{{job="drafthouse",part="target",compile="{state}"}}'


def gauge(value: float) -> str:
    return f"{value}x{MINUTES}"


def well() -> dict[str, str]:
    """Return the history of every series, in promtool's notation, of a cluster that is well."""
    history = {
        series(name): gauge(GAUGES.get(name, 1))
        if of.kind == "gauge"
        else RESTS
        if name in NONE_WHEN_WELL
        else GROWS
        for name, of in CLUSTER_SERIES.items()
    }
    history |= {
        workers("ready"): gauge(5),
        ANSWERS % 200: GROWS,
        ANSWERS % 429: RESTS,
        ANSWERS % 500: RESTS,
        HEALTH % 200: f"0+12x{MINUTES}",
        HEALTH % 503: RESTS,
        FAILED_STREAMS: RESTS,
        REFUSED_STREAMS: RESTS,
        CERTIFICATE_END: gauge(90 * 86400),
        f'{PREFIX}http_requests_in_progress{{job="drafthouse"}}': gauge(3),
        f'{FIRST_TOKENS}_bucket{{job="drafthouse",le="2.5"}}': GROWS,
        f'{FIRST_TOKENS}_count{{job="drafthouse"}}': GROWS,
        DELIVERED_IN_TIME: GROWS,
        f'{DELIVERIES}_count{{job="drafthouse"}}': GROWS,
    }
    return history


FAULTS: Mapping[str, Mapping[str, str] | None] = {
    "DrafthouseMetricsAbsent": None,
    "DrafthouseNoTargetGroup": {series("coordinators_with_target"): gauge(0)},
    "DrafthouseErrorBudgetBurnsFast": {ANSWERS % 500: f"0+2x{MINUTES}"},
    "DrafthouseErrorBudgetBurnsSlowly": {ANSWERS % 500: f"0+0.5x{MINUTES}"},
    "DrafthouseHeadAway": {series("directory_silent_seconds"): f"0+30x{MINUTES}"},
    "DrafthouseIngressesDie": {series("ingress_losses"): f"0+1x{MINUTES}"},
    "DrafthouseStreamsLost": {series("lost_streams"): GROWS},
    "DrafthouseTurnsAway": {ANSWERS % 429: f"0+6x{MINUTES}"},
    "DrafthouseCertificateExpires": {CERTIFICATE_END: gauge(13 * 86400)},
    "DrafthouseOutOfTime": {series("request_timeouts"): GROWS},
    "DrafthouseFirstTokenLate": {f'{FIRST_TOKENS}_bucket{{job="drafthouse",le="2.5"}}': f"0+55x{MINUTES}"},
    "DrafthouseTokensSlow": {DELIVERED_IN_TIME: f"0+55x{MINUTES}"},
    "DrafthouseQueueLong": {series("num_requests_waiting"): gauge(40)},
    "DrafthouseWorksTwice": {series("num_recomputed_tokens"): f"0+20x{MINUTES}"},
    "DrafthouseDraftPoolEmpty": {series("draft_workers"): gauge(0)},
    "DrafthouseDraftsLate": {series("draft_deadline_misses"): f"0+6x{MINUTES}"},
    "DrafthouseDraftPoolFull": {
        # Memory is short, places are not.
        refused_for("place"): f"0+20x{MINUTES}",
        series("draft_sequences_refused"): f"0+20x{MINUTES}",
        series("draft_pool_usage_perc"): gauge(0.3),
    },
    "DrafthouseDraftPoolNotWorth": {series("speculation_pool_worth"): gauge(0.9)},
    "DrafthouseAcceptanceFell": {
        series("spec_decode_num_accepted_tokens"): f"0+50x{MINUTES - 80} {50 * (MINUTES - 80)}+10x80"
    },
    "DrafthouseInvalidDrafts": {series("invalid_drafts_dropped"): GROWS},
    "DrafthouseGrammarsNotKnown": {series("draft_grammar_failures"): GROWS},
    "DrafthouseLossyTokens": {series("spec_decode_num_lossy_tokens"): GROWS},
    "DrafthouseTargetsDie": {series("target_losses"): f"0+1x{MINUTES}"},
    "DrafthouseFailovers": {series("failovers"): f"0+1x{MINUTES}"},
    "DrafthouseTargetGroupsMissing": {series("target_groups_wanted"): gauge(3)},
    "DrafthouseDraftWorkersMissing": {series("draft_workers"): gauge(1)},
    "DrafthouseCompileFailed": {workers("failed"): gauge(1)},
    "DrafthouseCompilePending": {workers("pending"): gauge(1)},
    "DrafthouseMessagesDropped": {series("channel_messages_dropped"): GROWS},
}
"""What is not as in a cluster that is well; None: nothing is scraped."""
ALSO = {
    "DrafthouseErrorBudgetBurnsFast": {"DrafthouseErrorBudgetBurnsSlowly"},
    "DrafthouseNoTargetGroup": {"DrafthouseTargetGroupsMissing"},
    "DrafthouseDraftPoolEmpty": {"DrafthouseDraftWorkersMissing"},
}
"""Others that the same fault fires, and rightly."""
VARIED = (
    "DrafthouseMetricsAbsent",
    "DrafthouseCertificateExpires",
    "DrafthouseErrorBudgetBurnsFast",
    "DrafthouseFirstTokenLate",
    "DrafthouseDraftPoolFull",
    "DrafthouseAcceptanceFell",
    "DrafthouseCompilePending",
    "DrafthouseTargetGroupsMissing",
)
"""One of each kind: nothing scraped, a day that comes, a share of answers, late ones, two series at once, a
fall, a state, a difference."""


def scenario(history: Mapping[str, str], firing: set[str]) -> dict[str, object]:
    """Return a test of promtool: with this history exactly these alerts fire at its end."""
    expected = [{"labels": f'{{alertname="{name}"}}', "value": 1} for name in sorted(firing)]
    fired = 'count by (alertname) (ALERTS{alertstate="firing"})'
    return {
        "interval": "1m",
        "input_series": [{"series": name, "values": values} for name, values in history.items()],
        "promql_expr_test": [{"expr": fired, "eval_time": f"{MINUTES - 1}m", "exp_samples": expected}],
    }


@needs_promtool
@pytest.mark.parametrize(
    "objectives", [Objectives(), Objectives(first_token_s=1, next_tokens_s=0.1)], ids=str
)
def test_promtool_accepts_the_rules(tmp_path: Path, objectives: Objectives) -> None:
    file = tmp_path / "rules.yaml"
    file.write_text(rules_yaml(objectives))
    assert "SUCCESS" in promtool("check", "rules", file)


@needs_promtool
def test_nothing_fires_while_all_is_well(tmp_path: Path) -> None:
    run_scenarios(tmp_path, [scenario(well(), set())])


def test_there_is_a_fault_for_each() -> None:
    assert FAULTS.keys() == {alert.name for alert in ALERTS}


@needs_promtool
@pytest.mark.parametrize(
    "names",
    [
        pytest.param(VARIED, id="varied"),
        pytest.param(FAULTS.keys() - set(VARIED), id="the others", marks=pytest.mark.full),
    ],
)
def test_each_fires_at_its_fault_and_no_other(tmp_path: Path, names: Collection[str]) -> None:
    run_scenarios(
        tmp_path,
        [
            scenario({} if fault is None else {**well(), **fault}, {name} | ALSO.get(name, set()))
            for name, fault in FAULTS.items()
            if name in names
        ],
    )


@needs_promtool
@pytest.mark.parametrize(
    "history",
    [
        pytest.param({FAILED_STREAMS: f"0+2x{MINUTES}"}, id="streams alone"),
        pytest.param({FAILED_STREAMS: f"0+0.6x{MINUTES}", ANSWERS % 500: f"0+0.6x{MINUTES}"}, id="both"),
    ],
)
def test_streams_that_fail_use_up_the_budget_of_errors(tmp_path: Path, history: Mapping[str, str]) -> None:
    firing = {"DrafthouseErrorBudgetBurnsFast", "DrafthouseErrorBudgetBurnsSlowly"}
    run_scenarios(tmp_path, [scenario(well() | history, firing)])


@needs_promtool
def test_requests_of_keys_at_their_own_limit_are_not_turned_away_for_want_of_room(tmp_path: Path) -> None:
    """A key asks ten times as often as it may, and as all others together. Half of those get 429, or none."""
    at_limit = {REFUSED_KEYS: f"0+600x{MINUTES}"}
    run_scenarios(
        tmp_path,
        [
            scenario(well() | at_limit | {ANSWERS % 429: f"0+600x{MINUTES}"}, set()),
            scenario(well() | at_limit | {ANSWERS % 429: f"0+601x{MINUTES}"}, set()),
            scenario(well() | at_limit | {ANSWERS % 429: f"0+606x{MINUTES}"}, {"DrafthouseTurnsAway"}),
        ],
    )


@needs_promtool
def test_streams_that_comments_had_begun_are_turned_away_too(tmp_path: Path) -> None:
    """Whatever keys at their own limit are refused, which no stream is that has begun; and a door of an older
    version, which does not count them, is judged by its answers."""
    at_limit = {REFUSED_KEYS: f"0+600x{MINUTES}", ANSWERS % 429: f"0+600x{MINUTES}"}
    before = {name: values for name, values in well().items() if name != REFUSED_STREAMS}
    streams, answers = {REFUSED_STREAMS: f"0+6x{MINUTES}"}, {ANSWERS % 429: f"0+6x{MINUTES}"}
    run_scenarios(
        tmp_path,
        [
            scenario(well() | streams, {"DrafthouseTurnsAway"}),
            scenario(well() | at_limit | streams, {"DrafthouseTurnsAway"}),
            scenario(before, set()),
            scenario(before | answers, {"DrafthouseTurnsAway"}),
        ],
    )


@needs_promtool
def test_limits_that_clients_have_set_use_up_no_budget_of_errors(tmp_path: Path) -> None:
    """A client gives a tenth of its requests too little time; nobody else's are ended."""
    late = {ANSWERS % 504: f"0+6x{MINUTES}"}
    own = {CLIENT_TIMEOUTS % 504: f"0+6x{MINUTES}", CLIENT_TIMEOUTS % 200: f"0+6x{MINUTES}"}
    burns = {"DrafthouseErrorBudgetBurnsFast", "DrafthouseErrorBudgetBurnsSlowly"}
    run_scenarios(
        tmp_path,
        [
            scenario(well() | late | own, set()),
            scenario(well() | late | dict.fromkeys(own, RESTS), burns),
            scenario(well() | own | {ANSWERS % 504: f"0+9x{MINUTES}"}, burns),
        ],
    )


@needs_promtool
def test_one_request_that_fails_where_there_are_few_wakes_nobody(tmp_path: Path) -> None:
    """One request a minute; of the last twenty one has failed, two, or all."""
    few = well() | {ANSWERS % 200: f"0+1x{MINUTES}"}
    burns = {"DrafthouseErrorBudgetBurnsFast", "DrafthouseErrorBudgetBurnsSlowly"}
    run_scenarios(
        tmp_path,
        [
            scenario(few | {ANSWERS % 500: f"0x{MINUTES - 5} 1x5"}, set()),
            scenario(few | {FAILED_STREAMS: f"0x{MINUTES - 20} 1x15 2x5"}, set()),
            scenario(few | {ANSWERS % 500: f"0x{MINUTES - 20} 0+1x20"}, burns),
        ],
    )


@needs_promtool
def test_answers_of_other_routes_are_no_part_of_what_was_promised(tmp_path: Path) -> None:
    """A balancer asks for /health sixty times a minute, and hears 503 while a model loads; or 200, while
    every fiftieth of the few requests for text fails, or half of them is turned away."""
    checked = {HEALTH % 200: f"0+600x{MINUTES}"}
    burns = {"DrafthouseErrorBudgetBurnsFast", "DrafthouseErrorBudgetBurnsSlowly"}
    run_scenarios(
        tmp_path,
        [
            scenario(well() | {HEALTH % 503: GROWS}, set()),
            scenario(well() | {ANSWERS % 200: RESTS, HEALTH % 503: GROWS}, set()),
            scenario(well() | checked | {ANSWERS % 500: f"0+2x{MINUTES}"}, burns),
            scenario(well() | checked | {ANSWERS % 429: f"0+30x{MINUTES}"}, {"DrafthouseTurnsAway"}),
        ],
    )


@needs_promtool
def test_what_is_missing_for_a_while_only_is_not_missed(tmp_path: Path) -> None:
    """A model takes minutes to load after autoscaling has asked for it."""
    wanted, there = series("target_groups_wanted"), series("coordinators_with_target")
    for minutes, firing in ((10, set()), (25, {"DrafthouseTargetGroupsMissing"})):
        asked = {wanted: f"2x{MINUTES - minutes} 3x{minutes}"}
        run_scenarios(tmp_path, [scenario(well() | asked, firing)])
    surplus = {there: gauge(4), series("draft_workers"): gauge(9)}
    run_scenarios(tmp_path, [scenario(well() | surplus, set())])


@needs_promtool
def test_a_door_that_counts_no_failed_streams_is_judged_by_its_answers(tmp_path: Path) -> None:
    """In an update doors of an older version are scraped beside."""
    before = {name: values for name, values in well().items() if name != FAILED_STREAMS}
    firing = {"DrafthouseErrorBudgetBurnsFast", "DrafthouseErrorBudgetBurnsSlowly"}
    wrong = {**before, ANSWERS % 500: f"0+2x{MINUTES}"}
    run_scenarios(tmp_path, [scenario(before, set()), scenario(wrong, firing)])


@needs_promtool
def test_a_time_without_drafts_does_not_hide_that_fewer_are_accepted(tmp_path: Path) -> None:
    """Nothing is drafted for 40 minutes; of what is drafted then, most is accepted for half an hour."""
    idle = {
        series("spec_decode_num_draft_tokens"): f"0x39 0+60x{MINUTES - 40}",
        series("spec_decode_num_accepted_tokens"): f"0x39 0+50x30 1500+10x{MINUTES - 71}",
    }
    run_scenarios(tmp_path, [scenario(well() | idle, {"DrafthouseAcceptanceFell"})])


@needs_promtool
def test_there_are_no_draft_workers_to_be_worth_anything(tmp_path: Path) -> None:
    """Methods that draft at the target export no series of a pool, and are compared with plain decoding."""
    slower = {**well(), series("speculation_pool_worth"): gauge(0.9)}
    without_pool = {name: values for name, values in slower.items() if name != series("draft_workers")}
    empty_pool = {**slower, series("draft_workers"): gauge(0)}
    missed = {"DrafthouseDraftPoolEmpty", "DrafthouseDraftWorkersMissing"}
    run_scenarios(tmp_path, [scenario(without_pool, set()), scenario(empty_pool, missed)])


@needs_promtool
def test_there_need_be_nobody_where_nobody_asks(tmp_path: Path) -> None:
    """With min_groups and min_workers 0. A model takes minutes to load, in which the first requests wait."""
    at_rest = {
        series(name): gauge(0)
        for name in (
            "coordinators",
            "coordinators_with_target",
            "draft_workers",
            "target_groups_wanted",
            "draft_workers_wanted",
        )
    } | {series("scales_to_zero").replace("target", part): gauge(1) for part in ("target", "draft")}
    waiting, wanted = series("num_requests_without_group"), series("target_groups_wanted")
    drafters = series("draft_workers_wanted")
    loading = dict.fromkeys((waiting, wanted), f"0x{MINUTES - 9} 1x8")
    in_vain = dict.fromkeys((waiting, wanted), f"0x{MINUTES - 20} 1x20")
    missed = {"DrafthouseNoTargetGroup", "DrafthouseTargetGroupsMissing"}
    run_scenarios(
        tmp_path,
        [
            scenario(well() | at_rest, set()),
            scenario(well() | at_rest | loading, set()),
            scenario(well() | at_rest | in_vain, missed),
            # Autoscaling has asked for one, and nobody waits any more.
            scenario(well() | at_rest | {wanted: gauge(1)}, {"DrafthouseTargetGroupsMissing"}),
            # Rounds go on without drafts until the first draft worker is there.
            scenario(well() | at_rest | {drafters: f"0x{MINUTES - 9} 1x8"}, set()),
            scenario(
                well() | at_rest | {drafters: f"0x{MINUTES - 20} 1x20"}, {"DrafthouseDraftWorkersMissing"}
            ),
        ],
    )


@needs_promtool
def test_a_draft_pool_is_full_when_requests_go_without_drafts_for_it(tmp_path: Path) -> None:
    """Places and memory alike, added up; not when few do, nor for another reason."""
    without = {
        name: values for name, values in well().items() if name != series("fallback_requests_by_reason")
    }
    few = {refused_for("place"): f"0+2x{MINUTES}"}
    both = few | {refused_for("memory"): f"0+2x{MINUTES}"}
    late = {refused_for("late"): GROWS, series("draft_pool_usage_perc"): gauge(1)}
    run_scenarios(
        tmp_path,
        [
            scenario(without | few, set()),
            scenario(without | both, {"DrafthouseDraftPoolFull"}),
            scenario(without | late, {"DrafthouseDraftsLate"}),
        ],
    )


@needs_promtool
def test_draft_workers_are_late_when_requests_go_without_drafts_for_it(tmp_path: Path) -> None:
    """However few deadlines they miss, as one that is always late is seldom waited for. Not when few do."""
    few = {series("draft_deadline_misses"): f"0+2x{MINUTES}", refused_for("late"): f"0+2x{MINUTES}"}
    run_scenarios(
        tmp_path,
        [
            scenario(well() | few, set()),
            scenario(well() | few | {refused_for("late"): f"0+6x{MINUTES}"}, {"DrafthouseDraftsLate"}),
        ],
    )


@needs_promtool
def test_the_certificate_of_one_door_is_enough(tmp_path: Path) -> None:
    """Of two doors one has not got the renewed file; where there is no TLS nobody says anything."""
    stale = CERTIFICATE_END.replace("{", '{instance="10.0.0.2:8000",', 1)
    without = {name: values for name, values in well().items() if name != CERTIFICATE_END}
    run_scenarios(
        tmp_path,
        [
            scenario(well() | {stale: gauge(13 * 86400)}, {"DrafthouseCertificateExpires"}),
            scenario(without, set()),
        ],
    )


@needs_promtool
def test_a_draft_pool_is_not_judged_while_nobody_asks(tmp_path: Path) -> None:
    at_rest = {series("speculation_pool_worth"): gauge(0.9), series("rounds"): RESTS}
    run_scenarios(tmp_path, [scenario(well() | at_rest, set())])


@needs_promtool
def test_one_of_several_jobs_is_missed(tmp_path: Path) -> None:
    """Of two clusters in one Prometheus one is gone for half an hour."""
    in_progress = f'{PREFIX}http_requests_in_progress{{job="%s"}}'
    test = scenario(well() | {in_progress % "other": "3x120"}, set())
    fired = 'count by (alertname, job) (ALERTS{alertstate="firing"})'
    labels = '{alertname="DrafthouseMetricsAbsent", job="other"}'
    expected = [{"labels": labels, "value": 1}]
    text = {
        "summary": "No metrics of Drafthouse (other)",
        "description": "Prometheus has had no metrics of any ingress of other for five minutes. Either "
        "nothing is served, or Prometheus looks in the wrong place.",
        "runbook_url": "docs/operations/alerts.md#drafthousemetricsabsent",
    }
    alert = {
        "alertname": "DrafthouseMetricsAbsent",
        "eval_time": f"{MINUTES - 1}m",
        "exp_alerts": [{"exp_labels": {"severity": "critical", "job": "other"}, "exp_annotations": text}],
    }
    now = {"expr": fired, "eval_time": f"{MINUTES - 1}m", "exp_samples": expected}
    run_scenarios(tmp_path, [test | {"promql_expr_test": [now], "alert_rule_test": [alert]}])


@needs_promtool
@pytest.mark.parametrize(("num_losses", "fires"), [(2, False), (3, True)])
def test_more_than_two_losses_are_three(tmp_path: Path, num_losses: int, fires: bool) -> None:
    """Samples hardly ever lie at the ends of a window, and what grew between them is stretched to it."""
    test: dict[str, object] = {
        "interval": "50s",
        "input_series": [{"series": series("target_losses"), "values": f"0x20 {num_losses}x60"}],
        "promql_expr_test": [
            {
                "expr": 'max_over_time(ALERTS{alertname="DrafthouseTargetsDie"}[1h:1m])',
                "eval_time": "1h",
                "exp_samples": [
                    {
                        "labels": '{alertname="DrafthouseTargetsDie",alertstate="firing",job="drafthouse",'
                        'severity="warning"}',
                        "value": 1,
                    }
                ]
                * fires,
            }
        ],
    }
    run_scenarios(tmp_path, [test])


@needs_promtool
def test_an_alert_is_about_one_of_several_models(tmp_path: Path) -> None:
    """Of two, one has lost its groups, and its drafter is worth nothing. Both have the same door."""
    of_models = {series(name) for name in CLUSTER_SERIES} | {workers("ready")}
    faults = {series("coordinators_with_target"): gauge(0), series("speculation_pool_worth"): gauge(0.9)}
    history = {name: values for name, values in well().items() if name not in of_models}
    for model, wrong in (("large", {}), ("small", faults)):
        history |= {
            name.replace("{", f'{{model_name="{model}",', 1): values
            for name, values in {**well(), **wrong}.items()
            if name in of_models
        }
    test = scenario(history, set())
    fired = 'count by (alertname, model_name) (ALERTS{alertstate="firing"})'
    names = (
        "DrafthouseNoTargetGroup",
        "DrafthouseTargetGroupsMissing",
        "DrafthouseDraftPoolNotWorth",
    )
    labels = [f'{{alertname="{name}", model_name="small"}}' for name in sorted(names)]
    expected = [{"labels": one, "value": 1} for one in labels]
    alert = {
        "alertname": names[0],
        "eval_time": f"{MINUTES - 1}m",
        "exp_alerts": [
            {
                "exp_labels": {"severity": "critical", "job": "drafthouse", "model_name": "small"},
                "exp_annotations": {
                    "summary": "drafthouse (model small) has no target group",
                    "description": "The ingress of drafthouse (model small) reaches no coordinator that has "
                    "a target. Where it reaches none, every request is answered with 503; where all that it "
                    "reaches have lost their target and load another, requests and streams wait for that.",
                    "runbook_url": "docs/operations/alerts.md#drafthousenotargetgroup",
                },
            }
        ],
    }
    test["promql_expr_test"] = [{"expr": fired, "eval_time": f"{MINUTES - 1}m", "exp_samples": expected}]
    run_scenarios(tmp_path, [test | {"alert_rule_test": [alert]}])


@needs_promtool
def test_an_alert_that_does_not_fire_is_found(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="DrafthouseStreamsLost"):
        run_scenarios(tmp_path, [scenario(well(), {"DrafthouseStreamsLost"})])


@pytest.mark.parametrize("alert", ALERTS, ids=lambda alert: alert.name)
def test_an_operator_can_look_it_up(alert: Alert) -> None:
    section = re.search(rf"^## {alert.name}\n(.*?)(?=^#)", PAGE + "\n#", re.MULTILINE | re.DOTALL)
    assert section is not None, f"docs/operations/alerts.md has no section {alert.name}"
    assert len(section[1].split()) > 15
    assert f"#{alert.name.lower()}\n" in rules_yaml()


@pytest.mark.parametrize("alert", ALERTS, ids=lambda alert: alert.name)
def test_what_it_says_has_no_braces_but_those_of_templates(alert: Alert) -> None:
    for text in (alert.summary, alert.description):
        assert not re.search(r"[{}]", re.sub(r"\{\{ [^{}]* \}\}", "", text))


def test_links_go_where_the_documentation_is_published() -> None:
    rules = yaml.safe_load(rules_yaml(runbook="https://example.com/ops"))
    links = [
        rule["annotations"]["runbook_url"]
        for group in rules["groups"]
        for rule in group["rules"]
        if "alert" in rule
    ]
    assert len(links) == len(ALERTS)
    assert all(link.startswith("https://example.com/ops#drafthouse") for link in links)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"first_token_s": 3.0}, "not a boundary of the histogram: take one of .*2.5, 5"),
        ({"next_tokens_s": 0.11}, "not a boundary"),
        ({"share_in_time": 1.0}, "between 0 and 1"),
        ({"share_answered": 99.9}, "between 0 and 1"),
    ],
)
def test_objectives_that_cannot_be_checked_are_refused(wrong: dict[str, float], message: str) -> None:
    with pytest.raises(UserError, match=message):
        Objectives(**wrong)


@pytest.mark.parametrize("answered", [0.999, 0.95, 0.9, 0.5])
def test_whatever_was_promised_an_outage_burns_the_budget(answered: float) -> None:
    burns = [one for one in availability_alerts(Objectives(share_answered=answered)) if "Burns" in one.name]
    assert len(burns) == 2
    for alert in burns:
        shares = [float(text) for text in re.findall(r"> ([0-9.]+) and", alert.expression)]
        assert shares
        assert max(shares) <= 0.9
