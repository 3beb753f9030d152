"""The tools of an MCP server, over stdio, through langchain-mcp-adapters."""

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from langchain_quota import ToolCallLimit
from tests.scene import Kind, Scene, check_history
from tests.telemetry import Signals

pytest.importorskip("mcp")
clients = pytest.importorskip("langchain_mcp_adapters.client")
adapters = pytest.importorskip("langchain_mcp_adapters.tools")


@asynccontextmanager
async def tools_of_server(calls: Path) -> AsyncIterator[list[Any]]:
    """The tools of a server that notes its calls in a file."""
    args = [str(Path(__file__).with_name("mcp_server.py")), str(calls)]
    connection = {"transport": "stdio", "command": sys.executable, "args": args}
    client = clients.MultiServerMCPClient({"tools": connection})
    async with client.session("tools") as session:
        yield await adapters.load_mcp_tools(session)


@pytest.mark.parametrize("kind", ["quota", "graph"])
async def test_the_tools_of_a_server(kind: Kind, signals: Signals, tmp_path: Path) -> None:
    """Of three searches at once two run, in parallel; all count together; the model is told."""
    calls = tmp_path / "calls"
    limits = ToolCallLimit("search", run_limit=2), ToolCallLimit(run_limit=5)
    script = [["search", "search", "search", "calc"], ["fail", "calc", "calc"], "done"]
    given: Any = {"kind": kind, "tell_model": True, "hide_exhausted": True}
    async with tools_of_server(calls) as tools:
        scene = Scene(signals, script, limits, tools=tools, **given)
        await scene.play()
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
