"""One agent on one thread for a test, and the rules that hold in every situation."""

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

import pytest
from langchain.agents import create_agent
from langchain.agents.middleware import AgentMiddleware
from langchain_core.messages import AIMessage, BaseMessage, ToolMessage
from langchain_core.tools import BaseTool, StructuredTool
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.types import Command

from langchain_quota import ModelCallLimitMiddleware, ToolCallLimitMiddleware
from langchain_quota.decision import Call
from langchain_quota.limits import Limit
from langchain_quota.middleware._base import Limiter
from langchain_quota.testing import ScriptedChatModel, assert_valid_history
from tests.agent.conftest import Form
from tests.signals import Signals

Middleware = AgentMiddleware[Any, Any, Any]

CONFIG = {"configurable": {"thread_id": "thread-1"}}


def tool_limiter(
    signals: Signals, tool_name: str | None = None, **options: Any
) -> ToolCallLimitMiddleware[Any, Any]:
    """A drop-in for tool calls, of all tools or of one."""
    return ToolCallLimitMiddleware(tool_name=tool_name, telemetry=signals.telemetry, **options)


def model_limiter(signals: Signals, **options: Any) -> ModelCallLimitMiddleware[Any, Any]:
    """A drop-in for model calls."""
    return ModelCallLimitMiddleware(telemetry=signals.telemetry, **options)


def recording(name: str, ran: list[str], body: Callable[[], Any] | None = None) -> BaseTool:
    """A tool that records when it has run; `body` comes first and may raise or interrupt."""

    def run() -> str:
        result = None if body is None else body()
        ran.append(name)
        return f"{name} ran" if result is None else str(result)

    async def arun() -> str:
        return run()

    return StructuredTool.from_function(run, arun, name=name, description=name)


