"""LangChain's other middlewares, and retried nodes, beside the limiters: what is counted."""

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any

import pytest
from langchain.agents.middleware import (
    ClearToolUsesEdit,
    ContextEditingMiddleware,
    LLMToolEmulator,
    LLMToolSelectorMiddleware,
    ModelFallbackMiddleware,
    ModelRetryMiddleware,
    PIIMiddleware,
    SummarizationMiddleware,
    TodoListMiddleware,
    ToolRetryMiddleware,
)
from langchain_core.messages import AIMessage, ToolCall
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.types import RetryPolicy

from langchain_quota.testing import ScriptedChatModel
from tests.scene import Middleware, Scene, check_history, model_limiter, recording, tool_limiter
from tests.telemetry import Signals

TURN: list[Any] = [["search"] * 3, ["calc"], "done"]
"""A run that asks for more than the limits below admit."""

CONCURRENCY: dict[str, Any] = {"initial_delay": 0, "jitter": False}
"""Retries that do not wait."""

FAILED = ConnectionError("not now")
MAIL = "ann@example.com"


def limiters(signals: Signals) -> list[Middleware]:
    """Limiters under which two runs like `TURN` run three searches and one calculation."""
    return [
        model_limiter(signals, thread_limit=9, run_limit=4),
        tool_limiter(signals, "search", thread_limit=3, run_limit=2),
        tool_limiter(signals, thread_limit=4),
    ]


def failing(times: int = 1) -> Callable[[], None]:
    """Raises at the first calls."""
    calls = count(1)

    def fail() -> None:
        if next(calls) <= times:
            raise FAILED

    return fail


def saying(answer: Any) -> ScriptedChatModel:
    """A middleware's own model."""
    return ScriptedChatModel(script=lambda _: answer)


ASK = AIMessage(
    f"Asking {MAIL}", tool_calls=[ToolCall(name="search", args={}, id=each) for each in "abc"]
)
CHOICE = [("ToolSelectionResponse", {"tools": ["calc"]})]
CLEARED = ClearToolUsesEdit(trigger=1, keep=0, placeholder="cleared")
TWICE = [*TURN, *TURN]
OTHERS: dict[str, tuple[Callable[[list[str]], Middleware], list[Any]]] = {
    "tool retries": (lambda _: ToolRetryMiddleware(max_retries=4, **CONCURRENCY), TWICE),
    "model retries": (
        lambda _: ModelRetryMiddleware(max_retries=2, **CONCURRENCY),
        [FAILED, TURN[0], FAILED, FAILED, *TURN[1:], *TURN],
    ),
    "model retries that end in an answer": (
        lambda _: ModelRetryMiddleware(max_retries=1, **CONCURRENCY),
        [*TURN[:2], FAILED, FAILED, *TURN],
    ),
    "model fallback": (
        lambda _: ModelFallbackMiddleware(ScriptedChatModel(script=[TURN[0], "done"])),
        [FAILED, TURN[1], FAILED, *TURN],
    ),
    "tool emulator": (
        lambda ran: LLMToolEmulator(
            tools=["search"],
            model=ScriptedChatModel(script=lambda _: recording("search", ran).invoke({})),
        ),
        TWICE,
    ),
    "context editing": (lambda _: ContextEditingMiddleware(edits=[CLEARED]), TWICE),
    "redaction": (
        lambda _: PIIMiddleware("email", apply_to_output=True, apply_to_tool_results=True),
        [ASK, ["calc"], MAIL, *TURN],
    ),
    "summaries": (
        lambda _: SummarizationMiddleware(
            saying("a summary"), trigger=("messages", 4), keep=("messages", 1)
        ),
        TWICE,
    ),
    "tool selector": (lambda _: LLMToolSelectorMiddleware(model=saying(CHOICE)), TWICE),
}


