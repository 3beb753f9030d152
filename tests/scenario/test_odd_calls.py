"""Calls as models should not make them, and tools of every kind: each is checked, once."""

import asyncio
from typing import Any

import pytest
from langchain_core.messages import AIMessage, HumanMessage, InvalidToolCall, ToolCall
from langchain_core.tools import BaseTool, StructuredTool
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph.message import add_messages

from langchain_quota import ConcurrencyLimit, ToolCallLimit
from langchain_quota.limits import Limit
from tests.scene import ABANDONED, PATIENCE, Kind, Scene, check_history, texts, tool_limiter
from tests.telemetry import Signals


def call(tool: str, call_id: str | None = None) -> ToolCall:
    return ToolCall(name=tool, args={}, id=call_id, type="tool_call")


def check_ids(scene: Scene) -> None:
    """Assert the rules, and that each call has an id of its own."""
    scene.check()
    for messages in [*(each.messages for each in scene.model.calls), scene.state()["messages"]]:
        for message in messages:
            if isinstance(message, AIMessage):
                ids = [each["id"] for each in message.tool_calls]
                assert all(ids), message
                assert len(set(ids)) == len(ids), message


async def test_what_an_earlier_run_left(signals: Signals) -> None:
    """A thread that LangChain left with calls without an id is one that a provider accepts."""
    saver = InMemorySaver()
    before = Scene(signals, [[call("search"), call("calc")]], [], checkpointer=saver)
    with pytest.raises((TypeError, ValueError), match=r"unexpected type|tool_call_id"):
        await before.play()
    scene = Scene(signals, ["done"], [tool_limiter(signals, run_limit=2)], checkpointer=saver)
    result = await scene.play()
    sent = [each.type for each in scene.model.calls[0].messages]
    assert sent == ["human", "ai", "tool", "tool", "human"]
    assert texts(result) == [ABANDONED] * 2
    check_ids(scene)


async def test_blocks_that_stand_for_calls(signals: Signals) -> None:
    """Blocks of the content that stand for a call get its id; what else there is stays."""
    content: list[str | dict[str, Any]] = [
        "And:",
        {"type": "text", "text": "I search."},
        {"type": "tool_use", "name": "search", "id": None, "input": {}},
        {"type": "tool_use", "name": "search", "id": "a", "input": {}},
        {"type": "tool_call", "name": "calc", "args": {}},
        {"type": "function_call", "name": "search", "call_id": "", "id": "fc_1"},
        {"type": "tool_use", "name": "another", "id": None, "input": {}},
    ]
    calls = [call("search"), call("search", "a"), call("calc", ""), call("search")]
    script = [AIMessage(content, tool_calls=calls, id="m"), "done"]
    scene = await Scene(signals, script, [tool_limiter(signals, run_limit=9)]).played()
    asked = scene.result["messages"][1]
    first, _, calc, last = (each["id"] for each in asked.tool_calls)
    named = [{}, {}, {"id": first}, {}, {"id": calc}, {"call_id": last}, {}]
    assert asked.content == [
        {**block, **ids} if isinstance(block, dict) else block
        for block, ids in zip(content, named, strict=True)
    ]


@pytest.mark.parametrize("message_id", ["m", None])
def test_a_hook_called_directly(message_id: str | None, signals: Signals) -> None:
    """The update replaces the message in its place, with ids that are the same each time."""
    hook: Any = tool_limiter(signals, run_limit=1)
    batch = [call("search"), call("search", ""), call("search", "a")]
    asked = AIMessage("I search.", tool_calls=batch, id=message_id)
    state: Any = {"messages": [HumanMessage("hi"), asked]}
    update, again = hook.after_model(state, None), hook.after_model(state, None)
    assert [each.type for each in update["messages"]] == ["ai", "tool", "tool"]
    assert asked.tool_calls == batch
    merged: Any = add_messages(state["messages"], update["messages"])
    assert [each.type for each in merged] == ["human", "ai", "tool", "tool"]
    first, second, third = (each["id"] for each in merged[1].tool_calls)
    assert (bool(first), third) == (True, "a")
    assert [each.tool_call_id for each in merged[2:]] == [second, "a"]
    assert message_id is None or again["messages"][0].tool_calls == merged[1].tool_calls
    assert update["langchain_quota"]["counts"]["run_tools"] == {"__all__": 1}


def square(number: int) -> int:
    """Square a number."""
    return number * number


BROKEN = InvalidToolCall(
    name="search", args="{", id="broken", error="no JSON", type="invalid_tool_call"
)


