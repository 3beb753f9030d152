"""The Python of all pages runs, their numbers are true, and the code says their messages."""

import ast
import asyncio
import logging
import re
from codeop import CommandCompiler
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest
from langchain.agents import create_agent
from langchain.agents.middleware import ToolCallLimitMiddleware as LangChainsLimiter
from langchain.agents.middleware import before_agent
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import MessagesState, StateGraph
from langgraph.prebuilt import create_react_agent
from langgraph.warnings import LangGraphDeprecatedSinceV10

import langchain_quota
from langchain_quota import MemoryStore, ModelCallLimit, QuotaMiddleware, ToolCallLimit
from langchain_quota.testing import ScriptedChatModel
from tests.forked import run_python
from tests.scene import Scene, asking, recording
from tests.telemetry import Signals
from tools import reference

ROOT = Path(__file__).resolve().parents[2]
README, DOCS = ROOT / "README.md", ROOT / "docs"
REPOSITORY = "langchain-quota/langchain-quota"
PAGES = [page for page in sorted(DOCS.glob("**/*.md")) if "```python\n" in page.read_text()]
FIRST = [README, *(DOCS / f"{name}.md" for name in ("quickstart", "limits", "budgets", "people"))]
"""Pages of which a reader pastes a block without the others."""

OTHERS = (
    "deepagents",
    "fastapi",
    "langchain_openai",
    "langfuse",
    "langgraph_supervisor",
    "langgraph_swarm",
    "pydantic_settings",
)
"""Packages of pages that the oldest environment does not have."""

PRINTED = re.compile(r"```python\n(?:(?!```).)*```\n\n```text\n(.*?)```", re.DOTALL)
"""What a page says that its Python block prints."""


def blocks(page: Path, language: str = "python") -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(), re.DOTALL)


