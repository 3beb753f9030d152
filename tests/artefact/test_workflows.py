"""The workflows, and what a release needs."""

import re
from contextlib import suppress
from itertools import product
from pathlib import Path

import pytest

import langchain_quota
from tools import dist

ROOT = Path(__file__).parents[2]
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
