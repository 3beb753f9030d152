"""Imports go down, as CONTRIBUTING says, and the package is imported without any extra."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from tests.forked import run_python, without

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "langchain_quota"
SAID = " ".join((ROOT / "CONTRIBUTING.md").read_text().split()).split("Imports run down: ")[1]
LAYERS = [re.findall(r"`(\w+)`", each) for each in SAID.split(". ")[0].split("→")]
"""From the top down."""


def imported(path: Path) -> Iterator[list[str]]:
    """What a module imports of the package: the parts of each name. Types alone do not count."""
    tree = ast.parse(path.read_text())
    types = [
        node
        for block in ast.walk(tree)
        if isinstance(block, ast.If) and ast.unparse(block.test) == "TYPE_CHECKING"
        for node in ast.walk(block)
    ]
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(PACKAGE.name):
            _, *inner = str(node.module).split(".")
            yield from ([*inner, alias.name] for alias in node.names if node not in types)


def test_imports_run_down() -> None:
    """A module imports from its own layer and those below it; one method loads what it returns."""
    level = {part: index for index, layer in enumerate(LAYERS) for part in layer}
    folders = {path.name for path in PACKAGE.iterdir() if path.is_dir() and path.name[0] != "_"}
    assert folders - level.keys() == {"monitoring"}
    upward = {
        (path.relative_to(PACKAGE).as_posix(), to)
        for path in PACKAGE.rglob("*.py")
        for to, *_ in imported(path)
        if level.get(path.relative_to(PACKAGE).parts[0].removesuffix(".py"), -1) > level.get(to, 99)
    }
    assert upward == {("stores/rate_limiting.py", "agents")}


def test_stores_need_no_langchain() -> None:
    """Neither they nor what lies below them import LangChain or packages of telemetry."""
    lower = [layer for (layer,) in LAYERS[[*LAYERS].index(["stores"]) :]]
    paths = [
        path.relative_to(PACKAGE.parent)
        for each in lower
        for path in PACKAGE.glob(f"{each}/[!_]*.py")
    ]
    program = without(
        "langchain", "langchain_core", "langgraph", "opentelemetry", "prometheus_client"
    )
    program += "".join(f"import {'.'.join(path.with_suffix('').parts)}\n" for path in paths)
    done = run_python(program + "assert 'langchain_quota.telemetry' not in sys.modules")
    assert len(paths) > len(lower)
    assert (done.returncode, done.stderr) == (0, "")


def test_no_feature_imports_another() -> None:
    """A feature is known to itself, and to what users attach."""
    others = {
        (name, parts[1])
        for path in PACKAGE.rglob("*.py")
        for parts in imported(path)
        if (name := path.relative_to(PACKAGE).as_posix()) != "__init__.py"
        and not name.startswith("agents/")
        and parts[0] == "features"
        and parts[1] != f"{name}/".split("/")[1].removesuffix(".py")
    }
    assert others == set()


def test_importing_needs_no_extra() -> None:
    """All public names can be imported without the packages of the extras, and make no metric."""
    program = (
        "from langchain_quota import *\n"
        "from prometheus_client import REGISTRY\n"
        "assert not [each for each in REGISTRY.collect() if 'quota' in each.name]\n"
    )
    extras = ("redis", "psycopg", "httpx", "genai_prices", "opentelemetry.sdk")
    done = run_python(without(*extras) + program)
    assert (done.returncode, done.stderr) == (0, "")
