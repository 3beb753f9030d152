"""The Python in the README, CONTRIBUTING and the docs runs, and their numbers are true."""

import asyncio
import re
from codeop import CommandCompiler
from collections.abc import Callable, Sequence
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from langchain.agents import create_agent
from langchain.agents.middleware import AgentMiddleware
from langchain.agents.middleware import ToolCallLimitMiddleware as LangChainsLimiter
from langchain_core.messages import BaseMessage
from langgraph.checkpoint.memory import InMemorySaver
from rich.console import Console

from langchain_quota import MemoryStore, QuotaMiddleware, ToolCallLimit
from langchain_quota.cli.demo_view import Row, table
from langchain_quota.testing import ScriptedChatModel, Turn
from tests.forked import as_module, run_python
from tests.signals import Signals
from tools import picture

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
BENCHMARKS = ROOT / "docs" / "benchmarks.md"
COMPARISON = ROOT / "docs" / "comparison.md"
COST = ROOT / "docs" / "cost.md"
OPERATIONS = ROOT / "docs" / "operations.md"
REPOSITORY = "https://github.com/langchain-quota/langchain-quota"
PAGES = [
    page for page in sorted((ROOT / "docs").glob("**/*.md")) if "```python\n" in page.read_text()
]
FIRST = [
    README,
    *(ROOT / "docs" / f"{name}.md" for name in ("index", "quickstart", "coding-assistants")),
]
"""Pages of which a reader pastes a block without the others."""

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


def test_the_readme_is_short() -> None:
    """The whole README fits on a few screens."""
    assert len(README.read_text().splitlines()) <= 120


