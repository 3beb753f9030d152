"""Imports go down, as CONTRIBUTING says, and the package is imported without any extra.

Each feature can be deleted: the kernel then does all that it does without it.
"""

import ast
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

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
    assert upward == {("stores/base.py", "agents")}


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


FEATURES = sorted(
    each.stem for each in (PACKAGE / "features").glob("[!_]*") if each.suffix in ("", ".py")
)
OF_THE_KERNEL = ("test_drop_ins.py", "test_exits.py", "test_resume.py", "test_shared_quotas.py")
"""Tool and model limits, drop-ins, quotas, exits, refunds, resumed runs."""
OTHERS = "not inline and not ask and not finalize and not budgets"
"""Those of their cases that need no feature."""
IMPORTED = "ignore::pytest.PytestAssertRewriteWarning"
"""The process has imported LangChain before pytest, which would say so."""
RUN = "import pytest, sys, langchain_quota as there; assert {src!r} in there.__file__, there; "


class Without(ast.NodeTransformer):
    """Takes a feature's lines out of a module.

    They are the imports from its folder or file, what they import where it stands in a tuple, among
    the bases of a class or in `__all__`.
    """

    def __init__(self, feature: str) -> None:
        self._home = f"features.{feature}"
        self._names: set[str] = set()

    def _is_its(self, node: ast.expr | None) -> bool:
        if isinstance(node, ast.Subscript):
            node = node.value
        return isinstance(node, ast.Name) and node.id in self._names

    def _is_in(self, module: object) -> bool:
        return f"{module}.".startswith(f"{self._home}.")

    def visit_ImportFrom(self, node: ast.ImportFrom) -> ast.AST | None:
        if not self._is_in((node.module or "").removeprefix("langchain_quota.")):
            return node
        self._names.update(each.name for each in node.names)
        return None

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        node.bases = [each for each in node.bases if not self._is_its(each)]
        return self.generic_visit(node)

    def visit_Tuple(self, node: ast.Tuple) -> ast.AST:
        node.elts = [each for each in node.elts if not self._is_its(each)]
        return node

    def visit_List(self, node: ast.List) -> ast.AST:
        node.elts = [each for each in node.elts if getattr(each, "value", "") not in self._names]
        return node


@pytest.mark.rest
@pytest.mark.parametrize("feature", FEATURES)
def test_the_kernel_without_a_feature(feature: str, tmp_path: Path) -> None:
    """Without its folder and its lines the kernel's tests pass."""
    copy = tmp_path / "src" / "langchain_quota"
    itself = [feature, f"{feature}.py"]

    def left_out(folder: str, _: list[str]) -> list[str]:
        return ["__pycache__", *(itself if Path(folder).name == "features" else ())]

    shutil.copytree(PACKAGE, copy, ignore=left_out)
    for path in copy.rglob("*.py"):
        if f"features.{feature}" in (text := path.read_text()):
            path.write_text(ast.unparse(Without(feature).visit(ast.parse(text))))
    tests = [f"tests/scenario/{each}" for each in OF_THE_KERNEL]
    options = ["-q", "-n0", "-x", "-p", "no:cacheprovider", "-W", IMPORTED, "-k", OTHERS, *tests]
    run = RUN.format(src=str(tmp_path)) + f"sys.exit(pytest.main({options}))"
    env = {**os.environ, "PYTHONPATH": str(tmp_path / "src")}
    done = run_python(run, env=env, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
