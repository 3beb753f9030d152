"""What the dashboards are put together from, in one style."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from string import ascii_uppercase
from typing import TypeVar

from grafana_foundation_sdk.builders.common import (
    GraphThresholdsStyleConfig,
    ReduceDataOptions,
    StackingConfig,
    TableFooterOptions,
    VizLegendOptions,
    VizTextDisplayOptions,
    VizTooltipOptions,
)
from grafana_foundation_sdk.builders.dashboard import (
    Dashboard,
    DashboardLink,
    Row,
    ThresholdsConfig,
)
from grafana_foundation_sdk.builders.prometheus import Dataquery
from grafana_foundation_sdk.builders.stat import Panel as StatPanel
from grafana_foundation_sdk.builders.table import Panel as TablePanel
from grafana_foundation_sdk.builders.tempo import TempoQuery
from grafana_foundation_sdk.builders.timeseries import Panel as TimeseriesPanel
from grafana_foundation_sdk.cog.builder import Builder
from grafana_foundation_sdk.models import common, dashboard
from grafana_foundation_sdk.models.prometheus import PromQueryFormat, QueryEditorMode
from grafana_foundation_sdk.models.tempo import SearchTableType

from dashboards import settings

PROMETHEUS = dashboard.DataSourceRef(type_val="prometheus", uid="${datasource}")
TEMPO = dashboard.DataSourceRef(type_val="tempo", uid="${tempo}")

Steps = Sequence[tuple[float | None, str]]
"""Colours by the value from which they hold; the first has none."""

P = TypeVar("P", StatPanel, TablePanel, TimeseriesPanel)

Properties = Mapping[str, object]
"""What a column, or a query's series, has of its own: values by the names of properties."""


# The first colour is also that of an empty field.
TIME_LEFT: Steps = (
    (None, settings.NEUTRAL),
    (0, settings.CRITICAL),
    (settings.LITTLE_TIME_SECONDS, settings.WARNING),
    (settings.SOME_TIME_SECONDS, settings.NEUTRAL),
)


LOW = 3
"""The height of a panel that shows numbers."""

DASHED_LINES = GraphThresholdsStyleConfig().mode(common.GraphThresholdsStyleMode.DASHED)
"""How a chart shows its thresholds."""

USED: Steps = ((None, settings.OK), (0.8, settings.WARNING), (1, settings.CRITICAL))


@dataclass(frozen=True, slots=True)
class Place:
    """A panel's id, its width in 24ths, and its height in rows; links contain the id."""

    number: int
    width: int
    height: int


