"""`make instructions`: count the machine instructions of key paths, and compare them with a commit.

Instructions do not depend on the load of the machine, as times do. A path may take 2 % more than at
the commit, or what `accepted.yaml` allows it, with the reason.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

import yaml

from benchmarks.costs import ROOT, costs
from benchmarks.scenes import STORED
from benchmarks.workloads import Asking, Emitting, Step, Work

ACCEPTED = Path(__file__).with_name("accepted.yaml")
MOST = 1.02
"""The highest ratio of a path's instructions to those at the other commit."""

SETUPS = (
    *("drop-in, tool", "drop-in, model", "Inline, 2"),
    *("QuotaMiddleware, tool", "QuotaMiddleware, model", "QuotaMiddleware, 2"),
    *("QuotaMiddleware, 8", "QuotaMiddleware, 8 and tokens", *STORED),
)

STEPS: dict[str, Work] = {f"step: {setup}": Step(setup, has_memory=False) for setup in SETUPS}
SHORT: dict[str, Work] = {
    "telemetry of a decision": Emitting(1, "not sampled"),
    "a store's answer": Asking(),
}
"""Paths that are repeated more often: what a process does once would show in their numbers."""


def main() -> int:
    """Count, and compare if a commit is named.

    Raises:
        SystemExit: valgrind is missing.
    """
    parser = argparse.ArgumentParser(prog="python -m benchmarks.instructions", description=__doc__)
    parser.add_argument("--against", metavar="COMMIT", help="compare with the merge base of this")
    parser.add_argument("--json", action="store_true", help="print the numbers as JSON")
    arguments = parser.parse_args()
    if shutil.which("valgrind") is None:
        raise SystemExit("valgrind is missing: on Debian and Ubuntu, apt-get install valgrind")
    counts = {**_counts(STEPS, (4, 24)), **_counts(SHORT, (40, 440))}
    if arguments.json:
        print(json.dumps(counts))  # noqa: T201 - a command: it prints
        return 0
    before = _counts_at(arguments.against) if arguments.against else {}
    accepted = yaml.safe_load(ACCEPTED.read_text()) or {}
    failed = False
    for name, count in counts.items():
        ratio = count / before[name] if name in before else None
        too_many = exceeds(name, count, before, accepted)
        failed |= too_many
        change = "" if ratio is None else f"{ratio - 1:+8.1%}{'  too many' if too_many else ''}"
        print(f"{name:36}{count:12,}{change}")  # noqa: T201 - the same
    if failed:
        print(f"If it is worth it, write the number and the reason into {ACCEPTED.name}.")  # noqa: T201 - the same
    return int(failed)


def exceeds(
    name: str, count: int, before: Mapping[str, int], accepted: Mapping[str, Mapping[str, object]]
) -> bool:
    """Return whether a path takes more instructions than it may."""
    most = accepted.get(name, {}).get("instructions", 0)
    allowed = max(before.get(name, count) * MOST, most if isinstance(most, int) else 0)
    return count > allowed


def _counts(works: Mapping[str, Work], times: tuple[int, int]) -> dict[str, int]:
    """Return the instructions of each path."""
    counted = costs([*works.values()], times, counted=True, rounds=1)
    return {name: round(counted.of[work]) for name, work in works.items()}


def _counts_at(commit: str) -> dict[str, int]:
    """Return the numbers at the merge base of a commit and HEAD, counted by the code there."""
    base = _git("merge-base", commit, "HEAD")
    with TemporaryDirectory(prefix="benchmark-") as name:
        tree = Path(name) / "tree"
        _git("worktree", "add", "--detach", str(tree), base)
        try:
            if not (tree / "benchmarks" / "instructions.py").exists():
                return {}
            found = subprocess.run(
                [sys.executable, "-m", "benchmarks.instructions", "--json"],
                cwd=tree,
                env={**os.environ, "PYTHONPATH": str(tree / "src")},
                check=True,
                capture_output=True,
                text=True,
            )
        finally:
            _git("worktree", "remove", "--force", str(tree))
    counts: dict[str, int] = json.loads(found.stdout)
    return counts


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True)
    return done.stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
