"""LangChain's other middlewares, and retried nodes, beside the limiters: what is counted."""

from collections import Counter
from collections.abc import Callable
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
    PIIDetectionError,
    PIIMiddleware,
    SummarizationMiddleware,
    TodoListMiddleware,
    ToolRetryMiddleware,
)
from langchain_core.messages import AIMessage, ToolCall, ToolMessage
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.types import RetryPolicy

from langchain_quota import ToolCallLimitExceededError
from langchain_quota.testing import ScriptedChatModel
from tests.agent.conftest import Order, in_order, orders
from tests.agent.rules import (
    Middleware,
    Scene,
    check_history,
    model_limiter,
    recording,
    tool_limiter,
)
from tests.signals import Signals

TURN = [["search"] * 3, ["calc"], "done"]
"""A turn that asks for more than the limits below admit."""

AT_ONCE: dict[str, Any] = {"initial_delay": 0, "jitter": False}
"""Retries that do not wait."""

MAIL = "ann@example.com"


def limiters(signals: Signals) -> list[Middleware]:
    """Limiters under which two turns like `TURN` run `LIMITED`."""
    return [
        model_limiter(signals, thread_limit=9, run_limit=4),
        tool_limiter(signals, "search", thread_limit=3, run_limit=2),
        tool_limiter(signals, thread_limit=4),
    ]


LIMITED = {"search": 3, "calc": 1}


def beside(signals: Signals, *others: Middleware, order: Order = (0, 1)) -> list[Middleware]:
    """The limiters and other middlewares, whichever come first: it matters only to node hooks."""
    return [each for part in in_order(order, limiters(signals), others) for each in part]


def failing(times: int = 1) -> Callable[[], None]:
    """Raises at the first calls."""
    calls = count(1)

    def fail() -> None:
        if next(calls) <= times:
            raise ConnectionError("not now")

    return fail


async def test_tool_retry(signals: Signals) -> None:
    """ToolRetryMiddleware: a tool call that is retried counts once."""
    ran: list[str] = []
    scene = Scene(
        signals,
        [*TURN, *TURN],
        beside(signals, ToolRetryMiddleware(max_retries=4, **AT_ONCE)),
        tools=[recording("search", ran, failing(3)), recording("calc", ran, failing())],
        ran=ran,
    )

    for _ in range(2):
        await scene.turn()
        scene.check()

    assert Counter(ran) == LIMITED


@pytest.mark.parametrize("on_failure", ["continue", "error"])
async def test_tool_retry_exhausted(on_failure: Any, signals: Signals) -> None:
    """ToolRetryMiddleware that gives up: the call had started, and counts once."""
    scene = Scene(
        signals,
        [["search"], "done", "done"],
        beside(signals, ToolRetryMiddleware(max_retries=2, on_failure=on_failure, **AT_ONCE)),
        tools=[recording("search", [], failing(99))],
    )

    if on_failure == "error":
        with pytest.raises(ConnectionError):
            await scene.turn()
    await scene.turn()

    assert scene.answers() == [("search", "error")]
    assert scene.state()["thread_tool_call_count"] == {"__all__": 1, "search": 1}
    check_history(scene.state()["messages"])
    scene.check_requests()


async def test_model_retry(signals: Signals) -> None:
    """ModelRetryMiddleware: a model call that is retried counts once."""
    failed = ConnectionError("not now")
    scene = Scene(
        signals,
        [failed, TURN[0], failed, failed, *TURN[1:], *TURN],
        beside(signals, ModelRetryMiddleware(max_retries=2, **AT_ONCE)),
    )

    for turn in (1, 2):
        await scene.turn()
        scene.check(models=3 * turn, models_in_run=3)

    assert Counter(scene.ran) == LIMITED
    assert len(scene.model.calls) == 9


