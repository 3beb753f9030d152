"""Python programs in processes of their own, which need not import LangChain first.

To import LangChain takes longer than most programs of the tests. One process imports it once, and
forks for each program. It has imported nothing of this project, and nothing that reads settings
when it is imported: those belong to the program.
"""

import atexit
import gc
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

ROOT = Path(__file__).resolve().parents[1]
TIMEOUT = 120
"""Seconds after which a program is ended by SIGALRM."""


def run_python(
    program: str,
    *arguments: str,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run a program as `python -c` does, with what it writes captured as UTF-8.

    A test of how Python itself starts, of signals or of a terminal needs a process from scratch.

    Args:
        program: The program's text.
        arguments: What is behind the `-c` in `sys.argv`.
        env: The environment; by default that of the tests.
        cwd: Where it runs; by default where the tests do.
    """
    with tempfile.TemporaryDirectory(prefix="forked-") as name:
        output, errors = Path(name, "output"), Path(name, "errors")
        command = ["-c", *arguments]
        order = {
            "program": program,
            "arguments": command,
            "env": dict(os.environ if env is None else env),
            "cwd": str(cwd or Path.cwd()),
            "output": str(output),
            "errors": str(errors),
        }
        process = _prepared()
        assert process.stdin is not None
        assert process.stdout is not None
        print(json.dumps(order), file=process.stdin, flush=True)
        code = int(process.stdout.readline())
        return subprocess.CompletedProcess(
            command, code, output.read_text("utf-8"), errors.read_text("utf-8")
        )


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
def _prepared() -> "subprocess.Popen[str]":
    """The process that forks: one for each process of the tests, whose end is its own."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.forked"],
        cwd=ROOT,
        env={**os.environ, "PYTHONIOENCODING": "utf-8"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    atexit.register(process.communicate)
    return process


def _fork_for_each() -> None:
    import langchain.agents  # noqa: F401, PLC0415 - in this process, and not in that of the tests

    gc.freeze()  # or the first collection of each fork would copy all that is shared
    while line := sys.stdin.readline():
        child = os.fork()
        if child == 0:
            _become(json.loads(line))
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)  # noqa: T201 - the answer


def _become(order: dict[str, Any]) -> NoReturn:
    """Be the process that was asked for, until its program ends."""
    signal.alarm(TIMEOUT)
    for descriptor, path in enumerate((os.devnull, order["output"], order["errors"])):
        flags = os.O_RDONLY if descriptor == 0 else os.O_WRONLY | os.O_CREAT
        os.dup2(os.open(path, flags), descriptor)
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
    with suppress(OSError):
        sys.stdout.flush()
    os._exit(code)


if __name__ == "__main__":
    _fork_for_each()
