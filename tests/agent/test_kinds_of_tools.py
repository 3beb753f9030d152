"""Tools of every kind beside the limiters."""

import asyncio
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from operator import add
from typing import Annotated, Any

import pytest
from langchain.agents import AgentState
from langchain.tools import InjectedState, InjectedStore, InjectedToolCallId, ToolRuntime
from langchain_core.messages import AIMessage, BaseMessage, ToolMessage
from langchain_core.tools import BaseTool, StructuredTool
from langgraph.store.base import BaseStore
from langgraph.store.memory import InMemoryStore
from langgraph.types import Command

from langchain_quota import ToolCallLimitExceededError
from tests.agent.conftest import Order, in_order, orders
from tests.agent.rules import Scene, model_limiter, recording, tool_limiter
from tests.signals import Signals

MEETING = 30
"""The seconds within which tools that run in parallel meet; only a failure waits so long."""

Kind = Callable[[str, list[str]], BaseTool]


class NotesState(AgentState[Any]):
    notes: Annotated[list[str], add]


def sync_and_async(name: str, ran: list[str]) -> BaseTool:
    return recording(name, ran)


def sync_only(name: str, ran: list[str]) -> BaseTool:
    def run() -> str:
        ran.append(name)
        return "found"

    return StructuredTool.from_function(run, name=name, description=name)


def async_only(name: str, ran: list[str]) -> BaseTool:
    async def run() -> str:
        await asyncio.sleep(0)
        ran.append(name)
        return "found"

    return StructuredTool.from_function(coroutine=run, name=name, description=name)


def tool_class(name: str, ran: list[str]) -> BaseTool:
    class Find(BaseTool):
        def _run(self) -> str:
            ran.append(name)
            return "found"

        async def _arun(self) -> str:
            return self._run()

    return Find(name=name, description=name)


def return_direct(name: str, ran: list[str]) -> BaseTool:
    tool = recording(name, ran)
    tool.return_direct = True
    return tool


def content_and_artifact(name: str, ran: list[str]) -> BaseTool:
    def run() -> tuple[str, dict[str, int]]:
        ran.append(name)
        return "found", {"rows": 3}

    return StructuredTool.from_function(
        run, name=name, description=name, response_format="content_and_artifact"
    )


def tool_message(name: str, ran: list[str]) -> BaseTool:
    def run(call_id: Annotated[str, InjectedToolCallId]) -> ToolMessage:
        ran.append(name)
        return ToolMessage("found", tool_call_id=call_id, name=name)

    return StructuredTool.from_function(run, name=name, description=name)


def command(name: str, ran: list[str]) -> BaseTool:
    def run(call_id: Annotated[str, InjectedToolCallId]) -> Command[Any]:
        ran.append(name)
        return Command(update={"messages": [ToolMessage("found", tool_call_id=call_id, name=name)]})

    return StructuredTool.from_function(run, name=name, description=name)


def command_with_state(name: str, ran: list[str]) -> BaseTool:
    def run(call_id: Annotated[str, InjectedToolCallId]) -> Command[Any]:
        ran.append(name)
        answer = ToolMessage("noted", tool_call_id=call_id, name=name)
        return Command(update={"messages": [answer], "notes": ["a note"]})

    return StructuredTool.from_function(run, name=name, description=name)


def injected_state(name: str, ran: list[str]) -> BaseTool:
    def run(state: Annotated[dict[str, Any], InjectedState]) -> str:
        assert isinstance(state["messages"][0], BaseMessage)
        ran.append(name)
        return "found"

    return StructuredTool.from_function(run, name=name, description=name)


def injected_store(name: str, ran: list[str]) -> BaseTool:
    def run(store: Annotated[BaseStore, InjectedStore()]) -> str:
        store.put(("found",), name, {"by": name})
        ran.append(name)
        return "found"

    return StructuredTool.from_function(run, name=name, description=name)


