"""The log line about a check that takes long."""

import pytest

from langchain_quota import ModelCallLimit
from tests.scene import Scene
from tests.telemetry import Signals


@pytest.mark.parametrize(("slow", "lines"), [(0.0, 1), (60.0, 0)])
async def test_a_check_that_takes_long(
    slow: float,
    lines: int,
    signals: Signals,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A check that takes as long as a slow one is logged with its agent, another one is not."""
    monkeypatch.setattr("langchain_quota.telemetry.slow_checks.SLOW", slow)
    await Scene(signals, ["Hi!"], [ModelCallLimit(run_limit=1)]).play()
    found = [one for one in caplog.messages if "took" in one]
    assert len(found) == lines
