"""Mistakes of the first hour that no agent is needed for, and the sentence each leads to."""

import asyncio
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from langchain_quota import (
    CostLimit,
    MemoryStore,
    ModelCallLimit,
    Quota,
    QuotaMiddleware,
    QuotaStoreError,
    RedisStore,
    Telemetry,
    TokenLimit,
    ToolCallLimit,
    start_metrics_server,
    with_limits,
)
from langchain_quota.cli import main
from tests.agent import test_first_hour as with_agents
from tests.forked import run_python
from tests.troubleshooting import PAGE, begins, messages, raised

SEARCH = ToolCallLimit("search", run_limit=9)


@dataclass
class Bench:
    """What a mistake is made with."""

    capsys: pytest.CaptureFixture[str]
    monkeypatch: pytest.MonkeyPatch
    path: Path

    def command(self, *arguments: str) -> str:
        """The last line that the command writes, which says why it did nothing."""
        try:
            code: Any = main(arguments)
        except SystemExit as ended:
            code = ended.code
        assert code == 2
        return self.capsys.readouterr().err.splitlines()[-1]


Mistake = Callable[[Bench], str]
MISTAKES: dict[str, Mistake] = {}
"""What a user sees of each mistake, by how the page says that it begins."""


def sees(message: str) -> Callable[[Mistake], Mistake]:
    def register(mistake: Mistake) -> Mistake:
        MISTAKES[message] = mistake
        return mistake

    return register


def refused(error: type[Exception], make: Callable[[], Any]) -> Mistake:
    return lambda _: raised(error, make)


def of_sub_agents(*, middleware: Any = (), subagents: Any = ()) -> None:
    """Takes what `create_deep_agent` takes."""


# What the type checker would refuse is made all the same.
tool_limit: Any = ToolCallLimit
cost_limit: Any = CostLimit
quotas: Any = QuotaMiddleware
quota: Any = Quota

