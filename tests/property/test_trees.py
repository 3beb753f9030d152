"""Random trees of agents, started in every way that LangChain documents.

One budget holds for all, and a receipt has what their models and tools say themselves.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from contextvars import copy_context
from dataclasses import dataclass
from decimal import Decimal
from typing import Any
from uuid import uuid4

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from langchain.tools import ToolRuntime
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.runnables import RunnableLambda
from langchain_core.tools import BaseTool, StructuredTool
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.types import Command, interrupt

from langchain_quota import CostLimit, QuotaMiddleware
from tests.examples import DEPTH, examples
from tests.scene import Form, both_forms, delegate, recording
from tests.telemetry import telling
from tests.trees import ASKED, LOST, PER_TOKEN, Billed, Tree, config, in_a_thread, price


def traced() -> Any:
    """A tracer of the user's own, instead of the callbacks of the run."""
    return {"callbacks": [BaseCallbackHandler()]}


def elsewhere() -> Any:
    return config(uuid4().hex)


def chain(child: Any) -> Any:
    return RunnableLambda(child.invoke, child.ainvoke)


def without_callbacks(runtime: ToolRuntime) -> Any:
    return {key: each for key, each in runtime.config.items() if key != "callbacks"}


INVOKED: dict[str, Callable[[ToolRuntime], Any]] = {
    "invoke": lambda runtime: None,
    "config": lambda runtime: runtime.config,
    "thread id": lambda runtime: elsewhere(),
    "callbacks": lambda runtime: traced(),
    "both": lambda runtime: {**elsewhere(), **traced()},
    "chain": lambda runtime: traced(),
}
"""How a tool invokes an agent: with which config."""

RUN: dict[str, Callable[[ToolRuntime], Any]] = {
    "run": lambda runtime: {},
    "run, config": lambda runtime: {"config": runtime.config},
    "run, callbacks": lambda runtime: traced(),
}
"""How it runs another tool that does: with which arguments."""

THREADS: dict[str, Callable[[Any, BaseTool, ToolRuntime], Any]] = {
    "context": lambda child, tool, runtime: in_a_thread(copy_context().run, child.invoke, ASKED),
    "another loop": lambda child, tool, runtime: in_a_thread(
        copy_context().run, asyncio.run, child.ainvoke(ASKED)
    ),
    "thread, config": lambda child, tool, runtime: in_a_thread(child.invoke, ASKED, runtime.config),
    "thread, run": lambda child, tool, runtime: in_a_thread(tool.run, {}, config=runtime.config),
    "thread, callbacks": lambda child, tool, runtime: in_a_thread(
        tool.run, {}, config={**runtime.config, **traced()}
    ),
    "thread, metadata": lambda child, tool, runtime: in_a_thread(
        chain(child).invoke, ASKED, {**without_callbacks(runtime), **traced()}
    ),
    "bare thread": lambda child, tool, runtime: in_a_thread(child.invoke, ASKED),
    "bare thread, run": lambda child, tool, runtime: in_a_thread(tool.run, {}),
}
"""How it starts an agent in another thread."""

WAYS = [*INVOKED, *RUN, *THREADS]
UNKNOWN = ("bare thread", "bare thread, run")
"""The ways in which nothing says which run has started an agent."""


@dataclass(frozen=True)
class Shape:
    """An agent of a tree.

    Attributes:
        searches: How often it searches.
        hands_over: Whether a graph hands over from it to another agent, which searches once.
        below: The agents that its tools start, and how.
    """

    searches: int
    hands_over: bool = False
    below: tuple[tuple[str, "Shape"], ...] = ()

    @property
    def asked(self) -> list[int]:
        """How many searches each root run asks for, this one's first."""
        own, others = self.searches + self.hands_over, []
        for way, child in self.below:
            first, *rest = child.asked
            others += rest
            if way in UNKNOWN:
                others.append(first)
            else:
                own += first
        return [own, *others]


def shapes(deep: int, ways: Sequence[str] = WAYS) -> st.SearchStrategy[Shape]:
    """Trees with at most so many levels below the first."""
    below: Any = st.just(())
    if deep:
        started = st.tuples(st.sampled_from(ways), shapes(deep - 1, ways))
        below = st.lists(started, min_size=deep > 1, max_size=2).map(tuple)
    return st.builds(Shape, st.integers(0, 2), st.booleans(), below)


def handing_over(agent: Any, other: Any) -> Any:
    """A graph whose first agent hands over to another one."""
    on = RunnableLambda[Any, Any](lambda _: Command(goto="second"))
    graph = StateGraph(MessagesState)
    graph.add_node("first", chain(agent) | on, destinations=("second",))
    graph.add_node("second", other)
    graph.add_edge(START, "first")
    return graph.compile()


