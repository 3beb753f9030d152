"""The tools of an MCP server, over stdio, through langchain-mcp-adapters."""

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from langchain_quota import QuotaMiddleware, ToolCallLimit
from langchain_quota.limits import Limit
from tests.scene import Scene
from tests.signals import Signals

pytest.importorskip("mcp")
clients = pytest.importorskip("langchain_mcp_adapters.client")
adapters = pytest.importorskip("langchain_mcp_adapters.tools")

SERVER = Path(__file__).with_name("mcp_server.py")


@asynccontextmanager
async def tools_of_server(calls: Path) -> AsyncIterator[list[Any]]:
    """The tools of a server that notes its calls in a file."""
    connection = {
        "transport": "stdio",
        "command": sys.executable,
        "args": [str(SERVER), str(calls)],
    }
    client = clients.MultiServerMCPClient({"tools": connection})
    async with client.session("tools") as session:
        yield await adapters.load_mcp_tools(session)


async def play(signals: Signals, calls: Path, script: Any, *limits: Limit, **options: Any) -> Scene:
    """One run of an agent with the server's tools; what they noted is what ran."""
    quota = QuotaMiddleware(limits, telemetry=signals.telemetry, **options)
    async with tools_of_server(calls) as tools:
        scene = Scene(signals, script, [quota], tools=tools)
        await scene.play()
    scene.ran += (await asyncio.to_thread(calls.read_text)).split()
    return scene


async def test_a_limit_of_all_tools(signals: Signals, tmp_path: Path) -> None:
    """The server's tools count together, also one that fails."""
    scene = await play(
        signals,
        tmp_path / "calls",
        [["fail", "calc"], ["calc"], "done"],
        ToolCallLimit(run_limit=2),
        hide_exhausted=True,
    )

    assert sorted(scene.ran) == ["calc", "fail"]
    assert scene.answers() == [("fail", "error"), ("calc", "success"), ("calc", "error")]
    assert scene.metric("tool:*", "blocked", "run") == 1
    scene.check()
