"""Quotas per root run: one budget for the outermost run with everything that it starts."""

import asyncio
import gc
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from contextvars import copy_context
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from langchain.agents import create_agent
from langchain_core.runnables import RunnableLambda
from langchain_core.tools import BaseTool, StructuredTool
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.func import entrypoint, task
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.types import Command, Send
from prometheus_client import CollectorRegistry

from langchain_quota import (
    MemoryStore,
    ModelCallLimit,
    ModelCallLimitExceededError,
    Quota,
    QuotaMiddleware,
    Telemetry,
)
from langchain_quota.admission import AcquireRequest, AcquireResult
from langchain_quota.middleware._root_run import log_lost
from langchain_quota.testing import ScriptedChatModel, captured_decisions
from tests.agent.conftest import Form, both_forms
from tests.agent.shared import FickleStore
from tests.agent.trees import (
    ASKED,
    Tree,
    ask,
    config,
    human,
    in_one_tool,
    inside,
    one_by_one,
)
from tests.examples import examples
from tests.signals import Signals


@both_forms
async def test_a_tree(form: Form, signals: Signals) -> None:
    """Three levels with parallel agents share a run's budget; the thread's next run has another."""
    tree = Tree(signals.telemetry)
    leaves = [ask(tree.agent(2), f"leaf_{n}") for n in range(2)]
    middle = [ask(tree.agent(1, *leaves), f"middle_{n}") for n in range(2)]
    top = tree.agent(1, *middle, checkpointer=InMemorySaver())

    for turn in (1, 2):
        if form == "sync":
            top.invoke(ASKED, config())
        else:
            await top.ainvoke(ASKED, config())

        assert len(tree.ran) == 5 * turn


async def test_many_runs_at_once(signals: Signals) -> None:
    """Fifty runs at once, on threads or on none, have exactly their own budgets."""
    tree = Tree(signals.telemetry)
    leaves = [ask(tree.agent(2), f"leaf_{n}") for n in range(2)]
    top = tree.agent(3, ask(tree.agent(1, *leaves)))

    def asked(name: str) -> dict[str, Any]:
        return {"messages": [("user", name)]}

    with captured_decisions() as decisions:
        await asyncio.gather(
            *(top.ainvoke(asked(f"on {n}"), config(n % 5)) for n in range(25)),
            *(top.ainvoke(asked(f"off {n}")) for n in range(25)),
        )

    subjects = Counter(
        status.quotas[0].subject
        for decision in decisions
        if decision.outcome == "allowed"
        for status in decision.limits
    )
    assert len(subjects) == 50
    assert set(subjects.values()) == {5}
    assert len(tree.ran) == 250


async def test_a_full_store(signals: Signals) -> None:
    """Any number of runs fit into a store that drops their counts: who needs them brings them."""
    tree = Tree(signals.telemetry, store=MemoryStore(max_keys=4))
    top = tree.agent(1, ask(tree.agent(2, ask(tree.agent(3)))))

    await asyncio.gather(*(top.ainvoke(ASKED, config(n)) for n in range(20)))

    assert len(tree.ran) == 20 * 5


def graph_of(node: Any, tasks: int) -> Any:
    """A graph that sends several tasks to a node at once."""
    graph = StateGraph(MessagesState)
    graph.add_node("work", node)
    graph.add_conditional_edges(START, lambda state: [Send("work", state)] * tasks, ["work"])
    graph.add_edge("work", END)
    return graph.compile()


def chain_of(agent: Any, tasks: int) -> Any:
    """A function of the functional API with several tasks at once."""

    @task
    async def work() -> Any:
        return (await agent.ainvoke(ASKED))["messages"][-1].content

    @entrypoint()
    async def flow(_: Any) -> list[Any]:
        return await asyncio.gather(*(work() for _ in range(tasks)))

    return flow


def parallel_of(agent: Any, tasks: int) -> Any:
    """A plain runnable that asks an agent several times at once."""

    async def several(_: Any) -> Any:
        return await asyncio.gather(*(agent.ainvoke(ASKED) for _ in range(tasks)))

    return RunnableLambda(several)


