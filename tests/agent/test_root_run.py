"""Quotas per root run: one budget for the outermost run with everything that it starts."""

import gc
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import pytest
from langchain_core.runnables import RunnableLambda
from langchain_core.tools import StructuredTool
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.types import Command

from langchain_quota.middleware._root_run import log_lost
from tests.agent.trees import (
    ASKED,
    Tree,
    config,
    human,
    in_one_tool,
    inside,
)
from tests.signals import Signals


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


async def test_not_resumed(signals: Signals) -> None:
    """A new message to a thread that waits for a human begins a root run with a new budget."""
    workers = Workers(Tree(signals.telemetry), in_one_tool)

    await workers.go(ASKED)
    await workers.go(ASKED)
    await workers.go(Command(resume="yes"))

    assert len(workers.tree.ran) == 2 + 5


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