@dataclass(frozen=True, slots=True)
class Query:
    """A query of a chart, or of numbers; the legend names its series, such as `{{limit}}`."""

    expr: str
    legend: str
    exemplar: bool = False
    properties: Properties | None = None


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table: of a label, or of the values of PromQL."""

    title: str
    source: str
    properties: Properties | None = None


def new_dashboard(
    uid: str,
    title: str,
    description: str,
    variables: list[Builder[dashboard.VariableModel]],
    *contents: Row | Builder[dashboard.Panel],
) -> Dashboard:
    """A dashboard of panels and rows, linked to its sisters."""
    sisters = (
        DashboardLink("Quota dashboards")
        .type(dashboard.DashboardLinkType.DASHBOARDS)
        .tags([settings.TAG])
        .keep_time(keep_time=True)
        .include_vars(include_vars=True)
    )
    made = (
        Dashboard(title)
        .uid(uid)
        .description(description)
        .tags([settings.TAG])
        .time(settings.TIME_FROM, "now")
        .refresh(settings.REFRESH)
        .tooltip(dashboard.DashboardCursorSync.CROSSHAIR)
        .link(sisters)
        .variables(variables)
    )
    for each in contents:
        if isinstance(each, Row):
            made.with_row(each)
        else:
            made.with_panel(each)
    return made


def row(number: int, title: str, *panels: Builder[dashboard.Panel]) -> Row:
    """A heading, under which panels are hidden until one opens it."""
    made = Row(title).id(number).collapsed(collapsed=True)
    for panel in panels:
        made.with_panel(panel)
    return made


def stat(  # noqa: PLR0913 - what a panel shows, in one call
    place: Place,
    title: str,
    description: str,
    queries: Sequence[Query],
    *,
    unit: str,
    steps: Steps = ((None, settings.NEUTRAL),),
    no_value: str = "no data",
) -> StatPanel:
    """Numbers of now, beside each other."""
    panel = (
        _framed(StatPanel(), place, title, description)
        .unit(unit)
        .no_value(no_value)
        # Grafana would give the text the first colour of the steps, which says that all is fine.
        .mappings([_no_value_in_grey(no_value)])
        .thresholds(configured(steps))
        .color_mode(common.BigValueColorMode.VALUE)
        .graph_mode(common.BigValueGraphMode.NONE)
        .justify_mode(common.BigValueJustifyMode.CENTER)
        # Grafana would make the names of three numbers too small to read. On a narrow screen,
        # larger ones would overlap.
        .text(VizTextDisplayOptions().title_size(11).value_size(20))
        .text_mode(common.BigValueTextMode.VALUE_AND_NAME)
        .wide_layout(wide_layout=False)
        .show_percent_change(show_percent_change=False)
        .orientation(common.VizOrientation.VERTICAL)
        .reduce_options(ReduceDataOptions().calcs(["lastNotNull"]))
    )
    _ask(panel, queries)
    return panel


def _no_value_in_grey(text: str) -> dashboard.SpecialValueMap:
    """Return the mapping of a missing number to a text in the neutral colour."""
    result = dashboard.ValueMappingResult(text=text, color=settings.NEUTRAL, index=0)
    null = dashboard.SpecialValueMatch.NULL
    return dashboard.SpecialValueMap(dashboard.DashboardSpecialValueMapOptions(null, result))


def timeseries(  # noqa: PLR0913 - the same
    place: Place,
    title: str,
    description: str,
    queries: Sequence[Query],
    *,
    unit: str,
    has_numbers: bool = True,
) -> TimeseriesPanel:
    """Lines; a gap is a gap. The legend has the last number of each, if it `has_numbers`."""
    panel = (
        _framed(TimeseriesPanel(), place, title, description)
        .unit(unit)
        .min(0)
        .span_nulls(span_nulls=False)
        .show_points(common.VisibilityMode.AUTO)
        .fill_opacity(5)
        .legend(
            VizLegendOptions()
            .show_legend(show_legend=True)
            .display_mode(common.LegendDisplayMode.LIST)
            .placement(common.LegendPlacement.BOTTOM)
            .calcs(["lastNotNull"] * has_numbers)
        )
        .tooltip(
            VizTooltipOptions()
            .mode(common.TooltipDisplayMode.MULTI)
            .sort(common.SortOrder.DESCENDING)
        )
    )
    _ask(panel, queries)
    return panel


def bars(  # noqa: PLR0913 - the same
    place: Place,
    title: str,
    description: str,
    queries: Sequence[Query],
    *,
    unit: str,
    has_totals: bool = True,
) -> TimeseriesPanel:
    """Stacked bars: how much happened since the bar before. The legend has the largest total first.

    Without totals, some of the series are lines, whose numbers do not add up.
    """
    legend = (
        VizLegendOptions()
        .show_legend(show_legend=True)
        .display_mode(common.LegendDisplayMode.TABLE)
        .placement(common.LegendPlacement.RIGHT)
        .calcs(["sum"] if has_totals else [])
    )
    return (
        timeseries(place, title, description, queries, unit=unit)
        .legend(legend.sort_by("Total").sort_desc(sort_desc=True) if has_totals else legend)
        .max_data_points(settings.MOST_BARS)
        .draw_style(common.GraphDrawStyle.BARS)
        .line_width(1)
        .fill_opacity(80)
        .stacking(StackingConfig().mode(common.StackingMode.NORMAL).group("A"))
    )


def fixed(colour: str) -> Properties:
    """One colour, whatever the value is."""
    return {"color": {"mode": dashboard.FieldColorModeId.FIXED, "fixedColor": colour}}


def style(panel: P, styles: Mapping[str, Properties]) -> P:
    """Give series what they have of their own, by their names."""
    for name, properties in styles.items():
        panel.override_by_name(name, _properties(properties))
    return panel


LINE: Properties = {
    **fixed(settings.NEUTRAL),
    "custom.drawStyle": "line",
    "custom.fillOpacity": 0,
    "custom.stacking": {"mode": "none"},
}
"""A line among bars."""

UNNAMED: Properties = {"custom.hideFrom": {"legend": True, "tooltip": True, "viz": False}}
"""Nothing that a legend should list."""

THIN: Properties = {**fixed(settings.NEUTRAL), "custom.fillOpacity": 0}
"""A line to compare with."""
DASHED: Properties = {**THIN, "custom.lineStyle": {"fill": "dash", "dash": [6, 6]}}


def table(  # noqa: PLR0913 - the same
    place: Place,
    title: str,
    description: str,
    columns: Sequence[Column],
    *,
    sort_by: str,
    no_value: str,
    labels_from: str | None = None,
) -> TablePanel:
    """A table of labels and of values now, of several queries.

    A column whose source has a selector is a query, any other a label. The rows are sorted by the
    values of `sort_by`, falling: a column's query, or one whose values are not shown. `labels_from`
    is a query that only adds labels.
    """
    shown = [column.source for column in columns if "{" in column.source]
    # First, because Grafana leaves rows without its value where they are: below, then.
    every = [*dict.fromkeys([sort_by, *shown, *([labels_from] if labels_from else [])])]
    value = {expr: f"Value #{ref_id}" for ref_id, expr in zip(ascii_uppercase, every, strict=False)}
    panel = _empty_table(place, title, description).unit(settings.COUNT).no_value(no_value)
    for ref_id, expr in zip(ascii_uppercase, every, strict=False):
        panel.with_target(_target(expr, ref_id).instant().format(PromQueryFormat.TABLE))
    names = [value.get(column.source, column.source) for column in columns]
    titles = [column.title for column in columns]
    transformations: list[tuple[str, object]] = [
        ("merge", {}),
        ("sortBy", {"fields": {}, "sort": [{"field": value[sort_by], "desc": True}]}),
        ("limit", {"limitField": settings.TOP}),
        ("filterFieldsByName", {"include": {"names": names}}),
        (
            "organize",
            {
                "excludeByName": {},
                "indexByName": {name: index for index, name in enumerate(names)},
                "renameByName": dict(zip(names, titles, strict=True)),
            },
        ),
    ]
    for name, options in transformations:
        panel.with_transformation(dashboard.DataTransformerConfig(name, options=options))
    for column in columns:
        properties = dict(column.properties or {})
        if column.source not in value:
            properties.setdefault("unit", "string")  # an id of digits only is no number
            properties.setdefault("noValue", "")
        else:
            properties.setdefault("noValue", "-")
        if properties:
            panel.override_by_name(column.title, _properties(properties))
    return panel


def text(title: str, label: str, width: int | None = None, **properties: object) -> Column:
    """A column of a label; without a width it takes the space that is left."""
    own = {
        **({} if width is None else {"custom.width": width}),
        "custom.inspect": True,
        "custom.cellOptions": {"type": "auto", "wrapText": True},
    }
    return Column(title, label, {**own, **properties})


def hidden(label: str) -> Column:
    """A column that only links need."""
    return Column(label, label, {"custom.hidden": True})


def gauge(title: str, expr: str) -> Column:
    """A column of shares, as bars in what width is left: blue, orange near 1, red from 1 on."""
    cell = common.TableBarGaugeCellOptions(
        mode=common.BarGaugeDisplayMode.BASIC,
        value_display_mode=common.BarGaugeValueMode.TEXT,
    )
    own = {"unit": "percentunit", "decimals": 0, "min": 0, "max": 1, "custom.cellOptions": cell}
    colours = {"color": {"mode": "thresholds"}, "thresholds": thresholds(USED)}
    return Column(title, expr, {**own, **colours})


def severities() -> Properties:
    """What a column of severities has of its own."""
    results = {
        name: dashboard.ValueMappingResult(text=name, color=colour, index=index)
        for index, (name, colour) in enumerate(settings.SEVERITIES.items())
    }
    cell = {"type": "color-text"}
    return {"mappings": [dashboard.ValueMap(options=results)], "custom.cellOptions": cell}


def share_of(title: str, expr: str) -> Column:
    """A column of shares, as numbers."""
    return Column(title, expr, {"unit": settings.SHARE, "decimals": 1, "custom.width": 110})


def when(title: str, expr: str, width: int) -> Column:
    """A column of times, as from now."""
    return Column(title, expr, {"unit": "dateTimeFromNow", "custom.width": width})


def count(title: str, expr: str, width: int) -> Column:
    """A column of whole numbers."""
    return Column(title, expr, {"decimals": 0, "custom.width": width})


def lasts(expr: str) -> Column:
    """A column of how many seconds something has lasted, such as `5 mins`."""
    return Column("For", expr, {"unit": "s", "decimals": 0, "custom.width": 75})


def left(expr: str, title: str = "Left", width: int = 80) -> Column:
    """A column of amounts whose unit another column names."""
    return Column(title, expr, {"custom.width": width, "unit": settings.ROUNDED})


def duration(title: str, expr: str, width: int) -> Column:
    """A column of seconds; little time is marked."""
    own = {
        "unit": "s",
        "decimals": 0,
        "thresholds": thresholds(TIME_LEFT),
        "color": {"mode": "thresholds"},
        "custom.cellOptions": {"type": "color-text"},
    }
    return Column(title, expr, {**own, "custom.width": width})


def traces(place: Place, title: str, description: str, query: str) -> TablePanel:
    """Spans that Tempo finds."""
    target = (
        TempoQuery()
        .datasource(TEMPO)
        .query_type("traceql")
        .query(query)
        .limit(settings.TRACES_SHOWN)
        .spss(settings.SPANS_PER_TRACE)
        .table_type(SearchTableType.SPANS)
        .filters([])
        .ref_id("A")
    )
    return (
        _empty_table(place, title, description).datasource(TEMPO).unit("none").with_target(target)
    )


def thresholds(steps: Steps) -> dict[str, object]:
    """Thresholds as a property of a column."""
    return {
        "mode": dashboard.ThresholdsMode.ABSOLUTE,
        "steps": [{"value": value, "color": colour} for value, colour in steps],
    }


def _framed(panel: P, place: Place, title: str, description: str) -> P:
    return (
        panel.id(place.number)
        .span(place.width)
        .height(place.height)
        .title(title)
        .description(description)
        .datasource(PROMETHEUS)
    )


def _empty_table(place: Place, title: str, description: str) -> TablePanel:
    return (
        _framed(TablePanel(), place, title, description)
        .show_header(show_header=True)
        .frame_index(0)
        .footer(TableFooterOptions().show(show=False).reducer([]))
        .cell_height(common.TableCellHeight.SM)
    )


def _target(expr: str, ref_id: str) -> Dataquery:
    return (
        Dataquery()
        .datasource(PROMETHEUS)
        .editor_mode(QueryEditorMode.CODE)
        .expr(expr)
        .ref_id(ref_id)
    )


def _ask(panel: StatPanel | TimeseriesPanel, queries: Sequence[Query]) -> None:
    for ref_id, query in zip(ascii_uppercase, queries, strict=False):
        target = _target(query.expr, ref_id).legend_format(query.legend).exemplar(query.exemplar)
        # Of a chart over a week, the last point may be hours old, and of what is gone, much older.
        panel.with_target(target.instant() if isinstance(panel, StatPanel) else target.range())
        if query.properties is not None:
            panel.override_by_query(ref_id, _properties(query.properties))


def configured(steps: Steps) -> ThresholdsConfig:
    """Thresholds of a panel."""
    return (
        ThresholdsConfig()
        .mode(dashboard.ThresholdsMode.ABSOLUTE)
        .steps([dashboard.Threshold(value, colour) for value, colour in steps])
    )


def _properties(properties: Properties) -> list[dashboard.DynamicConfigValue]:
    return [dashboard.DynamicConfigValue(key, value) for key, value in properties.items()]
