"""The project's own tools: what `make mutants` plants, what `make compare` lists; workflows."""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
from contextlib import suppress
from itertools import product
from pathlib import Path

import pytest

import langchain_quota
from tools import dist, scores
from tools.compare import main
from tools.copies import PACKAGE, ROOT
from tools.mutants import Fault, faults, planted
from tools.operators import Mutant

SUMS = """
UNUSED = 5

async def add(first, second):
    return first + second
"""
LATER = """
def subtract(first, second):
    return first - second
"""
TEST = """
from langchain_quota.core import sums

async def test_add():
    assert await sums.add(1, 2) == 3
"""


def test_every_fault_can_be_planted() -> None:
    """A fault finds its place once in its file, and the test beside it exists."""
    for fault in faults():
        source = (ROOT / fault.file).read_text(encoding="utf-8")
        assert planted(fault, source) != source
        path, *_, name = fault.test.partition("[")[0].split("::")
        assert f"def {name}(" in (ROOT / path).read_text(encoding="utf-8"), fault.test


@pytest.mark.parametrize(
    ("scope", "old", "new", "changed"),
    [
        ("A.f", "g(x,   1)", "x", "y = x"),
        ("A.f", "return y", "pass", "pass"),
        ("A.f", "y", "z", None),
        ("", "g", "h", None),
        ("B", "g", "h", None),
    ],
)
def test_places(scope: str, old: str, new: str, changed: str | None) -> None:
    """A place is named by function and code, however it is written; it must be there once."""
    source = "class A:\n  def f(x):\n    y = g(\n      x, 1)  # why\n    return y\ng(1)\n"
    fault = Fault("", Path("a.py"), scope, old, new, "")
    if changed is None:
        with pytest.raises(SystemExit, match="such places"):
            planted(fault, source)
    else:
        assert f"        {changed}\n" in planted(fault, source)


def test_a_project(tmp_path: Path) -> None:
    """What is tested is found, and nothing else; a diff tries its own lines."""
    shutil.copytree(ROOT / "tools", tmp_path / "tools")
    package = tmp_path / PACKAGE
    sums = package / "core" / "sums.py"
    sums.parent.mkdir(parents=True)
    for init in (package / "__init__.py", sums.with_name("__init__.py")):
        init.touch()
    sums.write_text(SUMS)
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_sums.py").write_text(TEST)
    (tmp_path / "pyproject.toml").write_text(
        '[tool.pytest.ini_options]\naddopts = ["--import-mode=importlib"]\nasyncio_mode = "auto"\n'
        'markers = ["rest"]\n[tool.coverage.run]\nsource_pkgs = ["langchain_quota"]\n'
    )
    author = ("-c", "user.name=test", "-c", "user.email=test@example.org")
    for command in (["init", "--quiet"], ["add", "."], [*author, "commit", "--quiet", "-m", "Add"]):
        subprocess.run(["git", *command], cwd=tmp_path, check=True)

    def run(*arguments: str) -> tuple[int, dict[str, set[str]]]:
        command = [sys.executable, "-m", "tools.mutants", "--jobs=1", "--report=report", *arguments]
        environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(package.parent)}
        done = subprocess.run(command, cwd=tmp_path, env=environment, check=False)
        outcomes: dict[str, set[str]] = {}
        for each in json.loads((tmp_path / "report").read_text()):
            mutant = Mutant(**each["mutant"])
            outcomes.setdefault(each["outcome"], set()).add(mutant.function)
        return done.returncode, outcomes

    assert run("--sample=70", "--update") == (0, {"found": {"add"}, "survived": {""}})
    sums.write_text(SUMS + LATER)
    assert run("--diff=HEAD") == (1, {"no test": {"subtract"}})


def test_scores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No module may lose more than two points, nor a change be tested less than every module."""
    monkeypatch.setattr(scores, "SCORES", tmp_path / "scores.json")
    accepted = {"core": 90.0, "stores": 70.0, "all": 80.0}

    def check(name: str, score: float, **given: object) -> int:
        options = {"sample": None, "diff": None, "again": None, "seed": "1", "update": False}
        return scores.check_scores({**accepted, name: score}, argparse.Namespace(**options | given))

    assert check("core", 10.0, diff="main") == 0
    assert check("core", 90.0, sample=70, update=True) == 0
    assert [check("core", score, sample=70) for score in (88.0, 87.9)] == [0, 1]
    assert [check("all", score, diff="main") for score in (68.0, 67.9)] == [0, 1]
    assert check("core", 99.0, sample=600) == 1


@pytest.mark.rest
def test_a_planted_fault_is_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A copy with a fault differs in nothing else; without a public name none is compared."""
    package = shutil.copytree(ROOT / "src" / "langchain_quota", tmp_path / "langchain_quota")
    arguments = ["--against", str(tmp_path), "--agents", "6", "--jobs", "1", "--show", "1"]
    with (package / "telemetry" / "tracing.py").open("a") as file:
        file.write('\nTOOL_NAME = "renamed"\n')
    assert main(arguments) == 1
    field, where, _, _, total = capsys.readouterr().out.splitlines()
    assert field.startswith("spans of ")
    assert where.endswith(".gen_ai.tool.name")
    alike = 6 - int(field.split()[2])
    assert 0 < alike < 6
    assert total == f"{alike} of 6 agents are played in the same way"

    public = package / "__init__.py"
    public.write_text(public.read_text().replace('("Telemetry"', '("Renamed"'))
    assert main(arguments) == 1
    nothing = "0 of 0 agents are played in the same way\n"
    reason = "6 agents need what one edition does not have: Telemetry\n"
    assert capsys.readouterr().out == reason + nothing


WORKFLOWS = "".join(each.read_text() for each in (ROOT / ".github" / "workflows").iterdir())


def test_workflows_pin_actions_and_run_the_makefile() -> None:
    """Each action is named by a commit with its version, and what make runs is a target."""
    used = re.findall(r"\buses: (.+)", WORKFLOWS)
    pinned = re.compile(r"[\w./-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+")
    assert used == [each for each in used if pinned.fullmatch(each)] != []
    run = " ".join(re.findall(r"(?m)^ *- run: make ([a-z -]+)", WORKFLOWS)).split()
    targets = re.findall(r"(?m)^([a-z-]+):.*## ", (ROOT / "Makefile").read_text())
    assert {"lint", "dist"} <= {*run} <= {*targets}


def test_versions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Package, changelog and tag have one version, or nothing is released; ours have."""
    dist.check_version(langchain_quota.__version__)
    monkeypatch.setattr(dist, "ROOT", tmp_path)
    right = []
    for newest, tag in product(("Unreleased", "1.0", "0.9"), ("", "v1.0", "v1.1")):
        (tmp_path / "CHANGELOG.md").write_text(f"## [{newest}]\n\n## [0.1]\n")
        monkeypatch.setattr(dist, "run", lambda *_, tag=tag: [tag])
        with suppress(dist.DistError):
            dist.check_version("1.0")
            right.append((newest, tag))
    assert right == [("Unreleased", ""), ("1.0", ""), ("1.0", "v1.0")]
