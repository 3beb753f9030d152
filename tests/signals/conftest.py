"""What tests of signals share."""

import time

import pytest

from tests.stores import Clock


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The time of all, which begins with an hour."""
    made = Clock(3_600_000.0)
    monkeypatch.setattr(time, "time", made)
    return made
