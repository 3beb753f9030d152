"""Quotas per root run: one budget for the outermost run with everything that it starts.

`property/test_trees.py` plays the ways in which a tool starts an agent. Here are other places, runs
that wait for a human, runs whose root run cannot be known, and limits that nothing can remember.
"""

import asyncio
import subprocess
import sys
import warnings
from collections import Counter
from functools import partial
from typing import Any

import pytest
from langchain.tools import ToolRuntime
from langchain_core.runnables import RunnableLambda
from langchain_core.tools import BaseTool, StructuredTool
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.func import entrypoint, task
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import create_react_agent
from langgraph.types import Command, Send

from langchain_quota import (
    GraphQuota,
    MemoryStore,
    ModelCallLimit,
    Quota,
    QuotaMiddleware,
    QuotaWarning,
    TokenLimit,
    ToolCallLimit,
)
from langchain_quota.errors import QuotaStoreError
from langchain_quota.limits import Limit
from langchain_quota.testing import ScriptedChatModel, captured_decisions
from tests import trees
from tests.forked import run_python
from tests.scene import Form, Kind, Scene, asking, both_forms, delegate, tool_limiter
from tests.stores import DistantStore, UnsureStore
from tests.telemetry import Signals, needs_inline
from tests.trees import ASKED, Tree, config, human, in_one_tool, inside, one_by_one

SEARCHES = ToolCallLimit("search", quotas=[Quota(5, per="root_run")])


async def test_many_runs_at_once(signals: Signals) -> None:
    """Twelve runs at once, on threads or on none, have exactly their own budgets."""
    tree = Tree(signals.telemetry)
    leaves = [delegate(tree.agent(2), f"leaf_{n}") for n in range(2)]
    top = tree.agent(3, delegate(tree.agent(1, *leaves)))
    with captured_decisions() as decisions:
        await asyncio.gather(
            *(top.ainvoke(ASKED, config(n % 3)) for n in range(6)),
            *(top.ainvoke(ASKED) for n in range(6)),
        )
    allowed = [each.limits for each in decisions if each.outcome == "allowed"]
    subjects = Counter(status.quotas[0].subject for limits in allowed for status in limits)
    assert [*subjects.values()] == [5] * 12


def by_send(agent: Any) -> Any:
    graph = StateGraph(MessagesState)
    graph.add_node("work", agent)
    graph.add_conditional_edges(START, lambda state: [Send("work", state)] * 4, ["work"])
    return graph.compile()


def by_tasks(agent: Any) -> Any:
    @task
    async def work() -> Any:
        return (await agent.ainvoke(ASKED))["messages"][-1].content

    @entrypoint()
    async def flow(_: Any) -> list[Any]:
        return await asyncio.gather(*(work() for _ in range(4)))

    return flow


@pytest.mark.parametrize("outer", [by_send, by_tasks])
async def test_below_what_has_no_limits(outer: Any, signals: Signals) -> None:
    """Agents that a graph or the functional API starts at once share one budget."""
    tree = Tree(signals.telemetry, store=DistantStore(MemoryStore()))
    several = outer(tree.agent(2))
    for turn in (1, 2):
        await several.ainvoke(ASKED, config())
        assert len(tree.ran) == 5 * turn


def calling(tree: Tree, *agents: Any) -> list[BaseTool]:
    """A tool that asks another agent with its config alone, and then others without; and one."""
    other = delegate(tree.agent(9))

    def call(runtime: ToolRuntime) -> str:
        answer = str(trees.in_a_thread(other.run, {}, config=runtime.config))
        for each in agents:
            trees.in_a_thread(each.invoke, ASKED)
        return answer

    return [tree.search(), StructuredTool.from_function(call, description="Ask.")]


@pytest.mark.parametrize(("kind", "most"), [("graph", 9), ("react", 9), ("quota", 1)])
def test_a_thread_with_the_config(kind: Kind, most: int, signals: Signals) -> None:
    """A tool passes its root run on by its config alone, also if a full store drops the count."""
    tree = Tree(signals.telemetry, store=MemoryStore(max_keys=most))
    others = [tree.agent(1)] if most == 1 else []
    options: Any = {"kind": kind, "store": tree.store, "tools": calling(tree, *others)}
    scene = Scene(signals, [["call"], ["search"], "done"], [SEARCHES], **options)
    scene.agent.invoke(ASKED, config())
    assert len(tree.ran) == 5 + len(others)


@needs_inline
async def test_an_interrupt_in_a_node_that_handles_errors(signals: Signals) -> None:
    """A tool that asks a human interrupts the run, though its node turns errors into answers."""
    tools = [StructuredTool.from_function(human)]
    limits = GraphQuota([SEARCHES], store=MemoryStore(), telemetry=signals.telemetry)
    model = limits.model(ScriptedChatModel(script=[["human"], "done"]))
    node = limits.tools(tools, handle_tool_errors=True)
    graph = create_react_agent(model, node, checkpointer=InMemorySaver())
    assert (await graph.ainvoke(ASKED, config()))["__interrupt__"]
    result = await graph.ainvoke(Command(resume="yes"), config())
    assert result["messages"][-2].text == "human: yes"


