"""The Python in the README, CONTRIBUTING and the docs runs, and the README's numbers are true."""

import asyncio
import re
from collections.abc import Callable, Iterator, Sequence
from io import StringIO
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest
from langchain.agents import create_agent
from langchain.agents.middleware import AgentMiddleware
from langchain.agents.middleware import ToolCallLimitMiddleware as LangChainsLimiter
from langchain_core.messages import BaseMessage
from langgraph.checkpoint.memory import InMemorySaver
from prometheus_client import generate_latest
from rich.console import Console

import langchain_quota
from langchain_quota import MemoryStore, QuotaMiddleware, ToolCallLimit
from langchain_quota.cli.demo_board import Board, Row, Use
from langchain_quota.cli.demo_traffic import LIMITS
from langchain_quota.cli.demo_view import table
from langchain_quota.levels import Level
from langchain_quota.testing import ScriptedChatModel, Turn
from tests.conftest import Signals
from tests.forked import as_module, run_python
from tools import picture

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
BENCHMARKS = ROOT / "docs" / "benchmarks.md"
REPOSITORY = "https://github.com/langchain-quota/langchain-quota"
PAGES = [
    page for page in sorted((ROOT / "docs").glob("**/*.md")) if "```python\n" in page.read_text()
]
HERE = (
    f"{REPOSITORY}/blob/main/",
    "https://raw.githubusercontent.com/langchain-quota/langchain-quota/main/",
)

OTHERS = ("deepagents", "langchain_openai", "langfuse", "langgraph_supervisor", "langgraph_swarm")
"""Packages of pages that the oldest environment does not have."""

PRINTED = re.compile(r"```python\n(?:(?!```).)*```\n\n```text\n(.*?)```", re.DOTALL)
"""What a page says that its Python block prints."""

RUNS = 5
LIMIT = 3
DEADLINE = 60
"""Seconds after which runs that should meet are taken to have been run one by one."""


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
    """Every Python block of the README runs, in order, and /metrics says what it says."""
    said = [line for block in _blocks(README, "text") for line in block.splitlines()]
    assert said
    series = dict(line.rsplit(" ", 1) for line in said)
    before = {each: _value(generate_latest().decode(), each) for each in series}
    namespace: dict[str, Any] = {}
    for block in _blocks(README):
        exec(compile(block, str(README), "exec"), namespace)  # noqa: S102 - our own README

    with urlopen(servers[0].url) as response:  # noqa: S310 - our own server
        after = response.read().decode()
    assert {each: _value(after, each) - before[each] for each in series} == {
        each: float(value) for each, value in series.items()
    }


