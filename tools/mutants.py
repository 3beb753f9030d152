"""`make mutants`: plants each fault of `tools/faults.yaml` in a copy; its tests must find it.

A fault is one text in one file, replaced by another. First all tests that are named beside the
faults run on the code as it is, and must pass. Then each fault is planted in a copy of the project,
and every test that is named beside it must fail there. `--search` runs other tests on chosen
faults, and prints those that find them: name one for each fault, or better two.
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
LEFT_OUT = shutil.ignore_patterns(
    ".git", ".venv*", ".hypothesis", ".mypy_cache", ".pytest_cache", ".ruff_cache", "dist", "site"
)
OF_A_TEST = 30
"""After so many seconds a test has failed: a fault may make an agent go round in circles."""

OF_A_FAULT = 600
FAILED = re.compile(r"^(?:FAILED|ERROR) ([^\s\[]+)", re.MULTILINE)
SKIPPED = re.compile(r"^SKIPPED .*", re.MULTILINE)


@dataclass(frozen=True)
class Fault:
    """A change that tests must find."""

    part: str
    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


def faults(names: Sequence[str]) -> list[Fault]:
    """The faults of these names, or all of them."""
    by_part = yaml.safe_load(FAULTS.read_text(encoding="utf-8"))
    made = [
        Fault(part, name, each["file"], each["old"], each["new"], tuple(each["tests"]))
        for part, entries in by_part.items()
        for name, each in entries.items()
    ]
    if unknown := set(names) - {each.name for each in made}:
        sys.exit(f"no such fault: {', '.join(sorted(unknown))}")
    return [each for each in made if not names or each.name in names]


def changed(fault: Fault) -> str:
    """The text of the file with the fault, whose old text must be there exactly once."""
    text = (ROOT / fault.file).read_text(encoding="utf-8")
    if text.count(fault.old) != 1:
        sys.exit(f"{fault.name}: {fault.file} has {text.count(fault.old)} times {fault.old!r}")
    made = text.replace(fault.old, fault.new)
    if fault.file.endswith(".py"):
        compile(made, fault.file, "exec")
    return made


def run(root: Path, tests: Sequence[str], *options: str) -> str:
    """What pytest says of tests of a copy of the project."""
    command = [sys.executable, "-m", "pytest", "-q", "--tb=no", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, f"--timeout={OF_A_TEST}", *options, *tests],
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(root / "src")},
        capture_output=True,
        text=True,
        timeout=OF_A_FAULT,
        check=False,
    )
    if done.returncode not in {0, 1}:
        raise RuntimeError(f"pytest failed\n{done.stdout}{done.stderr}")
    return done.stdout


def check_that_all_pass(tests: Sequence[str]) -> None:
    """A test that fails without a fault, or is skipped, finds nothing."""
    said = run(ROOT, tests, "-n", str(os.cpu_count()))
    if others := FAILED.findall(said) + SKIPPED.findall(said):
        sys.exit("\n".join(["these tests must pass without a fault:", *others]))


def found_by(fault: Fault, tests: Sequence[str]) -> list[str]:
    """The tests that fail in a copy of the project that has the fault."""
    with TemporaryDirectory() as directory:
        copy = Path(directory, "copy")
        # With the compiled modules, which stay valid.
        shutil.copytree(ROOT, copy, ignore=LEFT_OUT)
        (copy / fault.file).write_text(changed(fault), encoding="utf-8")
        try:
            said = run(copy, tests, "-n0")
        except (RuntimeError, subprocess.TimeoutExpired) as error:
            error.add_note(f"fault {fault.name}")
            raise
    return sorted(set(FAILED.findall(said)))


def main() -> int:
    """Plant faults: 1 if a test that is named beside one does not find it."""
    parser = argparse.ArgumentParser(prog="python -m tools.mutants", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="FAULT", help="some faults; by default all")
    parser.add_argument(
        "--search", action="append", default=[], metavar="TEST", help="find tests that find it"
    )
    options = parser.parse_args()
    chosen = faults(options.names)
    for fault in chosen:
        changed(fault)
    if not options.search:
        check_that_all_pass(sorted({test for fault in chosen for test in fault.tests}))
    survived = []
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        tests = [options.search or fault.tests for fault in chosen]
        for fault, finders in zip(chosen, pool.map(found_by, chosen, tests), strict=True):
            print(f"{fault.name}: {', '.join(finders) or 'NOT FOUND'}", flush=True)
            missing = set() if options.search else {*fault.tests} - {*finders}
            if missing:
                print(f"{fault.name}: NOT FOUND by {', '.join(sorted(missing))}", flush=True)
            if missing or not finders:
                survived.append(fault.name)
    for part in dict.fromkeys(fault.part for fault in chosen):
        names = [fault.name for fault in chosen if fault.part == part]
        print(f"{part}: {len({*names} - {*survived})} of {len(names)} found")
    print(f"{len(chosen) - len(survived)} of {len(chosen)} faults found")
    return 1 if survived else 0


if __name__ == "__main__":
    sys.exit(main())
