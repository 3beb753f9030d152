"""The demo: agents on several threads, a table of what they use, and what /metrics says."""

import asyncio
import errno
import logging
import os
import shutil
import signal
import sqlite3
import sys
import textwrap
import time
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Event
from typing import Any
from uuid import uuid4

from langchain.agents import create_agent
from langchain.chat_models import init_chat_model
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, ToolCall
from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.sqlite.aio import AsyncSqliteSaver
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from prometheus_client import generate_latest
from rich.console import Console, Group, JustifyMethod
from rich.live import Live
from rich.table import Table
from rich.text import Text

from langchain_quota import (
    Decision,
    MemoryStore,
    MetricsServer,
    ModelCallLimit,
    Outcome,
    QuotaMiddleware,
    RepeatLimit,
    Telemetry,
    TokenLimit,
    ToolCallLimit,
    start_metrics_server,
    usage,
)
from langchain_quota.cli import INTERRUPTED
from langchain_quota.cli.arguments import DEFAULT
from langchain_quota.cli.printing import STYLES, CommandError, bar, bar_characters, say
from langchain_quota.telemetry import names
from langchain_quota.testing import ScriptedChatModel, captured_decisions
from langchain_quota.units import level

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

_Request = tuple[str, dict[str, Any]]
_WOODS: list[_Request] = [("search", {"query": wood}) for wood in ("oak", "ash", "elm", "pine")]
_SCRIPT: dict[str, Sequence[Sequence[_Request]]] = {
    _GREEDY: (_WOODS, [("search", {"query": "prices"}), ("weather", {"city": "Oslo"})]),
    _MODEST: ([("weather", {"city": "Oslo"})],),
    _STEADY: ([("search", {"query": "walnut"}), ("convert", {"amount": 40})],),
    _RESTLESS: [[("convert", {"amount": amount})] for amount in range(1, 8)],
    _LOOPING: [[("convert", {"amount": 40})]] * 5,
}
"""The calls that the scripted model asks for, answer by answer."""

_SHOWN_METRICS = (
    f'{names.CALLS.name}{{decision="allowed",kind="tool",tool="search"}}',
    f'{names.CALLS.name}{{decision="blocked",kind="tool",tool="search"}}',
    f'{names.SPENT["tokens"].name}{{limit="{TOKENS.name}",',
    f'{names.SUBJECTS.name}{{limit="{TOKENS.name}",scope="thread",state="exhausted"}}',
    f'{names.THREAD_USED["calls"].name}{{limit="{MODEL.name}",thread_id="customer-1"}}',
)
"""How the series begin that are shown, without the agent's label: so they fit 80 columns."""

_COUNTS = ("allowed", "blocked", "last refusal   ")
_THOUSAND = 1000
_WIDE = 100
"""From how many columns on there is room for the allowed calls and the last refusal."""
_OWN_AGENTS = "https://github.com/langchain-quota/langchain-quota"


def run(options: Namespace) -> int:
    """Run the demo to its end, or with `serve` until Ctrl-C after its end; the exit code."""
    code = 0
    with ExitStack() as stack:
        # What the limits do is in the table already.
        logger = logging.getLogger("langchain_quota")
        stack.callback(logger.setLevel, logger.level)
        logger.setLevel(logging.ERROR)
        model = None
        if options.model is not None:
            # A missing package or key: each provider raises its own error.
            with _failing(f"cannot use the model {options.model!r}", Exception):
                model = init_chat_model(options.model)
        file = Path(stack.enter_context(TemporaryDirectory())) / "threads.sqlite"
        if options.db is not None:
            file = _writable(options.db)
        # PROMETHEUS_MULTIPROC_DIR may name no directory, or one that is not writable.
        with _failing("cannot keep metrics", ValueError):
            server = stack.enter_context(_served(options.port))
        provider = _traced()
        stack.callback(provider.shutdown)
        with _failing("cannot keep metrics", OSError, ValueError):
            traffic = Traffic(options, model, provider)
        heading = f"{options.threads} threads for {options.seconds} s, Ctrl-C ends them; "
        heading += f"metrics: {server.url}"
        say(heading)
        view = View([*traffic.rows.values()], heading)
        try:
            with _failing(f"the database {str(file)!r} failed", sqlite3.Error), view.on_screen():
                asyncio.run(traffic.run(file, view))
        except KeyboardInterrupt:
            code = INTERRUPTED
        view.end()
        serves = options.serve and not code
        _summarize(traffic, server.url, serves=serves)
        if serves:
            say(f"Serving {server.url} until Ctrl-C.")
            with suppress(KeyboardInterrupt):
                Event().wait()
    return code