def starting(child: Any, way: str, name: str, started: list[str]) -> BaseTool:
    """A tool that starts an agent."""
    tool = delegate(child, started=started)
    invoked = chain(child) if way == "chain" else child

    def start(runtime: ToolRuntime) -> str:
        started.append(name)
        if way in RUN:
            tool.run({}, **RUN[way](runtime))
        elif way in THREADS:
            THREADS[way](child, tool, runtime)
        else:
            invoked.invoke(ASKED, INVOKED[way](runtime))
        return "done"

    async def astart(runtime: ToolRuntime) -> str:
        started.append(name)
        if way in RUN:
            await tool.arun({}, **RUN[way](runtime))
        elif way in THREADS:
            THREADS[way](child, tool, runtime)
        else:
            await invoked.ainvoke(ASKED, INVOKED[way](runtime))
        return "done"

    return StructuredTool.from_function(start, astart, name=name, description="Ask.")


def built(tree: Tree, shape: Shape) -> Any:
    """The agents of a shape, with what is around them."""
    tools = [
        starting(built(tree, child), way, f"start_{n}", tree.started)
        for n, (way, child) in enumerate(shape.below)
    ]
    agent = tree.agent(shape.searches, *tools)
    return handing_over(agent, tree.agent(1)) if shape.hands_over else agent


async def invoke(agent: Any, form: Form, given: Any = ASKED, where: Any = None) -> None:
    if form == "sync":
        await asyncio.to_thread(agent.invoke, given, where)
    else:
        await agent.ainvoke(given, where)


async def check(shape: Shape, most: int, form: Form) -> None:
    """Run a tree, and compare what ran with the budgets of its root runs."""
    signals = telling(spans="off")
    tree = Tree(signals.telemetry, most)
    await invoke(built(tree, shape), form)
    assert len(tree.ran) == sum(min(most, each) for each in shape.asked)
    assert signals.samples(LOST) == {}


@both_forms
@examples(40)
@given(shape=shapes(3), most=st.integers(0, 6))
async def test_any_tree(form: Form, shape: Shape, most: int) -> None:
    """Exactly the budget runs, once for the whole tree; a bare thread has its own."""
    await check(shape, most, form)


@both_forms
async def test_every_way(form: Form) -> None:
    """Each way, on two levels of one tree, so that none is left out by chance."""
    leaf = Shape(2)
    below = tuple((way, Shape(1, below=((way, leaf), (way, leaf)))) for way in WAYS)
    await check(Shape(1, below=below), 5, form)


UNSEEN = (*UNKNOWN, "thread, run", "thread, callbacks", "thread, metadata")
"""The ways that pass on neither the context nor the callbacks of a run."""
AS_CALLER = ("chain", "config", "run, config", "thread, config")
"""The ways in which LangChain gives an agent the name of its caller."""


def is_named(shape: Shape) -> bool:
    """Whether each agent of a tree runs under its own name, and not that of its caller."""
    return all(
        way not in AS_CALLER and not child.hands_over and is_named(child)
        for way, child in shape.below
    )


@pytest.mark.timeout(3600)
@settings(max_examples={"quick": 6, "deep": 300, "explore": 1_000}[DEPTH])
@given(
    shape=shapes(3, [way for way in WAYS if way not in UNSEEN]),
    most=st.integers(0, 6),
    limited=st.lists(st.sampled_from(["search", "meters", "calls", "none"]), min_size=1),
    form=st.sampled_from(["sync", "async"]),
    asks=st.booleans(),
)
async def test_receipts(shape: Shape, most: int, limited: Any, form: Form, *, asks: bool) -> None:
    """Calls, tokens, dollars and refusals are those of the models and tools, over an interrupt."""
    tree = Billed(telling(spans="off").telemetry, most, limited=limited)
    person = recording("human", [], lambda: tree.started.append(interrupt("May I?")))
    top = tree.agent(0, *([person] if asks else []), checkpointer=InMemorySaver())
    inner = built(tree, shape)
    options: Any = {"prices": price, "telemetry": telling(spans="off").telemetry}
    quota = QuotaMiddleware([CostLimit(enforce=False)], **options)
    with quota.receipt() as bill:
        runs = [(inner, ASKED, None), (top, ASKED, config())]
        for agent, asked, where in [*runs, *([(top, Command(resume="yes"), config())] * asks)]:
            await invoke(agent, form, asked, where)
    models = bill.total("model")
    assert models.calls == tree.calls.total()
    assert models.total_tokens == tree.tokens.total()
    if is_named(shape):
        lines = [each for each in bill.lines if each.kind == "model"]
        assert {each.agent: each.calls for each in lines} == tree.calls
        assert {each.agent: each.total_tokens for each in lines} == tree.tokens
    assert models.input_tokens == tree.tokens.total() - tree.calls.total()
    assert bill.dollars == Decimal(tree.tokens.total() * PER_TOKEN) / 10**9
    ran = Counter[str]()
    for each in bill.lines:
        ran[each.name] += each.calls if each.kind == "tool" else 0
    started = Counter("human" if each == "yes" else each for each in [*tree.ran, *tree.started])
    assert +ran == started
    assert sum(bill.total("tool").blocked.values()) == len(tree.asked) - len(tree.ran)
    assert (bill.runs, bill.ended_by) == (2, [])