@pytest.mark.parametrize("page", [README, *PAGES], ids=lambda page: page.name)
def test_python_blocks_run(page: Path) -> None:
    """Every Python block of the page runs, in order, and prints what stands behind it as text.

    The README shows all that a terminal shows, with the lines of the log.
    """
    code = _on_any_port("\n".join(_blocks(page)))
    for package in OTHERS:
        if f"from {package}" in code:
            pytest.importorskip(package)
    done = run_python(code, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    printed = [line for block in PRINTED.findall(page.read_text()) for line in block.splitlines()]
    seen = [*done.stderr.splitlines(), *done.stdout.splitlines()]
    assert {line for line in printed if "…" not in line} <= {*seen}
    if page == README:
        assert printed == seen


@pytest.mark.parametrize("page", FIRST, ids=lambda page: page.name)
def test_each_block_runs_alone(page: Path) -> None:
    """On the pages that a stranger reads first, a block that continues another one says so."""
    alone = [
        code
        for before, code in re.findall(r"(.*?)```python\n(.*?)```", page.read_text(), re.DOTALL)
        if "This continues" not in before.rpartition("```")[2]
    ]
    assert alone
    for code in alone:
        done = run_python(_on_any_port(code), cwd=ROOT)
        assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("page", FIRST, ids=lambda page: page.name)
def test_each_block_can_be_pasted_at_a_prompt(page: Path) -> None:
    """Python's prompt takes each block line by line: an empty line ends what is indented."""
    for code in _blocks(page):
        compiled = CommandCompiler()
        entered: list[str] = []
        for line in [*code.splitlines(), ""]:
            entered.append(line)
            if compiled("\n".join(entered)) is not None:
                entered.clear()
        assert not entered


def test_python_blocks_of_contributing_run() -> None:
    """The blocks of CONTRIBUTING run one after the other, and the tests in them pass."""
    namespace: dict[str, Any] = {}
    for block in _blocks(ROOT / "CONTRIBUTING.md"):
        exec(compile(block, "CONTRIBUTING.md", "exec"), namespace)  # noqa: S102 - our own page
    tests = [value for name, value in namespace.items() if name.startswith("test_")]
    assert tests
    for test in tests:
        test()


# The numbers in the README, and on the pages of costs.


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
    said = f"five concurrent runs of one conversation with a limit of {LIMIT} [make 15 calls]"
    assert said in README.read_text()
    row = f"| five runs at once on a thread with limit {LIMIT} | 15 calls | 3 with a store, 15 w"
    assert row in COMPARISON.read_text()


def test_costs_are_those_of_the_benchmarks() -> None:
    """The costs in the comparison are in docs/benchmarks.md."""
    text = " ".join(COMPARISON.read_text().split())
    steps = _table("A step, in instructions")
    said = "With eight of LangChain's limiters, a step takes about three times as many CPU"
    assert said in text
    for column in (3, 6):
        assert round(float(steps["LangChain, 8"][column])) == 3
    assert "One limiter of LangChain's costs less than one of ours" in text
    for kind in ("model", "tool"):
        assert float(steps[f"LangChain, {kind}"][3]) < float(steps[f"drop-in, {kind}"][3])

    supersteps = {name: row[1] for name, row in _table("What a step stores: PostgreSQL").items()}
    names = ("none", "LangChain, 8", "QuotaMiddleware, 8", "Inline, 8")
    none, langchain, ours, inline = (supersteps[name] for name in names)
    assert f"8 limits; without limits: {none} | {langchain} | {ours}; {inline} with" in text


NAMES = {
    "none": "none",
    "`QuotaMiddleware`, 2 limits": "QuotaMiddleware, 2",
    "`QuotaMiddleware`, 8 limits": "QuotaMiddleware, 8",
    "`InlineQuotaMiddleware`, 8 limits": "Inline, 8",
    "LangChain's limiters, 2": "LangChain, 2",
    "LangChain's limiters, 8": "LangChain, 8",
}
"""The rows of docs/cost.md, as docs/benchmarks.md calls them."""


def test_the_page_on_costs_has_the_numbers_of_the_benchmarks() -> None:
    """The tables of docs/cost.md, and the numbers that it begins with, are those measured."""
    runs = _table("Runs of ten steps")
    milliseconds = _table("Milliseconds", COST)
    for name, row in list(milliseconds.items())[2:]:
        assert row[1:] == runs[NAMES[name]][2::2]

    stored = _table("What a step stores: PostgreSQL")
    sizes = {name: int(stored[name][4].replace(",", "")) for name in NAMES.values()}
    stores = _table("Bytes", COST)
    for name, row in list(stores.items())[2:]:
        more = sizes[NAMES[name]] - sizes["none"]
        assert row[1:] == [*stored[NAMES[name]][2::2], f"{more:,}"]

    begins = COST.read_text().partition("## ")[0]
    two = "`QuotaMiddleware`, 2 limits"
    assert re.findall(r"\*\*([\d.,]+)", begins) == [
        milliseconds[two][4].removesuffix("0"),
        stores[two][3],
        re.findall(r"exported thread \| (\d+) for every limit", OPERATIONS.read_text())[0],
    ]


def _table(heading: str, page: Path = BENCHMARKS) -> dict[str, list[str]]:
    """The rows of the table under a heading of a page, by their first cell."""
    section = page.read_text().split(f"\n## {heading}\n")[1].split("\n## ")[0]
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


EXTRAS = {"demo"}
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
    heading, *lines = _lines(svg)
    assert heading == "thread search tools model tokens allowed blocked last refusal"
    # One customer is granted one more search.
    uses = " ".join(rf"[\d.]+k?/{most} [▇_]+" for most in ("[89]", "16", "20", "6k"))
    assert len(lines) == picture.THREADS
    for number, line in enumerate(lines, 1):
        refusal = r"( \w+ \((thread|run)\))?"
        assert re.fullmatch(rf"customer-{number} {uses} \d+ \d+{refusal}", line), line
    assert not re.search(r"…|@font-face|@import|url\((?!#)|href|<image", svg)


def test_the_picture_is_the_demos() -> None:
    """The committed picture shows what the demo shows, of all three levels, and loads nothing."""
    svg = (picture.IMAGES / "demo.svg").read_text()
    _check(svg)
    assert len(set(re.findall(r"\.demo-r\d+ \{ fill: (#\w+)", svg))) >= 4
    assert any(" 8/8 " in line for line in _lines(svg))


def test_the_picture_can_be_made(tmp_path: Path) -> None:
    """`make picture` draws such a picture, and one of top, from the demo's own traffic."""
    target = tmp_path / "images"
    done = run_python(as_module("tools.picture"), "--seconds", "1", "--to", str(target), cwd=ROOT)
    assert done.returncode == 0, done.stderr
    _check((target / "demo.svg").read_text())
    assert "customer-1" in (target / "top.svg").read_text()


def test_nothing_is_cut_in_the_view() -> None:
    """The demo's view has room for the last refusal in every terminal that is wide enough."""
    most = {"search": 8, "tools": 16, "model": 20, "tokens": 6000}
    row = Row("customer-1", most, most, last_refusal="search (thread)")
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


def _on_any_port(code: str) -> str:
    """The code, so that other tests may have the usual port."""
    return code.replace("start_metrics_server()", "start_metrics_server(port=0)")
