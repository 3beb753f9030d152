"""What LangChain's limiters promise holds for ours: the same assertions run on both."""

import re
from importlib.metadata import version
from typing import Any

import langchain.agents.middleware.model_call_limit as langchain_model
import langchain.agents.middleware.tool_call_limit as langchain_tool
import pytest
from langchain.agents import create_agent
from langchain_core.messages import AIMessage, AnyMessage, HumanMessage, ToolCall, ToolMessage
from langchain_core.tools import tool
from langgraph.runtime import Runtime

import langchain_quota
from langchain_quota.testing import ScriptedChatModel
from tests.scene import Form

State = dict[str, Any]

# Before 1.3.18, LangChain's "end" does not answer other pending calls.
ANSWERS_PENDING = tuple(map(int, version("langchain").split(".")[:3])) >= (1, 3, 18)
from_1_3_18 = pytest.mark.skipif(
    not ANSWERS_PENDING, reason="LangChain answers what `end` leaves pending since 1.3.18"
)
each_tool_limiter = pytest.mark.parametrize(
    "limiter",
    [langchain_tool.ToolCallLimitMiddleware, langchain_quota.ToolCallLimitMiddleware],
    ids=["langchain", "ours"],
)
each_ending_tool_limiter = pytest.mark.parametrize(
    "limiter",
    [
        pytest.param(langchain_tool.ToolCallLimitMiddleware, marks=from_1_3_18),
        langchain_quota.ToolCallLimitMiddleware,
    ],
    ids=["langchain", "ours"],
)
each_model_limiter = pytest.mark.parametrize(
    "limiter",
    [langchain_model.ModelCallLimitMiddleware, langchain_quota.ModelCallLimitMiddleware],
    ids=["langchain", "ours"],
)

SEARCH_REFUSED = "Tool call limit exceeded. Do not call 'search' again."


@tool
def search(query: str = "") -> str:
    """Search."""
    return "found"


async def hook(
    limiter: Any, name: str, state: State, runtime: Any = None, form: Form = "async"
) -> Any:
    if form == "sync":
        return getattr(limiter, name)(state, runtime)
    return await getattr(limiter, f"a{name}")(state, runtime)


def asking(*tools: str, prefix: str = "call") -> AIMessage:
    """An AIMessage that calls tools, with ids `call0`, `call1` ..."""
    calls = [
        ToolCall(name=name, args={}, id=f"{prefix}{index}", type="tool_call")
        for index, name in enumerate(tools)
    ]
    return AIMessage("", tool_calls=calls)


def tool_state(*tools: str, thread: State | None = None, run: State | None = None) -> State:
    return {
        "messages": [HumanMessage("hi"), asking(*tools)],
        "thread_tool_call_count": thread or {},
        "run_tool_call_count": run or {},
    }


def counts(update: State) -> tuple[State, State]:
    return update["thread_tool_call_count"], update["run_tool_call_count"]


def answers(update: State) -> list[tuple[str, str | None, str, str]]:
    return [
        (each.tool_call_id, each.name, each.status, str(each.content))
        for each in update.get("messages", [])
        if isinstance(each, ToolMessage)
    ]


# Construction


@each_tool_limiter
def test_tool_limiter_attributes(limiter: Any) -> None:
    """A tool limiter shows its arguments, and the defaults, as attributes."""
    given_all = limiter(tool_name="search", thread_limit=5, run_limit=3, exit_behavior="end")
    assert vars_of(given_all, "tool_name", "thread_limit", "run_limit", "exit_behavior") == (
        "search",
        5,
        3,
        "end",
    )
    given_one = limiter(run_limit=3)
    assert vars_of(given_one, "tool_name", "thread_limit", "run_limit", "exit_behavior") == (
        None,
        None,
        3,
        "continue",
    )


def vars_of(limiter: Any, *names: str) -> tuple[Any, ...]:
    return tuple(getattr(limiter, name) for name in names)


@each_tool_limiter
@pytest.mark.parametrize(
    ("arguments", "fragment"),
    [
        ({}, "At least one limit must be specified (thread_limit or run_limit)"),
        ({"tool_name": "search"}, "At least one limit must be specified"),
        ({"run_limit": 1, "exit_behavior": "stop"}, "Invalid exit_behavior"),
        ({"thread_limit": 3, "run_limit": 5}, "run_limit (5) cannot exceed thread_limit (3)"),
    ],
)
def test_tool_limiter_refuses_arguments(limiter: Any, arguments: State, fragment: str) -> None:
    """Wrong arguments of a tool limiter are a ValueError with the known words."""
    with pytest.raises(ValueError, match=re.escape(fragment)):
        limiter(**arguments)


@each_model_limiter
@pytest.mark.parametrize(
    ("arguments", "fragment"),
    [
        ({}, "At least one limit must be specified (thread_limit or run_limit)"),
        ({"run_limit": 1, "exit_behavior": "continue"}, "Invalid exit_behavior"),
    ],
)
def test_model_limiter_refuses_arguments(limiter: Any, arguments: State, fragment: str) -> None:
    """Wrong arguments of a model limiter are a ValueError with the known words."""
    with pytest.raises(ValueError, match=re.escape(fragment)):
        limiter(**arguments)


@each_tool_limiter
def test_equal_tool_limits_are_accepted(limiter: Any) -> None:
    """A run may be given the whole limit of the thread."""
    assert limiter(thread_limit=3, run_limit=3).thread_limit == 3


# Public names


# Hooks