def injected_tool_call_id(name: str, ran: list[str]) -> BaseTool:
    def run(call_id: Annotated[str, InjectedToolCallId]) -> str:
        assert call_id.startswith("call_")
        ran.append(name)
        return "found"

    return StructuredTool.from_function(run, name=name, description=name)


def tool_runtime(name: str, ran: list[str]) -> BaseTool:
    def run(runtime: ToolRuntime[Any, Any]) -> str:
        assert runtime.store is not None
        assert runtime.state["messages"]
        assert runtime.tool_call_id
        ran.append(name)
        return "found"

    return StructuredTool.from_function(run, name=name, description=name)


KINDS: tuple[Kind, ...] = (
    sync_and_async,
    sync_only,
    tool_class,
    return_direct,
    content_and_artifact,
    tool_message,
    command,
    command_with_state,
    injected_state,
    injected_store,
    injected_tool_call_id,
    tool_runtime,
)

kinds = pytest.mark.parametrize("kind", [*KINDS, async_only], ids=lambda kind: kind.__name__)


def three_searches(messages: Sequence[BaseMessage]) -> Any:
    return "done" if isinstance(messages[-1], ToolMessage) else ["search"] * 3


def scene_of(signals: Signals, kind: Kind, *middleware: Any, script: Any) -> Scene:
    ran: list[str] = []
    return Scene(
        signals,
        script,
        middleware,
        tools=[kind("search", ran), "calc"],
        ran=ran,
        state_schema=NotesState,
        store=InMemoryStore(),
    )


@kinds
async def test_each_kind(kind: Kind, signals: Signals) -> None:
    """A tool of this kind, called three times at once in each turn: limits and rules hold."""
    scene = scene_of(
        signals,
        kind,
        model_limiter(signals, thread_limit=9, run_limit=3),
        tool_limiter(signals, "search", thread_limit=3, run_limit=2),
        tool_limiter(signals, thread_limit=9, run_limit=5),
        script=three_searches,
    )

    for ran in (2, 3, 3):
        await scene.turn()
        assert scene.ran == ["search"] * ran
        scene.check()


@kinds
@pytest.mark.parametrize("exit_behavior", ["end", "error"])
async def test_each_kind_where_the_run_stops(
    kind: Kind, exit_behavior: Any, signals: Signals
) -> None:
    """A batch of this kind of tool that `end` or `error` stops: none of it runs or is charged."""
    scene = scene_of(
        signals,
        kind,
        tool_limiter(signals, run_limit=2, exit_behavior=exit_behavior),
        script=[["search"], ["search", "search", "calc"], "done", "done"],
    )

    if exit_behavior == "error" and kind is not return_direct:
        with pytest.raises(ToolCallLimitExceededError):
            await scene.turn()
    else:
        await scene.turn()
    assert scene.ran == ["search"]
    scene.check(answered=exit_behavior == "end")

    if exit_behavior == "error" and kind is return_direct:
        # The first turn ended with the tool's answer: the second has the batch.
        with pytest.raises(ToolCallLimitExceededError):
            await scene.turn()
    await scene.turn()
    scene.check()


@pytest.mark.parametrize("tool_name", ["search", None])
async def test_return_direct_beside_a_refusal(tool_name: str | None, signals: Signals) -> None:
    """`return_direct` beside a refused call of the same tool: the run ends with its answer."""
    scene = scene_of(
        signals,
        return_direct,
        tool_limiter(signals, tool_name, run_limit=1),
        script=[["search", "search"], "done"],
    )

    result = await scene.turn()

    assert result["messages"][-1].content == "search ran"
    assert len(scene.model.calls) == 1
    scene.check()


async def test_return_direct_refused(signals: Signals) -> None:
    """`return_direct` with every call refused: the model is asked again, the run does not hang."""
    scene = scene_of(
        signals,
        return_direct,
        tool_limiter(signals, run_limit=0),
        script=[["search", "search"], "done"],
    )

    result = await scene.turn()

    assert result["messages"][-1].content == "done"
    assert scene.ran == []
    scene.check()


