"""The demo: agents on several threads, a table of their use, and some lines of /metrics."""

import asyncio
import logging
import os
import shutil
import signal
import sys
import time
from argparse import Namespace
from collections import deque
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from threading import Event
from typing import Any
from uuid import uuid4

from langchain.agents import create_agent
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, ToolCall
from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.memory import InMemorySaver
from opentelemetry import trace
from prometheus_client import generate_latest
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from langchain_quota import (
    ConcurrencyLimit,
    Decision,
    MemoryStore,
    ModelCallLimit,
    QuotaMiddleware,
    RepeatLimit,
    Telemetry,
    TokenLimit,
    ToolCallLimit,
    start_metrics_server,
)
from langchain_quota.cli import INTERRUPTED
from langchain_quota.cli.printing import CommandError, one_line, say
from langchain_quota.cli.top import STYLES, compact, gauge
from langchain_quota.core.decision import Outcome
from langchain_quota.limits import Limit
from langchain_quota.limits.call import THREAD
from langchain_quota.runtime.units import level
from langchain_quota.stores.keys import CountKey
from langchain_quota.telemetry import names
from langchain_quota.testing import ScriptedChatModel

AGENT = "support"
NEAR = 0.8
_SEARCH_SECONDS = 0.2

SEARCH = ToolCallLimit("search", thread_limit=8, run_limit=3)
MODEL = ModelCallLimit(thread_limit=20, run_limit=6)
TOKENS = TokenLimit(thread_limit=6_000)
LIMITS = (SEARCH, ToolCallLimit(thread_limit=16, run_limit=6), MODEL, TOKENS)
"""The limits per thread, which the table shows."""

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

_PRINTED_SERIES = (
    f'{names.CALLS.name}{{decision="allowed",kind="tool",tool="search"}}',
    f'{names.CALLS.name}{{decision="blocked",kind="tool",tool="search"}}',
    f'{names.SPENT["tokens"].name}{{limit="{TOKENS.name}",',
    f'{names.RUNS_ENDED.name}{{limit="{TOKENS.name}"}}',
    f'{names.THREAD_USED["calls"].name}{{limit="{MODEL.name}",thread_id="customer-1"}}',
)
"""The beginnings of the series to print, without the agent's label, to fit 80 columns."""


def run(options: Namespace) -> int:
    """Run the demo, with `serve` until Ctrl-C after its end, and return the exit code."""
    code = 0
    with ExitStack() as stack:
        # Hide the log lines, because the table shows what the limits do.
        logger = logging.getLogger("langchain_quota")
        stack.callback(logger.setLevel, logger.level)
        logger.setLevel(logging.ERROR)
        try:
            traffic = Traffic(options.threads, options.seconds)
            server = stack.enter_context(start_metrics_server(options.port))
        except ValueError as error:
            raise CommandError(one_line(error)) from error
        except OSError as error:
            raise CommandError(str(error.strerror).replace("port=", "--port")) from error
        heading = f"{options.threads} threads for {options.seconds} s, Ctrl-C ends them; "
        heading += f"metrics: {server.url}"
        say(heading)
        # Print no colors without a terminal, even if the environment forces them.
        console = Console(force_terminal=sys.stdout.isatty())

        def draw() -> Group:
            rows = traffic.rows()
            # Show the newest events in the room below the heading, the table and a space.
            newest = list(traffic.events)[-max(1, console.height - len(rows) - 3) :]
            lines = Text("\n".join(["", *newest]), no_wrap=True, overflow="ellipsis")
            return Group(Text(heading, no_wrap=True), table(rows), lines)

        # Use a separate screen, because keys do not disturb it.
        screen = Live(get_renderable=draw, console=console, screen=True, refresh_per_second=5)
        # End like after Ctrl-C, because the user's own screen must come back.
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        redraws = console.is_terminal and not console.is_dumb_terminal
        try:
            asyncio.run(traffic.run(screen if redraws else nullcontext()))
        except KeyboardInterrupt:
            code = INTERRUPTED
        console.print(table(traffic.rows()))
        serves = options.serve and not code
        _summarize(traffic, server.url, serves=serves)
        if serves:
            say(f"Serving {server.url} until Ctrl-C.")
            with suppress(KeyboardInterrupt):
                Event().wait()
    return code


def _summarize(traffic: "Traffic", url: str, *, serves: bool) -> None:
    """Print what happened, and what to do next, in the lines of a small terminal."""
    say(f'\nSome of {url}, all with agent="{AGENT}":')
    samples = generate_latest().decode().replace(f'agent="{AGENT}",', "").splitlines()
    for beginning in _PRINTED_SERIES:
        for sample in [sample for sample in samples if sample.startswith(beginning)][:1]:
            say(f"  {sample.removesuffix('.0')}")
    say()
    worst = max(traffic.rows(), key=lambda row: row.blocked)
    say(f"Calls over its limits that {worst.thread} asked for: {worst.blocked}; none ran.")
    command = "langchain-quota"
    if shutil.which(command) is None and Path(sys.argv[0]).name == command:
        command = min(sys.argv[0], os.path.relpath(sys.argv[0]), key=len)  # by `make demo`
    say("\n1. Limit your own agent: https://github.com/langchain-quota/langchain-quota")
    watch = "run beside it" if serves else "with --serve, and beside it"
    address = f" {url.removeprefix('http://').removesuffix('/metrics')}" if serves else ""
    say(f"2. Watch it live: {watch} {command} top{address}")
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