def ran(code: str) -> CompletedProcess[str]:
    """What the code has printed, which leaves the usual port to other tests."""
    for package in OTHERS:
        if f"from {package}" in code:
            pytest.importorskip(package)
    port = "start_metrics_server(port=0)"
    done = run_python(code.replace("start_metrics_server()", port), cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return done


@pytest.mark.parametrize(
    "page",
    [README, *(pytest.param(page, marks=pytest.mark.rest) for page in PAGES)],
    ids=lambda page: page.name,
)
def test_python_blocks_run(page: Path) -> None:
    """Every Python block of a page runs, and prints what the page says; the README shows all."""
    done = ran("\n".join(blocks(page)))
    printed = [line for block in PRINTED.findall(page.read_text()) for line in block.splitlines()]
    seen = [*done.stderr.splitlines(), *done.stdout.splitlines()]
    assert {line for line in printed if "…" not in line} <= {*seen}
    if page == README:
        assert printed == seen


@pytest.mark.rest
@pytest.mark.parametrize("page", FIRST, ids=lambda page: page.name)
def test_each_block_runs_alone(page: Path) -> None:
    """A block runs alone, or with the page's first; in Python's prompt, an empty line ends it."""
    first = blocks(page)[0]
    all_continue = "All later blocks continue" in " ".join(page.read_text().split())
    for before, code in re.findall(r"(.*?)```python\n(.*?)```", page.read_text(), re.DOTALL):
        said = "This continues the first example" in before.rpartition("```")[2]
        continues = said or (all_continue and code != first)
        ran(f"{first}\n{code}" if continues else code)
        compiled = CommandCompiler()
        entered: list[str] = []
        for line in [*code.splitlines(), ""]:
            entered.append(line)
            if compiled("\n".join(entered)) is not None:
                entered.clear()
        assert not entered


WISHES = re.findall(
    r"^\| (.+?) \| .+? \| \[.+?\]\((\w+\.md)#?([\w-]*)\) \|$",
    (DOCS / "index.md").read_text(),
    re.MULTILINE,
)
"""What the home page offers, and where a click leads."""
assert len(WISHES) > 11


@pytest.mark.rest
@pytest.mark.parametrize(("wish", "page", "anchor"), WISHES, ids=[each[0] for each in WISHES])
def test_each_wish_is_one_click_from_home(wish: str, page: str, anchor: str) -> None:
    """The first code behind a link of the home page runs alone, or with the page's first."""
    text = (DOCS / page).read_text()
    if anchor:
        title = anchor.replace("-", "[^a-z]+")
        text = re.split(rf"(?im)^#+ (?:{title}|.* \{{ #{anchor} \}})$", text)[1]
    before, language, code = re.findall(r"\A(.*?)```(python|shell)\n(.*?)```", text, re.DOTALL)[0]
    if "This continues the first example" in before:
        code = f"{blocks(DOCS / page)[0]}\n{code}"
    if language == "shell":
        assert code.startswith("langchain-quota export ")
    else:
        ran(code)


def test_contributing() -> None:
    """Its blocks run, and the tests in them pass; the files of its examples have what it says."""
    page = ROOT / "CONTRIBUTING.md"
    namespace: dict[str, Any] = {}
    for block in blocks(page):
        exec(compile(block, "CONTRIBUTING.md", "exec"), namespace)  # noqa: S102 - our own page
    tests = [value for name, value in namespace.items() if name.startswith("test_")]
    assert tests
    for test in tests:
        test()
    rows = re.findall(
        r"^\| `((?!tests/)[\w./-]+\.\w+)` \| (.+?) \| ", page.read_text(), re.MULTILINE
    )
    quotes = [(path, quote) for path, cell in rows for quote in re.findall(r"`([^`]+)`", cell)]
    assert len(quotes) > 15
    assert [each for each in quotes if each[1] not in (ROOT / each[0]).read_text()] == []


@pytest.mark.parametrize(("limiter", "calls"), [("langchain", 15), ("state", 15), ("store", 3)])
async def test_concurrent_runs(limiter: str, calls: int, signals: Signals) -> None:
    """Five runs at once on a thread with limit 3 make as many calls as the README says."""
    # Runs go on when all of them have begun, and have read the thread's state.
    barrier = asyncio.Barrier(5)

    @before_agent
    async def meet(state: Any, runtime: Any) -> None:
        await barrier.wait()

    middleware: Any = LangChainsLimiter(tool_name="search", thread_limit=3)
    if limiter != "langchain":
        store = MemoryStore() if limiter == "store" else None
        limits = [ToolCallLimit("search", thread_limit=3)]
        middleware = QuotaMiddleware(limits, store=store, telemetry=signals.telemetry)
    scene = Scene(signals, asking(*["search"] * 4), [meet, middleware])
    await asyncio.gather(*(scene.play() for _ in range(5)))
    assert len(scene.ran) == calls
    said = "five concurrent runs of one conversation with a limit of 3 [make 15 calls]"
    assert said in " ".join(README.read_text().split())
    row = "| five runs at once on a thread with limit 3 | 15 calls | 3 with a store, 15 w"
    assert row in (DOCS / "comparison.md").read_text()


def test_lines_with_a_real_model() -> None:
    """The README's agent with a real model can be made with a scripted one; it has 120 lines."""
    [code] = blocks(README, "py")
    scripted = code.replace('"openai:gpt-4o"', "ScriptedChatModel(script=[])")
    names = {"ScriptedChatModel": ScriptedChatModel, "search": ScriptedChatModel.get_name}
    exec(scripted.partition("result = ")[0], names)  # noqa: S102 - our own page
    assert "agent" in names
    assert scripted != code
    assert len(README.read_text().splitlines()) <= 120


def test_links_lead_to_files() -> None:
    """Each relative link and picture of the README and the docs leads to a file, kept or made."""
    link = re.compile(
        r"""\]\(([^)\s]+)\)|^\[[^\]]+\]: (\S+)$|(?:src|srcset|href)="([^"]+)\"""", re.MULTILINE
    )
    dead, count = [], 0
    made = {DOCS / path for path in reference.pages()}
    for page in [README, ROOT / "CONTRIBUTING.md", *DOCS.glob("**/*.md")]:
        text = re.sub(r"```.*?```|`[^`\n]*`", "", page.read_text(), flags=re.DOTALL)
        for target in map("".join, link.findall(text)):
            path = target.partition("#")[0]
            if path and not re.match(r"[a-z]+:", path):
                count += 1
                to = (page.parent / path).resolve()
                dead += [] if to.exists() or to in made else [f"{page.name}: {target}"]
        if page == README:
            assert count > 15  # its own files, in whatever forge or clone it is read
            assert f"{REPOSITORY}/" not in text
    assert dead == []


def test_promises_name_their_tests() -> None:
    """Each test that docs/promises.md gives as a proof is there."""
    named = re.findall(r"`(tests/[\w/]+\.py)`", (DOCS / "promises.md").read_text())
    assert len(named) > 5
    assert [name for name in named if not (ROOT / name).is_file()] == []


def test_llms_txt_lists_every_page() -> None:
    """docs/llms.txt leads to each page, those that are made included, and to the first runbook."""
    links = re.findall(
        r"(?m)^- \[.+\]\((https://\S+/)(?:main/docs|en/stable)/(\S+)\): \w",
        (DOCS / "llms.txt").read_text(),
    )
    made = reference.pages().keys()
    assert {page for host, page in links if "readthedocs" in host} == {*made}
    left_out = re.compile(r"runbooks/|reference/(?!index)|index\.md|changelog")
    pages = re.findall(r"[\w/-]+\.md", (ROOT / "mkdocs.yml").read_text().partition("\nnav:")[2])
    listed = {*made, *(page for page in pages if not left_out.match(page))}
    assert sorted(page for _, page in links) == sorted(listed)


@pytest.mark.parametrize(
    "name", ["customers", "operate", "people", "agents", "langgraph", "../docker/README"]
)
def test_pages_name_counts(name: str) -> None:
    """Users read and change counts by names: no page shows a key, or turns parts into dollars."""
    page = (DOCS / f"{name}.md").read_text()
    assert not re.search(
        r"CountKey|\.usages\([^)]|--key|\w:(user_id|tenant|thread|root_run):|10\*\*9", page
    )


def test_the_docs_are_short() -> None:
    """All pages that are kept have at most 24,400 words, and the README 600 without its code."""
    words = {page: len(page.read_text().split()) for page in DOCS.glob("**/*.md")}
    assert sum(words.values()) <= 24_400, words
    assert words[DOCS / "index.md"] <= 400
    text = re.sub(r"```.*?```", "", README.read_text(), flags=re.DOTALL)
    assert len(text.split()) <= 600
    assert len([line for line in blocks(README)[0].splitlines() if line]) <= 12


CODE = Path(langchain_quota.__file__).parent
ASKED: Any = {"messages": [("user", "hi")]}
SEARCH = ToolCallLimit("search", run_limit=9)
MODEL = ModelCallLimit(run_limit=9)


def messages() -> list[str]:
    """What the page says that a user sees: how messages begin, with `…` for what varies."""
    page = (Path(__file__).parents[2] / "docs" / "troubleshooting.md").read_text()
    return re.findall(r"(?m)^\| `([^`]+)` \| [^|]+ \| [^|]+ \|$", page)


def begins(seen: str, message: str) -> bool:
    """Whether a text that was seen begins as a message of the page does."""
    return re.match(".+".join(map(re.escape, message.split("…"))), seen) is not None


def raised(error: type[BaseException], make: Callable[[], Any]) -> str:
    """What a user reads of the exception that something raises."""
    with pytest.raises(error) as caught:
        make()
    return str(caught.value)


def quota(signals: Signals, *limits: Any, **options: Any) -> QuotaMiddleware[Any, Any]:
    return QuotaMiddleware(limits, telemetry=signals.telemetry, **options)


def agent(*middleware: Any, **options: Any) -> Any:
    """An agent that searches once, and then is done."""
    model = ScriptedChatModel(script=[["search"], "done"])
    tools = options.pop("tools", [recording("search", [])])
    return create_agent(model, tools, middleware=middleware, **options)


def older_agent(signals: Signals) -> None:
    make: Any = create_react_agent
    with pytest.warns(LangGraphDeprecatedSinceV10):
        make(ScriptedChatModel(script=[]), [], middleware=[quota(signals, SEARCH)])


node: Any = StateGraph(MessagesState).add_node
alone: Any = create_agent
OF_LIBRARIES: dict[str, Callable[[Signals], object]] = {
    "'QuotaMiddleware' object is not iterable": lambda signals: alone(
        ScriptedChatModel(script=[]), middleware=quota(signals, SEARCH)
    ),
    "create_react_agent() got unexpected keyword arguments: {'middleware': …": older_agent,
    "Expected a Runnable, callable or dict": lambda signals: node("quota", quota(signals, SEARCH)),
    "Checkpointer requires one or more of the following 'configurable' keys: …": (
        lambda signals: agent(quota(signals, MODEL), checkpointer=InMemorySaver()).invoke(ASKED)
    ),
}
"""Mistakes that LangChain, LangGraph or Python answer."""


@pytest.mark.parametrize("message", OF_LIBRARIES)
def test_a_mistake_that_a_library_answers(message: str, signals: Signals) -> None:
    """The mistake, made for real, shows a message that the page explains."""
    assert message in messages()
    assert begins(raised(Exception, lambda: OF_LIBRARIES[message](signals)), message)


LOGGED = {
    "store of langchain-quota failed with QuotaStoreError": " of langchain-quota failed with "
}
"""What the code says of messages that do not begin with its own words."""


def test_every_message_is_said() -> None:
    """No message is on the page twice, and the code says the greater part of each."""
    page = messages()
    assert len(page) == len(set(page)) > 15
    nodes = chain.from_iterable(
        ast.walk(ast.parse(each.read_text())) for each in CODE.rglob("*.py")
    )
    code = "\n".join(str(each.value) for each in nodes if isinstance(each, ast.Constant))
    for message in {*page} - {*OF_LIBRARIES}:
        parts = re.split("…|: |, ", LOGGED.get(message, message))
        assert sum(len(each) for each in parts if each.strip() in code) >= len(message) * 0.5, (
            message
        )


PROVIDERS = [
    {"type": "web_search_20250305", "name": "web_search"},
    {"type": "function", "function": {"name": "lookup", "parameters": {}}},
    {"type": "code_interpreter"},
]


@pytest.mark.parametrize(
    ("names", "options", "told"),
    [
        ({"tool_name": "serach"}, {}, ["WARNING 'serach' (did you mean 'search'?)"]),
        ({"exclude": ["serach", "write_todos"]}, {}, ["WARNING 'serach' (did you mean 'search'?)"]),
        (
            {"tool_name": ["fetch", "research_papers"]},
            {},
            ["INFO 'fetch', 'research_papers'; its tools are 'search'"],
        ),
        ({"tool_name": ["fetch", "search"]}, {}, []),
        ({"tool_name": ["web_search", "lookup", "code_interpreter"]}, {"tools": PROVIDERS}, []),
    ],
)
def test_a_misspelt_tool(
    names: Any, options: Any, told: list[str], signals: Signals, caplog: pytest.LogCaptureFixture
) -> None:
    """A limit without a tool, and a name spelt like one, are logged once there are tools."""
    caplog.set_level(logging.INFO, "langchain_quota")
    held = quota(signals, ToolCallLimit(run_limit=9, **names))
    create_agent(ScriptedChatModel(script=["done"]), [], middleware=[held]).invoke(ASKED)
    for _ in range(2):
        agent(held, **options).invoke(ASKED)
    said = "limits name tools that agent … does not have: …", "a limit holds no tool of agent …: …"
    found = [each for each in caplog.records if any(begins(each.getMessage(), of) for of in said)]
    assert [f"{e.levelname} {e.getMessage().partition(': ')[2]}" for e in found] == told
