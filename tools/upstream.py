"""Run LangChain's own tests of its limiters on the drop-ins, in the sync and in the async form.

The tests come from the sdist of the pinned version. pip fetches it from the package index, and it
is kept beside the virtual environment. Exit status 1 if a test fails, or if there is no sdist and
`CI=true`.
"""

import asyncio
import importlib
import os
import subprocess
import sys
import tarfile
from collections.abc import Callable, Sequence
from functools import wraps
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from langchain.agents.middleware import AgentMiddleware

import langchain_quota

ROOT = Path(__file__).resolve().parent.parent
KEPT = ROOT / ".venv-langchain-tests"
MODULES = ("tool_call_limit", "model_call_limit")
TESTS = "tests/unit_tests/agents"
FILES = (
    "tests/__init__.py",
    "tests/unit_tests/__init__.py",
    f"{TESTS}/__init__.py",
    f"{TESTS}/model.py",
    f"{TESTS}/middleware/__init__.py",
    f"{TESTS}/middleware/implementations/__init__.py",
    *(f"{TESTS}/middleware/implementations/test_{module}.py" for module in MODULES),
)
"""The files that are taken from the sdist. They need neither its settings nor its fixtures."""

FORMS = ("sync", "async")
DROP_INS = (langchain_quota.ToolCallLimitMiddleware, langchain_quota.ModelCallLimitMiddleware)
HOOKS = ("before_agent", "before_model", "after_model")


class UpstreamError(Exception):
    """The tests cannot be run; the message says why, in one line."""


class OnDropIns:
    """A plugin of pytest that gives LangChain's tests our classes in place of LangChain's.

    Args:
        form: With `"async"` every hook runs in its async form only, and every agent by `ainvoke`.
    """

    def __init__(self, form: str) -> None:
        for module in MODULES:
            theirs = importlib.import_module(f"langchain.agents.middleware.{module}")
            for name in set(dir(langchain_quota)) & set(vars(theirs)):
                setattr(theirs, name, getattr(langchain_quota, name))
        if form == "async":
            _run_async()

    @pytest.hookimpl
    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Fail if a file does not test our classes.

        Raises:
            pytest.UsageError: A file tests something else, or nothing.
        """
        modules = {item.getparent(pytest.Module).obj for item in session.items}  # type: ignore[union-attr]  # all are in one
        tested = {
            each
            for module in modules
            for name, each in vars(module).items()
            if name.endswith("CallLimitMiddleware")
        }
        if tested != set(DROP_INS):
            raise pytest.UsageError(f"the tests are not of the drop-ins, but of {tested}")


def _run_async() -> None:
    """Make the sync form of every hook run the async form."""
    for drop_in in DROP_INS:
        for hook in HOOKS:
            sync = getattr(drop_in, hook)
            if sync is not getattr(AgentMiddleware, hook):
                setattr(drop_in, hook, _by(sync, f"a{hook}"))
    graph = importlib.import_module("langgraph.graph.state").CompiledStateGraph
    graph.invoke = _by(graph.invoke, "ainvoke")


def _by(sync: Callable[..., Any], asynchronous: str) -> Callable[..., Any]:
    """A sync method that runs the async method with the same arguments instead."""

    @wraps(sync)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return asyncio.run(getattr(self, asynchronous)(*args, **kwargs))

    return method


def pinned() -> str:
    """The version of LangChain that `make` installs."""
    pins = (ROOT / "constraints.txt").read_text()
    return dict(line.split("==") for line in pins.splitlines() if "==" in line)["langchain"]


def sdist(kept: Path, wanted: str) -> Path:
    """The sdist of the installed LangChain; fetched if it is not kept.

    Args:
        kept: Where it is kept.
        wanted: The version that should be installed.

    Raises:
        UpstreamError: It cannot be fetched, or another version is installed.
    """
    path = kept / f"langchain-{wanted}.tar.gz"
    if not path.is_file():
        command = (sys.executable, "-m", "pip", "download", "--disable-pip-version-check")
        only = ("--quiet", "--no-deps", "--no-binary", "langchain", "--dest", str(kept))
        done = subprocess.run(
            (*command, *only, f"langchain=={wanted}"), check=False, capture_output=True, text=True
        )
        if done.returncode or not path.is_file():
            reason = (done.stderr.strip() or "pip fetched something else").splitlines()[-1]
            raise UpstreamError(f"no sdist of langchain {wanted} from the package index: {reason}")
    if version("langchain") != wanted:
        raise UpstreamError(f"langchain {version('langchain')} is installed, not {wanted}")
    return path


def run(archive: Path, form: str) -> int:
    """Run the tests in one form; pytest's exit status."""
    with TemporaryDirectory() as directory:
        with tarfile.open(archive) as content:
            top = archive.name.removesuffix(".tar.gz")
            for file in FILES:
                content.extract(f"{top}/{file}", directory, filter="data")
        root = Path(directory, top)
        # `tests` is LangChain's package here, not ours.
        sys.path[:] = [str(root), *(each for each in sys.path if Path(each).resolve() != ROOT)]
        return pytest.main(
            [
                *(
                    "-c",
                    os.devnull,
                    "--rootdir",
                    str(root),
                    "--noconftest",
                    "-p",
                    "no:cacheprovider",
                ),
                "-q",
                *(str(root / file) for file in FILES if "/test_" in file),
            ],
            plugins=[OnDropIns(form)],
        )


def main(arguments: Sequence[str] = ()) -> int:
    """Run all tests in each form, each in a process of its own.

    Args:
        arguments: Nothing; or the sdist and the form of one run.
    """
    if arguments:
        archive, form = arguments
        return run(Path(archive), form)
    try:
        archive_path = sdist(KEPT, pinned())
    except UpstreamError as error:
        print(f"LangChain's own tests were not run: {error}", file=sys.stderr)
        return int(os.environ.get("CI") == "true")
    failed = []
    for each in FORMS:
        print(f"=== LangChain's own tests on the drop-ins, {each}", flush=True)
        command = (sys.executable, str(Path(__file__)), str(archive_path), each)
        # With only this plugin, and without the settings of this project.
        environment = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_ADDOPTS": ""}
        if subprocess.run(command, env=environment, check=False).returncode:
            failed.append(each)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
