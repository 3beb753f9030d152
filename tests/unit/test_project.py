"""What those who take part see: the forms, the workflow and CONTRIBUTING say what is so."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

from tests.faults import at, no_faults
from tests.forked import run_python

ROOT = Path(__file__).parents[2]
GITHUB = ROOT / ".github"
CONFIG = GITHUB / "ISSUE_TEMPLATE" / "config.yml"
FORMS = sorted({*GITHUB.glob("ISSUE_TEMPLATE/*.yml")} - {CONFIG})
WORKFLOWS = sorted((GITHUB / "workflows").glob("*.yml"))
CONTRIBUTING = ROOT / "CONTRIBUTING.md"
MAIN = "https://github.com/langchain-quota/langchain-quota/blob/main/"


def check_schema(schema: str, *paths: Path) -> None:
    command = Path(sys.executable).with_name("check-jsonschema")
    done = subprocess.run(
        (command, "--builtin-schema", f"vendor.{schema}", *paths),
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def load(path: Path) -> Any:
    return yaml.safe_load(path.read_text())


# GitHub's own files.


def test_the_issue_forms_are_forms() -> None:
    """GitHub's schema accepts each form."""
    assert {path.stem for path in FORMS} == {"bug", "feature", "miscount"}
    check_schema("github-issue-forms", *FORMS)


def test_the_chooser_is_one() -> None:
    """GitHub's schema accepts the configuration of the list of forms."""
    check_schema("github-issue-config", CONFIG)


def test_the_workflow_is_one() -> None:
    """GitHub's schema accepts the workflow."""
    assert WORKFLOWS
    check_schema("github-workflows", *WORKFLOWS)


def test_the_workflow_runs_what_must_hold() -> None:
    """CI runs the one script, with rights to read only, and actions of one major version."""
    (workflow,) = map(load, WORKFLOWS)
    steps = [step for job in workflow["jobs"].values() for step in job["steps"]]
    commands = [step["run"] for step in steps if "run" in step]
    assert ".ci/run" in commands
    assert (ROOT / ".ci" / "run").stat().st_mode & 0o111
    targets = makefile_targets()
    assert {each.split()[1] for each in commands if each.startswith("make ")} <= targets
    assert workflow["permissions"] == {"contents": "read"}
    assert all("timeout-minutes" in job for job in workflow["jobs"].values())
    actions = [step["uses"] for step in steps if "uses" in step]
    assert actions
    assert [each for each in actions if not re.fullmatch(r"actions/[\w-]+@v\d+", each)] == []


def test_the_workflow_has_every_python() -> None:
    """CI has each Python that the package says it supports, the oldest as `python3`."""
    (workflow,) = map(load, WORKFLOWS)
    asked = [
        step["with"]["python-version"].split()
        for job in workflow["jobs"].values()
        for step in job["steps"]
        if "setup-python" in step.get("uses", "")
    ]
    classifiers = re.findall(r"Python :: (3\.\d+)", (ROOT / "pyproject.toml").read_text())
    assert asked == [list(reversed(classifiers))]


def test_the_programs_in_the_forms_run() -> None:
    """What a form offers as a program to begin with runs, and prints something."""
    programs = [
        (path, field["attributes"]["value"])
        for path in FORMS
        for field in load(path)["body"]
        if field["attributes"].get("render") == "python" and "value" in field["attributes"]
    ]
    assert [path.stem for path, _ in programs] == ["bug", "miscount"]
    ended = [(path, run_python(program, cwd=ROOT)) for path, program in programs]
    no_faults(
        (
            f"{at(path, 'render: python')}: code {done.returncode}\n{done.stdout}{done.stderr}"
            for path, done in ended
            if done.returncode or "blocked" not in done.stdout
        ),
        remedy="Let the form's program run as it stands, and print a refusal.",
    )


def test_links_lead_to_files() -> None:
    """What a form links to is there."""
    no_faults(
        (
            f"{at(path, link)}: {link}"
            for path in (*FORMS, CONFIG)
            for link in re.findall(rf"{MAIN}([\w./-]+)", path.read_text())
            if not (ROOT / link).is_file()
        ),
        remedy="Link to a file of the project.",
    )


def makefile_targets() -> set[str]:
    return set(re.findall(r"^([a-z-]+):.*## ", (ROOT / "Makefile").read_text(), re.MULTILINE))


def trails() -> list[tuple[Path, list[str]]]:
    """The rows of the worked examples: a file, and what stands in it."""
    found = []
    for line in CONTRIBUTING.read_text().splitlines():
        row = re.match(r"\| `([\w./-]+\.\w+)` \| (.+?) \| ", line)
        if row:
            found.append((ROOT / row[1], re.findall(r"`([^`]+)`", row[2])))
    return found


def test_the_worked_examples_are_true() -> None:
    """Each file of a worked example is there, and has in it what the page says."""
    rows = trails()
    assert len(rows) > 20
    assert all(quotes for _, quotes in rows)
    no_faults(
        (
            f"{at(CONTRIBUTING, quote)}: {path.relative_to(ROOT)} has no {quote}"
            for path, quotes in rows
            for quote in quotes
            if not path.is_file() or quote not in path.read_text()
        ),
        remedy="Quote what the file has.",
    )


def test_the_commands_of_contributing_are_there() -> None:
    """Each `make` target that is named is one, and each that matters is named."""
    text = CONTRIBUTING.read_text()
    named = set(re.findall(r"`make ([a-z-]+)", text))
    assert named <= makefile_targets()
    assert named >= {"test", "lint", "docs", "dist", "picture", "dashboards", "bench"}


def test_the_paths_in_contributing_are_there() -> None:
    """Each file and folder that is named by its path is there."""
    text = re.sub(r"```.*?```", "", CONTRIBUTING.read_text(), flags=re.DOTALL)
    paths = re.findall(r"`((?:src|tests|docs|dashboards|\.ci)/[\w./-]*)`", text)
    links = re.findall(r"\]\((?!https:)([^)]+)\)", text)
    assert len(paths) > 10
    no_faults(
        (
            f"{at(CONTRIBUTING, path)}: {path}"
            for path in (*paths, *links)
            if not (ROOT / path).exists()
        ),
        remedy="Name a file or folder that is there.",
    )