class DistantStore(FickleStore):
    """A store that lets others run while it is asked, as one on the network does."""

    async def aacquire(self, request: AcquireRequest) -> AcquireResult:
        await asyncio.sleep(0)
        return self.acquire(request)


@pytest.mark.parametrize("outer", [graph_of, chain_of, parallel_of])
async def test_under_what_has_no_limits(outer: Any, signals: Signals) -> None:
    """Agents that a graph, the functional API or a runnable starts at once share one budget."""
    tree = Tree(signals.telemetry, store=DistantStore(MemoryStore()))
    several = outer(tree.agent(2), 4)

    for turn in (1, 2):
        await several.ainvoke(ASKED, config())
        assert len(tree.ran) == 5 * turn


@both_forms
async def test_a_thread_of_its_own(form: Form, signals: Signals) -> None:
    """A sub-agent with a thread id of its own draws on the budget of the outermost run."""
    tree = Tree(signals.telemetry)
    child = tree.agent(3, checkpointer=InMemorySaver())
    several = [ask(child, f"child_{n}", config=config(f"child-{n}")) for n in range(3)]
    top = tree.agent(1, *several)

    if form == "sync":
        top.invoke(ASKED, config())
    else:
        await top.ainvoke(ASKED, config())

    assert len(tree.ran) == 5


@pytest.mark.parametrize("exit_behavior", ["end", "error", "finalize"])
async def test_model_calls(exit_behavior: Any, signals: Signals) -> None:
    """Model calls of all agents count together, whatever the limit does at its number."""
    store, models = MemoryStore(), []

    def agent(*tools: BaseTool) -> Any:
        model = ScriptedChatModel(
            script=lambda messages: [tools[0].name] if len(tools) else "nothing found"
        )
        models.append(model)
        limit = ModelCallLimit(quotas=[Quota(6, per="root_run")], exit_behavior=exit_behavior)
        return create_agent(
            model,
            tools,
            middleware=[QuotaMiddleware([limit], store=store, telemetry=signals.telemetry)],
        )

    top = agent(ask(agent(ask(agent()))))
    with suppress(ModelCallLimitExceededError):
        await top.ainvoke(ASKED, config())

    assert sum(len(model.calls) for model in models) == 6


@dataclass
class Workers:
    """A graph as one worker after another builds it, over one checkpointer and one store."""

    tree: Tree
    build: Any
    saver: InMemorySaver = field(default_factory=InMemorySaver)

    async def go(self, given: Any) -> None:
        """Run, as a worker that remembers nothing."""
        await self.build(self.tree, self.saver).ainvoke(given, config())


def between(tree: Tree, saver: InMemorySaver) -> Any:
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
    """A run that another worker resumes goes on with its budget; the next run has a new one."""
    workers = Workers(Tree(signals.telemetry), build)

    for turn in (1, 2):
        await workers.go(ASKED)
        before = len(workers.tree.ran) - 5 * (turn - 1)
        assert 0 < before < 5
        await workers.go(Command(resume="yes"))
        assert len(workers.tree.ran) == 5 * turn


@pytest.mark.parametrize("dropped", [False, True])
async def test_resumed_inside_another_run(*, dropped: bool, signals: Signals) -> None:
    """An agent that goes on keeps its budget where the outermost run is not what is resumed.

    So it does where the store has dropped the count.
    """
    tree, saver = Tree(signals.telemetry, most=1), InMemorySaver()

    def worker() -> Any:
        agent = create_agent(
            ScriptedChatModel(script=one_by_one("search", "human", "search")),
            [tree.search(), StructuredTool.from_function(human)],
            middleware=[tree.quota()],
            checkpointer=saver,
        )

        async def handle(request: dict[str, Any]) -> Any:
            return await agent.ainvoke(request["given"], config())

        return RunnableLambda(handle)

    await worker().ainvoke({"given": ASKED})
    if dropped:
        tree.store = MemoryStore()
    await worker().ainvoke({"given": Command(resume="yes")})

    assert len(tree.ran) == 1


