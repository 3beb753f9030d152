"""The demo's agent, its limits, and the conversations that run into them."""

import asyncio
import math
import sqlite3
import textwrap
import time
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

from langchain.agents import create_agent
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, ToolCall
from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.base import BaseCheckpointSaver
from langgraph.checkpoint.sqlite.aio import AsyncSqliteSaver
from opentelemetry.sdk.trace import TracerProvider

from langchain_quota.budgets import TokenLimit
from langchain_quota.cli.command import CommandError
from langchain_quota.cli.demo_view import NEAR, Row, View
from langchain_quota.decision import Decision
from langchain_quota.limits import ModelCallLimit, ToolCallLimit
from langchain_quota.middleware.quota import QuotaMiddleware
from langchain_quota.repeats import RepeatLimit
from langchain_quota.resolved import ResolvedLimit
from langchain_quota.state import usage
from langchain_quota.stores.memory import MemoryStore
from langchain_quota.telemetry import Telemetry
from langchain_quota.testing import ScriptedChatModel, captured_decisions

AGENT = "support"

SEARCH = ToolCallLimit("search", thread_limit=8, run_limit=3)
MODEL = ModelCallLimit(thread_limit=20, run_limit=6)
TOKENS = TokenLimit(thread_limit=6_000)
LIMITS = (SEARCH, ToolCallLimit(thread_limit=16, run_limit=6), MODEL, TOKENS)
"""The limits per thread, which the table shows."""

GRACE_SECONDS = 10
"""How long a turn of a real model that began before the end may go on after it."""

_GREEDY = "Search for oak, ash, elm and pine boards, one search each, then for their prices."
_MODEST = "What is the weather in Oslo? Can you deliver today?"
_STEADY = "Search for walnut boards, and convert 40 EUR to NOK for me."
_RESTLESS = "Convert 1, 2, 3, 4, 5, 6 and 7 EUR to NOK, one after the other."
_LOOPING = "Convert 40 EUR to NOK again and again, until the rate is better."

_CUSTOMERS = (
    (_GREEDY, _GREEDY, _MODEST, _GREEDY, _GREEDY),
    (_MODEST, _STEADY, _MODEST, _MODEST, _STEADY),
    (_STEADY, _GREEDY, _STEADY, _STEADY, _STEADY),
    (_RESTLESS, _MODEST, _LOOPING, _MODEST, _LOOPING),
)
_TURNS = len(_CUSTOMERS[0])

_Request = tuple[str, dict[str, Any]]
_WOODS: list[_Request] = [("search", {"query": wood}) for wood in ("oak", "ash", "elm", "pine")]
_SCRIPT: dict[str, Sequence[Sequence[_Request]]] = {
    _GREEDY: (_WOODS, [("search", {"query": "prices"}), ("weather", {"city": "Oslo"})]),
    _MODEST: ([("weather", {"city": "Oslo"})],),
    _STEADY: ([("search", {"query": "walnut"}), ("convert", {"amount": 40})],),
    _RESTLESS: [[("convert", {"amount": amount})] for amount in range(1, 8)],
    _LOOPING: [[("convert", {"amount": 40})]] * 5,
}


