"""Python programs in processes of their own, which need not import LangChain first.

One process imports it once, which takes long, and forks for each program. It imports nothing of
this project, and nothing that reads settings when it is imported: those belong to the program.
"""

import atexit
import gc
import importlib
import io
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache, partial
from pathlib import Path
from types import FrameType, ModuleType
from typing import IO, Any, NoReturn, Self

ROOT = Path(__file__).resolve().parents[1]
TIMEOUT = 120
"""Seconds after which a program that is waited for is ended by SIGALRM."""

LIFETIME = 600
"""The same for one that is only started."""

COMMAND_LINE = "import sys; from langchain_quota.cli import main; sys.exit(main(sys.argv[1:]))"
_LONGEST_ORDER = 1 << 20


class Program:
    """A program that runs, with the methods of `subprocess.Popen` that tests use."""

    def __init__(self, status: IO[bytes], arguments: Sequence[str]) -> None:
        self._status = status
        self._arguments = arguments
        self.pid = int(status.readline())
        self.returncode: int | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self.wait()

    def poll(self) -> int | None:
        """The exit code, if it has ended."""
        with suppress(subprocess.TimeoutExpired):
            return self.wait(0)
        return None

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end: the exit code, below 0 if a signal ended it."""
        if self.returncode is None:
            if not select.select([self._status], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired([*self._arguments], timeout or 0)
            self.returncode = int(self._status.readline())
            self._status.close()
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal, if it still runs."""
        if self.poll() is None:
            with suppress(ProcessLookupError):  # it has just ended
                os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def start_python(
    program: str,
    *arguments: str,
    stdout: int,
    stderr: int,
    stdin: int | None = None,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    imported: Sequence[str] = (),
    seconds: int = LIFETIME,
) -> Program:
    """Start a program as `python -c` does; `imported` are modules that it finds imported, too.

    A test of how Python itself starts needs a process from scratch.
    """
    command = ["-c", *arguments]
    order: dict[str, Any] = {
        "program": program,
        "arguments": command,
        "cwd": str(cwd or Path.cwd()),
    }
    order |= {"env": dict(os.environ if env is None else env), "seconds": seconds}
    readable, writable = os.pipe()
    with open(os.devnull, "rb") as nothing:  # noqa: PTH123 - no path of a file
        given = [nothing.fileno() if stdin is None else stdin, stdout, stderr, writable]
        socket.send_fds(_prepared(*imported), [json.dumps(order).encode()], given)
    os.close(writable)
    return Program(io.FileIO(readable), command)


class Workers(list[Program]):
    """Processes that do the same, one of which may be killed, and another one begins."""

    def __init__(self, start: Callable[[], Program]) -> None:
        super().__init__(start() for _ in range(4))
        self._start = start

    def restart(self, number: int = 0) -> None:
        """Kill a process that still runs, and begin another one, which is the last one then."""
        killed = self.pop(number)
        assert killed.poll() is None
        killed.__exit__()
        self.append(self._start())


@contextmanager
def processes(worker: Callable[..., Any], *arguments: object, log: Path) -> Iterator[Workers]:
    """Four processes that run a coroutine function of a module, with arguments that are text."""
    program = calling(worker)
    with log.open("wb") as file:
        output: Any = {"stdout": file.fileno(), "stderr": file.fileno(), "cwd": ROOT}
        given = [program, *map(str, arguments)]
        running = Workers(partial(start_python, *given, imported=[worker.__module__], **output))
        try:
            yield running
        finally:
            for each in running:
                each.__exit__()