MISTAKES |= {
    "At least one limit must be specified: thread_limit, run_limit, quotas or at_once": refused(
        ValueError, lambda: ToolCallLimit("search")
    ),
    "run_limit must be 0 or more, not …": refused(
        ValueError, lambda: ToolCallLimit("search", run_limit=-1)
    ),
    "thread_limit must be a whole number or None, not …": refused(
        TypeError, lambda: tool_limit("search", thread_limit="3")
    ),
    "run_limit (…) cannot exceed thread_limit (…)": refused(
        ValueError, lambda: ToolCallLimit("search", run_limit=5, thread_limit=3)
    ),
    "Invalid exit_behavior: …. Choose one of …": refused(
        ValueError, lambda: tool_limit("search", run_limit=1, exit_behavior="finalize")
    ),
    "ToolCallLimit takes numbers by name: …": refused(TypeError, lambda: tool_limit("search", 3)),
    "tool_name must be a string, several strings or None, not …": refused(
        TypeError, lambda: tool_limit(main, run_limit=3)
    ),
    "limits must be a sequence of limits, such as [ToolCallLimit(…)], not …": refused(
        TypeError, lambda: quotas(SEARCH)
    ),
    "limits must be ToolCallLimit, ModelCallLimit, TokenLimit, CostLimit or "
    "RepeatLimit, not …": refused(TypeError, lambda: quotas([Quota(3)])),
    "run_limit must not be a float, which holds … only nearly: write it as a string, …": refused(
        TypeError, lambda: cost_limit(run_limit=0.1)
    ),
    "run_limit must have at most six decimal places, not …": refused(
        ValueError, lambda: CostLimit(run_limit="0.0000001")
    ),
    "keep=… must be at least reserve=…": refused(
        ValueError,
        lambda: TokenLimit(run_limit=9, exit_behavior="finalize", keep=2, reserve=3),
    ),
    "charge_all_models=True needs a budget to charge: …": refused(
        ValueError, lambda: QuotaMiddleware([SEARCH], charge_all_models=True)
    ),
    "exit_behavior='ask' cannot be used with reserve=…": refused(
        ValueError, lambda: TokenLimit(run_limit=9, exit_behavior="ask", reserve=2)
    ),
    "grant=… needs exit_behavior='ask'": refused(
        ValueError, lambda: ToolCallLimit("search", run_limit=9, grant=5)
    ),
    "exit_behavior='finalize' needs keep: …": refused(
        ValueError, lambda: CostLimit(run_limit=1, exit_behavior="finalize")
    ),
    "QuotaMiddleware takes the limits in one list": refused(
        TypeError, lambda: quotas(SEARCH, ModelCallLimit(run_limit=9))
    ),
    "QuotaMiddleware.__init__() got an unexpected keyword argument": refused(
        TypeError, lambda: quotas(run_limit=3)
    ),
    "… limits are named …": refused(
        ValueError, lambda: quotas([SEARCH, ToolCallLimit("search", thread_limit=9)])
    ),
    "limit … can never be reached": refused(
        ValueError, lambda: quotas([SEARCH, ToolCallLimit("search", run_limit=10, name="late")])
    ),
    "limit … has quotas: give a store": refused(
        ValueError, lambda: quotas([ToolCallLimit("search", quotas=[Quota(3)])])
    ),
    "store must be a QuotaStore or None, not …": refused(
        TypeError, lambda: quotas([SEARCH], store=MemoryStore)
    ),
    "name must not be 'run': it has a meaning of its own": refused(
        ValueError, lambda: Quota(3, per="run")
    ),
    "window=… cannot be used with per='root_run'": refused(
        ValueError, lambda: Quota(3, per="root_run", window=timedelta(days=1))
    ),
    "quota has no store, so each agent would count for itself": refused(
        ValueError, lambda: with_limits(of_sub_agents, QuotaMiddleware([SEARCH]))
    ),
    "per must not be 'run', under which a store counts runs": refused(
        ValueError, lambda: Quota(5, per="run", name="job")
    ),
    "per, without a name, must match [a-z_]{1,32}, not …": refused(
        ValueError, lambda: Quota(5, per="userId")
    ),
    "thread_limit must be a function of state and runtime, as in …": refused(
        TypeError, lambda: tool_limit("search", thread_limit=lambda state: 3)
    ),
    "window must be a timedelta or None, not …": refused(
        TypeError, lambda: quota(5, window=86_400)
    ),
    "the URL of Redis must be redis://": refused(ValueError, lambda: RedisStore("localhost:6379")),
}


@sees("… conflicts with … of another Telemetry on the same registry")
def two_settings(_: Bench) -> str:
    registry = CollectorRegistry()
    Telemetry(registry=registry)
    text = raised(ValueError, lambda: Telemetry(registry=registry, near=0.5))
    assert "Telemetry(registry=CollectorRegistry(), …)" in text
    return text


@sees("no URL of Redis was given, and LANGCHAIN_QUOTA_REDIS_URL is not set")
def no_server(bench: Bench) -> str:
    bench.monkeypatch.delenv("LANGCHAIN_QUOTA_REDIS_URL", raising=False)
    return raised(ValueError, RedisStore)


def _without_coverage() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("COV")}


def told(program: str, **environment: str) -> str:
    """The last line of a program that fails: the text of its exception."""
    return _sentence(run_python(program, env={**os.environ, **environment}), 1)


def told_alone(program: str, *, code: int = 1, **environment: str) -> str:
    """The same of a program that takes rights from its process."""
    ended = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        # Where coverage is measured, its own file would be what cannot be written.
        env={**_without_coverage(), **environment},
    )
    return _sentence(ended, code)


def _sentence(ended: "subprocess.CompletedProcess[str]", code: int) -> str:
    assert ended.returncode == code, ended.stderr
    line = ended.stderr.splitlines()[-1]
    return re.sub(r"^\w+(Error|Warning): ", "", line)


@sees("RedisStore needs the package redis")
def redis_is_not_installed(_: Bench) -> str:
    # None in sys.modules is how Python marks a module that cannot be imported.
    return told(
        "import sys; sys.modules['redis'] = None\nimport langchain_quota as ours\nours.RedisStore()"
    )