async def test_model_retry_that_answers_for_the_model(signals: Signals) -> None:
    """ModelRetryMiddleware that gives up with a message of its own: the call counts once."""
    failed = ConnectionError("not now")
    scene = Scene(
        signals,
        [["search"], failed, failed, failed, "done"],
        beside(signals, ModelRetryMiddleware(max_retries=2, **AT_ONCE)),
    )

    await scene.turn()
    scene.check(models=2, models_in_run=2)

    await scene.turn()
    scene.check(models=3, models_in_run=1)


async def test_model_retry_that_raises(signals: Signals) -> None:
    """ModelRetryMiddleware that gives up by raising: the call is not counted."""
    failed = ConnectionError("not now")
    scene = Scene(
        signals,
        [["search"], failed, failed, "done"],
        beside(signals, ModelRetryMiddleware(max_retries=1, on_failure="error", **AT_ONCE)),
    )

    with pytest.raises(ConnectionError):
        await scene.turn()
    scene.check(models=1, models_in_run=1)

    await scene.turn()
    scene.check(models=2, models_in_run=1)


async def test_model_fallback(signals: Signals) -> None:
    """ModelFallbackMiddleware: a call that a second model answers counts once."""
    failed = ConnectionError("not now")
    fallback = ScriptedChatModel(script=[TURN[0], "done"])
    scene = Scene(
        signals,
        [failed, TURN[1], failed, *TURN],
        beside(signals, ModelFallbackMiddleware(fallback)),
    )

    for turn in (1, 2):
        await scene.turn()
        scene.check(models=3 * turn, models_in_run=3)

    assert Counter(scene.ran) == LIMITED
    assert len(fallback.calls) == 2


async def test_model_fallback_that_fails(signals: Signals) -> None:
    """ModelFallbackMiddleware with no model that answers: the call is not counted."""
    failed = ConnectionError("not now")
    scene = Scene(
        signals,
        [failed, "done"],
        beside(signals, ModelFallbackMiddleware(ScriptedChatModel(script=[failed]))),
    )

    with pytest.raises(ConnectionError):
        await scene.turn()
    await scene.turn()

    scene.check(models=1, models_in_run=1)


async def test_tool_emulator(signals: Signals) -> None:
    """LLMToolEmulator: an emulated tool call counts, the model call that emulates it does not."""
    ran: list[str] = []

    def emulate(_: object) -> str:
        ran.append("search")
        return "emulated"

    emulator = ScriptedChatModel(script=emulate)
    scene = Scene(
        signals,
        [*TURN, *TURN],
        beside(signals, LLMToolEmulator(tools=["search"], model=emulator)),
        tools=[recording("search", []), recording("calc", ran)],
        ran=ran,
    )

    for _ in range(2):
        await scene.turn()
        scene.check()

    assert Counter(ran) == LIMITED
    assert len(emulator.calls) == 3


async def test_context_editing(signals: Signals) -> None:
    """ContextEditingMiddleware clears answers in the requests: the counts do not notice."""
    scene = Scene(
        signals,
        [*TURN, *TURN],
        beside(
            signals,
            ContextEditingMiddleware(
                edits=[ClearToolUsesEdit(trigger=1, keep=0, placeholder="cleared")]
            ),
        ),
    )

    for _ in range(2):
        await scene.turn()
        scene.check()

    assert Counter(scene.ran) == LIMITED
    sent = scene.model.calls[-1].messages
    assert {each.content for each in sent if isinstance(each, ToolMessage)} == {"cleared"}


@orders(2)
async def test_pii_redacted(order: Order, signals: Signals) -> None:
    """PIIMiddleware rewrites input, output and tool results: the counts do not notice."""
    ran: list[str] = []
    ask = AIMessage(
        f"Asking {MAIL}",
        tool_calls=[ToolCall(name="search", args={}, id=each) for each in ("a", "b", "c")],
    )
    scene = Scene(
        signals,
        [ask, ["calc"], MAIL, *TURN],
        beside(
            signals,
            PIIMiddleware("email", apply_to_output=True, apply_to_tool_results=True),
            order=order,
        ),
        tools=[recording("search", ran, lambda: MAIL), recording("calc", ran)],
        ran=ran,
    )

    for _ in range(2):
        await scene.turn(f"I am {MAIL}")
        scene.check()

    assert Counter(ran) == LIMITED
    assert MAIL not in str(scene.state()["messages"])


