"""`make test-matrix`: the package's tests on every Python, from oldest to newest langchain."""

import shutil
import subprocess

import nox


def runs(version: str) -> bool:
    """Whether a Python is there: pyenv's commands may run none."""
    python = shutil.which(f"python{version}")
    return python is not None and not subprocess.run((python, "-V"), check=False).returncode


FOUND = [each for each in ("3.11", "3.12", "3.13", "3.14") if runs(each)]
if not FOUND:
    raise SystemExit("none of python3.11 to python3.14 is on PATH")
VERSIONS = {
    "oldest": ("-c", "constraints-oldest.txt", "--group", "test-oldest"),
    "pinned": ("-c", "constraints.txt", "--group", "test"),
    "newest": ("--upgrade", "--upgrade-strategy", "eager", "--group", "test"),
}
COMBINATIONS = [
    *((each, "oldest") for each in FOUND[:1]),
    *((each, "pinned") for each in FOUND[1:-1]),
    *((each, "newest") for each in FOUND[-1:]),
]
"""The first Python on the oldest versions, the last on the newest, the others on the pinned.

The pinned versions are also those of `make test`.
"""

SAME_EVERYWHERE = ("artefact", "docs", "server")
"""Folders of tests of what users do not install: the repository's pages, dashboards and rules.

`make test` and `make test-all` run them once, with the pinned versions.
"""

SHOW = "from importlib.metadata import version as v; print(v('langchain'), v('langgraph'))"


@nox.session(venv_backend="venv")
@nox.parametrize("python, versions", COMBINATIONS)
def tests(session: nox.Session, versions: str) -> None:
    """Run the tests on one Python, with the oldest, the pinned or the newest versions."""
    session.install("-c", "constraints.txt", "--upgrade", "pip")
    session.install(*VERSIONS[versions], "--editable", ".[otlp]")
    session.run("python", "-c", SHOW)
    given = session.posargs or ["tests", *(f"--ignore=tests/{name}" for name in SAME_EVERYWHERE)]
    session.run("pytest", "-m", "not rest", *given)
