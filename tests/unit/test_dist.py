"""What is released: the checks of tools/dist.py find what is wrong; tests/typing is complete."""

import ast
import io
import os
import re
import subprocess
import tarfile
from collections.abc import Mapping
from pathlib import Path
from zipfile import ZipFile

import pytest

import langchain_quota
from tools.dist import (
    ADDED,
    DIST_INFO,
    EXPECTED,
    ROOT,
    DistError,
    cloning,
    package_files,
    sdist_faults,
    shell,
    shell_blocks,
    version_faults,
    wheel_faults,
)

INFO = "langchain_quota-1.2.3.dist-info/"
PACKAGE = {"langchain_quota/__init__.py": b"x = 1", "langchain_quota/py.typed": b""}
METADATA = b"Metadata-Version: 2.4\nName: langchain-quota\n\n"
CHANGELOG = "# Changelog\n\n## [{}]\n\n## [1.0.0] - 2026-01-01\n"


def wheel(directory: Path, changes: Mapping[str, bytes | None]) -> list[str]:
    """What is wrong with a wheel of the package, after some changes to its files."""
    files: dict[str, bytes | None] = {
        **PACKAGE,
        **{INFO + name: b"" for name in DIST_INFO},
        INFO + "METADATA": METADATA,
        **changes,
    }
    path = directory / "some.whl"
    with ZipFile(path, "w") as archive:
        for name, content in files.items():
            if content is not None:
                archive.writestr(name, content)
    return wheel_faults(path, PACKAGE, "1.2.3")


@pytest.mark.parametrize(
    ("changes", "faults"),
    [
        ({}, []),
        ({"langchain_quota/py.typed": None}, ["langchain_quota/py.typed is missing in the wheel"]),
        ({f"{INFO}licenses/LICENSE": None}, [f"{INFO}licenses/LICENSE is missing in the wheel"]),
        ({"tests/test_x.py": b""}, ["tests/test_x.py should not be in the wheel"]),
        (
            {"langchain_quota/__init__.py": b"x = 2"},
            ["langchain_quota/__init__.py is not that of the checkout"],
        ),
    ],
    ids=["whole", "untyped", "unlicensed", "tests", "old"],
)
def test_a_wheel_is_the_package(
    changes: Mapping[str, bytes | None], faults: list[str], tmp_path: Path
) -> None:
    """A file too few, one too many, and one of another version are found."""
    assert wheel(tmp_path, changes) == faults


def test_the_wheel_is_to_hold_what_is_needed() -> None:
    """What the package reads at run time is expected in the wheel, and no tests."""
    files = package_files(ROOT)
    assert {
        "langchain_quota/py.typed",
        "langchain_quota/stores/acquire.lua",
        "langchain_quota/stores/operations.lua",
        "langchain_quota/monitoring/rules.yaml",
        "langchain_quota/_version.py",
    } <= files.keys()
    assert any(name.startswith("langchain_quota/monitoring/dashboards/") for name in files)
    assert not any("test_" in name or name.endswith(".pyc") for name in files)


def test_an_sdist_is_the_repository(tmp_path: Path) -> None:
    """A file of the repository that is missing, and one that is none of it, are found."""
    path = tmp_path / "some.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        for name in ("PKG-INFO", "pyproject.toml", "notes.txt"):
            archive.addfile(tarfile.TarInfo(f"langchain_quota-1.2.3/{name}"), io.BytesIO())
    assert sdist_faults(path, ["pyproject.toml", "notes.txt"]) == []
    assert sdist_faults(path, ["pyproject.toml", "Makefile"]) == [
        "Makefile is missing in the sdist",
        "notes.txt should not be in the sdist",
    ]


@pytest.mark.parametrize(
    ("newest", "tags", "faults"),
    [
        ("Unreleased", [], []),
        ("1.2.3", [], []),
        ("1.2.3", ["v1.2.3", "latest"], []),
        ("1.2.2", [], ["CHANGELOG.md begins with 1.2.2, and the package says 1.2.3"]),
        (
            "Unreleased",
            ["v1.2.3"],
            ["CHANGELOG.md begins with Unreleased, and the package says 1.2.3"],
        ),
        ("1.2.3", ["v1.2.4"], ["the commit has the tag v1.2.4, and not v1.2.3"]),
    ],
)
def test_there_is_one_version(newest: str, tags: list[str], faults: list[str]) -> None:
    """Package, changelog and tag that do not agree are found; only a release needs an entry."""
    assert version_faults("1.2.3", CHANGELOG.format(newest), tags) == faults


def test_the_types_of_every_public_name_are_checked() -> None:
    """Each public name stands in tests/typing."""
    used = {
        node.id
        for path in (ROOT / "tests" / "typing").glob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Name)
    }
    assert {*langchain_quota.__all__} - used == {"__version__"}


# The README's shell.

README = (ROOT / "README.md").read_text()


def test_the_lines_of_the_readme_are_found() -> None:
    """Every line of a shell block is run, without its comment; and each treated apart is there."""
    blocks = shell_blocks("```shell\na b  # why\n\nc\n```\n```python\nd\n```\n```shell\ne\n```\n")
    assert blocks == [["a b", "c"], ["e"]]
    lines = {line for block in shell_blocks(README) for line in block}
    assert {*ADDED, *EXPECTED, "make up"} <= lines
    assert 0 < cloning(shell_blocks(README)) < len(shell_blocks(README))


@pytest.mark.parametrize(
    ("lines", "fault"),
    [
        (["false", "true"], "ended with 1"),
        (["test -f notes.txt", "langchain-quota demo"], "printed:\nnonsense"),
    ],
    ids=["one that fails", "one that prints something else"],
)
def test_each_line_has_to_succeed(lines: list[str], fault: str, tmp_path: Path) -> None:
    """A line that fails before one that does not is found, and one that prints something else."""
    (tmp_path / "notes.txt").touch()
    command = tmp_path / "langchain-quota"
    command.write_text("#!/bin/sh\necho nonsense\n")
    command.chmod(0o700)
    settings = {"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    shell(["test -f notes.txt", "langchain-quota"], tmp_path, settings)
    with pytest.raises(DistError, match=re.escape(fault)):
        shell(lines, tmp_path, settings)


def test_without_docker(tmp_path: Path) -> None:
    """Without Docker `make up` says in one line what is needed, and where to get it."""
    done = subprocess.run(
        ("make", "up", "DOCKER=no-such-docker", f"ENV_FILE={tmp_path / 'env'}"),
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        # Called by `make test`, it would also say which directory it enters.
        env={name: value for name, value in os.environ.items() if not name.startswith("MAKE")},
    )
    assert done.returncode == 2
    assert re.fullmatch(r"Docker with Compose is needed: https://\S+\n", done.stdout)
    assert not any(tmp_path.iterdir())