def run_python(program: str, *arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a program to its end, as `start_python` starts it, with what it writes, as UTF-8."""
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        given: Any = {"stdout": output.fileno(), "stderr": errors.fileno(), "seconds": TIMEOUT}
        with start_python(program, *arguments, **given, **options) as running:
            code = running.wait()
        written = []
        for file in (output, errors):
            file.seek(0)
            written.append(file.read().decode())
        return subprocess.CompletedProcess(["-c", *arguments], code, *written)


def as_module(name: str) -> str:
    """The program that `python -m` runs."""
    return f"import runpy; runpy.run_module({name!r}, run_name='__main__', alter_sys=True)"


def calling(worker: Callable[..., Any]) -> str:
    """The program that runs a coroutine function of a module to its end."""
    module, name = worker.__module__, worker.__qualname__
    return f"import asyncio, sys; from {module} import {name}; asyncio.run({name}(*sys.argv[1:]))"


def without(*packages: str) -> str:
    """The lines with which a program begins that cannot import packages, as if none had."""
    # None in sys.modules is how Python marks a module that cannot be imported.
    return (
        "import sys\n"
        f"for hidden in {packages!r}:\n"
        "    for name in [each for each in sys.modules if f'{each}.'.startswith(f'{hidden}.')]:\n"
        "        del sys.modules[name]\n"
        "    sys.modules[hidden] = None\n"
    )


@cache
def _prepared(*imported: str) -> socket.socket:
    """A way to the process that forks: one for each process of the tests and set of modules."""
    ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for each in (ours, its):
        each.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _LONGEST_ORDER)
    with its:
        # Nothing that a program has written waits in a buffer when it ends.
        options = ["-u", "-X", "utf8", "-m", "tests.forked"]
        command = [sys.executable, *options, str(its.fileno()), *imported]
        none = subprocess.DEVNULL
        process = subprocess.Popen(
            command, cwd=ROOT, stdin=none, stdout=none, pass_fds=[its.fileno()]
        )
    atexit.register(process.wait)
    atexit.register(ours.close)
    return ours


def _fork_for_each(orders: socket.socket, imported: Sequence[str]) -> None:
    for name in ("langchain.agents", *imported):
        importlib.import_module(name)
    gc.freeze()  # or the first collection of each fork would copy all that is shared
    signal.signal(signal.SIGCHLD, _forget)
    while True:
        text, descriptors, _, _ = socket.recv_fds(orders, _LONGEST_ORDER, 4)
        if not text:
            return
        order = json.loads(text)
        if os.fork() == 0:
            orders.close()
            _attend(order, descriptors)
        for each in descriptors:
            os.close(each)


def _forget(_signal: int, _frame: FrameType | None) -> None:
    """Reap the processes that have attended to a program, and have ended."""
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _attend(order: dict[str, Any], descriptors: list[int]) -> NoReturn:
    """Fork once more, and tell the process' id and how it ends: its parent goes on meanwhile."""
    *standard, status = descriptors
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    child = os.fork()
    if child == 0:
        os.close(status)
        _become(order, standard)
    for each in standard:
        os.close(each)
    os.write(status, b"%d\n" % child)
    _, ended = os.waitpid(child, 0)
    with suppress(BrokenPipeError):  # nobody wants to know
        os.write(status, b"%d\n" % os.waitstatus_to_exitcode(ended))
    os._exit(0)


def _become(order: dict[str, Any], standard: list[int]) -> NoReturn:
    """Be the process that was asked for, until its program ends."""
    signal.alarm(order["seconds"])
    # Where the tests run in the background, a shell has them ignore it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for descriptor, given in enumerate(standard):
        os.dup2(given, descriptor)
        os.close(given)
    os.chdir(order["cwd"])
    os.environ.clear()
    os.environ.update(order["env"])
    sys.argv = order["arguments"]
    own = [path for path in order["env"].get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.path[:] = ["", *own, *(path for path in sys.path[1:] if path not in own)]
    main = sys.modules["__main__"] = ModuleType("__main__")
    try:
        exec(compile(order["program"], "<string>", "exec"), main.__dict__)  # noqa: S102 - its purpose
        code = 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        if isinstance(ended.code, str):
            print(ended.code, file=sys.stderr)  # noqa: T201 - what `sys.exit(text)` does
    except BaseException:  # noqa: BLE001 - as the interpreter does
        sys.excepthook(*sys.exc_info())
        code = 1
    # What the interpreter does at its end, without taking apart the modules that are shared.
    threading._shutdown()  # type: ignore[attr-defined]  # as multiprocessing does
    atexit._run_exitfuncs()
    os._exit(code)


if __name__ == "__main__":
    with socket.socket(fileno=int(sys.argv[1])) as _orders:
        _fork_for_each(_orders, sys.argv[2:])