@contextmanager
def _failing(what: str, *errors: type[Exception]) -> Iterator[None]:
    """Say in one line what cannot be done, and which of the errors is why."""
    try:
        yield
    except errors as error:
        raise CommandError(textwrap.shorten(f"{what}: {error}", width=400)) from error


def _writable(db: Path) -> Path:
    file = db.absolute()
    with _failing(f"cannot use --db {str(db)!r}", sqlite3.Error, ValueError):
        if not file.parent.is_dir():
            raise ValueError("its directory does not exist")
        if file.is_dir():
            raise ValueError("it is a directory")
        with closing(sqlite3.connect(file)) as connection:
            connection.execute("BEGIN IMMEDIATE")
            connection.rollback()
    return file


def _served(port: int) -> MetricsServer:
    try:
        return start_metrics_server(port=port)
    except OSError as error:
        reason = str(error.strerror)
        if error.errno == errno.EADDRINUSE:
            reason = f"{reason.partition(';')[0]}; choose another with --port"
        raise CommandError(reason) from error


def _traced() -> TracerProvider:
    """A provider of the demo's own: the process's global one stays as it is."""
    named = Resource.create({"service.name": "langchain-quota-demo"})
    provider = TracerProvider(resource=named.merge(OTELResourceDetector().detect()))
    given = os.environ.get
    if given("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT") or given("OTEL_EXPORTER_OTLP_ENDPOINT"):
        asked = given("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL") or given("OTEL_EXPORTER_OTLP_PROTOCOL")
        protocol = asked or "grpc"
        # Each protocol's exporter brings packages of its own: only the one asked for is imported.
        with _failing("cannot send spans", ValueError, ImportError):
            if protocol not in {"grpc", "http/protobuf"}:
                raise ValueError(f"no OTLP exporter for {protocol!r}: grpc or http/protobuf")
            package = f"opentelemetry.exporter.otlp.proto.{protocol.partition('/')[0]}"
            exporter = import_module(f"{package}.trace_exporter").OTLPSpanExporter()
            provider.add_span_processor(BatchSpanProcessor(exporter))
    return provider


def _summarize(traffic: "Traffic", url: str, *, serves: bool) -> None:
    """Say what happened, and what to do next, in the lines of a small terminal."""
    say()
    say(f'Some of {url}, all with agent="{AGENT}":')
    samples = generate_latest().decode().replace(f'agent="{AGENT}",', "").splitlines()
    for shown in _SHOWN_METRICS:
        for series in [each for each in samples if each.startswith(shown)][:1]:
            say(f"  {series.removesuffix('.0')}")
    say()
    worst = max(traffic.rows.values(), key=lambda row: row.blocked)
    calls = "1 call" if worst.blocked == 1 else f"{worst.blocked} calls"
    prevented = f"{worst.thread} asked for {calls} over its limits; none ran."
    say(prevented if worst.blocked else "No thread asked for a call over its limits.")
    say()
    command = "langchain-quota"
    if shutil.which(command) is None and Path(sys.argv[0]).name == command:
        command = min(sys.argv[0], os.path.relpath(sys.argv[0]), key=len)  # by `make demo`
    say(f"1. Limit your own agent: {_OWN_AGENTS}")
    watch = "run beside it" if serves else "with --serve, and beside it"
    address = ""
    if serves and url != DEFAULT:
        address = f" {url.removeprefix('http://').removesuffix('/metrics')}"
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


