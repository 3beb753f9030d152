"""Random trees of agents, started in every way that LangChain documents, against one budget."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

import pytest
from hypothesis import given
from hypothesis import strategies as st
from langchain.tools import ToolRuntime
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.runnables import RunnableLambda
from langchain_core.tools import BaseTool, StructuredTool
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.types import Command, Send
from prometheus_client import CollectorRegistry

from langchain_quota import MemoryStore, Telemetry
from langchain_quota.stores.redis import RedisStore
from tests.agent.trees import ASKED, Tree, ask, config
from tests.examples import examples
from tests.scene import Form, both_forms
from tests.servers.redis import RedisServer, running_redis

LOST = "langchain_quota_lost_root_runs_total"


class Tracer(BaseCallbackHandler):
    """A tracer of the user's own."""


def traced() -> Any:
    return {"callbacks": [Tracer()]}


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


Way = Callable[[Any, BaseTool, ToolRuntime], Any]
"""Starts an agent, which a tool of its own asks, too, in a tool with a runtime."""

SYNC: dict[str, Way] = {
    "invoke": lambda child, tool, runtime: child.invoke(ASKED),
    "config": lambda child, tool, runtime: child.invoke(ASKED, runtime.config),
    "thread id": lambda child, tool, runtime: child.invoke(ASKED, elsewhere()),
    "callbacks": lambda child, tool, runtime: child.invoke(ASKED, traced()),
    "both": lambda child, tool, runtime: child.invoke(ASKED, {**elsewhere(), **traced()}),
    "chain": lambda child, tool, runtime: chain(child).invoke(ASKED, traced()),
    "run": lambda child, tool, runtime: tool.run({}),
    "run, config": lambda child, tool, runtime: tool.run({}, config=runtime.config),
    "run, callbacks": lambda child, tool, runtime: tool.run({}, callbacks=[Tracer()]),
    "task": lambda child, tool, runtime: asyncio.run(child.ainvoke(ASKED)),
    "context": lambda child, tool, runtime: in_a_thread(copy_context().run, child.invoke, ASKED),
    "thread, config": lambda child, tool, runtime: in_a_thread(child.invoke, ASKED, runtime.config),
    "thread, run": lambda child, tool, runtime: in_a_thread(tool.run, {}, config=runtime.config),
    "thread, metadata": lambda child, tool, runtime: in_a_thread(
        chain(child).invoke, ASKED, {**without_callbacks(runtime), **traced()}
    ),
    "bare thread": lambda child, tool, runtime: in_a_thread(child.invoke, ASKED),
    "bare thread, run": lambda child, tool, runtime: in_a_thread(tool.run, {}),
}
"""How a sync tool starts an agent."""


async def in_an_executor(function: Callable[..., Any], *args: Any) -> Any:
    """What a function returns in a thread of an executor, which has no context."""
    with ThreadPoolExecutor() as executor:
        return await asyncio.get_running_loop().run_in_executor(executor, function, *args)


ASYNC: dict[str, Callable[[Any, BaseTool, ToolRuntime], Awaitable[Any]]] = {
    "invoke": lambda child, tool, runtime: child.ainvoke(ASKED),
    "config": lambda child, tool, runtime: child.ainvoke(ASKED, runtime.config),
    "thread id": lambda child, tool, runtime: child.ainvoke(ASKED, elsewhere()),
    "callbacks": lambda child, tool, runtime: child.ainvoke(ASKED, traced()),
    "both": lambda child, tool, runtime: child.ainvoke(ASKED, {**elsewhere(), **traced()}),
    "chain": lambda child, tool, runtime: chain(child).ainvoke(ASKED, traced()),
    "run": lambda child, tool, runtime: tool.arun({}),
    "run, config": lambda child, tool, runtime: tool.arun({}, config=runtime.config),
    "run, callbacks": lambda child, tool, runtime: tool.arun({}, callbacks=[Tracer()]),
    "task": lambda child, tool, runtime: asyncio.create_task(child.ainvoke(ASKED)),
    "context": lambda child, tool, runtime: asyncio.to_thread(child.invoke, ASKED),
    "thread, config": lambda child, tool, runtime: in_an_executor(
        child.invoke, ASKED, runtime.config
    ),
    "thread, run": lambda child, tool, runtime: in_an_executor(
        lambda: tool.run({}, config=runtime.config)
    ),
    "thread, metadata": lambda child, tool, runtime: in_an_executor(
        chain(child).invoke, ASKED, {**without_callbacks(runtime), **traced()}
    ),
    "bare thread": lambda child, tool, runtime: in_an_executor(child.invoke, ASKED),
    "bare thread, run": lambda child, tool, runtime: in_an_executor(tool.run, {}),
}
"""The same for an async tool."""

UNKNOWN = ("bare thread", "bare thread, run")
"""The ways in which nothing says which run has started an agent."""


