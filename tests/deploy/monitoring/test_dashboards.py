"""What Grafana gets."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest

from deploy.monitoring.dashboards import ALL_DASHBOARDS
from deploy.monitoring.panels import Dashboard

pytest.importorskip("grafana_foundation_sdk", reason="the extra `grafana` is not installed")
from deploy.monitoring.grafana import grafana_json

pages = pytest.mark.parametrize("page", ALL_DASHBOARDS, ids=lambda page: page.uid)


def panels_of(page: Dashboard) -> list[dict[str, Any]]:
    return [panel for panel in grafana_json(page)["panels"] if panel["type"] != "row"]


@pages
def test_every_expression_arrives(page: Dashboard) -> None:
    sent = [target["expr"] for panel in panels_of(page) for target in panel["targets"]]
    assert sent == [query.expression for panel in page.panels for query in panel.queries]


@pages
def test_a_tired_operator_is_told_what_a_panel_means(page: Dashboard) -> None:
    for panel in panels_of(page):
        assert len(panel["description"]) >= 8, panel["title"]
        assert panel["fieldConfig"]["defaults"]["unit"], panel["title"]
        assert panel["targets"], panel["title"]


@pages
def test_panels_do_not_cover_each_other(page: Dashboard) -> None:
    taken: dict[tuple[int, int], str] = {}
    for panel in grafana_json(page)["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        for cell in itertools.product(
            range(place["x"], place["x"] + place["w"]), range(place["y"], place["y"] + place["h"])
        ):
            assert cell not in taken, f"{panel['title']} covers {taken[cell]}"
            taken[cell] = panel["title"]


@pages
def test_ids_are_unique_and_variables_are_there(page: Dashboard) -> None:
    sent = grafana_json(page)
    ids = [panel["id"] for panel in sent["panels"]]
    assert len(ids) == len(set(ids))
    names = {variable["name"] for variable in sent["templating"]["list"]}
    assert {"datasource", "model", "job"} <= names
    text = json.dumps(sent["panels"])
    for variable in page.variables:
        assert f"${variable.name}" in text


@pages
def test_the_same_code_gives_the_same_bytes(page: Dashboard) -> None:
    assert json.dumps(grafana_json(page)) == json.dumps(grafana_json(page))


@pages
def test_a_number_is_that_of_now(page: Dashboard) -> None:
    """Of a range Grafana would show the last value in it: all is well, for an hour after all is gone."""
    for panel in panels_of(page):
        is_number = panel["type"] == "stat"
        for target in panel["targets"]:
            assert (target["instant"], target["range"]) == (is_number, not is_number), panel["title"]


def test_what_was_kept_of_promises_is_told_for_all_of_the_time_that_is_shown() -> None:
    """The last minute is too short for a share of 0.999, and may hold no request."""
    (objectives,) = (page for page in ALL_DASHBOARDS if page.uid == "drafthouse-slo")
    shares = [panel for panel in objectives.panels if panel.kind == "number"]
    assert len(shares) == 3
    for panel in shares:
        (query,) = panel.queries
        assert "[$__range]" in query.expression
        assert "$__rate_interval" not in query.expression


def test_uids_and_titles_are_unique() -> None:
    assert len({page.uid for page in ALL_DASHBOARDS}) == len(ALL_DASHBOARDS) == 5
    assert len({page.title for page in ALL_DASHBOARDS}) == len(ALL_DASHBOARDS)
    assert all(len(page.uid) <= 40 for page in ALL_DASHBOARDS)


def test_where_small_numbers_are_bad_they_are_red() -> None:
    (overview,) = (page for page in ALL_DASHBOARDS if page.uid == "drafthouse-overview")
    colours = {
        panel["title"]: [
            step["color"] for step in panel["fieldConfig"]["defaults"].get("thresholds", {}).get("steps", ())
        ]
        for panel in panels_of(overview)
    }
    assert colours["Target groups"] == ["red", "yellow", "green"]
    assert colours["Memory in use"] == ["green", "yellow", "red"]
