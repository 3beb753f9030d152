"""`make mutants`: plants each fault of `tools/faults.yaml` in a copy, and says which tests find it.

A fault is one text in one file, replaced by another. The tests that are named beside it must fail
in a copy of the project that has the fault. `--search` runs all tests of `make test` instead, and
prints those that find it.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import yaml

ROOT = Path(__file__).resolve().parents[1]
FAULTS = Path(__file__).with_name("faults.yaml")
COPIED = ("src", "tests", "dashboards", "docs", "docker", "benchmarks", "tools")
SECONDS = 600
FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+)", re.MULTILINE)


@dataclass(frozen=True)
class Fault:
    """A change that at least one test must find."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


@dataclass(frozen=True)
class Tried:
    """What the tests said of a fault."""

    fault: Fault
    found_by: tuple[str, ...]
    output: str


def faults(names: Sequence[str]) -> list[Fault]:
    """The faults of these names, or all of them."""
    entries = yaml.safe_load(FAULTS.read_text(encoding="utf-8"))
    made = [Fault(**{**each, "tests": tuple(each["tests"])}) for each in entries]
    if unknown := set(names) - {each.name for each in made}:
        sys.exit(f"no such fault: {', '.join(sorted(unknown))}")
    return [each for each in made if not names or each.name in names]


def plant(fault: Fault, root: Path) -> None:
    """Replace the text of a fault, which must be there exactly once."""
    path = root / fault.file
    text = path.read_text(encoding="utf-8")
    if text.count(fault.old) != 1:
        sys.exit(f"{fault.name}: {fault.file} has {text.count(fault.old)} times {fault.old!r}")
    path.write_text(text.replace(fault.old, fault.new), encoding="utf-8")


def tried(fault: Fault, *, search: bool) -> Tried:
    """Run the fault's tests on a copy of the project that has the fault."""
    with TemporaryDirectory() as directory:
        copy = Path(directory, "copy")
        copy.mkdir()
        for name in COPIED:
            shutil.copytree(ROOT / name, copy / name)
        for each in (*ROOT.glob("*.toml"), *ROOT.glob("*.md"), *ROOT.glob("*.yml")):
            shutil.copy(each, copy)
        shutil.copy(ROOT / "Makefile", copy)
        plant(fault, copy)
        tests = ("-m", "not rest") if search else (*fault.tests, "-x")
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-n0", "-p", "no:cacheprovider", *tests],
            cwd=copy,
            env={**os.environ, "PYTHONPATH": str(copy / "src"), "PYTHONDONTWRITEBYTECODE": "1"},
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=False,
        )
    if done.returncode not in (0, 1):
        sys.exit(f"{fault.name}: pytest failed\n{done.stdout}{done.stderr}")
    return Tried(fault, tuple(FAILED.findall(done.stdout)), done.stdout)


def main() -> int:
    """Try faults: 1 if one of them is not found."""
    parser = argparse.ArgumentParser(prog="python -m tools.mutants", description=__doc__)
    parser.add_argument("names", nargs="*", help="some faults; by default all")
    parser.add_argument("--search", action="store_true", help="find the tests that find a fault")
    options = parser.parse_args()
    chosen = faults(options.names)
    survived = []
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for each in pool.map(lambda fault: tried(fault, search=options.search), chosen):
            found = ", ".join(each.found_by) or "NOT FOUND"
            print(f"{each.fault.name}: {found}", flush=True)
            if not each.found_by:
                survived.append(each.fault.name)
    print(f"{len(chosen) - len(survived)} of {len(chosen)} faults found")
    return 1 if survived else 0


if __name__ == "__main__":
    sys.exit(main())
