"""LangChain's own tests, where their sdist cannot be had."""

import os
from pathlib import Path

import pytest

from tests.forked import run_python
from tools import upstream

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(("ci", "status"), [("true", 1), ("", 0)], ids=["CI", "elsewhere"])
def test_without_an_index(ci: str, status: int, tmp_path: Path) -> None:
    """One line says what is missing; CI does not go on without it."""
    program = f"""
import sys
from pathlib import Path
from tools import upstream
upstream.KEPT = Path({str(tmp_path)!r})
sys.exit(upstream.main())
"""
    no_index = {"PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": os.devnull, "PIP_FIND_LINKS": ""}
    done = run_python(program, env=os.environ | no_index | {"CI": ci}, cwd=ROOT)
    assert (done.returncode, done.stdout) == (status, "")
    [line] = done.stderr.splitlines()
    assert line.startswith("LangChain's own tests were not run: no sdist of langchain ")
    assert "No matching distribution" in line


def test_of_another_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests of one version are not run on another: which would be missing is not known."""
    monkeypatch.setattr(upstream, "version", lambda _: "0.1")
    (tmp_path / "langchain-0.2.tar.gz").touch()
    with pytest.raises(upstream.UpstreamError, match=r"langchain 0\.1 is installed, not 0\.2"):
        upstream.sdist(tmp_path, "0.2")
