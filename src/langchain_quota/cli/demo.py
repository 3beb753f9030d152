"""The demo: agents on several threads, whose quotas a page shows; a line for each refusal."""

import asyncio
import logging
import os
import shutil
import signal
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from itertools import count
from operator import itemgetter
from pathlib import Path
from threading import Event
from typing import Any
from uuid import uuid4

from langchain.agents import create_agent
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, ToolCall
from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.memory import InMemorySaver
from opentelemetry import trace
from prometheus_client import CollectorRegistry

from langchain_quota import (
    ConcurrencyLimit,
    CostLimit,
    Decision,
    MemoryStore,
    ModelCallLimit,
    Price,
    Quota,
    QuotaMiddleware,
    RepeatLimit,
    Telemetry,
    TokenLimit,
    ToolCallLimit,
    max_usage,
    start_metrics_server,
)
from langchain_quota.cli import INTERRUPTED, CommandError, one_line, say, table
from langchain_quota.core.decision import Outcome
from langchain_quota.ops.exposition import MetricsServer
from langchain_quota.testing import ScriptedChatModel

AGENT = "support"
_SEARCH_SECONDS = 0.2

SEARCH = ToolCallLimit("search", thread_limit=8, run_limit=3)
MODEL = ModelCallLimit(thread_limit=20, run_limit=6)
TOKENS = TokenLimit(thread_limit=6_000, reserve=max_usage)
LIMITS = (SEARCH, ToolCallLimit(thread_limit=16, run_limit=6), MODEL, TOKENS)
"""The limits per conversation, which the table at the end shows."""

_GREEDY = "Search for oak, ash, elm and pine boards, one search each, then for their prices."
_MODEST = "What is the weather in Oslo? Can you deliver today?"
_STEADY = "Search for walnut boards, and convert 40 EUR to NOK for me."
_RESTLESS = "Convert 1, 2, 3, 4, 5, 6 and 7 EUR to NOK, one after the other."
_LOOPING = "Convert 40 EUR to NOK again and again, until the rate is better."
_CHATS = (
    (_GREEDY, _GREEDY, _MODEST, _GREEDY, _GREEDY),
    (_MODEST, _STEADY, _MODEST, _MODEST, _STEADY),
    (_STEADY, _GREEDY, _STEADY, _STEADY, _STEADY),
    (_RESTLESS, _MODEST, _LOOPING, _MODEST, _LOOPING),
)
_TURNS = len(_CHATS[0])
_CUSTOMERS = ("acme", "globex")
_DOLLARS = 0.045
"""The budget of a customer for a month, in dollars for each conversation."""

_PROFILE: Any = {"max_output_tokens": 120}

_Request = tuple[str, dict[str, object]]
_WOODS: list[_Request] = [("search", {"query": wood}) for wood in ("oak", "ash", "elm", "pine")]
_SCRIPT: dict[str, Sequence[Sequence[_Request]]] = {
    _GREEDY: (_WOODS, [("search", {"query": "prices"}), ("weather", {"city": "Oslo"})]),
    _MODEST: ([("weather", {"city": "Oslo"})],),
    _STEADY: ([("search", {"query": "walnut"}), ("convert", {"amount": 40})],),
    _RESTLESS: [[("convert", {"amount": amount})] for amount in range(1, 8)],
    _LOOPING: [[("convert", {"amount": 40})]] * 5,
}
"""The calls that the scripted model asks for, answer by answer."""


def run(options: Namespace) -> int:
    """Run the demo, with `serve` until Ctrl-C after its end, and return the exit code."""
    code = 0
    with ExitStack() as stack:
        # Hide the log lines, because the demo prints what the limits do.
        logger = logging.getLogger("langchain_quota")
        stack.callback(logger.setLevel, logger.level)
        logger.setLevel(logging.ERROR)
        try:
            traffic = Traffic(options.threads, options.seconds, on_refusal=say)
            server = stack.enter_context(
                start_metrics_server(options.port, registry=traffic.registry)
            )
        except ValueError as error:
            raise CommandError(one_line(error)) from error
        except OSError as error:
            remedy = str(error.strerror).replace("port=", "--port").replace("addr= or ", "")
            raise CommandError(remedy) from error
        say(f"{options.threads} conversations for {options.seconds} s; Ctrl-C ends them.")
        say(f"Watch them live in a browser: {server.page_url}\n")
        # End like after Ctrl-C, so that the summary is printed.
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        try:
            asyncio.run(traffic.run())
        except KeyboardInterrupt:
            code = INTERRUPTED
        serves = options.serve and not code
        _summarize(traffic, server, serves=serves)
        if serves:
            say(f"Serving {server.page_url} until Ctrl-C.")
            with suppress(KeyboardInterrupt):
                Event().wait()
    return code


def _summarize(traffic: "Traffic", server: MetricsServer, *, serves: bool) -> None:
    """Print what happened, and what to do next, in the lines of a small terminal."""
    headings = ["chat", *(_title(limit.name) for limit in LIMITS), "blocked"]
    lines = [
        [thread, *traffic.uses(thread), str(blocked)] for thread, blocked in traffic.blocked.items()
    ]
    say()
    for line in table(headings, lines, right=headings[1:]):
        say(line)
    say()
    chat, most = max(traffic.blocked.items(), key=itemgetter(1))
    say(f"{sum(traffic.blocked.values())} calls were blocked, {most} of them in {chat}. None ran.")
    say(f"Spent of the month's budgets: {traffic.spent()}.")
    command = "langchain-quota"
    if shutil.which(command) is None and Path(sys.argv[0]).name == command:
        command = min(sys.argv[0], os.path.relpath(sys.argv[0]), key=len)  # by `make demo`
    page = server.page_url if serves else f"{command} demo --serve"
    say(f"\n1. Open the page, and click a red row: {page}")
    say("2. Limit your own agent: https://github.com/langchain-quota/langchain-quota")
    say(f"3. Get dashboards: {command} export grafana --to grafana")


