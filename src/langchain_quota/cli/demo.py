"""The demo: agents on several threads, a table of what they use, and what /metrics says."""

import asyncio
import errno
import logging
import os
import shutil
import sqlite3
import sys
import textwrap
import time
import urllib.request
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Event
from typing import Any

from langchain.chat_models import init_chat_model
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import HumanMessage
from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.sqlite.aio import AsyncSqliteSaver
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter

from langchain_quota.cli import INTERRUPTED
from langchain_quota.cli.command import CommandError, say
from langchain_quota.cli.demo_board import Board, Row
from langchain_quota.cli.demo_traffic import (
    AGENT,
    LIMITS,
    MODEL,
    SEARCH,
    TOKENS,
    TURNS,
    build_agent,
    limiter,
    questions,
    scripted_model,
)
from langchain_quota.cli.demo_view import Display, display, print_table
from langchain_quota.cli.top_options import DEFAULT
from langchain_quota.decision import Decision
from langchain_quota.exposition import MetricsServer, start_metrics_server
from langchain_quota.state import usage
from langchain_quota.telemetry import Telemetry, names
from langchain_quota.testing import captured_decisions

NEAR = 0.8

GRACE_SECONDS = 10
"""How long a turn that began before the end may go on after it."""

_SHOWN_METRICS = (
    f'{names.CALLS.name}{{decision="allowed",kind="tool",tool="search"}}',
    f'{names.CALLS.name}{{decision="blocked",kind="tool",tool="search"}}',
    f'{names.SPENT["tokens"].name}{{limit="{TOKENS.name}",',
    f'{names.SUBJECTS.name}{{limit="{TOKENS.name}",scope="thread",state="exhausted"}}',
    f'{names.THREAD_USED["calls"].name}{{limit="{MODEL.name}",thread_id="customer-1"}}',
)
"""How the series begin that are shown, without the agent's label: so they fit 80 columns."""

_OWN_AGENTS = "https://github.com/langchain-quota/langchain-quota"
_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")


def run(options: Namespace) -> int:
    """Run the demo to its end, or with `serve` until Ctrl-C after its end; the exit code.

    Raises:
        CommandError: The port, the file, the model, the directory of metrics or the exporter of
            spans cannot be used.
    """  # noqa: DOC501 - the name is that of the function which makes the CommandError
    code = 0
    with ExitStack() as stack:
        stack.enter_context(_only_errors_logged())
        model = scripted_model() if options.model is None else _real_model(options.model)
        if options.db is None:
            file = Path(stack.enter_context(TemporaryDirectory())) / "threads.sqlite"
        else:
            file = _writable(options.db)
        server = stack.enter_context(_served(options.port))
        provider = stack.enter_context(_traced())
        try:
            traffic = _Traffic(options, model, provider)
        except (OSError, ValueError) as error:  # PROMETHEUS_MULTIPROC_DIR cannot be written to
            raise _error("cannot keep metrics", error) from error
        heading = f"{options.threads} threads for {options.seconds} s, Ctrl-C ends them; "
        heading += f"metrics: {server.url}"
        say(heading)
        try:
            with display(heading) as shown:
                asyncio.run(traffic.run(file, shown))
        except KeyboardInterrupt:
            code = INTERRUPTED
        except sqlite3.Error as error:
            raise _error(f"the database {str(file)!r} failed", error) from error
        serves = options.serve and not code
        _summarize(traffic, server, serves=serves)
        if serves:
            say(f"Serving {server.url} until Ctrl-C.")
            with suppress(KeyboardInterrupt):
                Event().wait()
    return code


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
        self._scripted = options.model is None
        self.carried_over = 0
        """How many threads began with what they had used in an earlier run."""

    async def run(self, file: Path, shown: Display) -> None:
        async with AsyncSqliteSaver.from_conn_string(str(file)) as saver:
            tool_seconds = min(0.5, self._options.seconds / TURNS / 10)
            agent = build_agent(self._model, saver, self._quota, tool_seconds=tool_seconds)
            await self._take_states(agent)
            begun = [row for row in self.board.rows() if any(use.used for use in row.uses)]
            self.carried_over = len(begun)
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
                # The script's turns are few: all of them end, however busy the machine is.
                most = None if self._scripted else self._options.seconds + GRACE_SECONDS
                await asyncio.wait(conversations, timeout=most)
                for conversation in conversations:
                    conversation.cancel()
                await asyncio.sleep(max(0, end - time.monotonic()))
                over.set()
        except ExceptionGroup as group_error:
            raise group_error.exceptions[0] from None
        finally:
            self.board.take(decisions)

    async def _conversation(self, agent: Any, number: int, end: float) -> None:
        thread = self._threads[number]
        turn_seconds = self._options.seconds / TURNS
        # Customers do not all begin at the same moment.
        begin = end - self._options.seconds + turn_seconds / 2 * number / len(self._threads)
        for turn, question in enumerate(questions(number), 1):
            await asyncio.sleep(max(0, begin - time.monotonic()))
            if (number, turn) == (0, TURNS - 1):
                # The first customer has asked for more, and uses it.
                await self._quota.agrant(
                    _config(thread), 1, limit=SEARCH.name, reason="asked for more", id="demo"
                )
            with self._tracer.start_as_current_span(
                "conversation turn", attributes={"gen_ai.conversation.id": thread}
            ):
                await self._turn(agent, thread, question)
            if time.monotonic() >= end and not self._scripted:
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
    """Log errors only: what the limits do is in the table already."""
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
def _traced() -> Iterator[TracerProvider]:
    # A provider of the demo's own: the process's global one stays as it is.
    named = Resource.create({"service.name": "langchain-quota-demo"})
    provider = TracerProvider(resource=named.merge(OTELResourceDetector().detect()))
    if _first(_ENDPOINTS) is not None:
        try:
            provider.add_span_processor(BatchSpanProcessor(_exporter()))
        except (ValueError, ImportError) as error:
            raise _error("cannot send spans", error) from error
    try:
        yield provider
    finally:
        provider.shutdown()


