"""`on_decision`: callables that are given every decision, before the agent goes on."""

import asyncio
import functools
import gc
import pickle
from collections.abc import Sequence
from typing import Any

import pytest
from langchain.agents.middleware import ModelRetryMiddleware
from langchain_core.messages import BaseMessage

from langchain_quota import Decision, ModelCallLimit, ToolCallLimit, ToolCallLimitExceededError
from langchain_quota.limits import Limit
from tests.scene import Form, Kind, Scene, cancel_at, either, recording
from tests.telemetry import Signals

Seen = tuple[str, str]


class BillingError(Exception):
    """The billing is down."""


def failing(decision: Decision) -> None:
    raise BillingError(decision.call.tool)


async def afailing(decision: Decision) -> None:
    await asyncio.sleep(0)
    failing(decision)


def tale(decisions: Sequence[Decision]) -> list[Seen]:
    return [(each.call.tool or "model", str(each.outcome)) for each in decisions]


def observer_of(sort: str, seen: list[Decision]) -> Any:
    """An observer of this sort, which writes down what it sees."""

    async def awaited(decision: Decision, note: str = "") -> None:
        await asyncio.sleep(0)
        seen.append(decision)

    class Called:
        async def __call__(self, decision: Decision) -> None:
            await awaited(decision)

    sorts: dict[str, Any] = {
        "sync": seen.append,
        "async": awaited,
        "partial": functools.partial(awaited, note="a note"),
        "object": Called(),
        "returned": lambda decision: awaited(decision, "a note"),
    }
    return sorts[sort]


ASYNC_SORTS = ["async", "partial", "object", "returned"]
each_sort = pytest.mark.parametrize(
    ("form", "sort"), [("sync", "sync"), ("async", "sync"), *(("async", k) for k in ASYNC_SORTS)]
)

LIMITS: list[Limit] = [
    ModelCallLimit(run_limit=3),
    ToolCallLimit("search", run_limit=1),
    ToolCallLimit("calc", run_limit=1, enforce=False),
]


@each_sort
@either
async def test_every_decision_once_and_in_order(
    form: Form, sort: str, kind: Kind, signals: Signals
) -> None:
    """An observer of any sort is given what was decided about each call, once, as it was made."""
    seen, known, ran = list[Decision](), list[int](), list[str]()
    batches = [["search", "calc", "search"], ["calc", "ask"], ["calc"]]

    def answer(_messages: Sequence[BaseMessage]) -> Any:
        known.append(len(seen))
        return batches.pop(0)

    def body() -> None:
        known.append(len(seen))

    tools = [recording(each, ran, body) for each in ("search", "calc", "ask")]
    options: Any = {"kind": kind, "form": form, "tools": tools}
    scene = Scene(signals, answer, LIMITS, on_decision=observer_of(sort, seen), **options)
    await scene.play()
    assert tale(seen) == [
        *(("model", "allowed"), ("search", "allowed"), ("calc", "allowed"), ("search", "blocked")),
        *(("model", "allowed"), ("calc", "would_block"), ("ask", "allowed")),
        *(("model", "allowed"), ("calc", "would_block"), ("model", "blocked")),
    ]
    assert all(ours is theirs for ours, theirs in zip(seen, scene.decisions, strict=True))
    if kind == "quota":
        assert known == [1, 4, 4, 5, 7, 7, 8, 9]


@each_sort
async def test_a_hook_that_runs_again(
    form: Form, sort: str, signals: Signals, caplog: pytest.LogCaptureFixture
) -> None:
    """Where a hook that raised runs again nothing is recorded twice; nor by one that raises."""
    seen = list[Decision]()
    limit = ToolCallLimit("search", run_limit=0, exit_behavior="error")
    given = [failing if sort == "sync" else afailing, observer_of(sort, seen)]
    scene = Scene(signals, [["calc", "search"]], [limit], form=form, on_decision=given)
    for again in (scene.play, scene.go_on, scene.go_on):
        with pytest.raises(ToolCallLimitExceededError):
            await again()
    expected = [("calc", "skipped"), ("search", "blocked")]
    assert tale(scene.decisions) == expected
    assert tale(seen) == expected
    assert signals.errors("observer", "BillingError") == 2
    assert [each.levelname for each in caplog.records].count("ERROR") == 1


@either
@pytest.mark.parametrize("sort", ["async", "partial", "object"])
async def test_an_async_one_under_invoke(kind: Kind, sort: str, signals: Signals) -> None:
    """Under the sync path an async observer is refused at the first call, before anything runs."""
    seen = list[Decision]()
    given = [lambda _decision: None, observer_of(sort, seen)]
    forgiven: list[Any] = [ModelRetryMiddleware(max_retries=0), ToolCallLimit(run_limit=1)]
    items = forgiven if kind == "quota" else LIMITS
    scene = Scene(signals, ["done"], items, kind=kind, form="sync", on_decision=given)
    with pytest.raises(RuntimeError, match=r"on_decision=.* is async: call the agent with ainvoke"):
        await scene.play()
    assert (scene.model.calls, scene.ran, seen) == ((), [], [])
    gc.collect(1)  # a coroutine that was never awaited warns here, and warnings are errors


@pytest.mark.parametrize("goes_on", [True, False], ids=["the same run", "another turn"])
async def test_a_cancelled_run(*, goes_on: bool, signals: Signals) -> None:
    """A run cancelled while an observer waits stops there, and whatever follows is whole."""
    waiting, finished, patient = asyncio.Event(), list[str | None](), False

    async def bill(decision: Decision) -> None:
        if decision.call.tool == "calc" and not patient:
            waiting.set()
            await asyncio.Event().wait()
        finished.append(decision.call.tool)

    limits = [ToolCallLimit(thread_limit=2)]
    script = [["search", "calc"], "done"]
    scene = Scene(signals, script, limits, on_decision=bill)
    await cancel_at(waiting, scene.play())
    assert scene.ran == []
    patient = True
    await (scene.go_on() if goes_on else scene.play())
    assert finished == (["search", "calc"] if goes_on else ["search"])
    assert scene.last_text() == "done"
    assert signals.errors("observer", "BillingError") == 0
    assert scene.used(limits[0]) == ((2, 2) if goes_on else (0, 0))


async def test_a_decision_that_is_kept(signals: Signals) -> None:
    """A decision of a long run is small, can be pickled, and stays as it was."""
    kept: list[Decision] = []
    written: list[bytes] = []

    def keep(decision: Decision) -> None:
        kept.append(decision)
        written.append(pickle.dumps(decision))

    limits: list[Limit] = [ToolCallLimit("search", thread_limit=50), ModelCallLimit(run_limit=50)]
    scene = Scene(signals, [*[["search"]] * 20, "done"], limits, on_decision=keep)
    await scene.invoke({"messages": [("user", "x" * 1000), ("ai", "y" * 1000)] * 200})
    assert len(kept) == 41
    assert max(map(len, written)) < 4000
    assert [pickle.loads(each) for each in written] == kept  # noqa: S301 - its own