class Traffic:
    """The conversations: each on its own thread, all at once, with a scripted model by default."""

    def __init__(
        self, options: Namespace, model: BaseChatModel | None, provider: TracerProvider
    ) -> None:
        self._options = options
        self._real_model = model
        self._tracer = provider.get_tracer("langchain_quota.demo")
        # The more threads, the more searches run at the same time.
        at_once = ToolCallLimit("search", name="search at once", at_once=options.threads // 3 or 1)
        self._quota = QuotaMiddleware(
            [*LIMITS, at_once, RepeatLimit(3)],
            # Only a store gives grants. It begins with the counts of the checkpointer.
            store=MemoryStore(),
            telemetry=Telemetry(tracer_provider=provider, near=NEAR),
        )
        most: dict[str, Any] = {limit.name: limit.thread_limit for limit in LIMITS}
        threads = [f"customer-{number + 1}" for number in range(options.threads)]
        self.rows = {name: Row(name, dict.fromkeys(most, 0), {**most}) for name in threads}

    async def run(self, file: Path, view: "View") -> None:
        """Hold the conversations, kept in a file, and show them."""
        async with AsyncSqliteSaver.from_conn_string(str(file)) as saver:
            agent = create_agent(
                self._real_model or ScriptedChatModel(script=_next_turn, keep_calls=0),
                tools=[search, weather, convert],
                name=AGENT,
                checkpointer=saver,
                system_prompt="You help the customers of a timber yard. Use the tools. Be brief.",
                middleware=[self._quota],
            )
            await self._take_states(agent)
            with captured_decisions() as decisions:
                await self._converse(agent, decisions, view)
            await self._take_states(agent)
            await asyncio.to_thread(view.show)

    async def _converse(self, agent: Any, decisions: list[Decision], view: "View") -> None:
        end = time.monotonic() + self._options.seconds
        try:
            async with asyncio.TaskGroup() as group:
                running = [
                    group.create_task(self._conversation(agent, number, end))
                    for number in range(len(self.rows))
                ]
                while not all(each.done() for each in running):
                    self._take(decisions)
                    await asyncio.to_thread(view.show)
                    await asyncio.wait(running, timeout=view.interval)
        except ExceptionGroup as failed:
            raise failed.exceptions[0] from failed
        finally:
            self._take(decisions)

    async def _conversation(self, agent: Any, number: int, end: float) -> None:
        thread = [*self.rows][number]
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
                    if self._real_model is None or isinstance(error, sqlite3.Error):
                        raise
                    with _failing(f"the model {self._options.model!r} failed", Exception):
                        raise
            begin += turn_seconds
            if time.monotonic() >= end and self._real_model is not None:
                break
        await asyncio.sleep(max(0, end - time.monotonic()))

    def _take(self, decisions: list[Decision]) -> None:
        for decision in decisions:
            self.rows[str(decision.call.thread_id)].take(decision)
        decisions.clear()

    async def _take_states(self, agent: Any) -> None:
        for row in self.rows.values():
            used = usage(await agent.aget_state(_config(row.thread)))
            counts = {MODEL.counter: used.model, **used.tools, **used.spent}
            row.used |= {limit.name: counts.get(limit.counter, 0) for limit in LIMITS}


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


@dataclass
class Row:
    """A thread: what it has used of each limit, by name, and what became of its calls."""

    thread: str
    used: dict[str, int]
    most: dict[str, int]
    allowed: int = 0
    blocked: int = 0
    last_refusal: str = ""

    def take(self, decision: Decision) -> None:
        """Take in a decision about a call of the thread."""
        self.allowed += decision.outcome is Outcome.ALLOWED
        self.blocked += decision.outcome is Outcome.BLOCKED
        for status in decision.limits:
            if status.limit in self.used:
                self.used[status.limit] = status.thread_used
                # Grants have raised it.
                self.most[status.limit] = status.thread_limit or 0
            if status.refused:
                self.last_refusal = f"{_title(status.limit)} ({status.refusal_scope})"


class View:
    """The threads under a heading: a table redrawn in a terminal, printed as lines elsewhere."""

    def __init__(self, rows: Sequence[Row], heading: str) -> None:
        self._console = Console()
        can_redraw = self._console.is_terminal and not self._console.is_dumb_terminal
        self._is_live = sys.stdout.isatty() and can_redraw
        if not self._is_live:  # no colors, even where the environment forces them
            self._console = Console(force_terminal=False, color_system=None)
        self.interval = 0.2 if self._is_live else 1.0
        self._rows = rows
        self._heading = Text(heading, no_wrap=True)
        self._live: Live | None = None
        self._printed: list[str] = []

    @contextmanager
    def on_screen(self) -> Iterator[None]:
        """Show the table, where it can be redrawn, on a screen of its own that keys do not tear."""
        # That screen is gone at the end, so call `end` then.
        if not self._is_live:
            yield
            return
        # The user's own screen must come back.
        before = signal.signal(signal.SIGTERM, signal.default_int_handler)
        try:
            with Live(console=self._console, screen=True, auto_refresh=False) as self._live:
                yield
        finally:
            signal.signal(signal.SIGTERM, before)

    def show(self) -> None:
        """Redraw the table, or print those of its lines that changed; it may block."""
        if self._live is not None:
            shown = Group(self._heading, table(self._rows, self._console))
            self._live.update(shown, refresh=True)
            return
        lines = self._lines()
        for line in lines:
            if line not in self._printed:
                say(line)
        self._printed = lines

    def end(self) -> None:
        """Print the table where it stays."""
        if not self._is_live:
            say()
        for line in self._lines():
            say(line)

    def _lines(self) -> list[str]:
        with self._console.capture() as captured:
            self._console.print(table(self._rows, self._console))
        return [line.rstrip() for line in captured.get().splitlines()]


def table(rows: Sequence[Row], console: Console) -> Table:
    """The threads as a table; names are shown as they are, never read as markup."""
    counts = _COUNTS if console.width >= _WIDE else _COUNTS[1:2]
    fixed = max(len(row.thread) for row in rows) + sum(1 + len(each) for each in counts)
    fixed += max(
        sum(2 + len(_numbers(row.used[each], row.most[each])) for each in row.used) for row in rows
    )
    width = max(2, min(20, (console.width - fixed) // len(rows[0].used)))
    characters = bar_characters(console.encoding)
    shown = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False)
    for title in ("thread", *map(_title, rows[0].used), *counts):
        justify: JustifyMethod = "right" if title in _COUNTS[:2] else "left"
        shown.add_column(
            title, justify=justify, min_width=len(title), no_wrap=True, overflow="crop"
        )
    for row in rows:
        gauges = (gauge(row.used[each], row.most[each], width, characters) for each in row.used)
        cells = (
            Text(str(row.allowed)),
            Text(str(row.blocked), "red" if row.blocked else ""),
            Text(row.last_refusal),
        )
        shown.add_row(Text(row.thread), *gauges, *(cells if counts is _COUNTS else cells[1:2]))
    return shown


def gauge(used: int, most: int, width: int, characters: str = "▇_") -> Text:
    """Such as `3/8 ▇▇____`; only the bar has a color, so that the numbers can be read anywhere."""
    drawn = bar(used / most if most else 1.0, width, characters)
    style = STYLES[level(used, most, NEAR)]
    return Text.assemble(_numbers(used, most), " ", (drawn, style), no_wrap=True)


def _numbers(used: int, most: int) -> str:
    # Thousands have a decimal.
    room = 2 * len(_short(most)) + (1 if most < _THOUSAND else 3)
    return f"{_short(used)}/{_short(most)}".ljust(room)


def _short(amount: int) -> str:
    """An amount in few characters, such as `950` or `8.9k`, and never more than it is."""
    return str(amount) if amount < _THOUSAND else f"{amount * 10 // _THOUSAND / 10:g}k"


def _title(limit: str) -> str:
    return "tools" if limit == "tool:*" else limit.removeprefix("tool:")