def test_example_is_short() -> None:
    """The first example is at most 12 lines of code."""
    code = [line for line in _blocks(README)[0].splitlines() if line.strip()]
    assert len(code) <= 12


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_python_blocks_of_the_docs_run(page: Path) -> None:
    """Every Python block of the page runs, in order, and prints what stands behind it as text."""
    code = "\n".join(_blocks(page))
    for package in OTHERS:
        if f"from {package}" in code:
            pytest.importorskip(package)
    done = run_python(code, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    printed = [line for block in PRINTED.findall(page.read_text()) for line in block.splitlines()]
    assert {line for line in printed if "…" not in line} <= {*done.stdout.splitlines()}


def test_python_blocks_of_contributing_run() -> None:
    """The blocks of CONTRIBUTING run one after the other, and the tests in them pass."""
    namespace: dict[str, Any] = {}
    for block in _blocks(ROOT / "CONTRIBUTING.md"):
        exec(compile(block, "CONTRIBUTING.md", "exec"), namespace)  # noqa: S102 - our own page
    tests = [value for name, value in namespace.items() if name.startswith("test_")]
    assert tests
    for test in tests:
        test()


# The numbers in the README.


class Meet(AgentMiddleware[Any, Any]):
    """Lets runs go on when all of them have begun, and have read the thread's state."""

    def __init__(self) -> None:
        super().__init__()
        self._barrier = asyncio.Barrier(RUNS)

    async def abefore_agent(self, state: Any, runtime: Any) -> None:
        await self._barrier.wait()


def _langchains(signals: Signals) -> Any:
    return LangChainsLimiter(tool_name="search", thread_limit=LIMIT)


def _without_store(signals: Signals) -> Any:
    return QuotaMiddleware(
        [ToolCallLimit("search", thread_limit=LIMIT)], telemetry=signals.telemetry
    )


def _with_store(signals: Signals) -> Any:
    return QuotaMiddleware(
        [ToolCallLimit("search", thread_limit=LIMIT)],
        store=MemoryStore(),
        telemetry=signals.telemetry,
    )


@pytest.mark.parametrize(
    ("limiter", "calls"), [(_langchains, 15), (_without_store, 15), (_with_store, 3)]
)
async def test_concurrent_runs(
    limiter: Callable[[Signals], Any], calls: int, signals: Signals
) -> None:
    """Five runs at once on a thread with limit 3 make as many calls as the README says."""
    ran = []

    def search(query: str = "") -> str:
        """Search the web."""
        ran.append(query)
        return "nothing found"

    def script(messages: Sequence[BaseMessage]) -> Turn:
        return ["search"] * (LIMIT + 1) if messages[-1].type == "human" else "I give up."

    agent: Any = create_agent(
        ScriptedChatModel(script=script),
        [search],
        middleware=[Meet(), limiter(signals)],
        checkpointer=InMemorySaver(),
    )
    config = {"configurable": {"thread_id": "7"}}
    async with asyncio.timeout(DEADLINE):
        await asyncio.gather(
            *(agent.ainvoke({"messages": [("user", "Find it!")]}, config) for _ in range(RUNS))
        )
    assert len(ran) == calls
    text = README.read_text()
    assert f"five concurrent runs on a thread with limit {LIMIT} make 15 calls" in text
    assert "| five runs at once on a thread with limit 3 | 15 calls | 3 with a store, 15 w" in text


def test_costs_are_those_of_the_benchmarks() -> None:
    """What the README says of costs stands in docs/benchmarks.md."""
    text = " ".join(README.read_text().split())
    steps = _table("A step, in instructions")
    assert "eight of them make a step of an agent three times as expensive" in text
    for column in (3, 6):
        assert round(float(steps["LangChain, 8"][column])) == 3
    for kind in ("model", "tool"):
        assert float(steps[f"LangChain, {kind}"][3]) < float(steps[f"drop-in, {kind}"][3])

    supersteps = {name: row[1] for name, row in _table("What a step stores: memory").items()}
    names = ("none", "LangChain, 8", "QuotaMiddleware, 8", "Inline, 8")
    none, langchain, ours, inline = (supersteps[name] for name in names)
    assert f"with {langchain} supersteps of LangGraph instead of {none}" in text
    assert f"8 limits (without any: {none}) | {langchain} | {ours}; {inline} with" in text


def _table(heading: str) -> dict[str, list[str]]:
    """The rows of the table under a heading of the benchmarks, by their first cell."""
    section = BENCHMARKS.read_text().split(f"\n## {heading}\n")[1].split("\n## ")[0]
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in section.splitlines()
        if line.startswith("|")
    ]
    return {row[0]: row for row in rows}


# The README as it is shown elsewhere.


def test_links_are_absolute_and_lead_somewhere() -> None:
    """The README is shown by package indexes, too: no link is relative, and ours lead to files."""
    text = README.read_text()
    for language in ("python", "shell", "text"):
        for block in _blocks(README, language):
            text = text.replace(block, "")
    targets = re.findall(r"\]\(([^)\s]+)\)|^\[[^\]]+\]: (\S+)$", text, re.MULTILINE)
    links = [inline or reference for inline, reference in targets]
    assert len(links) > 10
    assert [link for link in links if not link.startswith("https://")] == []
    ours = [link.removeprefix(each) for link in links for each in HERE if link.startswith(each)]
    assert len(ours) > 10
    assert [path for path in ours if not (ROOT / path.partition("#")[0]).is_file()] == []