@pytest.mark.parametrize(
    ("batch", "charged"),
    [
        # A call that could not be parsed is none; the one beside it is.
        (AIMessage("", tool_calls=[call("search", "a")], invalid_tool_calls=[BROKEN]), 1),
        (AIMessage("", invalid_tool_calls=[BROKEN]), 0),
        ([("square", {"number": "x"}), ("square", {"number": 2}), "square"], 2),
    ],
    ids=["broken beside a whole one", "broken", "bad arguments"],
)
async def test_calls_that_cannot_run(batch: Any, charged: int, signals: Signals) -> None:
    """A call that LangChain answers with an error is allowed, charged, and answered once."""
    tools: list[str | BaseTool] = ["search", StructuredTool.from_function(square)]
    limiter = tool_limiter(signals, run_limit=2)
    scene = await Scene(signals, [batch, *["done"] * 3], [limiter], tools=tools).played()
    if isinstance(batch, list):
        assert len(scene.answers()) == len(batch)
        check_history(scene.state()["messages"])
    await scene.play()
    assert scene.state().get("thread_tool_call_count", {}).get("__all__", 0) == charged
    assert scene.metric("tool:*", "allowed") == charged


async def test_a_tool_that_the_provider_runs(signals: Signals) -> None:
    """A tool that the provider itself runs is no tool call of the agent: it is not counted."""
    searched: list[str | dict[str, Any]] = [
        {"type": "server_tool_call", "name": "web_search", "args": {}, "id": "a"},
        {"type": "text", "text": "found"},
    ]
    scene = Scene(signals, [AIMessage(searched)], [tool_limiter(signals, run_limit=0)])
    await scene.play()
    assert scene.state().get("thread_tool_call_count", {}) == {}
    scene.check()


def served(ran: list[str]) -> Any:
    """An MCP server, which notes each call; a search answers when two of them run at once."""
    server = pytest.importorskip("mcp.server.fastmcp").FastMCP("tools")
    together = asyncio.Barrier(2)

    async def search(query: str = "") -> str:
        ran.append("search")
        async with asyncio.timeout(PATIENCE):
            await together.wait()
        return "found"

    async def calc(term: str = "") -> int:
        ran.append("calc")
        return 42

    async def fail() -> str:
        ran.append("fail")
        raise ValueError("no")

    for each in (search, calc, fail):
        server.add_tool(each)
    return server


@pytest.mark.parametrize("kind", ["quota", "graph"])
async def test_the_tools_of_a_server(kind: Kind, signals: Signals) -> None:
    """Of three searches at once two run, in parallel; all count together; the model is told."""
    adapters = pytest.importorskip("langchain_mcp_adapters.tools")
    memory = pytest.importorskip("mcp.shared.memory")
    limits = ToolCallLimit("search", run_limit=2), ToolCallLimit(run_limit=5)
    script = [["search", "search", "search", "calc"], ["fail", "calc", "calc"], "done"]
    given: Any = {"kind": kind, "tell_model": True, "hide_exhausted": True, "ran": list[str]()}
    async with memory.create_connected_server_and_client_session(served(given["ran"])) as session:
        tools = await adapters.load_mcp_tools(session)
        scene = await Scene(signals, script, limits, tools=tools, **given).played()
    assert sorted(scene.ran) == ["calc", "calc", "fail", "search", "search"]
    errors = sorted(name for name, status in scene.answers() if status == "error")
    assert errors == ["calc", "fail", "search"]
    for limit in limits:
        assert scene.metric(limit.name, "blocked", "run") == 1
    # A server's answers are made of blocks.
    told = scene.model.calls[1].messages[-1].content[-1]
    assert told == {"type": "text", "text": "Budget: search: 0 of 2 left; all tools: 2 of 5 left."}
    scene.check_requests()
    check_history(scene.state()["messages"])


MADE = '''
def search() -> None:
    """Search."""

class Look(BaseTool):
    name: str = "look"
    description: str = "Look."

    def _run(self) -> None:
        pass
'''


async def test_tools_that_exec_has_made(signals: Signals) -> None:
    """Functions and methods without a module are tools like any other."""
    made: dict[str, Any] = {"BaseTool": BaseTool}
    exec(MADE, made)  # noqa: S102 - the text above
    assert made["search"].__module__ is None
    tools = [StructuredTool.from_function(made["search"]), made["Look"]()]
    limits: list[Limit] = [ToolCallLimit(run_limit=3), ConcurrencyLimit(max_concurrency=1)]
    script = [["search", "look"], ["search", "look"], "done"]
    scene = await Scene(signals, script, limits, tools=tools).played()
    assert sorted(status for _, status in scene.answers()) == ["error", *["success"] * 3]
