"""The kinds of panels that the dashboards are made of, and the variables that all of them have."""

from __future__ import annotations

from itertools import count
from string import ascii_uppercase

from grafana_foundation_sdk.builders import common as parts
from grafana_foundation_sdk.builders import dashboard, heatmap, prometheus, stat, table, timeseries
from grafana_foundation_sdk.models import common
from grafana_foundation_sdk.models import dashboard as models
from grafana_foundation_sdk.models.heatmap import HeatmapColorMode
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

SOURCE = models.DataSourceRef(type_val="prometheus", uid="${datasource}")
SECONDS, SHARE, PER_SECOND, BYTES, NUMBER = "s", "percentunit", "reqps", "bytes", "short"  # as Grafana calls them
# variable: the metric and the label that it takes its values from
VARIABLES = {
    "pool": ("headrace_in_flight_requests", "pool"),
    "model": ("headrace_requests_total", "model"),
    "tenant": ("headrace_requests_total", "tenant"),
    "class": ("headrace_requests_total", "class"),
}

Line = tuple[str, str]  # an expression, and how its lines are called
Panel = timeseries.Panel | stat.Panel | heatmap.Panel | table.Panel
Row = tuple[str, list[Panel]]


def query(expr: str, legend: str = "", ref: str = "A", *, exemplar: bool = False) -> prometheus.Dataquery:
    """One line, or several."""
    told = prometheus.Dataquery().expr(expr).datasource(SOURCE).legend_format(legend or "__auto").ref_id(ref)
    return told.exemplar(True) if exemplar else told


def series(
    title: str, text: str, unit: str, *lines: Line, stacked: bool = False, most: float | None = None
) -> timeseries.Panel:
    """Lines over time, a third of the width."""
    panel = timeseries.Panel().title(title).description(text).unit(unit).datasource(SOURCE).span(8).height(8).min(0)
    panel = panel.fill_opacity(30 if stacked else 5).show_points(common.VisibilityMode.NEVER)
    panel = panel.tooltip(parts.VizTooltipOptions().mode(common.TooltipDisplayMode.MULTI))
    if stacked:
        panel = panel.stacking(parts.StackingConfig().mode(common.StackingMode.NORMAL))
    if most is not None:
        panel = panel.max(most)
    for ref, (expr, legend) in zip(ascii_uppercase, lines, strict=False):
        panel = panel.with_target(query(expr, legend, ref, exemplar="_bucket" in expr))
    return panel


def number(
    title: str, text: str, unit: str, expr: str, *, bad: float | None = None, good: float | None = None
) -> stat.Panel:
    """One value and its course. It turns red from `bad` on, or below `good`."""
    steps = [models.Threshold(value=None, color="green" if good is None else "red")]
    if bad is not None:
        steps.append(models.Threshold(value=bad, color="red"))
    if good is not None:
        steps.append(models.Threshold(value=good, color="green"))
    thresholds = dashboard.ThresholdsConfig().mode(models.ThresholdsMode.ABSOLUTE).steps(steps)
    panel = stat.Panel().title(title).description(text).unit(unit).datasource(SOURCE).span(4).height(5)
    panel = panel.reduce_options(parts.ReduceDataOptions().calcs(["lastNotNull"]))
    return panel.thresholds(thresholds).with_target(query(expr))


def heat(title: str, text: str, expr: str) -> heatmap.Panel:
    """How a histogram's observations lie over time; `expr` is a sum by `le`."""
    panel = heatmap.Panel().title(title).description(text).datasource(SOURCE).span(12).height(9)
    panel = panel.color(heatmap.HeatmapColorOptions().mode(HeatmapColorMode.SCHEME).scheme("Oranges").steps(64))
    return panel.with_target(query(expr, "{{le}}", exemplar=True).format(PromQueryFormat.HEATMAP))


def listing(title: str, text: str, expr: str) -> table.Panel:
    """The present values as rows."""
    panel = table.Panel().title(title).description(text).datasource(SOURCE).span(8).height(8).show_header(True)
    return panel.with_target(query(expr).instant().format(PromQueryFormat.TABLE))


def board(uid: str, title: str, text: str, *rows: Row) -> dashboard.Dashboard:
    """A dashboard of named rows, with all variables, and links to the others."""
    told = dashboard.Dashboard(f"Headrace / {title}").uid(f"headrace-{uid}").description(text).tags(["headrace"])
    told = told.refresh("30s").time("now-1h", "now").timezone("browser").readonly()
    told = told.tooltip(models.DashboardCursorSync.CROSSHAIR)
    told = told.with_variable(dashboard.DatasourceVariable("datasource").label("Data source").type("prometheus"))
    for name, (metric, label) in VARIABLES.items():
        variable = dashboard.QueryVariable(name).label(name.capitalize()).datasource(SOURCE)
        variable = variable.query(f"label_values({metric}, {label})").include_all(True).multi(True).all_value(".*")
        told = told.with_variable(variable.refresh(models.VariableRefresh.ON_TIME_RANGE_CHANGED))
    link = dashboard.DashboardLink("Headrace").type(models.DashboardLinkType.DASHBOARDS).tags(["headrace"])
    told = told.link(link.as_dropdown(True).keep_time(True).include_vars(True))
    ids = count(1)
    for name, panels in rows:
        told = told.with_row(dashboard.Row(name).id(next(ids)))
        for panel in panels:
            told = told.with_panel(panel.id(next(ids)))
    return told