def between(tree: Tree, saver: Any) -> Any:
    """A graph of an agent, a human, and another agent."""
    graph = StateGraph(MessagesState)
    for name, node in (("a", tree.agent(2)), ("b", tree.agent(9))):
        graph.add_node(name, RunnableLambda(node.invoke, node.ainvoke))
    graph.add_node("human", lambda state: human() and None)
    graph.add_edge(START, "a")
    graph.add_edge("a", "human")
    graph.add_edge("human", "b")
    return graph.compile(checkpointer=saver)


@pytest.mark.parametrize("build", [inside, in_one_tool, between])
async def test_resumed_elsewhere(build: Any, signals: Signals) -> None:
    """A run that another worker resumes goes on with its budget; the next run has a new one.

    If the store does not say which run it is, the run raises, and can be resumed again.
    """
    tree, saver = Tree(signals.telemetry, store=UnsureStore()), InMemorySaver()
    for turn in (1, 2):
        await build(tree, saver).ainvoke(ASKED, config())
        assert 0 < len(tree.ran) - 5 * (turn - 1) < 5
        if build is between:
            tree.store.down = True
            with pytest.raises(QuotaStoreError, match="resume it again"):
                await build(tree, saver).ainvoke(Command(resume="yes"), config())
            tree.store.down = False
        await build(tree, saver).ainvoke(Command(resume="yes"), config())
        assert len(tree.ran) == 5 * turn


async def test_not_resumed(signals: Signals) -> None:
    """A new message to a thread that waits for a human begins a root run with a new budget."""
    tree, saver = Tree(signals.telemetry), InMemorySaver()
    inputs: list[Any] = [ASKED, ASKED, Command(resume="yes")]
    for given in inputs:
        await in_one_tool(tree, saver).ainvoke(given, config())
    assert len(tree.ran) == 2 + 5


async def test_resumed_inside_another_run(signals: Signals) -> None:
    """An agent that goes on keeps its budget, without its outermost run and the store's count."""
    tree, saver = Tree(signals.telemetry, most=1), InMemorySaver()
    inputs: list[Any] = [ASKED, Command(resume="yes")]
    for given in inputs:
        tree.store = MemoryStore()
        script = one_by_one("search", "human", "search")
        tools = [tree.search(), StructuredTool.from_function(human)]
        worker = Scene(signals, script, [tree.quota()], tools=tools, checkpointer=saver)
        await RunnableLambda(worker.invoke).ainvoke(given)
    assert len(tree.ran) == 1


LATE = """
from langchain.agents import create_agent
from langchain_core.tools import StructuredTool
from prometheus_client import REGISTRY

from langchain_quota.testing import ScriptedChatModel

trees = []


def late() -> str:
    "Make an agent with limits, and ask it."
    from langchain_quota import Telemetry
    from tests.trees import ASKED, Tree

    trees[:] = trees or [Tree(Telemetry())]
    trees[0].agent(9, name="late").invoke(ASKED)
    return "done"


model = ScriptedChatModel(script=[["late"], ["late"], "done"])
agent = create_agent(model, [StructuredTool.from_function(late)])
agent.invoke({"messages": [("user", "Go!")]})
labels = {"component": "root_run", "error_type": "inside"}
print(len(trees[0].ran), REGISTRY.get_sample_value("langchain_quota_errors_total", labels))
"""


@pytest.mark.rest
def test_what_cannot_be_known() -> None:
    """A run that lost its root run, begun before any quota, has its own budget, logged once."""
    done = subprocess.run(
        [sys.executable, "-c", LATE], check=True, capture_output=True, text=True, timeout=120
    )
    assert done.stdout.split() == ["10", "2.0"]
    assert done.stderr.count("Create middlewares when the program starts") == 1


ASKED_BY_LANGCHAIN = """
from langchain_core.callbacks import CallbackManager
from langchain_core.tracers.context import _configure_hooks
from tests.tokens import answer
from tests.scene import Scene
from tests.telemetry import telling
from langchain_quota import MemoryStore, ModelCallLimit, Quota, TokenLimit

def ours():
    return [each[0] for each in _configure_hooks if each[0].name.startswith("langchain_quota")]

signals = telling()
Scene(signals, ["done"], [ModelCallLimit(run_limit=1)], form="sync")
CallbackManager.configure()
print(len(ours()))
for limit in (ModelCallLimit(quotas=[Quota(9, per="root_run")]), TokenLimit(run_limit=99)):
    scene = Scene(signals, [answer(1)], [limit], store=MemoryStore(), form="sync")
    scene.agent.invoke({"messages": [("user", "hi")]}, scene.config)
    print(len(ours()))
for each in ours():
    default, found = object(), each.get()
    assert (each.get(default) is default) == (found is None)
"""


