"""Beside a middleware that answers open calls before ours: refunds are those without it."""

from collections.abc import Callable
from typing import Annotated, Any, Required

import pytest
from langchain.agents.middleware import AgentMiddleware, HumanInTheLoopMiddleware, hook_config
from langchain.agents.middleware.types import AgentState
from langchain_core.messages import AIMessage, RemoveMessage, ToolMessage, convert_to_messages
from langchain_core.tools import BaseTool, ToolException
from langgraph.graph.message import REMOVE_ALL_MESSAGES

from langchain_quota import MemoryStore, ToolCallLimit, ToolCallLimitExceededError
from langchain_quota.quotas import Quota
from tests.agent.conftest import Order, in_order, orders
from tests.agent.rules import Middleware, Scene, check_history, recording, tool_limiter
from tests.agent.shared import ANN, SharedScene, counts, quota
from tests.signals import Signals, needs_inline


class Patching(AgentMiddleware[Any, Any, Any]):
    """Answers what earlier turns left open, behind the call: as deepagents' own middleware does."""

    def before_agent(self, state: Any, runtime: Any) -> dict[str, Any]:
        messages = state["messages"]
        answered = {each.tool_call_id for each in messages if isinstance(each, ToolMessage)}
        patched = []
        for message in messages:
            patched.append(message)
            if isinstance(message, AIMessage):
                patched += [
                    ToolMessage("No result.", tool_call_id=call["id"], status="error")
                    for call in message.tool_calls
                    if call["id"] not in answered
                ]
        return {"messages": [RemoveMessage(id=REMOVE_ALL_MESSAGES), *patched]}


MIDDLEWARES: dict[str, Callable[[], list[Middleware]]] = {
    "none": list,
    "patching": lambda: [Patching()],
}

patched = pytest.mark.parametrize("patching", MIDDLEWARES.values(), ids=MIDDLEWARES.keys())


@patched
@orders(3)
async def test_error_in_a_stack(
    patching: Callable[[], list[Middleware]], order: Order, signals: Signals
) -> None:
    """What other limiters charged before `error` raised is refunded in the next turn."""
    scene = Scene(
        signals,
        [["calc"], ["search", "search", "calc"], ["search", "calc"], "done", "done"],
        [
            *patching(),
            *in_order(
                order,
                tool_limiter(signals, thread_limit=9),
                tool_limiter(signals, "search", run_limit=1, exit_behavior="error"),
                tool_limiter(signals, "calc", thread_limit=9),
            ),
        ],
    )

    with pytest.raises(ToolCallLimitExceededError):
        await scene.turn()
    for _ in range(2):
        await scene.turn()
        scene.check()

    assert sorted(scene.ran) == ["calc", "calc", "search"]
    judged_before_error = order[order.index(1) + 1 :]
    assert scene.metric("tool:*", "refunded") == (3 if 0 in judged_before_error else 0)


def appended(old: list[Any], new: Any) -> list[Any]:
    """A reducer that gives messages no ids, as deepagents' own."""
    messages = convert_to_messages(new)
    removed = [each.id == REMOVE_ALL_MESSAGES for each in messages]
    return messages[1:] if any(removed) else [*old, *messages]


class WithoutIds(AgentState[Any]):
    """A state whose messages keep what id they have."""

    messages: Required[Annotated[list[Any], appended]]


@needs_inline  # Older versions do not say whose reducer holds.
@patched
@orders(2)
async def test_messages_without_ids(
    patching: Callable[[], list[Middleware]], order: Order, signals: Signals
) -> None:
    """Even if the user's messages have no id, limiters see who began the run."""
    scene = Scene(
        signals,
        ["hello", ["search", "search"], ["search"], "done"],
        [
            *patching(),
            *in_order(
                order,
                tool_limiter(signals, thread_limit=9),
                tool_limiter(signals, "search", run_limit=1, exit_behavior="error"),
            ),
        ],
        state_schema=WithoutIds,
    )

    await scene.turn()
    with pytest.raises(ToolCallLimitExceededError):
        await scene.turn()
    await scene.turn()

    state = scene.state()
    assert [each.id for each in state["messages"] if each.type == "human"] == [None] * 3
    assert len(state["langchain_quota"]["begun_by"]) == 2
    assert scene.ran == ["search"]
    scene.check()