@dataclass(frozen=True)
class Shape:
    """An agent of a tree.

    Attributes:
        searches: How often it searches.
        within: What is around it: nothing, a graph that sends to it, or one that hands over.
        below: The agents that its tools start, and how.
    """

    searches: int
    within: str
    below: tuple[tuple[str, "Shape"], ...] = ()

    @property
    def asked(self) -> list[int]:
        """How many searches each root run asks for, this one's first."""
        own, others = self.searches + (self.within == "hand-off"), []
        for way, child in self.below:
            first, *rest = child.asked
            others += rest
            if way in UNKNOWN:
                others.append(first)
            else:
                own += first
        return [own, *others]


def shapes(deep: int) -> st.SearchStrategy[Shape]:
    """Trees with at most so many levels below the first."""
    below: Any = st.just(())
    if deep:
        started = st.tuples(st.sampled_from([*SYNC]), shapes(deep - 1))
        below = st.lists(started, min_size=deep > 1, max_size=2).map(tuple)
    within = st.sampled_from(["", "", "", "send", "hand-off"])
    return st.builds(Shape, st.integers(0, 2), within, below)


def sending(agent: Any) -> Any:
    """A graph that sends a task to an agent."""
    graph = StateGraph(MessagesState)
    graph.add_node("work", agent)
    graph.add_conditional_edges(START, lambda state: [Send("work", state)], ["work"])
    graph.add_edge("work", END)
    return graph.compile()


def handing_over(agent: Any, other: Any) -> Any:
    """A graph whose first agent hands over to another one."""

    def hand_over(state: Any) -> Command[Any]:
        agent.invoke(state)
        return Command(goto="second")

    async def ahand_over(state: Any) -> Command[Any]:
        await agent.ainvoke(state)
        return Command(goto="second")

    graph = StateGraph(MessagesState)
    first = RunnableLambda(hand_over, ahand_over)
    graph.add_node("first", first, destinations=("second",))
    graph.add_node("second", other)
    graph.add_edge(START, "first")
    return graph.compile()


def starting(child: Any, way: str, name: str) -> BaseTool:
    """A tool that starts an agent."""
    tool = ask(child)

    def start(runtime: ToolRuntime) -> str:
        SYNC[way](child, tool, runtime)
        return "done"

    async def astart(runtime: ToolRuntime) -> str:
        await ASYNC[way](child, tool, runtime)
        return "done"

    return StructuredTool.from_function(start, astart, name=name, description="Ask.")


def built(tree: Tree, shape: Shape) -> Any:
    """The agents of a shape, with what is around them."""
    tools = [
        starting(built(tree, child), way, f"start_{n}")
        for n, (way, child) in enumerate(shape.below)
    ]
    agent = tree.agent(shape.searches, *tools)
    if shape.within == "send":
        return sending(agent)
    return handing_over(agent, tree.agent(1)) if shape.within == "hand-off" else agent


@pytest.fixture(scope="module")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """A Redis server; each tree has a prefix of its own."""
    with running_redis(tmp_path_factory.mktemp("redis")) as server:
        yield server


async def check(shape: Shape, most: int, form: Form, store: Any) -> None:
    """Run a tree, and compare what ran with the budgets of its root runs."""
    registry = CollectorRegistry()
    tree = Tree(Telemetry(registry=registry, spans="off"), most, store=store)
    top = built(tree, shape)

    if form == "sync":
        await asyncio.to_thread(top.invoke, ASKED)
    else:
        await top.ainvoke(ASKED)

    counted = registry.get_sample_value(LOST, {"agent": "unnamed", "cause": "thread"}) or 0
    inside = registry.get_sample_value(LOST, {"agent": "unnamed", "cause": "inside"})
    assert len(tree.ran) == sum(min(most, each) for each in shape.asked)
    assert counted == len(shape.asked) - 1
    assert inside is None


@both_forms
@examples(40)
@given(shape=shapes(3), most=st.integers(0, 6))
async def test_in_memory(form: Form, shape: Shape, most: int) -> None:
    """Exactly the budget runs, once for the whole tree; a bare thread has its own: counted."""
    await check(shape, most, form, MemoryStore())


@both_forms
@examples(10)
@given(shape=shapes(3), most=st.integers(1, 6))
async def test_in_redis(redis_server: RedisServer, form: Form, shape: Shape, most: int) -> None:
    """The same where the budget is in Redis."""
    store = RedisStore(redis_server.url, prefix=redis_server.prefix(), timeout=30)
    try:
        await check(shape, most, form, store)
    finally:
        await store.aclose()


@both_forms
@pytest.mark.parametrize("way", SYNC)
async def test_each_way(way: str, form: Form) -> None:
    """Each way alone, three levels deep, so that none is left out by chance."""
    leaf = Shape(2, "")
    middle = Shape(1, "", ((way, leaf), (way, leaf)))

    await check(Shape(1, "", ((way, middle), ("invoke", middle))), 5, form, MemoryStore())
