"""Run the tests of the package on every Python found, from the oldest to newest langchain.

Needs nothing but Python: it makes an environment for each combination, and says at the end which
ones it ran. Exit status 1 if one of them failed.
"""

import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MINORS = range(11, 15)
SAME_EVERYWHERE = ("artefact", "docs", "server")
"""Folders of tests of what users do not install: the repository's pages, dashboards and rules.

`make test` and `make test-all` run them once, with the pinned versions.
"""

PIP = ("-m", "pip", "install", "--quiet", "--disable-pip-version-check")


@dataclass(frozen=True)
class Combination:
    """A Python, and the versions to install with it."""

    minor: int
    versions: str
    arguments: tuple[str, ...]
    group: str = "test"

    @property
    def venv(self) -> Path:
        """Where its environment is."""
        return ROOT / f".venv-3.{self.minor}-{self.versions}"

    def __str__(self) -> str:
        return f"Python 3.{self.minor}, {self.versions} versions"


PINNED = ("pinned", ("-c", "constraints.txt"))
OLDEST = ("oldest", ("-c", "constraints-oldest.txt"), "test-oldest")
NEWEST = ("newest", ("--upgrade", "--upgrade-strategy", "eager"))


def interpreters() -> dict[int, str]:
    """The Pythons that are found on PATH or under pyenv, by minor version."""
    found = {}
    for minor in MINORS:
        name = f"python3.{minor}"
        pyenv = sorted(Path.home().glob(f".pyenv/versions/3.{minor}.*/bin/{name}"))
        for candidate in [shutil.which(name), *map(str, pyenv), sys.executable]:
            if candidate and _minor(candidate) == minor:
                found[minor] = candidate
                break
    return found


def combinations(minors: list[int]) -> list[Combination]:
    """The first Python on the oldest versions, the last on the newest, the others on the pinned.

    The pinned versions are also those of `make test`.
    """
    return [
        Combination(minors[0], *OLDEST),
        *(Combination(minor, *PINNED) for minor in minors[1:-1]),
        Combination(minors[-1], *NEWEST),
    ]


def run(combination: Combination, python: str) -> str:
    """Make the environment, run the tests, and say how it went."""
    print(f"\n=== {combination}", flush=True)
    venv_python = str(combination.venv / "bin" / "python")
    commands: list[tuple[str, ...]] = [
        (python, "-m", "venv", "--clear", str(combination.venv)),
        (venv_python, *PIP, "-c", "constraints.txt", "--upgrade", "pip"),
        (
            venv_python,
            *PIP,
            *combination.arguments,
            "--group",
            combination.group,
            "--editable",
            ".[demo,otlp]",
        ),
        (
            *(venv_python, "-m", "pytest", "-m", "not rest", "tests"),
            *(f"--ignore=tests/{name}" for name in SAME_EVERYWHERE),
        ),
    ]
    for command in commands:
        if subprocess.run(command, cwd=ROOT, check=False).returncode:
            return f"FAILED at {' '.join(command[1:4])}"
    show = "from importlib.metadata import version as v; print(v('langchain'), v('langgraph'))"
    versions = subprocess.run(
        (venv_python, "-c", show), cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout.split()
    return f"ok: langchain {versions[0]}, langgraph {versions[1]}"


def main() -> int:
    """Run all combinations."""
    pythons = interpreters()
    if not pythons:
        print("no Python from 3.11 to 3.14 is found", file=sys.stderr)
        return 1
    results = {str(each): run(each, pythons[each.minor]) for each in combinations(sorted(pythons))}
    print("\nThe matrix:")
    for name, result in results.items():
        print(f"  {name}: {result}")
    absent = [f"3.{minor}" for minor in MINORS if minor not in pythons]
    if absent:
        print(f"  not found, not run: Python {', '.join(absent)}")
    return int(any(result.startswith("FAILED") for result in results.values()))


def _minor(python: str) -> int | None:
    show = "import sys; print(*sys.version_info[:2])"
    done = subprocess.run((python, "-c", show), check=False, capture_output=True, text=True)
    match done.stdout.split():
        case ["3", minor]:
            return int(minor)
    return None


if __name__ == "__main__":
    sys.exit(main())