@orders(2)
async def test_pii_blocked_before_the_model(order: Order, signals: Signals) -> None:
    """PIIMiddleware that stops a request: no model call is made, and none is counted."""
    scene = Scene(
        signals, ["done"], beside(signals, PIIMiddleware("email", strategy="block"), order=order)
    )

    with pytest.raises(PIIDetectionError):
        await scene.turn(f"I am {MAIL}")
    scene.check(models=0, models_in_run=0)

    await scene.turn("I am Ann")
    scene.check()


@orders(2)
async def test_pii_blocked_behind_the_model(order: Order, signals: Signals) -> None:
    """PIIMiddleware that stops an answer with tool calls: charged only if it is listed first."""
    ask = AIMessage(MAIL, tool_calls=[ToolCall(name="search", args={}, id="a")])
    scene = Scene(
        signals,
        [ask, "done"],
        beside(
            signals,
            PIIMiddleware("email", strategy="block", apply_to_input=False, apply_to_output=True),
            order=order,
        ),
    )

    with pytest.raises(PIIDetectionError):
        await scene.turn()
    await scene.turn()

    charged = 0 if order == (0, 1) else 1
    counts = scene.state().get("thread_tool_call_count", {})
    assert (counts.get("search", 0), counts.get("__all__", 0)) == (charged, charged)
    assert scene.state()["thread_model_call_count"] == 2
    assert scene.answers() == [("search", "error")]
    check_history(scene.state()["messages"])
    scene.check_requests()


@orders(2)
async def test_summarization(order: Order, signals: Signals) -> None:
    """SummarizationMiddleware replaces the history: counts go on, without its model calls."""
    summarizer = ScriptedChatModel(script=lambda _: "a summary")
    scene = Scene(
        signals,
        [*TURN, *TURN],
        beside(
            signals,
            SummarizationMiddleware(summarizer, trigger=("messages", 4), keep=("messages", 1)),
            order=order,
        ),
    )

    for _ in range(2):
        await scene.turn()
        scene.check()

    assert Counter(scene.ran) == LIMITED
    assert summarizer.calls
    assert "a summary" in str(scene.model.calls[-1].messages)


@orders(2)
async def test_summarization_at_the_limit(order: Order, signals: Signals) -> None:
    """After an exhausted model limiter nothing is summarized; before it, a call is wasted."""
    summarizer = ScriptedChatModel(script=lambda _: "a summary")
    scene = Scene(
        signals,
        ["one"],
        in_order(
            order,
            model_limiter(signals, thread_limit=1),
            SummarizationMiddleware(summarizer, trigger=("messages", 3), keep=("messages", 1)),
        ),
    )

    await scene.turn()
    await scene.turn()

    assert len(summarizer.calls) == (0 if order == (0, 1) else 1)
    scene.check(models=1, models_in_run=0)


def todos(text: str) -> tuple[str, dict[str, Any]]:
    return "write_todos", {"todos": [{"content": text, "status": "pending"}]}


@orders(2)
async def test_todo_list(order: Order, signals: Signals) -> None:
    """TodoListMiddleware: `write_todos` is a tool call like any other, counted and refused."""
    scene = Scene(
        signals,
        [[todos("one")], [todos("two"), "search"], [todos("three")], ["calc"], "done"],
        in_order(order, tool_limiter(signals, "write_todos", run_limit=2), TodoListMiddleware()),
    )

    result = await scene.turn()

    assert [each["content"] for each in result["todos"]] == ["two"]
    assert scene.ran == ["search", "calc"]
    assert scene.state()["thread_tool_call_count"] == {"write_todos": 2}
    assert scene.state()["langchain_quota"]["run_tools"] == {"write_todos": 2}
    check_history(result["messages"])
    scene.check_requests()