@patched
async def test_error_with_a_store(
    patching: Callable[[], list[Middleware]], signals: Signals
) -> None:
    """The store takes back what was charged before `error` raised."""
    store = MemoryStore()
    scene = SharedScene(
        signals,
        [["search"] * 3, ["search"], "done"],
        [
            *patching(),
            tool_limiter(signals, "search", run_limit=2, exit_behavior="error"),
            quota(signals, ToolCallLimit("search", quotas=[Quota(9, per="user_id")]), store=store),
        ],
    )
    scene.context = ANN

    with pytest.raises(ToolCallLimitExceededError):
        await scene.turn()
    await scene.turn()

    assert scene.ran == ["search"]
    assert counts(store) == {"search:user_id:ann": 1}
    assert scene.state()["thread_tool_call_count"] == {"search": 1}


@patched
async def test_a_crash_beside_a_refusal(
    patching: Callable[[], list[Middleware]], signals: Signals
) -> None:
    """A call that crashed had started: it stays charged, though others of its message never ran.

    The limiter of `search` is first, and has nothing left to judge.
    """
    ran: list[str] = []
    scene = Scene(
        signals,
        [["search", "calc", "flaky"], "done"],
        [
            *patching(),
            tool_limiter(signals, "search", run_limit=5, exit_behavior="error"),
            HumanInTheLoopMiddleware({"calc": True}),
            tool_limiter(signals, "search", run_limit=0, limit_name="none at all"),
            tool_limiter(signals, thread_limit=9),
        ],
        tools=["search", "calc", recording("flaky", ran, crash)],
    )

    await scene.turn()
    with pytest.raises(ConnectionError):
        await scene.resume({"decisions": [{"type": "approve"}]})
    await scene.turn()

    assert scene.state()["thread_tool_call_count"]["__all__"] == 2
    check_history(scene.state()["messages"])


def crash() -> None:
    raise ConnectionError("tool")


@patched
async def test_an_abandoned_review(
    patching: Callable[[], list[Middleware]], signals: Signals
) -> None:
    """Review between two limiters: what the one behind it charged is refunded."""
    scene = Scene(
        signals,
        [["search", "search"], "done"],
        [
            *patching(),
            tool_limiter(signals, run_limit=2),
            HumanInTheLoopMiddleware({"search": True}),
            tool_limiter(signals, "search", thread_limit=2),
        ],
    )

    await scene.turn()
    await scene.turn("never mind")

    assert scene.metric("tool:search", "refunded") == 2
    scene.check()


@patched
@pytest.mark.parametrize("kind", ["reject", "respond"])
async def test_a_review_and_an_answer(
    kind: str, patching: Callable[[], list[Middleware]], signals: Signals
) -> None:
    """Review between two limiters: what a reviewer answers stays charged by the later one."""
    scene = Scene(
        signals,
        [["search", "search"], "done", "done"],
        [
            *patching(),
            tool_limiter(signals, run_limit=2),
            HumanInTheLoopMiddleware({"search": True}),
            tool_limiter(signals, "search", thread_limit=2),
        ],
    )

    await scene.turn()
    await scene.resume({"decisions": [{"type": kind, "message": "no"}] * 2})
    await scene.turn()

    assert scene.ran == []
    assert scene.state()["thread_tool_call_count"] == {"search": 2}


class ToTheTools(AgentMiddleware[Any, Any, Any]):
    """Sends calls to the tools, past the limiters before it in the list."""

    @hook_config(can_jump_to=["tools"])
    def after_model(self, state: Any, runtime: Any) -> dict[str, Any] | None:
        return {"jump_to": "tools"} if state["messages"][-1].tool_calls else None


def refused_by_the_tool(ran: list[str]) -> BaseTool:
    """A tool that runs, and answers with an error."""

    def fail() -> None:
        ran.append("calc")
        raise ToolException("no")

    tool = recording("calc", [], fail)
    tool.handle_tool_error = True
    return tool


@patched
@pytest.mark.parametrize("direct", [False, True])
async def test_a_jump_to_the_tools(
    patching: Callable[[], list[Middleware]], *, direct: bool, signals: Signals
) -> None:
    """What ran past a limiter that never judged it stays charged to those that did."""
    ran: list[str] = []
    search = recording("search", ran)
    search.return_direct = direct
    tools = [search] if direct else [search, refused_by_the_tool(ran)]
    scene = Scene(
        signals,
        [[each.name for each in tools], *["done"] * (1 if direct else 2)],
        [
            *patching(),
            tool_limiter(signals, thread_limit=9),
            ToTheTools(),
            tool_limiter(signals, thread_limit=9, limit_name="behind"),
        ],
        tools=tools,
        ran=ran,
    )

    await scene.turn()
    await scene.turn()

    assert len(ran) == len(tools)
    assert scene.state()["thread_tool_call_count"] == {"__all__": len(tools)}
    assert scene.metric("behind", "refunded") == 0
