"""`python -m tools.metrics_page`: write the table of docs/reference/metrics.md from the code."""

from itertools import groupby
from pathlib import Path

from langchain_quota.telemetry.names import METRICS, MetricSpec

PAGE = Path(__file__).parents[1] / "docs" / "reference" / "metrics.md"
BEGIN = "<!-- `python -m tools.metrics_page` writes this table -->\n\n"
END = "\n<!-- the end of the table -->\n"
UNITS = ("calls.", "tokens.", "US dollars.", "seconds.")


def written(page: str) -> str:
    """The page with the table as the code has it now."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    lines = ["| name | labels | type | meaning |", "| --- | --- | --- | --- |"]
    for (kind, labels, text), specs in groupby(METRICS, _row_of):
        group = list(specs)
        names = ", ".join(f"`{spec.name}`" for spec in group)
        units = [spec.help.rpartition(", in ")[2].rstrip(".") for spec in group]
        meaning = group[0].help
        if len(group) > 1:
            meaning = f"{text}, in {', '.join(units[:-1])} or {units[-1]}."
        quoted_labels = ", ".join(f"`{label}`" for label in labels)
        lines.append(f"| {names} | {quoted_labels} | {kind} | {meaning} |")
    table = "".join(f"{line}\n" for line in lines)
    return f"{before}{BEGIN}{table}{END}{after}"


def _row_of(spec: MetricSpec) -> tuple[str, tuple[str, ...], str]:
    """Return what metrics in one row share: they differ only in their units."""
    text, _, unit = spec.help.rpartition(", in ")
    return spec.kind, spec.labels, text if unit in UNITS else spec.help


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))