@orders(2)
async def test_todo_list_under_a_limit_of_all_tools(order: Order, signals: Signals) -> None:
    """TodoListMiddleware: `write_todos` takes part in a limit of all tools together."""
    scene = Scene(
        signals,
        [[todos("one"), "search", "calc"], [todos("two")], "done"],
        in_order(order, tool_limiter(signals, run_limit=2), TodoListMiddleware()),
    )

    result = await scene.turn()

    assert [each["content"] for each in result["todos"]] == ["one"]
    assert scene.ran == ["search"]
    assert scene.state()["thread_tool_call_count"] == {"__all__": 2}
    check_history(result["messages"])
    scene.check_requests()


async def test_parallel_todo_lists(signals: Signals) -> None:
    """Limiter first: what TodoListMiddleware refuses itself is not charged, nor answered again."""
    scene = Scene(
        signals,
        [[todos("one"), todos("two"), "search"], "done"],
        [tool_limiter(signals, run_limit=1), TodoListMiddleware()],
    )

    result = await scene.turn()

    assert "todos" not in result
    assert scene.ran == ["search"]
    scene.check()


async def test_parallel_todo_lists_with_the_limiter_last(signals: Signals) -> None:
    """Limiter last: what TodoListMiddleware refuses stays charged, and can be answered twice."""
    scene = Scene(
        signals,
        [[todos("one"), todos("two")], "done"],
        [TodoListMiddleware(), tool_limiter(signals, run_limit=1)],
    )

    result = await scene.turn()

    ids = [each.tool_call_id for each in result["messages"] if isinstance(each, ToolMessage)]
    assert sorted(ids) == ["call_1", "call_2", "call_2"]
    assert scene.state()["thread_tool_call_count"] == {"__all__": 1}


@orders(2)
async def test_tool_selector(order: Order, signals: Signals) -> None:
    """LLMToolSelectorMiddleware: its own model calls are not counted; unoffered tools are."""
    selector = ScriptedChatModel(script=lambda _: [("ToolSelectionResponse", {"tools": ["calc"]})])
    scene = Scene(
        signals,
        [*TURN, *TURN],
        beside(signals, LLMToolSelectorMiddleware(model=selector), order=order),
    )

    for _ in range(2):
        await scene.turn()
        scene.check()

    # LangChain runs a tool that the agent has, even where it was not offered.
    assert Counter(scene.ran) == LIMITED
    assert {call.tools for call in scene.model.calls} == {("calc",)}
    assert len(selector.calls) == 6


@orders(2)
async def test_tool_selector_at_the_limit(order: Order, signals: Signals) -> None:
    """At a used-up model limit no tools are selected, wherever the selector is listed."""
    selector = ScriptedChatModel(script=lambda _: [("ToolSelectionResponse", {"tools": ["calc"]})])
    scene = Scene(
        signals,
        [["calc"], "done"],
        in_order(
            order, model_limiter(signals, run_limit=1), LLMToolSelectorMiddleware(model=selector)
        ),
    )

    await scene.turn()

    assert len(selector.calls) == 1
    scene.check()


RETRY = RetryPolicy(initial_interval=0, jitter=False, max_attempts=2, retry_on=Exception)
"""Once more, at once, whatever was raised."""


async def test_a_retried_tools_node(signals: Signals) -> None:
    """RetryPolicy on the agent's nodes: a tool that failed runs again and counts once."""
    ran: list[str] = []
    scene = Scene(
        signals,
        [*TURN, *TURN],
        beside(signals),
        tools=[recording("search", ran, failing()), recording("calc", ran, failing())],
        ran=ran,
    )
    scene.agent.retry_policy = (RETRY,)

    for _ in range(2):
        await scene.turn()
        scene.check()

    assert Counter(ran) == LIMITED