async def test_an_artifact_beside_a_refusal(signals: Signals) -> None:
    """The artifact of an admitted call reaches the history; a refused call has none."""
    scene = scene_of(
        signals,
        content_and_artifact,
        tool_limiter(signals, run_limit=1),
        script=[["search", "search"], "done"],
    )

    result = await scene.turn()

    answers = [each for each in result["messages"] if isinstance(each, ToolMessage)]
    artifacts = {each.status: each.artifact for each in answers}
    assert artifacts == {"success": {"rows": 3}, "error": None}
    scene.check()


async def test_a_state_update_beside_a_refusal(signals: Signals) -> None:
    """Only admitted calls update the state by their `Command`, each of them once."""
    scene = scene_of(
        signals,
        command_with_state,
        tool_limiter(signals, run_limit=2),
        script=[["search"] * 3, "done"],
    )

    result = await scene.turn()

    assert result["notes"] == ["a note"] * 2
    scene.check()


async def test_all_kinds_in_one_batch(signals: Signals) -> None:
    """Tools of all kinds in one batch, each called twice: as many run as are let through."""
    ran: list[str] = []
    offered = [*KINDS, async_only]
    names = [kind.__name__ for kind in offered]
    scene = Scene(
        signals,
        [[*names, *names], "done", names, "done"],
        [
            tool_limiter(signals, "command", thread_limit=1, run_limit=1),
            tool_limiter(signals, run_limit=len(names) + 4),
            model_limiter(signals, run_limit=2),
        ],
        tools=[kind(kind.__name__, ran) for kind in offered],
        ran=ran,
        state_schema=NotesState,
        store=InMemoryStore(),
    )

    await scene.turn()
    assert Counter(ran) == Counter(names) + Counter(names[:4])
    scene.check()

    await scene.turn()
    assert ran.count("command") == 1
    scene.check()


@orders(2)
async def test_parallel_calls(order: Order, signals: Signals) -> None:
    """Of six calls at once some are refused; those that are let through do run at once."""
    ran: list[str] = []
    # The last of the list judges first: the limit of 1 leaves 4 calls to the limit of 5, while
    # the limit of 5 refuses one more.
    let_through = 4 if order == (0, 1) else 3
    scene = Scene(
        signals,
        [["search", "calc"] * 3, "done"],
        in_order(
            order, tool_limiter(signals, run_limit=5), tool_limiter(signals, "search", run_limit=1)
        ),
        tools=_meeting(ran, let_through),
        ran=ran,
    )

    await scene.turn()

    assert len(ran) == let_through
    scene.check()


async def test_a_tool_that_the_provider_runs(signals: Signals) -> None:
    """A tool that the provider itself runs is no tool call of the agent: it is not counted."""
    searched: list[str | dict[str, Any]] = [
        {"type": "server_tool_call", "name": "web_search", "args": {}, "id": "a"},
        {"type": "text", "text": "found"},
    ]
    scene = Scene(
        signals,
        [AIMessage(searched)],
        [tool_limiter(signals, run_limit=0), model_limiter(signals, run_limit=1)],
    )

    await scene.turn()

    assert scene.state().get("thread_tool_call_count", {}) == {}
    scene.check()


def _meeting(ran: list[str], parties: int) -> list[BaseTool]:
    """Tools that return only when so many calls are running."""
    meeting, ameeting = threading.Barrier(parties), asyncio.Barrier(parties)

    def tool(name: str) -> BaseTool:
        def run() -> str:
            meeting.wait(MEETING)
            ran.append(name)
            return "met"

        async def arun() -> str:
            await asyncio.wait_for(ameeting.wait(), MEETING)
            ran.append(name)
            return "met"

        return StructuredTool.from_function(run, arun, name=name, description=name)

    return [tool("search"), tool("calc")]