async def search(query: str) -> str:
    """Search the catalogue of the timber yard."""
    await asyncio.sleep(_SEARCH_SECONDS)
    return f"12 boards of {query}, from 40 EUR"


def weather(city: str) -> str:
    """The weather in a city."""
    return f"sunny in {city}"


def convert(amount: float) -> str:
    """Convert an amount of EUR to NOK."""
    return f"{amount * 11.5:.2f} NOK"


class Traffic:
    """The conversations: concurrent, each on its own thread, with a scripted model."""

    def __init__(self, threads: int, seconds: float, on_refusal: Callable[[str], None]) -> None:
        self._seconds = seconds
        self._on_refusal = on_refusal
        self._tracer = trace.get_tracer("langchain_quota.demo")
        self.blocked = {f"chat-{number}": 0 for number in range(1, threads + 1)}
        # A registry of its own, because others may have settings of theirs on the global one.
        self.registry = CollectorRegistry()
        # The more threads, the more searches run at the same time.
        concurrency = ConcurrencyLimit(
            "search", name="search at once", max_concurrency=threads // 3 or 1
        )
        month = Quota(f"{_DOLLARS * threads:.2f}", per="customer", window="month")
        budget = CostLimit(quotas=[month], reserve=max_usage)
        self._quota = QuotaMiddleware(
            [*LIMITS, budget, concurrency, RepeatLimit(3)],
            store=MemoryStore(),
            prices={"scripted": Price(input=10, output=30)},
            on_decision=self._count_decision,
            telemetry=Telemetry(
                registry=self.registry, run_histograms=True, subject_label={"customer": str}
            ),
        )
        self._agent: Any = create_agent(
            ScriptedChatModel(model="scripted", script=_next_turn, keep_calls=0, profile=_PROFILE),
            tools=[search, weather, convert],
            name=AGENT,
            checkpointer=InMemorySaver(),
            system_prompt="You help the customers of a timber yard. Use the tools. Be brief.",
            middleware=[self._quota],
        )

    def uses(self, thread: str) -> list[str]:
        """Return how much a thread has used of each limit at this moment."""
        balances = (self._quota.left(limit.name, thread=thread) for limit in LIMITS)
        return [f"{balance.used:,}/{balance.limit:,}" for balance in balances]

    def spent(self) -> str:
        """Return how much customers have spent of their budgets."""
        budgets = [(name, self._quota.left("cost", customer=name)) for name in _CUSTOMERS]
        return ", ".join(f"{name} ${one.used:.2f} of ${one.limit:.2f}" for name, one in budgets)

    async def run(self) -> None:
        """Hold the conversations."""
        conversations = map(self._converse, self.blocked, count())
        await asyncio.gather(asyncio.sleep(self._seconds), *conversations)

    async def _converse(self, thread: str, number: int) -> None:
        config: RunnableConfig = {"configurable": {"thread_id": thread}}
        turn_seconds = self._seconds / _TURNS
        # Conversations begin at different times.
        begin = time.monotonic() + turn_seconds / 2 * number / len(self.blocked)
        for turn, question in enumerate(_CHATS[number % len(_CHATS)]):
            await asyncio.sleep(begin + turn * turn_seconds - time.monotonic())
            attributes = {"gen_ai.conversation.id": thread}
            with self._tracer.start_as_current_span("conversation turn", attributes=attributes):
                context = {"customer": _CUSTOMERS[number % len(_CUSTOMERS)]}
                messages = {"messages": [HumanMessage(question)]}
                await self._agent.ainvoke(messages, config, context=context)

    def _count_decision(self, decision: Decision) -> None:
        thread = str(decision.call.thread_id)
        self.blocked[thread] += decision.outcome is Outcome.BLOCKED
        for status in decision.limits:
            if status.refused:
                callee = decision.call.tool or "the model"
                reason = f"{_title(status.limit)} ({status.refusal_scope})"
                self._on_refusal(f"{thread}'s call of {callee} is blocked: {reason}")


def _next_turn(messages: Sequence[BaseMessage]) -> AIMessage:
    """Return the scripted model's answer, which depends on the messages alone."""
    last = max(i for i, message in enumerate(messages) if isinstance(message, HumanMessage))
    answers = sum(isinstance(message, AIMessage) for message in messages[last:])
    batches = _SCRIPT[str(messages[last].content)]
    calls = batches[answers] if answers < len(batches) else ()
    # As with real models, the input of a call is the whole history.
    input_tokens, output_tokens = 120 + 22 * len(messages), 20 + 25 * len(calls)
    return AIMessage(
        "" if calls else "That is all that I found.",
        tool_calls=[ToolCall(name=name, args=args, id=f"call_{uuid4()}") for name, args in calls],
        response_metadata={"model_name": "scripted"},
        usage_metadata={
            "input_tokens": input_tokens,
            "output_tokens": output_tokens,
            "total_tokens": input_tokens + output_tokens,
        },
    )


def _title(limit: str) -> str:
    return "tools" if limit == "tool:*" else limit.removeprefix("tool:")
