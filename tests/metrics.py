"""The metrics as queries see them."""

from langchain_quota.telemetry.names import METRICS

LABELS_OF = {
    series: {*metric.labels, *(("le",) if series.endswith("_bucket") else ())}
    for metric in METRICS
    for series in metric.series
}
"""The labels of each series, by its name."""
