"""The faults that `make mutants` plants."""

from pathlib import Path

import pytest

from tools.copies import ROOT
from tools.mutants import Fault, faults, planted


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
