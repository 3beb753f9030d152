"""A program in a forked process is as alone as one in a process from scratch."""

import os
import signal
import subprocess
from functools import partial
from pathlib import Path

import pytest

from tests.forked import run_python, start_python


def test_it_is_what_was_asked_for(tmp_path: Path) -> None:
    """The arguments, the environment, the directory and the paths are those that were given."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "mine.py").touch()
    program = (
        "import mine, os, sys\n"
        "print(sys.argv, sorted(os.environ), os.getcwd(), repr(sys.stdin.read()))\n"
        "sys.stderr.write('é')\n"
        "sys.exit(7)\n"
    )
    env = {"PYTHONPATH": str(tmp_path / "site"), "MINE": "1"}
    done = run_python(program, "a", "b c", env=env, cwd=tmp_path)
    assert done.stderr == "é"
    assert done.stdout == f"{['-c', 'a', 'b c']} {['MINE', 'PYTHONPATH']} {tmp_path} ''\n"
    assert done.returncode == 7


def test_nothing_is_there_before_it() -> None:
    """It finds LangChain, and nothing that reads settings, of this project or of a program before.

    Metrics of several workers depend on a variable that prometheus_client reads on its import.
    """
    left = "import langchain_quota, redis, os; left = 1; os.environ['LEFT'] = '1'"
    run_python(left, imported=("redis",))
    done = run_python(
        "found = sorted(globals())\n"
        "import os, sys\n"
        "print('langchain.agents' in sys.modules, found, 'LEFT' in os.environ,\n"
        "      [name for name in sys.modules if name.startswith(\n"
        "          ('langchain_quota', 'prometheus_client', 'redis', 'pytest', 'tests.'))])\n"
    )
    names, *_ = done.stdout.splitlines() or [done.stderr]
    expected = ["__builtins__", "__doc__", "__loader__", "__name__", "__package__", "__spec__"]
    assert names == f"True {expected} False []"


def test_it_ends_as_others_do() -> None:
    """Its exit handlers run, an error is reported, and a signal is its exit code."""
    done = run_python("import atexit\natexit.register(print, 'ended')\nraise ValueError('why')")
    assert (done.returncode, done.stdout) == (1, "ended\n")
    assert done.stderr.splitlines()[-1] == "ValueError: why"
    assert run_python("import os; os.abort()").returncode == -6


def test_the_environment_is_that_of_the_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where none is given, it is that of the tests when the program is run."""
    monkeypatch.setenv("MINE", "now")
    done = run_python("import os, sys; print(os.environ['MINE'], os.getppid(), os.getcwd())")
    mine, parent, directory = done.stdout.split()
    assert (mine, directory) == ("now", str(Path.cwd()))
    assert int(parent) != os.getpid()


def test_one_runs_beside_others(tmp_path: Path) -> None:
    """What is started goes on while others run, can be sent signals, and reads what it is given."""
    readable, writable = os.pipe()
    with (tmp_path / "output").open("w+b") as output:
        start = partial(start_python, stdout=output.fileno(), stderr=output.fileno())
        with (
            start("import sys; print(sys.stdin.read())", stdin=readable) as reads,
            start("import time; time.sleep(600)") as waits,
        ):
            os.close(readable)
            assert run_python("print(1)").stdout == "1\n"
            assert (reads.poll(), waits.poll()) == (None, None)
            with pytest.raises(subprocess.TimeoutExpired):
                waits.wait(0)
            waits.terminate()
            assert waits.wait(60) == -signal.SIGTERM
            waits.kill()  # nobody is there any more
            os.write(writable, b"all")
            os.close(writable)
            assert reads.wait(60) == 0
        output.seek(0)
        assert output.read() == b"all\n"