def without_rich(bench: Bench, command: str) -> str:
    name = f"langchain_quota.cli.{command}"
    for module in [each for each in sys.modules if each.startswith(("rich.", name))]:
        bench.monkeypatch.delitem(sys.modules, module)
    bench.monkeypatch.setitem(sys.modules, "rich", None)
    bench.monkeypatch.delattr(name, raising=False)
    return bench.command(command)


@sees("langchain-quota demo: needs the package …")
def the_demo_is_not_installed(bench: Bench) -> str:
    return without_rich(bench, "demo")


@sees("langchain-quota top: needs the package …")
def the_view_is_not_installed(bench: Bench) -> str:
    return without_rich(bench, "top")


@sees("cannot serve metrics on …: the port is taken")
def a_taken_port(_: Bench) -> str:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        seen = raised(OSError, lambda: start_metrics_server(taken.getsockname()[1]))
    return re.sub(r"^\[Errno \d+\] ", "", seen)


@sees(
    "cannot serve metrics on …: …; give another port= (0 takes a free one), or another address "
    "with addr= or LANGCHAIN_QUOTA_METRICS_ADDR"
)
def an_address_elsewhere(bench: Bench) -> str:
    bench.monkeypatch.setenv("LANGCHAIN_QUOTA_METRICS_ADDR", "192.0.2.1")
    return re.sub(r"^\[Errno \d+\] ", "", raised(OSError, lambda: start_metrics_server(0)))


@sees("PROMETHEUS_MULTIPROC_DIR=… is on a disk with … MiB free, and a worker begins with …")
def a_full_disk(bench: Bench) -> str:
    return told(
        "from langchain_quota import Telemetry\n"
        "from langchain_quota.telemetry import multiprocess\n"
        # More than any disk has.
        "multiprocess.NEEDED = 2**70\n"
        "Telemetry()",
        PROMETHEUS_MULTIPROC_DIR=str(bench.path),
    )


@sees("PROMETHEUS_MULTIPROC_DIR=… is no directory that this process can …")
def no_directory_for_workers(bench: Bench) -> str:
    missing = str(bench.path / "missing")
    return told(
        "from langchain_quota import Telemetry\nTelemetry()", PROMETHEUS_MULTIPROC_DIR=missing
    )


@sees("langchain-quota: error: the following arguments are required: command")
def no_command(bench: Bench) -> str:
    return bench.command()


@sees("langchain-quota: error: argument command: invalid choice: …")
def no_such_command(bench: Bench) -> str:
    return bench.command("exprot")


@sees("langchain-quota export grafana: error: the following arguments are required: --to")
def nowhere_to_write(bench: Bench) -> str:
    return bench.command("export", "grafana")


@sees("langchain-quota export: cannot use --to …")
def a_file_for_a_directory(bench: Bench) -> str:
    file = bench.path / "file"
    file.touch()
    seen = bench.command("export", "grafana", "--to", str(file))
    assert seen.endswith("a file is in the way; name a directory that you can write to")
    return seen


@sees("langchain-quota export: cannot write …")
def a_directory_without_room(bench: Bench) -> str:
    return told_alone(
        # No file may become longer than this, as on a disk that is full.
        "import resource, sys\n"
        "from langchain_quota.cli import main\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))\n"
        f"sys.exit(main(['export', 'grafana', '--to', {str(bench.path)!r}]))",
        code=2,
    )


@sees("langchain-quota export: … has …; --force overwrites")
def files_that_are_there(bench: Bench) -> str:
    assert main(["export", "grafana", "--to", str(bench.path)]) == 0
    return bench.command("export", "grafana", "--to", str(bench.path))


@sees(
    "langchain-quota demo: cannot serve metrics on …: the port is taken; choose another with --port"
)
def a_taken_port_of_the_demo(bench: Bench) -> str:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return bench.command("demo", "--port", str(taken.getsockname()[1]))


@sees("RedisStore(…): no answer within … s, and the event loop was blocked for … s meanwhile")
def a_blocked_event_loop(_: Bench) -> str:
    async def ask() -> None:
        with socket.create_server(("127.0.0.1", 0)) as silent:
            port = silent.getsockname()[1]
            store = RedisStore(f"redis://127.0.0.1:{port}/0", timeout=0.2)
            asked = asyncio.create_task(store.apeek(["x"]))
            await asyncio.sleep(0)
            time.sleep(0.5)  # noqa: ASYNC251 - the mistake
            await asked

    return raised(QuotaStoreError, lambda: asyncio.run(ask()))


