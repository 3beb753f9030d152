"""Tools of every kind beside the limiters, of an MCP server too; a limit of a user's own kind."""

import asyncio
import sys
from pathlib import Path
from typing import Any

import pytest
from langchain_core.messages import AIMessage

from langchain_quota import ToolCallLimit
from langchain_quota.limits.call import Call
from tests.scene import Kind, Scene, check_history, tool_limiter
from tests.telemetry import Signals


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


@pytest.mark.parametrize("kind", ["quota", "graph"])
async def test_the_tools_of_a_server(kind: Kind, signals: Signals, tmp_path: Path) -> None:
    """Of three searches at once two run, in parallel; all count together; the model is told."""
    clients = pytest.importorskip("langchain_mcp_adapters.client")
    adapters = pytest.importorskip("langchain_mcp_adapters.tools")
    calls = tmp_path / "calls"
    args = [str(Path(__file__).with_name("mcp_server.py")), str(calls)]
    connection = {"transport": "stdio", "command": sys.executable, "args": args}
    client = clients.MultiServerMCPClient({"tools": connection})
    limits = ToolCallLimit("search", run_limit=2), ToolCallLimit(run_limit=5)
    script = [["search", "search", "search", "calc"], ["fail", "calc", "calc"], "done"]
    given: Any = {"kind": kind, "tell_model": True, "hide_exhausted": True}
    async with client.session("tools") as session:
        tools = await adapters.load_mcp_tools(session)
        scene = await Scene(signals, script, limits, tools=tools, **given).played()
    scene.ran += (await asyncio.to_thread(calls.read_text)).split()
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


class BeginningLimit(ToolCallLimit):
    """A limit of a user's own kind, on tools by how their names begin."""

    def matches(self, call: Call) -> bool:
        return (call.tool or "").startswith("mcp_")


async def test_a_kind_of_limit_that_matches_by_something_else(signals: Signals) -> None:
    """Which calls a limit's own `matches` takes is asked for each tool, whichever came first."""
    script = [["calc"], ["mcp_read"], ["calc", "mcp_write"], "done"]
    names = ("calc", "mcp_read", "mcp_write")
    scene = await Scene(signals, script, [BeginningLimit(run_limit=1)], tools=names).played()
    assert scene.ran == ["calc", "mcp_read", "calc"]
