"""The names of metrics: whoever writes one down writes one that there is."""

import re
from collections.abc import Iterator
from pathlib import Path

from langchain_quota.telemetry.names import METRICS
from tests.metrics import LABELS_OF

ROOT = Path(__file__).parents[2]
WRITTEN = ("*.md", "docs/**/*.md", "src/**/*.py", "src/**/*.yaml", "dashboards/**/*", "docker/**/*")
# Not `job:langchain_quota_x:rate`, which rules record.
NAME = re.compile(r"(?<![\w:/.-])langchain_quota_\w+")


def unknown(text: str) -> Iterator[str]:
    """The names in a text that no metric has."""
    known = {*LABELS_OF, *(metric.name for metric in METRICS)}
    yield from (name for name in NAME.findall(text) if name not in known)


def test_no_name_is_unknown() -> None:
    """What documents, rules, dashboards and the code call a metric is in the list of metrics."""
    files = {
        path
        for pattern in WRITTEN
        for path in ROOT.glob(pattern)
        if path.is_file() and path.suffix in {".md", ".py", ".yaml", ".yml", ".json"}
    }
    parts = {path.relative_to(ROOT).parts[0] for path in files}
    assert {"README.md", "docs", "src", "dashboards", "docker"} <= parts
    found = [
        f"{path.relative_to(ROOT)}: {name}"
        for path in sorted(files)
        for name in unknown(path.read_text(encoding="utf-8"))
    ]
    assert found == []


def test_an_unknown_name_is_found() -> None:
    """A misspelt name and a counter without its ending are told; a recorded series is not."""
    text = "langchain_quota_cals_total{} / langchain_quota_calls + job:langchain_quota_x:rate"
    assert list(unknown(text)) == ["langchain_quota_cals_total", "langchain_quota_calls"]


def test_every_name_is_written_once() -> None:
    """In the code the names stand in one module: what needs one imports it."""
    home = ROOT / "src/langchain_quota/telemetry/names.py"
    written = NAME.findall(home.read_text())
    assert len(written) == len({*written})
    # The names of amounts in other units are made of these.
    made = {metric.name for metric in METRICS} - {*written}
    assert [each for each in sorted(made) if not re.search("_(tokens|dollars)", each)] == []
    literal = re.compile(r"""["']langchain_quota_\w+["']""")
    others = [*ROOT.glob("src/**/*.py"), *ROOT.glob("dashboards/*.py")]
    assert [path for path in others if path != home and literal.search(path.read_text())] == []
