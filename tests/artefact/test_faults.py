"""The faults that `make mutants` plants."""

from tools.mutants import ROOT, changed, faults


def test_every_fault_can_be_planted() -> None:
    """The text that a fault replaces stands once in its file, and the tests beside it exist."""
    for fault in faults(()):
        assert changed(fault) != (ROOT / fault.file).read_text(encoding="utf-8")
        for test in fault.tests:
            path, *_, name = test.partition("[")[0].split("::")
            assert f"def {name}(" in (ROOT / path).read_text(encoding="utf-8"), test
