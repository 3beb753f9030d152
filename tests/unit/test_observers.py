"""What observers were notified of is remembered by task: each decision reaches each of them once.

How they stand in an agent, and what becomes of their errors, is in tests/agent.
"""

import asyncio

import pytest

from langchain_quota import Call, Decision, Outcome
from langchain_quota.middleware import _observers as observers_module
from langchain_quota.middleware._observers import Observers
from tests.signals import Signals

Seen = list[tuple[str, str | None]]

BATCH = [Decision(Call("tool", tool), Outcome.ALLOWED) for tool in ("search", "calc")]
REFUSED = [Decision(each.call, Outcome.BLOCKED) for each in BATCH]
ALL: Seen = [("first", "search"), ("second", "search"), ("first", "calc"), ("second", "calc")]


def two(seen: Seen, signals: Signals) -> Observers:
    """Two observers that write down what they see."""

    def first(decision: Decision) -> None:
        seen.append(("first", decision.call.tool))

    async def second(decision: Decision) -> None:
        await asyncio.sleep(0)
        seen.append(("second", decision.call.tool))

    return Observers([first, second], signals.recorder)


@pytest.mark.parametrize(
    ("task", "again", "times"),
    [("task", BATCH, 1), ("task", REFUSED, 2), (None, BATCH, 2)],
    ids=["the same", "another outcome", "no task"],
)
async def test_a_task_that_runs_again(
    task: str | None, again: list[Decision], times: int, signals: Signals
) -> None:
    """It notifies nobody twice, unless it decides otherwise; outside of a task each call is new."""
    seen: Seen = []
    observers = two(seen, signals)
    await observers.anotify(BATCH, task)
    await observers.anotify(again, task)
    assert seen == ALL * times


async def test_one_that_raises_is_not_asked_again(signals: Signals) -> None:
    """Its error is counted, and the task that runs again goes on behind it."""
    seen: Seen = []

    def failing(decision: Decision) -> None:
        seen.append(("failing", decision.call.tool))
        raise LookupError("no such bill")

    observers = Observers(failing, signals.recorder)
    observers.notify(BATCH, "task")
    observers.notify(BATCH, "task")
    assert seen == [("failing", "search"), ("failing", "calc")]
    errors = "langchain_quota_errors_total"
    assert signals.value(errors, component="observer", error_type="LookupError") == 2


async def test_what_is_remembered_is_bounded(
    monkeypatch: pytest.MonkeyPatch, signals: Signals
) -> None:
    """Beyond so many tasks the oldest is forgotten, and would notify anew."""
    monkeypatch.setattr(observers_module, "MAX_TASKS", 2)
    seen: Seen = []
    observers = Observers(lambda decision: seen.append(("", decision.call.tool)), signals.recorder)
    for task in ("1", "2", "3", "3", "2", "1"):
        observers.notify(BATCH[:1], task)
    assert len(seen) == 4