def test_references_are_defined_and_used() -> None:
    """Each reference in the README has its address, each address its reference, in order."""
    text = README.read_text()
    defined = re.findall(r"^\[([^\]]+)\]: ", text, re.MULTILINE)
    prose = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    used = re.findall(r"\]\[([^\]]+)\]|\[([a-z]+)\](?![\[(:])", prose)
    assert {full or short for full, short in used} - EXTRAS == set(defined)
    assert defined == sorted(set(defined))


EXTRAS = {"cost", "demo", "otlp", "redis"}
"""In brackets, and no references."""


# The picture.


def _lines(svg: str) -> list[str]:
    """The lines of text in a picture of a terminal."""
    lines: dict[int, list[str]] = {}
    for number, text in re.findall(r'clip-path="url\(#demo-line-(\d+)\)">([^<]*)</text>', svg):
        lines.setdefault(int(number), []).append(text.replace("&#160;", " "))
    return [" ".join(" ".join(parts).split()) for _, parts in sorted(lines.items())]


def _check(svg: str) -> None:
    """Assert that a picture shows what the demo's view has: columns, threads, limits."""
    threads = [f"customer-{number + 1}" for number in range(picture.THREADS)]
    rows = Board(threads, LIMITS, near=0.8).rows()
    heading, *lines = _lines(svg)
    assert heading == "thread allowed blocked last refusal"
    assert len(lines) == len(rows)
    for row, line in zip(rows, lines, strict=True):
        limits = {use.title: re.sub("000$", "k", str(use.limit)) for use in row.uses}
        # One customer is granted one more.
        limits["search"] = "[89]"
        uses = [rf"{title} [\d.]+k?/{limit} [▇_]+" for title, limit in limits.items()]
        refusal = r"( \w+ \((thread|run)\))?"
        assert re.fullmatch(rf"{row.thread} {' '.join(uses)} \d+ \d+{refusal}", line), line
    assert not re.search(r"…|@font-face|@import|url\((?!#)|href|<image", svg)


def test_the_picture_is_the_demos() -> None:
    """The committed picture shows what the demo shows, of all three levels, and loads nothing."""
    svg = picture.PICTURE.read_text()
    _check(svg)
    assert len(set(re.findall(r"\.demo-r\d+ \{ fill: (#\w+)", svg))) >= 4
    assert any(" 8/8 " in line for line in _lines(svg))


def test_the_picture_can_be_made(tmp_path: Path) -> None:
    """`make picture` draws such a picture from the demo's own traffic."""
    target = tmp_path / "images" / "demo.svg"
    done = run_python(as_module("tools.picture"), "--seconds", "1", "--to", str(target), cwd=ROOT)
    assert done.returncode == 0, done.stderr
    _check(target.read_text())


def test_nothing_is_cut_in_the_view() -> None:
    """The demo's view has room for the last refusal in every terminal that is wide enough."""
    most = {"search": 8, "tools": 16, "model": 20, "tokens": 6000}
    uses = tuple(Use(title, limit, limit, Level.EXHAUSTED) for title, limit in most.items())
    row = Row("customer-1", uses, last_refusal="search (thread)")
    cut = []
    for width in range(100, 140):
        console = Console(width=width, file=StringIO(), force_terminal=True)
        console.print(table([row], console))
        assert isinstance(console.file, StringIO)
        if "…" in console.file.getvalue():
            cut.append(width)
    assert cut == []


def _blocks(page: Path, language: str = "python") -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(), re.DOTALL)


def _value(metrics: str, series: str) -> float:
    found = re.search(re.escape(series) + r" (\S+)", metrics)
    return float(found[1]) if found else 0.0