class Traffic:
    """The conversations: each on its own thread, all at once, with a scripted model by default."""

    def __init__(
        self, options: Namespace, model: BaseChatModel | None, provider: TracerProvider
    ) -> None:
        self._options = options
        self._is_scripted = model is None
        self._model = model or ScriptedChatModel(script=_next_turn, keep_calls=0)
        self._tracer = provider.get_tracer("langchain_quota.demo")
        # The more threads, the more searches run at the same time.
        at_once = ToolCallLimit("search", name="search at once", at_once=options.threads // 3 or 1)
        self._quota = QuotaMiddleware(
            [*LIMITS, at_once, RepeatLimit(3)],
            # Only a store gives grants. It begins with the counts of the checkpointer.
            store=MemoryStore(),
            telemetry=Telemetry(tracer_provider=provider, near=NEAR),
        )
        most = {limit.name: ResolvedLimit.of(limit).checks[0].most or 0 for limit in LIMITS}
        names = [f"customer-{number + 1}" for number in range(options.threads)]
        self._rows = {name: Row(name, dict.fromkeys(most, 0), {**most}) for name in names}
        self.rows = [*self._rows.values()]
        self.carried_over = 0
        """How many threads began with what they had used in an earlier run."""

    async def run(self, file: Path, view: View) -> None:
        """Hold the conversations, kept in a file, and show them."""
        async with AsyncSqliteSaver.from_conn_string(str(file)) as saver:
            agent = self._agent(saver)
            await self._take_states(agent)
            self.carried_over = sum(any(row.used.values()) for row in self.rows)
            with captured_decisions() as decisions:
                await self._converse(agent, decisions, view)
            await self._take_states(agent)
            await asyncio.to_thread(view.show)

    async def _converse(self, agent: Any, decisions: list[Decision], view: View) -> None:
        end = time.monotonic() + self._options.seconds
        # The script's turns are few: all of them end, however busy the machine is.
        latest = math.inf if self._is_scripted else end + GRACE_SECONDS
        running = {
            asyncio.create_task(self._conversation(agent, number, end))
            for number in range(len(self.rows))
        }
        try:
            while running and time.monotonic() < latest:
                self._take(decisions)
                await asyncio.to_thread(view.show)
                done, running = await asyncio.wait(running, timeout=view.interval)
                await asyncio.gather(*done)
        finally:
            for each in running:
                each.cancel()
            await asyncio.gather(*running, return_exceptions=True)
            self._take(decisions)

    async def _conversation(self, agent: Any, number: int, end: float) -> None:
        thread = self.rows[number].thread
        turn_seconds = self._options.seconds / _TURNS
        # Customers do not all begin at the same moment.
        begin = end - self._options.seconds + turn_seconds / 2 * number / len(self.rows)
        for turn, question in enumerate(_CUSTOMERS[number % len(_CUSTOMERS)], 1):
            await asyncio.sleep(max(0, begin - time.monotonic()))
            if (number, turn) == (0, _TURNS - 1):
                # The first customer has asked for more, and uses it.
                await self._quota.agrant(
                    _config(thread), 1, limit=SEARCH.name, reason="asked for more", id="demo"
                )
            attributes = {"gen_ai.conversation.id": thread}
            with self._tracer.start_as_current_span("conversation turn", attributes=attributes):
                try:
                    await agent.ainvoke({"messages": [HumanMessage(question)]}, _config(thread))
                except Exception as error:
                    if self._is_scripted or isinstance(error, sqlite3.Error):
                        raise
                    raise _failure(f"the model {self._options.model!r} failed", error) from error
            begin += turn_seconds
            if time.monotonic() >= end and not self._is_scripted:
                break
        await asyncio.sleep(max(0, end - time.monotonic()))

    def _take(self, decisions: list[Decision]) -> None:
        for decision in decisions:
            self._rows[str(decision.call.thread_id)].take(decision)
        decisions.clear()

    async def _take_states(self, agent: Any) -> None:
        for row in self.rows:
            used = usage(await agent.aget_state(_config(row.thread)))
            counts = {MODEL.counter: used.model, **used.tools, **used.spent}
            row.used |= {limit.name: counts.get(limit.counter, 0) for limit in LIMITS}

    def _agent(self, saver: BaseCheckpointSaver[Any]) -> Any:
        seconds = min(0.5, self._options.seconds / _TURNS / 10)

        async def search(query: str) -> str:
            """Search the catalogue of the timber yard."""
            await asyncio.sleep(seconds)
            return f"12 boards of {query}, from 40 EUR"

        def weather(city: str) -> str:
            """The weather in a city."""
            return f"sunny in {city}"

        def convert(amount: float) -> str:
            """Convert an amount of EUR to NOK."""
            return f"{amount * 11.5:.2f} NOK"

        return create_agent(
            self._model,
            tools=[search, weather, convert],
            name=AGENT,
            checkpointer=saver,
            system_prompt="You help the customers of a timber yard. Use the tools. Be brief.",
            middleware=[self._quota],
        )


@contextmanager
def failing(what: str, *errors: type[Exception]) -> Iterator[None]:
    """Say in one line what cannot be done, and which of the errors is why."""
    try:
        yield
    except errors as error:
        raise _failure(what, error) from error


def _failure(what: str, why: Exception) -> CommandError:
    return CommandError(textwrap.shorten(f"{what}: {why}", width=400))


def _config(thread: str) -> RunnableConfig:
    return {"configurable": {"thread_id": thread}}


def _next_turn(messages: Sequence[BaseMessage]) -> AIMessage:
    """The scripted model's answer, which depends on the messages alone."""
    asked = max(index for index, each in enumerate(messages) if isinstance(each, HumanMessage))
    answers = sum(isinstance(each, AIMessage) for each in messages[asked:])
    batches = _SCRIPT[str(messages[asked].content)]
    calls = batches[answers] if answers < len(batches) else ()
    # As with real models, the input of a call is the whole history.
    given, made = 120 + 22 * len(messages), 20 + 25 * len(calls)
    return AIMessage(
        "" if calls else "That is all that I found.",
        # A thread in a file outlives this model: ids must be unique among several models.
        tool_calls=[ToolCall(name=name, args=args, id=f"call_{uuid4()}") for name, args in calls],
        response_metadata={"model_name": "scripted"},
        usage_metadata={"input_tokens": given, "output_tokens": made, "total_tokens": given + made},
    )
