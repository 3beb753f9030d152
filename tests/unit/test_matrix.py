"""The matrix leaves out only tests that there are."""

from pathlib import Path

from tools.matrix import SAME_EVERYWHERE


def test_what_runs_once_is_there() -> None:
    """Each file that is left out of the matrix is one of these unit tests."""
    assert [name for name in SAME_EVERYWHERE if not Path(__file__).with_name(name).is_file()] == []
