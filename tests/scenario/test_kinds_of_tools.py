"""Tools of every kind beside the limiters, of an MCP server too."""

import asyncio
import sys
from functools import partial
from operator import add
from pathlib import Path
from typing import Annotated, Any

import pytest
from langchain.agents import AgentState, create_agent  # noqa: TID251 - it takes a store of its own
from langchain.tools import InjectedState, InjectedStore, InjectedToolCallId, ToolRuntime
from langchain_core.messages import AIMessage, ToolMessage
from langchain_core.tools import BaseTool, StructuredTool
from langgraph.store.base import BaseStore
from langgraph.store.memory import InMemoryStore
from langgraph.types import Command

from langchain_quota import ToolCallLimit
from tests.scene import Kind, Scene, asking, check_history, recording, tool_limiter
from tests.telemetry import Signals


class NotesState(AgentState[Any]):
    notes: Annotated[list[str], add]


def kinds(ran: list[str]) -> list[BaseTool]:
    """A tool of each kind, by its kind as its name."""

    def found(name: str) -> str:
        ran.append(name)
        return "found"

    def sync_only() -> str:
        return found("sync_only")

    async def async_only() -> str:
        return found("async_only")

    def command(call_id: Annotated[str, InjectedToolCallId]) -> Command[Any]:
        answer = ToolMessage(found("command"), tool_call_id=call_id, name="command")
        return Command(update={"messages": [answer], "notes": ["a note"]})

    def injected(
        state: Annotated[dict[str, Any], InjectedState],
        store: Annotated[BaseStore, InjectedStore()],
        runtime: ToolRuntime[Any, Any],
    ) -> str:
        assert state["messages"]
        assert runtime.tool_call_id
        store.put(("found",), "key", {"by": "injected"})
        return found("injected")

    def artifact() -> tuple[str, dict[str, int]]:
        return found("artifact"), {"rows": 3}

    direct = recording("return_direct", ran)
    direct.return_direct = True
    made = StructuredTool.from_function
    return [
        *(made(each, description=each.__name__) for each in (sync_only, command, injected)),
        made(coroutine=async_only, description="async_only"),
        made(artifact, description="artifact", response_format="content_and_artifact"),
        direct,
    ]


@pytest.mark.parametrize("kind", [each.name for each in kinds([])])
async def test_each_kind(kind: str, signals: Signals) -> None:
    """A tool of this kind, three times at once in each run: as many run as are allowed."""
    ran: list[str] = []
    limiters = [tool_limiter(signals, kind, thread_limit=3, run_limit=2)]
    limiters += [tool_limiter(signals, thread_limit=9, run_limit=5)]
    create = partial(create_agent, store=InMemoryStore())
    options: dict[str, Any] = {"state_schema": NotesState, "create": create}
    scene = Scene(signals, asking(*[kind] * 3), limiters, tools=kinds(ran), ran=ran, **options)
    for count in (2, 3, 3):
        result = await scene.play()
        assert scene.ran == [kind] * count
        scene.check()
    # Only admitted calls update the state, and have artifacts.
    assert result.get("notes", []) == (["a note"] * 3 if kind == "command" else [])
    artifacts = [each.artifact for each in result["messages"] if each.type == "tool"]
    assert artifacts.count({"rows": 3}) == (3 if kind == "artifact" else 0)


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
