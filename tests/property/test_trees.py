"""Random trees of agents, started in every way that LangChain documents, against one budget."""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

from hypothesis import given
from hypothesis import strategies as st
from langchain.tools import ToolRuntime
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.runnables import RunnableLambda
from langchain_core.tools import BaseTool, StructuredTool
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.types import Command

from tests.examples import examples
from tests.scene import Form, both_forms
from tests.telemetry import telling
from tests.trees import ASKED, LOST, Tree, ask, config


def traced() -> Any:
    """A tracer of the user's own, instead of the callbacks of the run."""
    return {"callbacks": [BaseCallbackHandler()]}


def elsewhere() -> Any:
    return config(uuid4().hex)


def chain(child: Any) -> Any:
    return RunnableLambda(child.invoke, child.ainvoke)


def without_callbacks(runtime: ToolRuntime) -> Any:
    return {key: each for key, each in runtime.config.items() if key != "callbacks"}


def in_a_thread(function: Callable[..., Any], *args: Any, **more: Any) -> Any:
    """What a function returns in a thread that has no context."""
    with ThreadPoolExecutor() as executor:
        return executor.submit(function, *args, **more).result()


INVOKED: dict[str, Callable[[ToolRuntime], Any]] = {
    "invoke": lambda runtime: None,
    "config": lambda runtime: runtime.config,
    "thread id": lambda runtime: elsewhere(),
    "callbacks": lambda runtime: traced(),
    "both": lambda runtime: {**elsewhere(), **traced()},
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

WAYS = ["chain", *INVOKED, *RUN, *THREADS]
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
    tool = ask(child, started=started)

    def start(runtime: ToolRuntime) -> str:
        started.append(name)
        if way in RUN:
            tool.run({}, **RUN[way](runtime))
        elif way in THREADS:
            THREADS[way](child, tool, runtime)
        elif way == "chain":
            chain(child).invoke(ASKED, traced())
        else:
            child.invoke(ASKED, INVOKED[way](runtime))
        return "done"

    async def astart(runtime: ToolRuntime) -> str:
        started.append(name)
        if way in RUN:
            await tool.arun({}, **RUN[way](runtime))
        elif way in THREADS:
            THREADS[way](child, tool, runtime)
        elif way == "chain":
            await chain(child).ainvoke(ASKED, traced())
        else:
            await child.ainvoke(ASKED, INVOKED[way](runtime))
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


async def check(shape: Shape, most: int, form: Form) -> None:
    """Run a tree, and compare what ran with the budgets of its root runs."""
    signals = telling(spans="off")
    tree = Tree(signals.telemetry, most)
    top = built(tree, shape)

    if form == "sync":
        await asyncio.to_thread(top.invoke, ASKED)
    else:
        await top.ainvoke(ASKED)

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
