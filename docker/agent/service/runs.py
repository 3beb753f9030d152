"""Runs of the agent: one at a time on a thread, streamed step by step, and fully cancelled."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextvars import ContextVar
from typing import Any

from langchain_core.messages import AIMessage, AIMessageChunk, HumanMessage, ToolMessage
from langchain_core.runnables import RunnableConfig

from langchain_quota import Decision, ModelCallLimitExceededError, ToolCallLimitExceededError
from langchain_quota.core.decision import Outcome
from service.agent import Caller
from service.shapes import Answer, Failed, Problem, Question, Refused, Shape, ends_run, refusal

MAX_WAITING = 100
"""The most events that wait for a slow client; then the agent waits, too."""

logger = logging.getLogger("service")

_decisions: ContextVar[list[Decision]] = ContextVar("decisions")


class Token(Shape):
    """A piece of the answer."""

    text: str


class ToolCalls(Shape):
    """The model wants tools to be called."""

    tools: list[str]


class ToolResult(Shape):
    """A tool has answered, or its call was refused."""

    tool: str
    text: str


Last = Answer | Refused | Failed
"""How a run can end."""


def observe(decision: Decision) -> None:
    """Remember a refusal with the run that it is part of."""
    if decision.outcome is Outcome.BLOCKED:
        _decisions.get([]).append(decision)


class BusyError(Exception):
    """The thread has a run that has not ended."""


class Runs:
    """Runs an agent for the API.

    Args:
        agent: The agent; its middleware tells `observe`.
    """

    def __init__(self, agent: Any) -> None:
        self._agent = agent
        self._busy: set[str] = set()

    def start(self, thread_id: str, question: Question) -> "Run":
        """Start a run.

        Raises:
            BusyError: One is going on on the thread in this process. Those of other processes are
                not seen: the shared store keeps the counts exact all the same.
        """
        if thread_id in self._busy:
            raise BusyError
        self._busy.add(thread_id)
        run = Run(self._agent, thread_id, question)
        run.task.add_done_callback(lambda _: self._busy.discard(thread_id))
        return run


class Run:
    """A run, in a task of its own; iterate over it until its end, and close it.

    Args:
        agent: The agent.
        thread_id: The thread.
        question: The message.
    """

    def __init__(self, agent: Any, thread_id: str, question: Question) -> None:
        self._agent = agent
        self._thread_id = thread_id
        self._question = question
        self._events: asyncio.Queue[Shape] = asyncio.Queue(MAX_WAITING)
        self.task = asyncio.create_task(self._run())

    async def __aiter__(self) -> AsyncIterator[Shape]:
        """What happens, as it happens; the end is one of `Last`."""
        while True:
            event = await self._events.get()
            yield event
            if isinstance(event, Last):
                return

    async def last(self) -> Shape:
        """Wait for the end."""
        return [event async for event in self][-1]

    async def close(self) -> None:
        """Cancel the run if it is still going on, and wait until it is gone."""
        self.task.cancel()
        await asyncio.wait([self.task])

    async def _run(self) -> None:
        try:
            last = await self._play()
        except Exception:
            logger.exception("a run failed")
            last = Failed(error=Problem(type="internal_error", message="the run failed"))
        await self._events.put(last)

    async def _play(self) -> Last:
        decisions: list[Decision] = []
        _decisions.set(decisions)  # for this task, and those that it starts
        seen = 0
        text = ""
        parts = self._agent.astream(
            {"messages": [HumanMessage(self._question.text)]},
            RunnableConfig(configurable={"thread_id": self._thread_id}),
            context=Caller(self._question.user_id),
            stream_mode=["messages", "updates"],
        )
        try:
            async for mode, part in parts:
                for decision in decisions[seen:]:
                    seen += 1
                    if not ends_run(decision):
                        await self._events.put(refusal(decision))
                for event in _tokens(part) if mode == "messages" else _steps(part):
                    await self._events.put(event)
                if mode == "updates":
                    text = _answer(part) or text
        except (ModelCallLimitExceededError, ToolCallLimitExceededError):
            pass  # the decision has been seen
        refusals = [refusal(each) for each in decisions if not ends_run(each)]
        ended = next((refusal(each) for each in decisions if ends_run(each)), None)
        if ended is not None:
            return Refused(error=ended, thread_id=self._thread_id, refusals=refusals)
        return Answer(thread_id=self._thread_id, text=text, refusals=refusals)


def _tokens(part: tuple[Any, dict[str, Any]]) -> list[Shape]:
    chunk, metadata = part
    if isinstance(chunk, AIMessageChunk) and metadata["langgraph_node"] == "model" and chunk.text:
        return [Token(text=chunk.text)]
    return []


def _messages(part: dict[str, Any], node: str) -> list[Any]:
    return list((part.get(node) or {}).get("messages") or [])


def _steps(part: dict[str, Any]) -> list[Shape]:
    steps: list[Shape] = [
        ToolCalls(tools=[call["name"] for call in message.tool_calls])
        for message in _messages(part, "model")
        if isinstance(message, AIMessage) and message.tool_calls
    ]
    for node in part:
        steps += [
            ToolResult(tool=message.name or "", text=message.text)
            for message in _messages(part, node)
            if isinstance(message, ToolMessage)
        ]
    return steps


def _answer(part: dict[str, Any]) -> str:
    return "".join(each.text for each in _messages(part, "model") if isinstance(each, AIMessage))
