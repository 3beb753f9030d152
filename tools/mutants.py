"""`make mutants`: plants faults in copies of the project, where tests must find them.

By default these are the faults of `tools/faults.yaml`, each with a test that must find it.
`--search` runs other tests on chosen faults, and prints those that find them. With `--diff` or
`--sample` they are mutants of `tools/operators.py`, with all tests that reach the changed lines.
"""

import argparse
import ast
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import yaml

from tools.copies import FAILED, PACKAGE, ROOT, Copies

FAULTS = Path(__file__).with_name("faults.yaml")
SKIPPED = re.compile(r"^SKIPPED .*", re.MULTILINE)


@dataclass(frozen=True)
class Fault:
    """A change that a test must find."""

    name: str
    file: Path
    scope: str
    old: str
    new: str
    test: str


def faults(names: Sequence[str] = ()) -> list[Fault]:
    """Return the faults of these names, or all of them."""
    by_file = yaml.safe_load(FAULTS.read_text(encoding="utf-8"))
    known = {
        name: Fault(
            name, PACKAGE / file, each.get("in", ""), each["old"], each["new"], each["test"]
        )
        for file, entries in by_file.items()
        for name, each in entries.items()
    }
    if unknown := {*names} - {*known}:
        sys.exit(f"no such fault: {', '.join(sorted(unknown))}")
    return [known[name] for name in names or known]


def planted(fault: Fault, source: str) -> str:
    """Return the text of a file with the fault, whose place must be there once."""
    if fault.file.suffix == ".py":
        with suppress(SyntaxError):  # SQL, for example
            (old,), new = (ast.parse(code).body for code in (fault.old, fault.new))
            return _planted_in_python(fault, ast.parse(source), old, new)
    scope = rf"^(local )?function {fault.scope}\(.*?^end" if fault.scope else r"\A.*\Z"
    text = _only(fault, [*re.finditer(scope, source, re.MULTILINE | re.DOTALL)])
    at = text.start() + _only(fault, [*re.finditer(re.escape(fault.old), text[0])]).start()
    return source[:at] + fault.new + source[at + len(fault.old) :]


def _planted_in_python(fault: Fault, tree: ast.AST, old: ast.AST, new: list[Any]) -> str:
    if isinstance(old, ast.Expr) and isinstance(new[0], ast.Expr):
        old, new = old.value, [new[0].value]
    scopes = [tree]
    for name in fault.scope.split(".") if fault.scope else ():
        scopes = [n for scope in scopes for n in ast.walk(scope) if getattr(n, "name", "") == name]
    form = _form(old)
    places = [n for scope in scopes for n in ast.walk(scope) if _form(n) == form]
    return ast.unparse(_Replacement(_only(fault, places), new).visit(tree))


def _form(node: ast.AST) -> str:
    return ast.dump(node).replace("ctx=Store()", "ctx=Load()")


def _only(fault: Fault, places: list[Any]) -> Any:
    if len(places) != 1:
        sys.exit(f"{fault.name}: {fault.file} has {len(places)} such places")
    return places[0]


class _Replacement(ast.NodeTransformer):
    """Puts an expression in the place of one, or statements."""

    def __init__(self, place: ast.AST, new: list[Any]) -> None:
        self.place, self.new = place, new

    def visit(self, node: ast.AST) -> Any:
        """Return what stands in the place of a node."""
        if node is not self.place:
            return self.generic_visit(node)
        return self.new if isinstance(node, ast.stmt) else self.new[0]


def check_that_all_pass(tests: Sequence[str]) -> None:
    """Exit if a test fails without a fault, or is skipped: it would find nothing."""
    command = [sys.executable, "-m", "pytest", "-q", "--tb=short", *tests]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode or SKIPPED.search(done.stdout):
        sys.exit(f"these tests must pass without a fault:\n{done.stdout}{done.stderr}")


def found_by(copies: Copies, tests: Sequence[str], fault: Fault) -> list[str]:
    """Return the tests that fail in a copy that has the fault."""
    text = planted(fault, (ROOT / fault.file).read_text(encoding="utf-8")).encode()
    status, said = copies.run(fault.file, text, *(tests or ["-x", fault.test]))
    if status is None:
        return [f"{fault.test}, which did not end"]
    if status not in {0, 1}:
        sys.exit(f"{fault.name}: pytest failed\n{said}")
    return sorted({*FAILED.findall(said)})


def plant_faults(chosen: Sequence[Fault], tests: Sequence[str], copies: Copies, jobs: int) -> int:
    """Plant faults, and print the tests that find them; 1 if one survives."""
    if not tests:
        check_that_all_pass(sorted({fault.test for fault in chosen}))
    survived = 0
    with ThreadPoolExecutor(jobs) as pool:
        finders = pool.map(partial(found_by, copies, tests), chosen)
        for fault, names in zip(chosen, finders, strict=True):
            survived += not names
            print(f"{fault.name}: {', '.join(names) or 'SURVIVED'}", flush=True)
    print(f"{len(chosen) - survived} of {len(chosen)} faults found")
    return int(survived > 0)


def main() -> int:
    """Plant faults or mutants: 1 if too many survive."""
    parser = argparse.ArgumentParser(prog="python -m tools.mutants", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="FAULT", help="some faults; by default all")
    parser.add_argument(
        "--search", action="append", default=[], metavar="TEST", help="find tests that find it"
    )
    chosen = parser.add_mutually_exclusive_group()
    chosen.add_argument("--diff", metavar="COMMIT", help="mutants of the lines changed since")
    chosen.add_argument("--sample", type=int, metavar="N", help="N mutants of what decides")
    chosen.add_argument("--again", type=Path, metavar="REPORT", help="the mutants of a report")
    parser.add_argument("--seed", default="1", help="of the sample; 1 by default")
    parser.add_argument("--minutes", type=float, default=1e6, help="plant none after so long")
    parser.add_argument("--report", type=Path, help="write the mutants and their outcomes here")
    parser.add_argument("--update", action="store_true", help="accept the scores of the sample")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="copies to test in")
    options = parser.parse_args()
    with TemporaryDirectory() as directory:
        if options.diff or options.sample or options.again:
            from tools.scores import plant_mutants  # noqa: PLC0415 - with libcst: a second

            return plant_mutants(options, directory)
        copies = Copies(directory, options.jobs)
        return plant_faults(faults(options.names), options.search, copies, options.jobs)


if __name__ == "__main__":
    sys.exit(main())
