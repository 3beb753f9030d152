"""The metrics as queries see them."""

import re
from collections.abc import Iterator

from langchain_quota.decision import Unit
from langchain_quota.telemetry import names
from langchain_quota.telemetry.names import METRICS

LABELS_OF = {
    series: {*metric.labels, *(("le",) if series.endswith("_bucket") else ())}
    for metric in METRICS
    for series in metric.series
}
"""The labels of each series, by its name."""

UNIT_OF: dict[str, Unit] = {
    spec.name: unit
    for each in vars(names).values()
    if isinstance(each, dict)
    for unit, spec in each.items()
    if isinstance(spec, names.MetricSpec)
}
"""The unit of each metric of amounts."""

_AMOUNT = re.compile(r"langchain_quota_\w+(?!\w|:ratio)")


def mixed(expr: str) -> Iterator[str]:
    """Where PromQL brings amounts of several units together.

    They may stand side by side, joined by `or`, where each has lost its unit: a share, or a time,
    is made from what is used and from the limit, in one unit.
    """
    parts = [
        {name for name in _AMOUNT.findall(part) if name in UNIT_OF}
        for part in re.split(r"\bor\b", expr)
    ]
    units = {UNIT_OF[name] for found in parts for name in found}
    for found in parts:
        in_part = {UNIT_OF[name] for name in found}
        if len(in_part) > 1:
            yield f"{sorted(found)} are brought together"
        kinds = {"limit" if "limit" in name else "used" for name in found}
        if len(units) > 1 and found and kinds != {"limit", "used"}:
            yield f"{sorted(found)} stands beside another unit"