async def test_a_runnable_without_input(signals: Signals) -> None:
    """A runnable that is called with nothing begins a root run, and resumes none."""
    tree = Tree(signals.telemetry)
    agent = tree.agent(9)
    job = RunnableLambda(lambda _: agent.invoke(ASKED, config()))

    for turn in (1, 2):
        await job.ainvoke(None)
        assert len(tree.ran) == 5 * turn


async def test_not_resumed(signals: Signals) -> None:
    """A new message to a thread that waits for a human begins a root run with a new budget."""
    workers = Workers(Tree(signals.telemetry), in_one_tool)

    await workers.go(ASKED)
    await workers.go(ASKED)
    await workers.go(Command(resume="yes"))

    assert len(workers.tree.ran) == 2 + 5


@examples(30)
@given(
    st.recursive(
        st.integers(0, 3).map(lambda searches: (searches, [])),
        lambda trees: st.tuples(st.integers(0, 2), st.lists(trees, max_size=3)),
        max_leaves=8,
    ),
    st.integers(0, 6),
)
async def test_any_tree(shape: Any, most: int) -> None:
    """Of all that the agents of a tree ask for, exactly the budget runs, or all if it is less."""
    tree = Tree(Telemetry(registry=CollectorRegistry(), spans="off"), most)

    def built(shape: Any) -> tuple[Any, int]:
        searches, below = shape
        children = [built(each) for each in below]
        tools = [ask(agent, f"child_{n}") for n, (agent, _) in enumerate(children)]
        asked = searches + sum(count for _, count in children)
        return tree.agent(searches, *tools), asked

    top, asked = built(shape)
    await top.ainvoke(ASKED)

    assert len(tree.ran) == min(most, asked)


def in_a_thread(function: Callable[[], Any]) -> Any:
    """What a function returns in a thread that has no context."""
    with ThreadPoolExecutor() as executor:
        return executor.submit(function).result()


def test_in_a_bare_thread(signals: Signals, caplog: pytest.LogCaptureFixture) -> None:
    """An agent that a tool starts in a thread without context has its own budget: one log line."""
    log_lost.cache_clear()
    tree = Tree(signals.telemetry)
    child = tree.agent(9)

    def elsewhere() -> str:
        """Ask somebody."""
        in_a_thread(lambda: child.invoke(ASKED))
        return "done"

    top = tree.agent(1, StructuredTool.from_function(elsewhere))

    for turn in (1, 2):
        top.invoke(ASKED)
        assert len(tree.ran) == (1 + 5) * turn
    assert caplog.text.count("copy_context().run") == 1


def test_in_a_thread_with_context(signals: Signals) -> None:
    """An agent that a tool starts in a thread with its context draws on the tool's budget."""
    tree = Tree(signals.telemetry)
    child = tree.agent(9)

    def elsewhere() -> str:
        """Ask somebody."""
        context = copy_context()
        in_a_thread(lambda: context.run(child.invoke, ASKED))
        return "done"

    tree.agent(1, StructuredTool.from_function(elsewhere)).invoke(ASKED)
    assert len(tree.ran) == 5


def test_a_server_of_threads(signals: Signals, caplog: pytest.LogCaptureFixture) -> None:
    """Runs of a server whose threads have no context log nothing; each has its own budget."""
    log_lost.cache_clear()
    gc.collect()  # runs of other tests that wait for a human
    tree = Tree(signals.telemetry)
    agent = tree.agent(9)

    for _ in range(2):
        in_a_thread(lambda: agent.invoke(ASKED))

    assert len(tree.ran) == 2 * 5
    assert "copy_context" not in caplog.text


async def test_an_outage(signals: Signals) -> None:
    """While the store is down nothing runs; then the run goes on with one budget."""
    store = FickleStore(MemoryStore())
    tree = Tree(signals.telemetry, store=store)
    store.down = True
    top = tree.agent(2, ask(tree.agent(9)))

    await top.ainvoke(ASKED, config())
    assert tree.ran == []
    store.down = False
    await top.ainvoke(ASKED, config())
    assert len(tree.ran) == 5