@pytest.mark.parametrize(("make", "script"), OTHERS.values(), ids=OTHERS.keys())
async def test_what_is_counted(make: Any, script: Sequence[Any], signals: Signals) -> None:
    """What a middleware repeats counts once, what it emulates counts, its own calls do not."""
    ran: list[str] = []
    other = make(ran)
    models, *limits = limiters(signals)
    fails = failing(3 if isinstance(other, ToolRetryMiddleware) else 0)
    tools = [recording("search", ran, fails), recording("calc", ran)]
    scene = Scene(signals, script, [models, other, *limits], tools=tools, ran=ran)

    for run in (1, 2):
        await scene.play(f"I am {MAIL}")
        scene.check(models=3 * run, models_in_run=3)

    assert Counter(scene.ran) == {"search": 3, "calc": 1}


async def test_model_retry_that_raises(signals: Signals) -> None:
    """ModelRetryMiddleware that gives up by raising: the call is not counted."""
    retry = ModelRetryMiddleware(max_retries=1, on_failure="error", **CONCURRENCY)
    scene = Scene(signals, [["search"], FAILED, FAILED, "done"], [*limiters(signals), retry])

    with pytest.raises(ConnectionError):
        await scene.play()
    scene.check(models=1, models_in_run=1)

    await scene.play()
    scene.check(models=2, models_in_run=1)


async def test_todo_list(signals: Signals) -> None:
    """TodoListMiddleware: `write_todos` is a tool call like any other, counted and refused."""
    limits = tool_limiter(signals, "write_todos", run_limit=2), tool_limiter(signals, run_limit=4)
    one, two, three = (
        ("write_todos", {"todos": [{"content": text, "status": "pending"}]})
        for text in ("one", "two", "three")
    )
    calls = [[one], [two, "search"], [three], ["calc"], ["calc"]]
    scene = Scene(signals, [*calls, "done"], [*limits, TodoListMiddleware()])

    result = await scene.play()

    assert [each["content"] for each in result["todos"]] == ["two"]
    assert scene.ran == ["search", "calc"]
    assert scene.state()["thread_tool_call_count"] == {"write_todos": 2, "__all__": 4}
    check_history(result["messages"])
    scene.check_requests()


RETRY = RetryPolicy(initial_interval=0, jitter=False, max_attempts=2, retry_on=Exception)
"""Once more, at once, whatever was raised."""


async def test_retried_nodes(signals: Signals) -> None:
    """RetryPolicy on the agent's nodes: what failed runs again and counts once; a refusal, too."""
    ran: list[str] = []
    script = [TURN[0], FAILED, *TURN[1:], *TURN, ["calc"]]
    raising = tool_limiter(signals, "calc", thread_limit=2, exit_behavior="error")
    tools = [recording(each, ran, failing()) for each in ("search", "calc")]
    scene = Scene(signals, script, [*limiters(signals), raising], tools=tools, ran=ran)
    scene.agent.retry_policy = (RETRY,)

    for run in (1, 2):
        await scene.play()
        scene.check(models=3 * run, models_in_run=3)
    assert Counter(ran) == {"search": 3, "calc": 1}


@pytest.mark.parametrize("memory", [None, True], ids=["no memory", "a memory of its own"])
async def test_an_agent_as_a_retried_node(memory: Any, signals: Signals) -> None:
    """RetryPolicy on a node that is an agent: each attempt is a run of its own, on a new thread.

    With a memory of its own, the next run goes on with the first attempt's.
    """
    ran: list[str] = []
    script = [["search"], ["flaky"], ["search"], "done", ["search", "search"], "done"]
    limiter = tool_limiter(signals, thread_limit=3 if memory else None, run_limit=2)
    tools = [recording("search", ran), recording("flaky", ran, failing())]
    scene = Scene(signals, script, [limiter], tools=tools, ran=ran, checkpointer=memory)
    graph: Any = StateGraph(MessagesState)
    graph.add_node("agent", scene.agent, retry_policy=RETRY)
    graph.add_edge(START, "agent")
    scene.agent = graph.compile(checkpointer=InMemorySaver())

    await scene.play()
    assert ran == ["search", "search"]
    assert scene.metric("tool:*", "allowed") == 3

    await scene.play()
    # Of the first attempt there are a search and the failed call: one is left.
    assert ran == ["search"] * (3 if memory else 4)
    scene.check_requests()
