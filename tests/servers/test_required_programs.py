"""What happens to a test whose server is not installed."""

import pytest

from tests.servers.programs import required_program


@pytest.fixture(autouse=True)
def nothing_on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine on which nothing is installed."""
    monkeypatch.setenv("PATH", "")


def test_skipped_with_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the program a test is skipped, and the reason says what to install."""
    monkeypatch.delenv("CI", raising=False)
    with pytest.raises(pytest.skip.Exception) as skipped:
        required_program("prometheus", "prometheus")
    assert skipped.value.msg == "prometheus not found: apt-get install prometheus"


def test_failed_under_ci(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under CI=true a missing program fails the test, so that CI cannot pass by skipping."""
    monkeypatch.setenv("CI", "true")
    with pytest.raises(pytest.fail.Exception) as failed:
        required_program("promtool", "prometheus")
    assert failed.value.msg == "promtool not found: apt-get install prometheus"
