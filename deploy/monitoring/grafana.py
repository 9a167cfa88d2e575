"""From our dashboards to the JSON that Grafana reads, through Grafana's own types (extra `grafana`).

The types are those of Grafana 10.1; later versions read them, too.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from grafana_foundation_sdk.builders import common as common_builders
from grafana_foundation_sdk.builders import dashboard as builders
from grafana_foundation_sdk.builders import prometheus, stat, timeseries
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import common, dashboard

from deploy.monitoring.panels import Dashboard, Limits, ListVariable, Panel, SeriesVariable, Variable
from deploy.monitoring.promql import PREFIX

TAG = "drafthouse"
_DATASOURCE = dashboard.DataSourceRef(type_val="prometheus", uid="${datasource}")
_PANEL_HEIGHT = {"lines": 8, "number": 4}
_OUR_UNITS = {"tokens/s": "suffix: tok/s"}
"""Others are Grafana's own."""
_EVERYWHERE: tuple[Variable, ...] = (
    SeriesVariable(name="model", label="Model", query=f"label_values({PREFIX}model_info, model_name)"),
    SeriesVariable(
        name="job",
        label="Job",
        query=f'label_values({PREFIX}model_info{{model_name=~"$model"}}, job)',
        all_is_any=False,  # series of a job's only model do not name it: the model is chosen by its job
    ),
)


def grafana_json(page: Dashboard) -> dict[str, Any]:
    """Return a dashboard as Grafana's API and its provisioning take it."""
    builder = (
        builders.Dashboard(page.title)
        .uid(page.uid)
        .description(page.description)
        .tags([TAG])
        .editable()
        .refresh("30s")
        .time("now-1h", "now")
        .timezone("browser")
        .tooltip(dashboard.DashboardCursorSync.CROSSHAIR)
        .link(_links())
        .with_variable(builders.DatasourceVariable("datasource").label("Data source").type("prometheus"))
    )
    for variable in (*_EVERYWHERE, *page.variables):
        builder.with_variable(_variable(variable))
    panel_id = 0
    for row in page.rows:
        panel_id += 1
        builder.with_row(builders.Row(row.title).id(panel_id))
        for panel in row.panels:
            panel_id += 1
            builder.with_panel(_panel(panel).id(panel_id))
    payload: dict[str, Any] = json.loads(json.dumps(builder.build(), cls=JSONEncoder, sort_keys=True))
    return payload


def dashboard_file(page: Mapping[str, Any]) -> tuple[str, str]:
    """Return name and text of the file that Grafana's provisioning reads a dashboard from."""
    return f"{page['uid']}.json", json.dumps(page, indent=2, sort_keys=True) + "\n"


def _links() -> builders.DashboardLink:
    """Return a menu of our other dashboards."""
    return (
        builders.DashboardLink("Drafthouse")
        .type(dashboard.DashboardLinkType.DASHBOARDS)
        .tags([TAG])
        .as_dropdown(True)
        .include_vars(True)
        .keep_time(True)
    )


def _variable(variable: Variable) -> builders.QueryVariable | builders.CustomVariable:
    if isinstance(variable, ListVariable):
        return (
            builders.CustomVariable(variable.name)
            .label(variable.label)
            .values(",".join(variable.values))
            .current(dashboard.VariableOption(True, variable.default, variable.default))
            .options([_option(value, variable.default) for value in variable.values])
        )
    series = (
        builders.QueryVariable(variable.name)
        .label(variable.label)
        .query(variable.query)
        .datasource(_DATASOURCE)
        .refresh(dashboard.VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(dashboard.VariableSort.ALPHABETICAL_ASC)
        .multi(True)
        .include_all(True)
        .current(dashboard.VariableOption(True, ["All"], ["$__all"]))
    )
    return series.all_value(".*") if variable.all_is_any else series


def _option(value: str, default: str) -> dashboard.VariableOption:
    return dashboard.VariableOption(value == default, value, value)


def _panel(panel: Panel) -> timeseries.Panel | stat.Panel:
    builder = _lines(panel) if panel.kind == "lines" else _number(panel)
    builder.title(panel.title).description(panel.description).datasource(_DATASOURCE)
    builder.unit(_OUR_UNITS.get(panel.unit, panel.unit)).min(0)
    builder.height(_PANEL_HEIGHT[panel.kind]).span(panel.width)
    if panel.limits is not None:
        builder.thresholds(_thresholds(panel.limits))
    for number, query in enumerate(panel.queries):
        target = (
            prometheus.Dataquery()
            .ref_id(chr(ord("A") + number))
            .expr(query.expression)
            .legend_format(query.legend)
            .datasource(_DATASOURCE)
        )
        # Of a range the last value there was would be shown, be it an hour old: green where all is gone.
        builder.with_target(target.range() if panel.kind == "lines" else target.instant())
    return builder


def _lines(panel: Panel) -> timeseries.Panel:
    builder = (
        timeseries.Panel()
        .line_width(1)
        .fill_opacity(30 if panel.is_stacked else 10)
        .show_points(common.VisibilityMode.NEVER)
        .tooltip(common_builders.VizTooltipOptions().mode(common.TooltipDisplayMode.MULTI))
        .legend(
            common_builders.VizLegendOptions()
            .show_legend(True)
            .display_mode(common.LegendDisplayMode.LIST)
            .placement(common.LegendPlacement.BOTTOM)
        )
    )
    if panel.is_stacked:
        builder.stacking(common_builders.StackingConfig().mode(common.StackingMode.NORMAL).group("A"))
    return builder


def _number(panel: Panel) -> stat.Panel:
    mode = common.BigValueColorMode.NONE if panel.limits is None else common.BigValueColorMode.VALUE
    return (
        stat.Panel()
        .color_mode(mode)
        .graph_mode(common.BigValueGraphMode.NONE)
        .reduce_options(common_builders.ReduceDataOptions().calcs(["lastNotNull"]))
    )


def _thresholds(limits: Limits) -> builders.ThresholdsConfig:
    """Return the steps, which Grafana wants from below, the first without value."""
    colours: Mapping[bool, tuple[tuple[float | None, str], ...]] = {
        True: ((None, "red"), (limits.bad, "yellow"), (limits.poor, "green")),
        False: ((None, "green"), (limits.poor, "yellow"), (limits.bad, "red")),
    }
    steps = [dashboard.Threshold(value, colour) for value, colour in colours[limits.bad < limits.poor]]
    return builders.ThresholdsConfig().mode(dashboard.ThresholdsMode.ABSOLUTE).steps(steps)
