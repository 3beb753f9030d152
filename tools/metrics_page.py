"""`python -m tools.metrics_page`: write the table of docs/reference/metrics.md from the code."""

from pathlib import Path

from langchain_quota.telemetry.names import METRICS

PAGE = Path(__file__).parents[1] / "docs" / "reference" / "metrics.md"
BEGIN = "<!-- `python -m tools.metrics_page` writes this table -->\n\n"
END = "\n<!-- the end of the table -->\n"


def written(page: str) -> str:
    """The page with the table as the code has it now."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    lines = ["| name | labels | type | meaning |", "| --- | --- | --- | --- |"]
    for each in METRICS:
        labels = ", ".join(f"`{label}`" for label in each.labels)
        lines.append(f"| `{each.name}` | {labels} | {each.kind} | {each.help} |")
    table = "".join(f"{line}\n" for line in lines)
    return f"{before}{BEGIN}{table}{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))
