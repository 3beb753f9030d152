"""The demo: agents on several threads, a table of what they use, and what /metrics says."""

import asyncio
import errno
import logging
import os
import shutil
import sqlite3
import sys
import urllib.request
from argparse import Namespace
from collections.abc import Sequence
from contextlib import ExitStack, closing, suppress
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Event

from langchain.chat_models import init_chat_model
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor

from langchain_quota.cli import INTERRUPTED
from langchain_quota.cli.command import CommandError, say
from langchain_quota.cli.demo_traffic import AGENT, MODEL, TOKENS, Traffic, failing
from langchain_quota.cli.demo_view import Row, View
from langchain_quota.cli.top_options import DEFAULT
from langchain_quota.exposition import MetricsServer, start_metrics_server
from langchain_quota.telemetry import names

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
            with failing(f"cannot use the model {options.model!r}", Exception):
                model = init_chat_model(options.model)
        if options.db is None:
            file = Path(stack.enter_context(TemporaryDirectory())) / "threads.sqlite"
        else:
            file = _writable(options.db)
        server = stack.enter_context(_served(options.port))
        provider = _traced()
        stack.callback(provider.shutdown)
        # PROMETHEUS_MULTIPROC_DIR may not be writable.
        with failing("cannot keep metrics", OSError, ValueError):
            traffic = Traffic(options, model, provider)
        heading = f"{options.threads} threads for {options.seconds} s, Ctrl-C ends them; "
        heading += f"metrics: {server.url}"
        say(heading)
        view = View(traffic.rows, heading)
        try:
            with failing(f"the database {str(file)!r} failed", sqlite3.Error), view.on_screen():
                asyncio.run(traffic.run(file, view))
        except KeyboardInterrupt:
            code = INTERRUPTED
        view.end()
        serves = options.serve and not code
        _summarize(traffic, server, serves=serves)
        if serves:
            say(f"Serving {server.url} until Ctrl-C.")
            with suppress(KeyboardInterrupt):
                Event().wait()
    return code


def _writable(db: Path) -> Path:
    file = db.absolute()
    with failing(f"cannot use --db {str(db)!r}", sqlite3.Error, ValueError):
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
        # PROMETHEUS_MULTIPROC_DIR may name no directory.
        with failing("cannot keep metrics", ValueError):
            return start_metrics_server(port=port)
    except OSError as error:
        reason = str(error.strerror)
        if error.errno == errno.EADDRINUSE:
            reason = f"{reason.partition(';')[0]}; choose another with --port"
        raise CommandError(reason) from error


def _traced() -> TracerProvider:
    # A provider of the demo's own: the process's global one stays as it is.
    named = Resource.create({"service.name": "langchain-quota-demo"})
    provider = TracerProvider(resource=named.merge(OTELResourceDetector().detect()))
    if _first(_ENDPOINTS):
        protocol = _first(_PROTOCOLS) or "grpc"
        # Each protocol's exporter brings packages of its own: only the one asked for is imported.
        with failing("cannot send spans", ValueError, ImportError):
            if protocol not in {"grpc", "http/protobuf"}:
                raise ValueError(f"no OTLP exporter for {protocol!r}: grpc or http/protobuf")
            package = f"opentelemetry.exporter.otlp.proto.{protocol.partition('/')[0]}"
            exporter = import_module(f"{package}.trace_exporter").OTLPSpanExporter()
            provider.add_span_processor(BatchSpanProcessor(exporter))
    return provider


def _first(variables: Sequence[str]) -> str | None:
    return next((value for each in variables if (value := os.environ.get(each))), None)


def _summarize(traffic: Traffic, server: MetricsServer, *, serves: bool) -> None:
    """Say what happened, and what to do next, in the lines of a small terminal."""
    say()
    say(f'Some of {server.url}, all with agent="{AGENT}":')
    # Not through a proxy that the environment may name.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(server.url, timeout=10) as response:
        samples = response.read().decode().replace(f'agent="{AGENT}",', "").splitlines()
    for shown in _SHOWN_METRICS:
        for series in [each for each in samples if each.startswith(shown)][:1]:
            say(f"  {series.removesuffix('.0')}")
    say()
    if traffic.carried_over:
        say(f"{traffic.carried_over} threads went on with what they had used in an earlier run.")
    say(prevented(traffic.rows))
    say()
    command = "langchain-quota"
    if shutil.which(command) is None and Path(sys.argv[0]).name == command:
        command = min(sys.argv[0], os.path.relpath(sys.argv[0]), key=len)  # by `make demo`
    say(f"1. Limit your own agent: {_OWN_AGENTS}")
    watch = "run beside it" if serves else "with --serve, and beside it"
    address = ""
    if serves and server.url != DEFAULT:
        address = f" {server.url.removeprefix('http://').removesuffix('/metrics')}"
    say(f"2. Watch it live: {watch} {command} top{address}")
    say(f"3. Get dashboards: {command} export grafana --to grafana")


def prevented(rows: Sequence[Row]) -> str:
    """A sentence about the thread that asked for most calls over its limits."""
    worst = max(rows, key=lambda row: row.blocked)
    if not worst.blocked:
        return "No thread asked for a call over its limits."
    calls = "1 call" if worst.blocked == 1 else f"{worst.blocked} calls"
    return f"{worst.thread} asked for {calls} over its limits; none ran."
