"""Imports go down, as CONTRIBUTING says, and the package is imported without any extra."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from tests.forked import run_python, without

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "langchain_quota"
SAID = " ".join((ROOT / "CONTRIBUTING.md").read_text().split()).split("Imports go down: ")[1]
LAYERS = [re.findall(r"`(\w+)`", each) for each in SAID.split(". ")[0].split("→")]
"""From the top down."""


def imported(path: Path) -> Iterator[list[str]]:
    """What a module imports of the package: the parts of each name."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(PACKAGE.name):
            _, *inner = str(node.module).split(".")
            yield from ([*inner, alias.name] for alias in node.names)


def test_imports_go_down() -> None:
    """A module imports from its own layer and those below; the rule and telemetry are apart."""
    level = {part: index for index, layer in enumerate(LAYERS) for part in layer}
    assert len(level) > 10
    assert all((PACKAGE / each).is_dir() or (PACKAGE / f"{each}.py").is_file() for each in level)
    modules = [(path, path.relative_to(PACKAGE).parts[0]) for path in PACKAGE.rglob("*.py")]
    pairs = {(part.removesuffix(".py"), to) for path, part in modules for to, *_ in imported(path)}
    known = {pair for pair in pairs if set(pair) <= set(level)}
    assert {(part, to) for part, to in known if level[part] > level[to]} == set()
    assert not {("admission", "telemetry"), ("telemetry", "admission")} & pairs


def test_no_feature_imports_another() -> None:
    """A feature is known to itself, to the middlewares that may have it, and where it is public."""
    known = {"__init__.py", "agents/quota.py", "agents/drop_ins.py"}
    others = {
        (name, each[1])
        for path in PACKAGE.rglob("*.py")
        for each in imported(path)
        if (name := path.relative_to(PACKAGE).as_posix()) not in known
        and each[0] == "features"
        and each[1] != f"{name}/".split("/")[1].removesuffix(".py")
    }
    assert others == set()


def test_importing_needs_no_extra() -> None:
    """All public names can be imported without the packages of the extras, and make no metric."""
    program = (
        "from langchain_quota import *\n"
        "from prometheus_client import REGISTRY\n"
        "assert not [each for each in REGISTRY.collect() if 'quota' in each.name]\n"
    )
    extras = ("redis", "psycopg", "rich", "httpx", "genai_prices", "opentelemetry.sdk")
    done = run_python(without(*extras) + program)
    assert (done.returncode, done.stderr) == (0, "")