async def test_a_retried_model_node(signals: Signals) -> None:
    """RetryPolicy on the agent's nodes: a model call that failed is made again, counted once."""
    scene = Scene(
        signals,
        [TURN[0], ConnectionError("not now"), *TURN[1:], *TURN],
        [model_limiter(signals, run_limit=3), tool_limiter(signals, thread_limit=3)],
    )
    scene.agent.retry_policy = (RETRY,)

    for turn in (1, 2):
        await scene.turn()
        scene.check(models=3 * turn, models_in_run=3)

    assert scene.ran == ["search"] * 3


async def test_a_retried_refusal(signals: Signals) -> None:
    """RetryPolicy that retries a refusal by `error`: raised again, refused once, not charged."""
    scene = Scene(
        signals,
        [["search"], ["search", "search"], "done"],
        [
            tool_limiter(signals, run_limit=2, exit_behavior="error"),
            model_limiter(signals, run_limit=9),
        ],
    )
    scene.agent.retry_policy = (RETRY,)

    with pytest.raises(ToolCallLimitExceededError):
        await scene.turn()

    assert scene.ran == ["search"]
    assert scene.metric("tool:*", "blocked", "run") == 1
    scene.check(answered=False)


class NodeScene(Scene):
    """A scene whose agent is a node, with a retry policy, of another graph."""

    def __init__(self, *args: Any, checkpointer: Any = None, **options: Any) -> None:
        super().__init__(*args, checkpointer=checkpointer, **options)
        self.saver = InMemorySaver()
        graph = StateGraph(MessagesState)
        graph.add_node("agent", self.agent, retry_policy=RETRY)
        graph.add_edge(START, "agent")
        self.agent = graph.compile(checkpointer=self.saver)

    def state(self) -> dict[str, Any]:
        """The state of the agent as the newest attempt left it."""
        newest = [namespace for namespace in self.saver.storage["thread-1"] if namespace][-1]
        config: Any = {"configurable": {"thread_id": "thread-1", "checkpoint_ns": newest}}
        saved = self.saver.get_tuple(config)
        assert saved is not None
        return dict(saved.checkpoint["channel_values"])


@pytest.mark.parametrize("failure", ["tool", "model"])
async def test_an_agent_as_a_retried_node(failure: str, signals: Signals) -> None:
    """RetryPolicy on a node that is an agent: LangGraph begins a new run of it, a new budget."""
    ran: list[str] = []
    scene = NodeScene(
        signals,
        [
            ["search", "search"],
            ["calc"] if failure == "tool" else ConnectionError("not now"),
            ["search", "search", "search"],
            ["calc"],
            "done",
        ],
        [model_limiter(signals, run_limit=3), tool_limiter(signals, "search", run_limit=2)],
        tools=[
            recording("search", ran),
            recording("calc", ran, failing(1 if failure == "tool" else 0)),
        ],
        ran=ran,
    )

    await scene.turn()

    # The first attempt ran two searches, the second two more.
    assert Counter(ran) == {"search": 4, "calc": 1}
    state = scene.state()
    assert state["langchain_quota"]["run_tools"] == {"search": 2}
    assert state["langchain_quota"]["run_model"] == 3
    assert scene.metric("tool:search", "allowed") == 4
    assert scene.metric("model", "allowed") == (5 if failure == "tool" else 4)
    check_history(state["messages"])
    scene.check_requests()


async def test_an_agent_with_its_own_memory_as_a_retried_node(signals: Signals) -> None:
    """The same with a memory of its own: attempts count apart, the next turn has the first's."""
    ran: list[str] = []
    scene = NodeScene(
        signals,
        [["search"], ["flaky"], ["search"], "done", ["search", "search"], "done"],
        [tool_limiter(signals, thread_limit=3)],
        tools=[recording("search", ran), recording("flaky", ran, failing())],
        ran=ran,
        checkpointer=True,
    )

    await scene.turn()
    assert ran == ["search", "search"]
    assert scene.state()["thread_tool_call_count"] == {"__all__": 1}

    await scene.turn()
    # Of the first attempt there are a search and the failed call: one is left.
    assert ran == ["search"] * 3
    scene.check_requests()
