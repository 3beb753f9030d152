"""The demo: agents on several threads, a table of what they use, and what /metrics says."""

import asyncio
import errno
import logging
import sqlite3
import textwrap
import time
import urllib.request
from argparse import Namespace
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Event
from typing import Any

from langchain.chat_models import init_chat_model
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import HumanMessage
from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.sqlite.aio import AsyncSqliteSaver
from opentelemetry.trace import TracerProvider

from langchain_quota.cli.command import CommandError, say
from langchain_quota.cli.demo_board import Board
from langchain_quota.cli.demo_tracing import SpanCounter, otlp_endpoint, tracer_provider
from langchain_quota.cli.demo_traffic import (
    AGENT,
    LIMITS,
    MODEL,
    SEARCH,
    TURNS,
    build_agent,
    limiter,
    questions,
    scripted_model,
)
from langchain_quota.cli.demo_view import Display, display
from langchain_quota.decision import Decision
from langchain_quota.exposition import MetricsServer, start_metrics_server
from langchain_quota.levels import Level
from langchain_quota.state import usage
from langchain_quota.telemetry import Telemetry, names
from langchain_quota.testing import captured_decisions

NEAR = 0.8

GRACE_SECONDS = 10
"""How long a turn that began in time may go on after the end."""

_SHOWN_METRICS = (
    f"{names.CALLS.name}{{",
    f"{names.LIMIT_DECISIONS.name}{{",
    f"{names.SPENT['tokens'].name}{{",
    f"{names.GRANTED['calls'].name}{{",
    f"{names.WAIT_SECONDS.name}_sum{{",
)


def run(options: Namespace) -> int:
    """Run the demo to its end, or with `serve` until Ctrl-C after its end.

    Raises:
        CommandError: The port, the file, the model, the directory of metrics or the exporter of
            spans cannot be used.
    """  # noqa: DOC501 - the name is that of the function which makes the CommandError
    with ExitStack() as stack:
        stack.enter_context(_only_errors_logged())
        model = scripted_model() if options.model is None else _real_model(options.model)
        if options.db is None:
            file = Path(stack.enter_context(TemporaryDirectory())) / "threads.sqlite"
        else:
            file = _writable(options.db)
        server = stack.enter_context(_served(options.port))
        spans = SpanCounter()
        provider = stack.enter_context(_traced(spans))
        try:
            traffic = _Traffic(options, model, provider)
        except (OSError, ValueError) as error:  # PROMETHEUS_MULTIPROC_DIR cannot be written to
            raise _error("cannot keep metrics", error) from error
        say(f"{options.threads} threads of agent {AGENT!r}, {TURNS} turns each; {server.url}")
        began = time.monotonic()
        try:
            with display() as shown:
                asyncio.run(traffic.run(file, shown))
        except sqlite3.Error as error:
            raise _error(f"the database {str(file)!r} failed", error) from error
        _summarize(options, traffic.board, spans, seconds=time.monotonic() - began)
        _show_metrics(server, options)
        if options.serve:
            with suppress(KeyboardInterrupt):
                Event().wait()
    return 0


class _Traffic:
    """The conversations: each on its own thread, all at once."""

    def __init__(self, options: Namespace, model: BaseChatModel, provider: TracerProvider) -> None:
        self._options = options
        self._model = model
        telemetry = Telemetry(tracer_provider=provider, near=NEAR)
        self._quota = limiter(options.threads, telemetry)
        self._tracer = provider.get_tracer("langchain_quota.demo")
        self._threads = [f"customer-{number + 1}" for number in range(options.threads)]
        self.board = Board(self._threads, LIMITS, near=NEAR)

    async def run(self, file: Path, shown: Display) -> None:
        async with AsyncSqliteSaver.from_conn_string(str(file)) as saver:
            tool_seconds = min(0.5, self._options.seconds / TURNS / 10)
            agent = build_agent(self._model, saver, self._quota, tool_seconds=tool_seconds)
            await self._take_states(agent)
            with captured_decisions() as decisions:
                await self._converse(agent, decisions, shown)
            await self._take_states(agent)
            await asyncio.to_thread(shown.show, self.board.rows())

    async def _converse(self, agent: Any, decisions: list[Decision], shown: Display) -> None:
        end = time.monotonic() + self._options.seconds
        over = asyncio.Event()
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._show(decisions, shown, over))
                conversations = [
                    group.create_task(self._conversation(agent, number, end))
                    for number in range(self._options.threads)
                ]
                await asyncio.wait(conversations, timeout=self._options.seconds + GRACE_SECONDS)
                for conversation in conversations:
                    conversation.cancel()
                await asyncio.sleep(max(0, end - time.monotonic()))
                over.set()
        except ExceptionGroup as group_error:
            raise group_error.exceptions[0] from None
        self.board.take(decisions)

    async def _conversation(self, agent: Any, number: int, end: float) -> None:
        thread = self._threads[number]
        turn_seconds = self._options.seconds / TURNS
        # Customers do not speak in chorus.
        begin = end - self._options.seconds + turn_seconds / 2 * number / len(self._threads)
        for turn, question in enumerate(questions(number), 1):
            await asyncio.sleep(max(0, begin - time.monotonic()))
            if (number, turn) == (0, TURNS - 1):
                # The first customer has asked for more, and uses it.
                await self._quota.agrant(
                    agent, _config(thread), 1, limit=SEARCH.name, reason="asked for more", id="demo"
                )
            with self._tracer.start_as_current_span(
                "conversation turn", attributes={"gen_ai.conversation.id": thread}
            ):
                await self._turn(agent, thread, question)
            if time.monotonic() >= end:
                return
            begin += turn_seconds

    async def _turn(self, agent: Any, thread: str, question: str) -> None:
        try:
            await agent.ainvoke({"messages": [HumanMessage(question)]}, _config(thread))
        except Exception as error:
            if self._options.model is None or isinstance(error, sqlite3.Error):
                raise
            raise _error(f"the model {self._options.model!r} failed", error) from error

    async def _show(self, decisions: list[Decision], shown: Display, over: asyncio.Event) -> None:
        while not over.is_set():
            self.board.take(decisions)
            decisions.clear()
            await asyncio.to_thread(shown.show, self.board.rows())
            with suppress(TimeoutError):
                await asyncio.wait_for(over.wait(), shown.interval)

    async def _take_states(self, agent: Any) -> None:
        for thread in self._threads:
            used = usage(await agent.aget_state(_config(thread)))
            counts = {MODEL.counter: used.model, **used.tools, **used.spent}
            by_limit = {limit.name: counts.get(limit.counter, 0) for limit in LIMITS}
            self.board.take_state(thread, by_limit)