@each_tool_limiter
@pytest.mark.parametrize(
    "messages",
    [
        [],
        [HumanMessage("hi")],
        [asking("calc"), AIMessage("done")],
        [HumanMessage("hi"), asking("calc", "calc")],
    ],
    ids=["empty", "no answer yet", "no calls", "other tools"],
)
async def test_nothing_to_judge(limiter: Any, messages: list[AnyMessage]) -> None:
    """Where no call of the limited tool waits, the hook returns `None`."""
    state = {"messages": messages}
    judged = await hook(limiter(tool_name="search", run_limit=0), "after_model", state)
    assert judged is None


@each_tool_limiter
async def test_no_messages_key(limiter: Any) -> None:
    """A state without messages is nothing to judge."""
    assert await hook(limiter(run_limit=0), "after_model", {}) is None


@each_tool_limiter
async def test_thread_count_leaves_blocked_calls_out(limiter: Any) -> None:
    """Three parallel calls at a run limit of 1 leave a thread count of 1 and a run count of 3."""
    state = tool_state("search", "search", "search")
    update = await hook(limiter(thread_limit=9, run_limit=1), "after_model", state)
    assert counts(update) == ({"__all__": 1}, {"__all__": 3})


@each_tool_limiter
async def test_end_stops_the_batch(limiter: Any) -> None:
    """`end` jumps, answers the call, tells both exceeded limits, and charges the thread nothing."""
    state = tool_state("search", thread={"search": 2}, run={"search": 2})
    end = limiter(tool_name="search", thread_limit=2, run_limit=2, exit_behavior="end")
    update = await hook(end, "after_model", state)
    assert update["jump_to"] == "end"
    assert answers(update) == [("call0", "search", "error", SEARCH_REFUSED)]
    assert counts(update) == ({"search": 2}, {"search": 3})
    assert isinstance(update["messages"][-1], AIMessage)
    assert update["messages"][-1].content == (
        "'search' tool call limit reached: thread limit exceeded (3/2 calls) "
        "and run limit exceeded (3/2 calls)."
    )


@each_ending_tool_limiter
async def test_end_answers_pending_calls_in_order(limiter: Any) -> None:
    """`end` answers refused calls first and then all others, each in the order of the batch."""
    state = tool_state("calc", "search", "write", "search", "calc")
    end = limiter(tool_name="search", run_limit=1, exit_behavior="end")
    update = await hook(end, "after_model", state)
    assert [(call_id, status) for call_id, _, status, _ in answers(update)] == [
        ("call3", "error"),
        ("call0", "error"),
        ("call1", "error"),
        ("call2", "error"),
        ("call4", "error"),
    ]
    texts = [text for _, _, _, text in answers(update)]
    assert texts[0] == SEARCH_REFUSED
    assert SEARCH_REFUSED not in texts[1:]
    assert counts(update) == ({"search": 0}, {"search": 2})


@each_model_limiter
@pytest.mark.parametrize(
    "state",
    [
        {"messages": []},
        {"messages": [], "thread_model_call_count": 1, "run_model_call_count": 0},
        {"messages": [HumanMessage("hi")], "thread_model_call_count": 0},
    ],
)
async def test_model_under_limit(limiter: Any, state: State) -> None:
    """Under the limit `before_model` returns exactly `None`."""
    under = limiter(thread_limit=2, run_limit=1)
    assert await hook(under, "before_model", state, Runtime()) is None
    assert await hook(under, "before_model", state, None) is None


@each_model_limiter
async def test_model_error(limiter: Any) -> None:
    """At the limit `error` raises, with the counts so far."""
    state = {"messages": [], "thread_model_call_count": 2, "run_model_call_count": 1}
    error = limiter(thread_limit=2, run_limit=1, exit_behavior="error")
    with pytest.raises(langchain_model.ModelCallLimitExceededError) as caught:
        await hook(error, "before_model", state, Runtime())
    assert numbers(caught.value) == {
        "thread_count": 2,
        "run_count": 1,
        "thread_limit": 2,
        "run_limit": 1,
    }


@each_model_limiter
@pytest.mark.parametrize(
    ("state", "thread", "run"),
    [
        ({"messages": []}, 1, 1),
        ({"messages": [], "thread_model_call_count": 4, "run_model_call_count": 2}, 5, 3),
    ],
)
async def test_model_counts(limiter: Any, state: State, thread: int, run: int) -> None:
    """`after_model` adds 1 to both counts, and writes nothing else of LangChain's."""
    update = await hook(limiter(run_limit=1), "after_model", state, Runtime())
    assert update["thread_model_call_count"] == thread
    assert update["run_model_call_count"] == run
    assert not {"messages", "jump_to"} & update.keys()


# In an agent


@each_model_limiter
async def test_agent_with_model_limiter(limiter: Any) -> None:
    """An agent takes either model limiter, and ends with the same words."""
    agent: Any = create_agent(
        ScriptedChatModel(script=[["search"], "never"]),
        [search],
        middleware=[limiter(run_limit=1)],
    )
    inputs = {"messages": [HumanMessage("hi")]}
    result = await agent.ainvoke(inputs)
    assert result["messages"][-1].content == "Model call limits exceeded: run limit (1/1)"
    assert set(result) == {"messages"}


# Side by side


async def judged(limiter: Any, name: str, form: Form, state: State) -> tuple[str, Any]:
    """What a hook does: the update that it returns, or what it raises."""
    try:
        return "returned", await hook(limiter, name, state, form=form)
    except (
        langchain_tool.ToolCallLimitExceededError,
        langchain_model.ModelCallLimitExceededError,
    ) as error:
        return "raised", (str(error), numbers(error))


def numbers(error: Exception) -> dict[str, Any]:
    """What LangChain's exceptions carry."""
    return {name: value for name, value in vars(error).items() if name != "decision"}