@dataclass
class Row:
    """A thread, with its use and the threshold of each limit, and the number of blocked calls."""

    thread: str
    uses: Sequence[tuple[int, int]] = ()
    blocked: int = 0


class Traffic:
    """The conversations: concurrent, each on its own thread, with a scripted model."""

    def __init__(self, threads: int, seconds: float) -> None:
        self._seconds = seconds
        self.events: deque[str] = deque(maxlen=1_000)
        """The events, the newest last."""
        self._tracer = trace.get_tracer("langchain_quota.demo")
        names_of_threads = (f"customer-{number}" for number in range(1, threads + 1))
        self._rows = {thread: Row(thread) for thread in names_of_threads}
        self._store = MemoryStore()
        # The more threads, the more searches run at the same time.
        concurrency = ConcurrencyLimit(
            "search", name="search at once", max_concurrency=threads // 3 or 1
        )
        self._quota = QuotaMiddleware(
            [*LIMITS, concurrency, RepeatLimit(3)],
            store=self._store,
            on_decision=self._count_decision,
            telemetry=Telemetry(near=NEAR, run_histograms=True),
        )
        self._agent: Any = create_agent(
            ScriptedChatModel(script=_next_turn, keep_calls=0),
            tools=[search, weather, convert],
            name=AGENT,
            checkpointer=InMemorySaver(),
            system_prompt="You help the customers of a timber yard. Use the tools. Be brief.",
            middleware=[self._quota],
        )

    def rows(self) -> list[Row]:
        """Return the threads with their use at this moment."""
        for row in self._rows.values():
            row.uses = [self._use(row.thread, limit) for limit in LIMITS]
        return [*self._rows.values()]

    async def run(self, screen: AbstractContextManager[object]) -> None:
        """Hold the conversations, while a screen shows them."""
        conversations = map(self._converse, self._rows, count())
        running = asyncio.gather(asyncio.sleep(self._seconds), *conversations)
        with screen:
            await running

    async def _converse(self, thread: str, number: int) -> None:
        config: RunnableConfig = {"configurable": {"thread_id": thread}}
        turn_seconds = self._seconds / _TURNS
        # Customers begin at different times.
        begin = time.monotonic() + turn_seconds / 2 * number / len(self._rows)
        for turn, question in enumerate(_CUSTOMERS[number % len(_CUSTOMERS)]):
            await asyncio.sleep(begin + turn * turn_seconds - time.monotonic())
            attributes = {"gen_ai.conversation.id": thread}
            with self._tracer.start_as_current_span("conversation turn", attributes=attributes):
                await self._agent.ainvoke({"messages": [HumanMessage(question)]}, config)

    def _count_decision(self, decision: Decision) -> None:
        row = self._rows[str(decision.call.thread_id)]
        row.blocked += decision.outcome is Outcome.BLOCKED
        for status in decision.limits:
            if status.refused:
                callee = decision.call.tool or "the model"
                reason = f"{_title(status.limit)} ({status.refusal_scope})"
                self.events.append(f"{row.thread} may not call {callee}: {reason}")

    def _use(self, thread: str, limit: Limit) -> tuple[int, int]:
        """Return how much the thread has used of a limit, and the limit's threshold."""
        [usage] = self._store.peek([str(CountKey(limit.counter, THREAD, thread))])
        threshold: Any = limit.thread_limit
        return usage.used if usage else 0, threshold


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


def table(rows: Sequence[Row]) -> Table:
    """Return the threads as a table, with names that are never read as markup."""
    result = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, expand=True)
    result.add_column("thread", no_wrap=True)
    for limit in LIMITS:
        result.add_column(_title(limit.name), no_wrap=True)
        result.add_column(ratio=1)
    result.add_column("blocked", justify="right", no_wrap=True)
    for row in rows:
        cells: list[RenderableType] = [Text(row.thread)]
        for used, threshold in row.uses:
            # Only the bar has a color, so that the numbers can be read anywhere.
            cells.append(Text(f"{compact(used)}/{compact(threshold)}"))
            cells.append(gauge(used, threshold, STYLES[level(used, threshold, NEAR)]))
        result.add_row(*cells, Text(str(row.blocked), "red" if row.blocked else ""))
    return result


def _title(limit: str) -> str:
    return "tools" if limit == "tool:*" else limit.removeprefix("tool:")