def _exporter() -> SpanExporter:
    # Each protocol's exporter brings packages of its own: only the one asked for is imported.
    protocol = _first(_PROTOCOLS) or "grpc"
    if protocol == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc import (  # noqa: PLC0415 - see above
            trace_exporter as grpc,
        )

        return grpc.OTLPSpanExporter()
    if protocol == "http/protobuf":
        from opentelemetry.exporter.otlp.proto.http import (  # noqa: PLC0415 - see above
            trace_exporter as http,
        )

        return http.OTLPSpanExporter()
    raise ValueError(f"no OTLP exporter for the protocol {protocol!r}: grpc or http/protobuf")


def _first(variables: tuple[str, ...]) -> str | None:
    return next((value for each in variables if (value := os.environ.get(each))), None)


def _summarize(traffic: _Traffic, server: MetricsServer, *, serves: bool) -> None:
    """Say what happened, and what to do next, in the lines of a small terminal."""
    rows = traffic.board.rows()
    print_table(rows)
    say()
    say(f'Some of {server.url}, all with agent="{AGENT}":')
    for sample in _metrics(server.url):
        say(f"  {sample}")
    say()
    if traffic.carried_over:
        say(f"{traffic.carried_over} threads went on with what they had used in an earlier run.")
    say(prevented(rows))
    say()
    for number, step in enumerate(_next_steps(server, serves=serves), 1):
        say(f"{number}. {step}")


def _metrics(url: str) -> Iterator[str]:
    # Not through a proxy that the environment may name.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(url, timeout=10) as response:
        samples = response.read().decode().replace(f'agent="{AGENT}",', "").splitlines()
    for shown in _SHOWN_METRICS:
        series = (each for each in samples if each.startswith(shown))
        yield from (each.removesuffix(".0") for each in islice(series, 1))


def prevented(rows: Sequence[Row]) -> str:
    """A sentence about the thread that asked for most calls over its limits."""
    worst = max(rows, key=lambda row: row.blocked)
    if not worst.blocked:
        return "No thread asked for a call over its limits."
    calls = "1 call" if worst.blocked == 1 else f"{worst.blocked} calls"
    return f"{worst.thread} asked for {calls} over its limits; none ran."


def _next_steps(server: MetricsServer, *, serves: bool) -> tuple[str, str, str]:
    command = "langchain-quota"
    if shutil.which(command) is None and Path(sys.argv[0]).name == command:
        command = min(sys.argv[0], os.path.relpath(sys.argv[0]), key=len)  # by `make demo`
    watch = f"Watch it live: with --serve, and beside it {command} top"
    if serves:
        address = server.url.removeprefix("http://").removesuffix("/metrics")
        watch = f"Watch it live: run beside it {command} top"
        watch += "" if server.url == DEFAULT else f" {address}"
    return (
        f"Limit your own agent: {_OWN_AGENTS}",
        watch,
        f"Get dashboards: {command} export grafana --to grafana",
    )


def _error(what: str, why: object) -> CommandError:
    return CommandError(textwrap.shorten(f"{what}: {why}", width=400))