def _config(thread: str) -> RunnableConfig:
    return {"configurable": {"thread_id": thread}}


@contextmanager
def _only_errors_logged() -> Iterator[None]:
    """What limits do is in the table already."""
    logger = logging.getLogger("langchain_quota")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


def _real_model(name: str) -> BaseChatModel:
    try:
        return init_chat_model(name)
    except Exception as error:  # a missing package or key: each provider raises its own
        raise _error(f"cannot use the model {name!r}", error) from error


def _writable(db: Path) -> Path:
    file = db.absolute()
    try:
        with closing(sqlite3.connect(file)) as connection:
            connection.execute("BEGIN IMMEDIATE")
            connection.rollback()
    except sqlite3.Error as error:
        reason: object = error
        if not file.parent.is_dir():
            reason = "its directory does not exist"
        elif file.is_dir():
            reason = "it is a directory"
        raise _error(f"cannot use --db {str(db)!r}", reason) from error
    return file


def _served(port: int) -> MetricsServer:
    try:
        return start_metrics_server(port=port)
    except OSError as error:
        reason = str(error.strerror)
        if error.errno == errno.EADDRINUSE:
            reason = f"{reason.partition(';')[0]}; choose another with --port"
        raise CommandError(reason) from error
    except ValueError as error:  # PROMETHEUS_MULTIPROC_DIR names no directory
        raise _error("cannot keep metrics", error) from error


@contextmanager
def _traced(spans: SpanCounter) -> Iterator[TracerProvider]:
    try:
        provider = tracer_provider(spans)
    except (ValueError, ImportError) as error:
        raise _error("cannot send spans", error) from error
    try:
        yield provider
    finally:
        provider.shutdown()


def _summarize(options: Namespace, board: Board, spans: SpanCounter, *, seconds: float) -> None:
    say()
    say(f"{options.threads} threads in {seconds:.1f} s, {board.carried_over} carried over")
    layout = "{:<12}{:>14}{:>9}{:>9}{:>14}{:>19}"
    headings = ("carried over", "charged", "blocked", "threads near", "threads exhausted")
    say(layout.format("limit", *headings))
    for total in board.totals():
        threads = (total.levels.get(Level.NEAR, 0), total.levels.get(Level.EXHAUSTED, 0))
        counts = (total.carried_over, total.charged, total.blocked, *threads)
        say(layout.format(total.limit, *counts))
    by_decision = ", ".join(f"{count} {name}" for name, count in sorted(spans.decisions.items()))
    where = otlp_endpoint() or "none, set OTEL_EXPORTER_OTLP_ENDPOINT"
    say(f"check_quota spans: {spans.decisions.total()} ({by_decision}); collector: {where}")


def _show_metrics(server: MetricsServer, options: Namespace) -> None:
    say(f"some of {server.url}:")
    # Not through a proxy that the environment may name.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(server.url, timeout=10) as response:
        lines = response.read().decode().splitlines()
    for line in lines:
        if line.startswith(_SHOWN_METRICS) and not line.endswith(" 0.0"):
            say(f"  {line}")
    until = "until Ctrl-C" if options.serve else "while the demo runs; --serve goes on serving"
    say(f"scrape {server.url} ({until})")


def _error(what: str, why: object) -> CommandError:
    return CommandError(textwrap.shorten(f"{what}: {why}", width=400))
