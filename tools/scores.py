"""Plants mutants in a copy of the project, and says how many of them tests find."""

import argparse
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

from coverage import CoverageData

from tools.copies import FAILED, PACKAGE, ROOT, Copies
from tools.operators import Mutant, Place, mutants_of, spread

MODULES = (
    *("core/", "stores/", "middleware/", "features/"),
    *("telemetry/receipts.py", "agents/model_pace.py", "ops/quota_headers.py"),
)
"""Where mutants are sampled: what decides."""
SCORES = Path(__file__).with_name("mutation_scores.json")
MAY_FALL = 2.0
"""So many points may the score of a module fall."""
MOST_TESTS = 200
"""A mutant that so many tests do not find survives: hundreds more would take minutes."""
MAP = ROOT / ".coverage.mutants"


def module_of(file: Path) -> str:
    """Return the module of a file, or its folder."""
    name = file.relative_to(PACKAGE).as_posix()
    return next((each for each in MODULES if name.startswith(each)), name.partition("/")[0])


def changed_lines(commit: str) -> Mapping[Path, set[int]]:
    """Return the lines of the package that differ from where a branch left a commit."""
    command = ["git", "diff", "--merge-base", "--unified=0", commit, "--", f"{PACKAGE}/*.py"]
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    changed: dict[Path, set[int]] = {}
    file = Path()
    for line in said.stdout.splitlines():
        if line.startswith("+++ "):
            file = Path(line.removeprefix("+++ b/"))
        elif hunk := re.match(r"@@ .* \+(\d+)(?:,(\d+))? @@", line):
            first = int(hunk[1])
            changed.setdefault(file, set()).update(range(first, first + int(hunk[2] or 1)))
    return {file: lines for file, lines in changed.items() if lines}


def tests_by_line(jobs: int) -> Mapping[str, Mapping[int, set[str]]]:
    """Return which tests of `make test` reach which lines of which files."""
    sources = (p for part in ("src", "tests") for p in (ROOT / part).rglob("*.py"))
    newest = max(path.stat().st_mtime for path in sources)
    if not MAP.exists() or MAP.stat().st_mtime < newest:
        print("Running the tests to see which lines each of them reaches …", flush=True)
        options = ("--cov", "--cov-context=test", "--cov-report=", "--cov-fail-under=0")
        command = [sys.executable, "-m", "pytest", "-q", f"-n{jobs}", "-m", "not rest", *options]
        environment = {**os.environ, "COVERAGE_FILE": str(MAP)}
        if subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode:
            MAP.unlink(missing_ok=True)
            sys.exit("the tests must pass before mutants are planted")
    data = CoverageData(str(MAP))
    data.read()
    return {
        str(Path(file).relative_to(ROOT)): {
            line: {context.rpartition("|")[0] for context in contexts}
            for line, contexts in data.contexts_by_lineno(file).items()
        }
        for file in data.measured_files()
    }


def tests_for(reached: Mapping[int, set[str]], place: Place, seed: str) -> list[str]:
    """Return tests that reach a statement, of all files; of the module, if it runs on import."""
    tests = set().union(*(reached.get(line, set()) for line in place.lines))
    if tests == {""}:
        tests = tests.union(*reached.values())
    return sorted(spread(tests - {""}, lambda test: test.partition("::")[0], seed)[:MOST_TESTS])


def chosen_mutants(options: argparse.Namespace) -> dict[Mutant, Place]:
    """Return the mutants that the options choose."""

    def choose(files: Iterable[Path], number: int | None = None) -> dict[Mutant, Place]:
        made = {mutant: at for file in sorted(files) for mutant, at in mutants_of(file).items()}
        order = spread(made, lambda mutant: (mutant.file, made[mutant].lines.stop), options.seed)
        return {mutant: made[mutant] for mutant in order[:number]}

    if options.again:
        report = [Mutant(**each["mutant"]) for each in json.loads(options.again.read_text())]
        places = choose({Path(mutant.file) for mutant in report if (ROOT / mutant.file).exists()})
        return {mutant: places[mutant] for mutant in report if mutant in places}
    if options.diff:
        changed = changed_lines(options.diff)
        places = choose(changed)
        return {m: at for m, at in places.items() if at.lines[-1] in changed[Path(m.file)]}
    files = [file.relative_to(ROOT) for file in (ROOT / PACKAGE).rglob("*.py")]
    chosen: dict[Mutant, Place] = {}
    for module in MODULES:
        of_module = (file for file in files if module_of(file) == module)
        chosen |= choose(of_module, options.sample // len(MODULES))
    return chosen


def plant_mutants(options: argparse.Namespace, directory: str) -> int:
    """Plant mutants, and print the scores and those that survive; 1 if a score is too low."""
    if not (chosen := chosen_mutants(options)):
        print("no mutants")
        return 0
    reached = tests_by_line(options.jobs)
    copies = Copies(directory, options.jobs)
    ends = time.monotonic() + 60 * options.minutes

    def outcome_of(mutant: Mutant) -> tuple[str, str]:
        tests = tests_for(reached.get(mutant.file, {}), chosen[mutant], options.seed)
        if not tests:
            return "no test", ""
        if time.monotonic() > ends:
            return "no time", ""
        text = chosen[mutant].planted((ROOT / mutant.file).read_bytes())
        status, said = copies.run(Path(mutant.file), text, "-x", *tests)
        outcome = {0: "survived", None: "hung"}.get(status, "found")
        return outcome, ", ".join(FAILED.findall(said))

    report = []
    with ThreadPoolExecutor(options.jobs) as pool:
        for mutant, (outcome, by) in zip(chosen, pool.map(outcome_of, chosen), strict=True):
            report.append({"mutant": asdict(mutant), "outcome": outcome, "by": by})
            if outcome != "found":
                print(f"{outcome}: {mutant.file} {mutant.function}", flush=True)
                print(f"- {mutant.old}\n+ {mutant.new}".replace("\n", "\n  "), flush=True)
            if options.report:
                options.report.write_text(json.dumps(report, indent=1) + "\n")
    return check_scores(scores_of(report), options)


def scores_of(report: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Print how many mutants were found in each module and in all, and return percentages."""
    outcomes: dict[str, list[bool]] = {}
    for each in report:
        if each["outcome"] != "no time":
            for name in (module_of(Path(each["mutant"]["file"])), "all"):
                outcomes.setdefault(name, []).append(each["outcome"] in {"found", "hung"})
    for name, found in outcomes.items():
        print(f"{name}: {sum(found)} of {len(found)} found")
    return {name: round(100 * sum(found) / len(found), 1) for name, found in outcomes.items()}


def check_scores(scores: Mapping[str, float], options: argparse.Namespace) -> int:
    """Compare with the accepted scores, or accept these; 1 if one is too low."""
    if options.again:
        return 0
    sample = {"mutants": options.sample, "seed": options.seed}
    if options.update:
        SCORES.write_text(json.dumps({"sample": sample, "scores": scores}, indent=2) + "\n")
    if not SCORES.exists():
        print("no scores are accepted yet: accept those of a sample with --update")
        return 0
    accepted = json.loads(SCORES.read_text())
    least = accepted["scores"]
    if options.diff:
        # A change need not be tested better than the module that is tested least.
        least = {"all": min(least.values())}
    elif accepted["sample"] != sample:
        print(f"the accepted scores are of {accepted['sample']}: accept these with --update")
        return 1
    low = [name for name, score in least.items() if scores.get(name, 0.0) < score - MAY_FALL]
    for name in low:
        print(f"{name}: {scores.get(name)} % found, in place of {least[name]} %")
    return int(bool(low))
