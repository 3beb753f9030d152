"""`make compare`: what it lists, and what it does not."""

import shutil
from pathlib import Path

import pytest

from tools.compare import ROOT, main


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