@sees("RedisStore(…): an unreadable reply, …")
def a_web_server_in_place_of_redis(_: Bench) -> str:
    def serve() -> None:
        connection, _ = server.accept()
        with connection:
            while connection.recv(65_536):
                connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

    with socket.create_server(("127.0.0.1", 0)) as server:
        Thread(target=serve, daemon=True).start()
        store = RedisStore(f"redis://127.0.0.1:{server.getsockname()[1]}/0", timeout=30)
        return raised(QuotaStoreError, lambda: store.peek(["x"]))


@sees("prices of known models need the package genai-prices: …")
def prices_without_a_list(bench: Bench) -> str:
    bench.monkeypatch.setitem(sys.modules, "genai_prices.data_snapshot", None)
    return raised(ModuleNotFoundError, lambda: QuotaMiddleware([CostLimit(run_limit=1)]))


@sees("langchain-quota quotas: --redis has a password")
def a_password_on_the_command_line(bench: Bench) -> str:
    return bench.command("quotas", "show", "--redis", "redis://:secret@127.0.0.1:1/0")


@pytest.mark.parametrize("message", MISTAKES)
def test_a_mistake_leads_to_a_sentence(
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """The mistake, made for real, shows a message that the page explains."""
    assert message in messages()
    assert begins(MISTAKES[message](Bench(capsys, monkeypatch, tmp_path)), message)


def test_every_message_is_tried() -> None:
    """Each message of the page is that of a mistake which is made here or with an agent."""
    page = messages()
    assert len(page) == len(set(page))
    assert set(page) == {*MISTAKES, *with_agents.MISTAKES}
    rows = re.findall(r"^\| `", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    of_targets = 7
    assert len(page) == len(rows) - of_targets


def test_the_way_out_is_told_of_a_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """Given as a store, a URL is not shown, which may hold a password, and the remedy is."""
    seen = raised(TypeError, lambda: quotas([SEARCH], store="redis://:secret@127.0.0.1/0"))
    assert seen.endswith("not a string: RedisStore(url) is one")


def test_a_string_is_no_list_of_limits() -> None:
    """A name in place of limits is shown as a whole, and not letter by letter."""
    assert raised(TypeError, lambda: quotas("search")).endswith("not 'search'")


def test_redis_can_be_asked_at_the_start() -> None:
    """What the page says to find out early whether Redis is there does find it out."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        store: Any = RedisStore(f"redis://127.0.0.1:{taken.getsockname()[1]}/0")
        with pytest.raises(Exception, match="check that Redis runs there") as caught:
            store.peek(["x"])
    assert type(caught.value).__name__ == "QuotaStoreError"


@pytest.mark.skipif(not hasattr(os, "setresuid"), reason="needs users of the system")
def test_a_directory_of_somebody_else() -> None:
    """Workers whose user may not write to the directory are told so, before metrics are made."""
    with tempfile.TemporaryDirectory() as directory:
        Path(directory).chmod(0o555)
        seen = told_alone(
            "import os\n"
            "from langchain_quota import Telemetry\n"
            "if os.getuid() == 0:\n"
            "    os.setresuid(65534, 65534, 65534)\n"
            "Telemetry()",
            PROMETHEUS_MULTIPROC_DIR=directory,
        )
    assert seen.startswith(f"PROMETHEUS_MULTIPROC_DIR={directory!r} is no directory that this")
    assert "can write to: make it before the workers start" in seen


def test_metrics_cannot_be_served_without_the_directory(tmp_path: Path) -> None:
    """The server of workers' metrics reports a missing directory, too."""
    missing = str(tmp_path / "missing")
    program = "from langchain_quota import start_metrics_server\nstart_metrics_server(0)"
    seen = told(program, PROMETHEUS_MULTIPROC_DIR=missing)
    assert seen.startswith(f"PROMETHEUS_MULTIPROC_DIR={missing!r} is no directory that this")
    assert "can read: make it before the workers start" in seen
