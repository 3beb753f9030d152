"""The Python in the README and the docs runs as it stands there."""

import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest
from prometheus_client import generate_latest

import langchain_quota

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"


@pytest.fixture
def servers(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[langchain_quota.MetricsServer]]:
    """The servers that the README starts: on a free port instead of its own."""
    started: list[langchain_quota.MetricsServer] = []
    start: Callable[..., langchain_quota.MetricsServer] = langchain_quota.start_metrics_server

    def start_on_free_port() -> langchain_quota.MetricsServer:
        started.append(start(port=0))
        return started[-1]

    monkeypatch.setattr(langchain_quota, "start_metrics_server", start_on_free_port)
    yield started
    for server in started:
        server.close()


def test_python_blocks_run(servers: list[langchain_quota.MetricsServer]) -> None:
    """Every Python block of the README runs, in order, and the metrics tell what it says."""
    blocked = (
        'langchain_quota_calls_total{agent="unnamed",decision="blocked",kind="tool",tool="search"}'
    )
    before = _value(generate_latest().decode(), blocked)
    namespace: dict[str, Any] = {}
    for block in _blocks(README):
        exec(compile(block, str(README), "exec"), namespace)  # noqa: S102 - our own README

    with urlopen(servers[0].url) as response:  # noqa: S310 - our own server
        after = _value(response.read().decode(), blocked)
    assert after - before == 2


def test_example_is_short() -> None:
    """The first example is at most 12 lines of code."""
    code = [line for line in _blocks(README)[0].splitlines() if line.strip()]
    assert len(code) <= 12


@pytest.mark.parametrize(
    "page", sorted((ROOT / "docs").glob("**/*.md")), ids=lambda page: page.name
)
def test_python_blocks_of_the_docs_run(page: Path) -> None:
    """Every Python block of the page runs, in order, in a process of its own."""
    program = "\n".join(_blocks(page))
    subprocess.run([sys.executable, "-c", program], check=True, cwd=ROOT)


def _blocks(page: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)


def _value(metrics: str, series: str) -> float:
    found = re.search(re.escape(series) + r" (\S+)", metrics)
    return float(found[1]) if found else 0.0
