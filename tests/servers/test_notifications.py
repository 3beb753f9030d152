"""Who is notified of what a service does: nobody while it is well, soon and seldom if it is not."""

import re
from pathlib import Path

import pytest

from tests.servers.alertmanager import Notification
from tests.traffic.agents import Profile
from tests.traffic.running import running_traffic
from tests.traffic.watched import watching

SPEED = 60
MOST = 5
"""Messages about one trouble, in half an hour."""

Messages = list[list[Notification]]


def told(
    profile: Profile, directory: Path, *, minutes: int, threads: int = 7
) -> tuple[Messages, bool]:
    """The messages about a service in so many minutes, and whether a limit refused a call."""
    with (
        running_traffic(
            profile,
            seconds=60 * minutes,
            speed=SPEED,
            threads=threads,
            directory=directory / "traffic",
        ) as traffic,
        watching(traffic, directory / "servers", speed=SPEED, scrape_interval="15s") as watch,
    ):
        traffic.begin()
        traffic.wait()
        return watch.webhook.messages, bool(traffic.truth().refusals("limit"))


@pytest.mark.parametrize("profile", ["healthy", "busy"])
def test_nobody_hears_of_a_service_that_is_well(profile: Profile, tmp_path: Path) -> None:
    """In ten minutes with a restart nothing is sent, though limits refuse as they are meant to."""
    messages, refused = told(profile, tmp_path, minutes=10)
    assert [alert for message in messages for alert in message] == []
    assert refused is (profile == "busy")


def test_a_prompt_loop_is_few_messages(tmp_path: Path) -> None:
    """Half an hour of a loop is five messages at most; each says on how many threads."""
    messages, _ = told("loop", tmp_path, minutes=30)
    assert 0 < len(messages) <= MOST, [[each.labels for each in message] for message in messages]
    assert {alert.path for alert in messages[0]} == {"/chat"}
    assert "LangChainQuotaLimitBreached" in {alert.labels["alertname"] for alert in messages[0]}
    for alert in (alert for message in messages for alert in message):
        assert alert.labels.get("limit") == "tool:lookup", alert
        assert re.search(r"\b\d+ threads?\b", alert.annotations["summary"]), alert


def test_a_lost_store_pages(tmp_path: Path) -> None:
    """Eight minutes without the store page for each agent that needs it, and nothing else does."""
    messages, _ = told("broken", tmp_path, minutes=32, threads=14)
    paged = [alert for message in messages for alert in message if alert.path == "/pager"]
    assert {alert.labels["alertname"] for alert in paged} == {"LangChainQuotaEnforcementDegraded"}
    firing = [alert.labels["agent"] for alert in paged if alert.status == "firing"]
    # The writer has two threads: it may be silent for so long that it does not count.
    assert {"researcher", "support"} <= set(firing) <= {"researcher", "support", "writer"}
    assert len(firing) == len(set(firing))