class Scene:
    """An agent on one thread, and all that it did.

    Args:
        signals: The telemetry that the middlewares write to.
        script: What the model plays.
        middleware: The middlewares, in list order.
        tools: Tools by name, which record that they ran.
        ran: The names of the tools that ran, for tools of the test's own.
        form: Which hooks run: those of `invoke`, or those of `ainvoke`.
        **options: Further arguments of `create_agent`.
    """

    def __init__(
        self,
        signals: Signals,
        script: Any,
        middleware: Sequence[Middleware],
        *,
        tools: Sequence[str | BaseTool] = ("search", "calc"),
        ran: list[str] | None = None,
        form: Form = "async",
        **options: Any,
    ) -> None:
        self.form = form
        self.signals = signals
        self.model = ScriptedChatModel(script=script)
        self.ran: list[str] = [] if ran is None else ran
        self.limits: list[Limit] = [
            limit for each in middleware if isinstance(each, Limiter) for limit in each._limits
        ]
        self._earlier_tools = 0
        self._earlier_models = 0
        self.agent: Any = create_agent(
            self.model,
            tools=[each if isinstance(each, BaseTool) else self._tool(each) for each in tools],
            middleware=middleware,
            **{"checkpointer": InMemorySaver(), **options},
        )

    def _tool(self, name: str) -> BaseTool:
        return recording(name, self.ran)

    async def turn(self, text: str = "hi") -> dict[str, Any]:
        """A new run."""
        self._earlier_tools = len(self.ran)
        self._earlier_models = len(self.model.calls)
        return await self.invoke({"messages": [("user", text)]})

    async def resume(self, value: Any) -> dict[str, Any]:
        """The same run goes on with an answer to its interrupt."""
        return await self.invoke(Command(resume=value))

    async def go_on(self) -> dict[str, Any]:
        """The same run goes on where it stopped."""
        return await self.invoke(None)

    async def invoke(self, given: Any) -> dict[str, Any]:
        if self.form == "sync":
            result = self.agent.invoke(given, CONFIG)
        else:
            result = await self.agent.ainvoke(given, CONFIG)
        return dict(result)

    async def updates(self, given: Any) -> list[dict[str, Any]]:
        """What a run streams in the stream mode `updates`."""
        if self.form == "sync":
            return list(self.agent.stream(given, CONFIG, stream_mode="updates"))
        return [each async for each in self.agent.astream(given, CONFIG, stream_mode="updates")]

    def state(self) -> dict[str, Any]:
        return dict(self.agent.get_state(CONFIG).values)

    def answers(self) -> list[tuple[str, str]]:
        """The tool and status of every answer in the history."""
        return [
            (str(each.name), each.status)
            for each in self.state()["messages"]
            if isinstance(each, ToolMessage)
        ]

    def metric(self, limit: str, decision: str, scope: str = "none") -> float:
        value = self.signals.value(
            "langchain_quota_limit_decisions_total",
            agent="unnamed",
            limit=limit,
            scope=scope,
            decision=decision,
        )
        return value or 0

    def check(
        self,
        *,
        answered: bool = True,
        before: Mapping[str, int] | None = None,
        models: int | None = None,
        models_in_run: int | None = None,
    ) -> None:
        """Assert the rules.

        Args:
            answered: Whether every tool call has its answer by now.
            before: The thread's counts from before this scene, by counter.
            models, models_in_run: The model calls of thread and run, where they are not the
                requests that the model received.
        """
        state = self.state()
        run = self.ran[self._earlier_tools :]
        received = len(self.model.calls)
        models = received if models is None else models
        in_run = received - self._earlier_models if models_in_run is None else models_in_run
        for limit in self.limits:
            if limit.kind == "model":
                thread_count, run_count = models, in_run
                kept = (state["thread_model_call_count"], state["langchain_quota"]["run_model"])
            else:
                thread_count, run_count = _matching(limit, self.ran), _matching(limit, run)
                kept = (
                    state.get("thread_tool_call_count", {}).get(limit.counter, 0),
                    state["langchain_quota"]["run_tools"].get(limit.counter, 0),
                )
            earlier = (before or {}).get(limit.counter, 0)
            if isinstance(limit.thread_limit, int):
                assert earlier + thread_count <= limit.thread_limit, limit.name
            if isinstance(limit.run_limit, int):
                assert run_count <= limit.run_limit, limit.name
            assert kept == (earlier + thread_count, run_count), limit.name
            charged = self.metric(limit.name, "allowed") - self.metric(limit.name, "refunded")
            assert charged == thread_count, limit.name
        self.check_requests()
        if answered:
            check_history(state["messages"])

    def check_requests(self) -> None:
        """Assert that whatever the model was sent is a valid history."""
        for call in self.model.calls:
            check_history(call.messages)


async def cancel_at(event: asyncio.Event, run: Coroutine[Any, Any, Any]) -> None:
    """Cancel a run as soon as it has come to an event; if it fails before, raise its error."""
    running = asyncio.create_task(run)
    reached = asyncio.create_task(event.wait())
    await asyncio.wait({running, reached}, return_when=asyncio.FIRST_COMPLETED)
    reached.cancel()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running


def check_history(messages: Sequence[BaseMessage]) -> None:
    """Assert that providers accept a history, but for the ids that the model itself repeats.

    Where a model gives one id to several calls of a message, LangChain answers each of those that
    run, and a refusal answers them all.
    """
    assert_valid_history(_with_distinct_ids(messages))


def _with_distinct_ids(messages: Sequence[BaseMessage]) -> list[BaseMessage]:
    """The history as if the calls of a message that share an id were one call."""
    found: list[BaseMessage] = []
    calls, answers = Counter[str](), Counter[str]()
    for message in messages:
        if isinstance(message, AIMessage):
            calls, answers = Counter(str(call["id"]) for call in message.tool_calls), Counter()
            distinct = {call["id"] or index: call for index, call in enumerate(message.tool_calls)}
            found.append(message.model_copy(update={"tool_calls": list(distinct.values())}))
        elif isinstance(message, ToolMessage):
            answers[message.tool_call_id] += 1
            if not 1 < answers[message.tool_call_id] <= calls[message.tool_call_id]:
                found.append(message)
        else:
            found.append(message)
    return found


def _matching(limit: Limit, ran: Sequence[str]) -> int:
    return sum(limit.matches(Call("tool", name)) for name in ran)
