"""RepeatLimit inside deepagents: its plans, its files, its sub-agents."""

from collections.abc import Sequence
from typing import Any

import pytest
from langchain.agents.middleware import TodoListMiddleware
from langchain_core.messages import BaseMessage
from langchain_core.tools import StructuredTool

from langchain_quota import MemoryStore, QuotaMiddleware, RepeatLimit, with_limits
from langchain_quota.testing import ScriptedChatModel, Turn
from tests.agent.rules import check_history, recording
from tests.signals import Signals

# Among the oldest versions there is none.
deepagents = pytest.importorskip("deepagents")


def refused(result: dict[str, Any]) -> list[str]:
    """The tools whose calls were refused as repeated."""
    return [
        each.name
        for each in result["messages"]
        if each.type == "tool" and str(each.content).startswith("This call was not run")
    ]


async def play(signals: Signals, script: Any, *tools: Any, **options: Any) -> dict[str, Any]:
    """A deep agent that plays a script under a limit of two equal calls."""
    quota = QuotaMiddleware[Any, Any]([RepeatLimit(2)], telemetry=signals.telemetry)
    agent = deepagents.create_deep_agent(
        ScriptedChatModel(script=script), tools, middleware=[quota, TodoListMiddleware()], **options
    )
    result: dict[str, Any] = await agent.ainvoke({"messages": [("user", "Go!")]})
    check_history(result["messages"])
    return result


@pytest.mark.filterwarnings("ignore:the sub-agents that the tool 'task'")
@pytest.mark.parametrize(
    "call",
    [
        ("write_todos", {"todos": []}),
        ("write_todos", {"todos": [{"content": "Look", "status": "pending"}]}),
        ("read_file", {"file_path": "/missing.txt"}),
        ("ls", {"path": "/"}),
        ("grep", {"pattern": "rome"}),
        ("edit_file", {"file_path": "/missing.txt", "old_string": "a", "new_string": "b"}),
    ],
    ids=lambda call: call[0],
)
async def test_its_own_tools(call: Any, signals: Signals) -> None:
    """A call of them that gives nothing new is refused as that of any tool."""
    result = await play(signals, [[call]] * 4 + ["done"])
    assert refused(result) == [call[0]] * 2


@pytest.mark.filterwarnings("ignore:the sub-agents that the tool 'task'")
async def test_a_file_that_changes(signals: Signals) -> None:
    """It is read and looked through after each change, and a plan moves on."""
    write = ("write_file", {"file_path": "/a.txt", "content": "0"})
    read, grep = ("read_file", {"file_path": "/a.txt"}), ("grep", {"pattern": "rome"})
    script: list[Any] = [[write]]
    for number in range(4):
        change = {"file_path": "/a.txt", "old_string": str(number), "new_string": str(number + 1)}
        todos = [{"content": f"Step {number}", "status": "in_progress"}]
        script += [[("write_todos", {"todos": todos})], [("edit_file", change)], [read], [grep]]
    assert refused(await play(signals, [*script, "done"])) == []


@pytest.mark.filterwarnings("ignore:the sub-agents that the tool 'task'")
async def test_an_answer_that_is_put_into_a_file(signals: Signals) -> None:
    """Its place names the call, and so differs each time: that is nothing new."""

    def export() -> str:
        """Export everything."""
        return "\n".join(f"row {number}" for number in range(50_000))

    script = [["export"]] * 3 + ["done"]
    result = await play(signals, script, StructuredTool.from_function(export))
    places = [str(each.content) for each in result["messages"] if each.type == "tool"]
    assert "large_tool_results" in places[0] != places[1]
    assert refused(result) == ["export"]


async def test_sub_agents(signals: Signals) -> None:
    """Each call of one is a run of its own: it may search for what the other one has."""
    ran: list[str] = []

    def child(messages: Sequence[BaseMessage]) -> Turn:
        asked = sum(each.type == "ai" for each in messages)
        return ["search"] if asked < 3 else "nothing"

    task = {"subagent_type": "researcher"}
    script = [
        [("task", {**task, "description": "Rome"}), ("task", {**task, "description": "Turin"})],
        [("task", {**task, "description": "Rome"})],
        [("task", {**task, "description": "Rome"})],
        "done",
    ]

    quota = QuotaMiddleware[Any, Any](
        [RepeatLimit(2)], store=MemoryStore(), telemetry=signals.telemetry
    )
    agent = with_limits(deepagents.create_deep_agent, quota)(
        ScriptedChatModel(script=script),
        subagents=[
            {
                "name": "researcher",
                "description": "Researches",
                "system_prompt": "Research.",
                "model": ScriptedChatModel(script=child),
                "tools": [recording("search", ran)],
            }
        ],
    )
    result = await agent.ainvoke({"messages": [("user", "Go!")]})
    assert ran == ["search"] * 2 * 3
    assert refused(result) == ["task"]