def test_what_langchain_takes_for_context_variables() -> None:
    """They are there once a limit needs them, and say like a `ContextVar` if there is nothing."""
    done = run_python(ASKED_BY_LANGCHAIN)
    assert (done.returncode, done.stdout.split()) == (0, ["0", "1", "3"]), done.stderr


TWICE = asking("search", "search")


@pytest.mark.parametrize("remedy", ["none", "store", "checkpointer"])
async def test_a_childs_thread_limit(remedy: str, signals: Signals) -> None:
    """It lasts one invocation, and warns once; a store, or `checkpointer=True`, make it hold."""
    child = Scene(
        signals,
        TWICE,
        [ToolCallLimit("search", thread_limit=1 if remedy == "none" else 3)],
        store=MemoryStore() if remedy == "store" else None,
        checkpointer=True if remedy == "checkpointer" else None,
    )
    limiter = tool_limiter(signals, thread_limit=9)
    script = [["delegate"], ["delegate"], "done"]
    scene = Scene(signals, script, [limiter], tools=[delegate(child.agent)])
    if remedy == "none":
        with pytest.warns(QuotaWarning, match="thread limit") as caught:
            await scene.play()
        assert len(caught) == 1
        assert child.ran == ["search"] * 2
    else:
        # Every warning of a test is an error.
        await scene.play()
        assert child.ran == ["search"] * 3
    assert scene.state()["thread_tool_call_count"] == {"__all__": 2}


# Under `invoke` a tool runs in another thread, in a copy of the context.
@both_forms
@pytest.mark.parametrize("name", [None, "researcher"])
async def test_a_childs_series(name: str | None, form: Form, signals: Signals) -> None:
    """A named child writes thread series; an unnamed one has its parent's name, and does not."""
    limits: list[Limit] = [
        ToolCallLimit("search", run_limit=9),
        ToolCallLimit("search", thread_limit=9, name="child"),
        ModelCallLimit(thread_limit=9, name="child model"),
    ]
    child = Scene(signals, TWICE, limits, name=name, checkpointer=None)
    limiter = tool_limiter(signals, thread_limit=9)
    options: dict[str, Any] = {"tools": [delegate(child.agent)], "name": "boss", "form": form}
    with pytest.warns(QuotaWarning):
        await Scene(signals, [["delegate"], "done"], [limiter], **options).play()
    series, thread = "langchain_quota_thread_used", "thread-1"
    assert signals.samples(series, limit="tool:*") == {("boss", thread): 1}
    for limit in ("child", "child model"):
        assert signals.samples(series, limit=limit) == ({(name, thread): 2} if name else {})


FORGETFUL = ToolCallLimit("search", thread_limit=9)
MAKES: list[Any] = [
    lambda telemetry: QuotaMiddleware[Any, Any]([FORGETFUL], telemetry=telemetry),
    lambda telemetry: QuotaMiddleware([TokenLimit(run_limit=999)], telemetry=telemetry),
    lambda telemetry: GraphQuota([FORGETFUL], telemetry=telemetry),
]


@pytest.mark.parametrize("make", MAKES, ids=["generic", "budget", "graph"])
async def test_of_a_middleware(make: Any, signals: Signals) -> None:
    """A thread limit that is forgotten, and tokens that are not reported: it is made there.

    It is shown once, and who filters warnings by module names their own.
    """
    with warnings.catch_warnings(record=True) as concurrency:
        warnings.simplefilter("default")
        limits = make(signals.telemetry)
    model = ScriptedChatModel(script=["A short answer."] * 3)
    if isinstance(limits, GraphQuota):
        agent: Any = create_react_agent(limits.model(model), limits.tools([]))
    else:
        agent = Scene(signals, model, [limits], checkpointer=None).agent
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("ignore")
        warnings.filterwarnings("default", module=__name__)
        for _ in range(2):
            await agent.ainvoke({"messages": [("user", "hi")]})
    # That of a graph without a store is known at once, and then there is no thread to count by.
    assert len(concurrency) == isinstance(limits, GraphQuota)
    (warning,) = [*concurrency, *caught][:1]
    assert warning.category is QuotaWarning
    assert (warning.filename, warning.lineno) == (__file__, make.__code__.co_firstlineno)


def test_code_without_a_module(signals: Signals) -> None:
    """Code that was never imported, as templates and consoles run it, has its line, too."""
    namespace: dict[str, Any] = {"make": partial(QuotaMiddleware, telemetry=signals.telemetry)}
    namespace["limits"] = [FORGETFUL]
    exec(compile("\n\nquota = make(limits)", "<console>", "exec"), namespace)  # noqa: S102 - as they do
    agent = Scene(signals, ["hi"], [namespace["quota"]], checkpointer=None).agent
    with pytest.warns(QuotaWarning, match="checkpointer") as caught:
        agent.invoke({"messages": [("user", "hi")]})
    (warning,) = caught
    assert (warning.filename, warning.lineno) == ("<console>", 3)
