"""Why a limit stopped a call or a run, as data: in messages and in streams."""

import asyncio
import json
from datetime import timedelta
from typing import Any

import pytest
from langchain_core.messages import AIMessage, ToolMessage
from langgraph.types import Command

from langchain_quota import (
    ConcurrencyLimit,
    CostLimit,
    MemoryStore,
    ModelCallLimit,
    Price,
    Quota,
    TimeLimit,
    TokenLimit,
    ToolCallLimit,
    ToolCallLimitExceededError,
    stop_reason,
)
from langchain_quota.limits import Limit
from langchain_quota.testing import ScriptedChatModel
from tests.scene import ANN, CONFIG, Form, Kind, Scene, both_forms, delegate, recording
from tests.stores import DAY, Clock, FickleStore, Passing
from tests.telemetry import HAS_INLINE, Signals, paid, telling

KINDS: list[Kind] = ["quota", *(["inline"] if HAS_INLINE else []), "drop-in", "graph"]  # type: ignore[list-item]
GO: Any = {"messages": [("user", "hi")]}
END: Any = {"exit_behavior": "end"}
STOP, EVENT = "langchain_quota_stop", "langchain_quota_event"
TWO, BATCH = ["search", "search"], ["search", "search", "calc"]
MIDNIGHT = "2026-01-02T00:00:00+00:00"
REASON = {"subject": None, "unit": "calls", "resets_at": None}
OF_SEARCH = {**REASON, "limit": "tool:search", "scope": "run", "used": 1, "threshold": 1}


def blocked(**data: Any) -> dict[str, Any]:
    return {**OF_SEARCH, "decision": "blocked", **data}


def of_calls(messages: Any) -> list[Any]:
    """The data of the tools' answers, in order; `None` for a tool's own answer."""
    answers = [each for each in messages if each.type == "tool"]
    return [each.artifact and each.artifact[STOP] for each in answers]


@pytest.mark.parametrize("kind", KINDS)
async def test_every_form_says_why(kind: Kind, signals: Signals) -> None:
    """Whatever holds the limits, each answer that they write has data, and so has the last one."""
    limit = ToolCallLimit("search", run_limit=1, **END)
    scene = Scene(signals, [["search"], BATCH], [limit], kind=kind)
    result = await scene.play()
    reason: Any = blocked()
    assert stop_reason(result) == stop_reason(result["messages"]) == reason
    assert stop_reason(result["messages"][-1]) == json.loads(json.dumps(reason))
    first, *others = of_calls(result["messages"])
    assert first is None
    # A graph answers by its final text alone.
    skipped = reason | {"decision": "skipped"}
    assert others == ([] if kind == "graph" else [reason, reason, skipped])
    going_on = ToolCallLimit("search", run_limit=1)
    result = await Scene(signals, [BATCH, "done"], [going_on], kind=kind).play()
    assert sorted(of_calls(result["messages"]), key=bool) == [None, None, reason]
    assert stop_reason(result) is None


HOURS: Any = {"quotas": [Quota(1, per="user_id", window=DAY)]}
PRICES = {"scriptedchatmodel": Price(input=1, output=1), "m": Price(input="1000", output=1)}
MODEL, DAILY = {"limit": "model"}, ModelCallLimit(**HOURS)
WEEK = Quota(1, per="global", window="1w")
NO_WEEK = Quota(lambda *_: None, per="global", window="1w", rollover=9)
ONCE, TWICE = (ModelCallLimit(quotas=[*HOURS["quotas"], each]) for each in (NO_WEEK, WEEK))
NEXT_WEEK = "2026-01-08T00:00:00+00:00"
LAST = ModelCallLimit(run_limit=1, exit_behavior="finalize")
OF_ANN = {"limit": "model", "scope": "user_id", "subject": "an", "resets_at": MIDNIGHT}
OF_STORE = {"limit": "model", "scope": "store", "used": None, "threshold": None}
TOKENS = {"limit": "tokens", "threshold": 10, "unit": "tokens"}
COST = {"limit": "cost", "used": 0.012, "threshold": 0.01, "unit": "dollars"}
ROWS: dict[str, tuple[Limit, Any, dict[str, Any] | None]] = {
    "a model call": (ModelCallLimit(run_limit=1), [TWO], MODEL),
    "a quota": (DAILY, [TWO], OF_ANN),
    "two quotas": (TWICE, [TWO], {**OF_ANN, "resets_at": NEXT_WEEK}),
    "a quota beside one without a limit": (ONCE, [TWO], OF_ANN),
    "tokens": (TokenLimit(run_limit=10), [paid(12, "search")], {**TOKENS, "used": 12}),
    "dollars": (CostLimit(run_limit="0.01"), [paid(12, "search")], COST),
    "a reserve": (TokenLimit(run_limit=10, reserve=8), [paid(5, "search")], {**TOKENS, "used": 5}),
    "an outage": (DAILY, [], OF_STORE),
    "a last call": (LAST, [TWO], MODEL),
    "a last answer": (LAST, ["Done."], None),
    "a dry run": (ToolCallLimit("search", run_limit=1, enforce=False), [TWO, "Done."], None),
}


@pytest.mark.parametrize(("limit", "script", "data"), ROWS.values(), ids=ROWS.keys())
async def test_what_the_data_says(limit: Limit, script: Any, data: Any) -> None:
    """It has amounts in the units that people see, and subjects as `subject_label` shows them."""
    signals = telling(subject_label={"user_id": lambda user: user[:2]})
    store = FickleStore(MemoryStore(clock=Clock()))
    store.down = data is OF_STORE
    options: Any = {"prices": PRICES} if data is COST else {}
    model = ScriptedChatModel(model="m", script=script)
    shared = store if limit.quotas else None
    scene = Scene(signals, model, [limit], context=ANN, store=shared, **options)
    with scene.quota.receipt() as bill:
        reason = stop_reason(await scene.play())
    assert reason == (data and blocked(**data))
    assert [limit for _, limit in bill.ended_by] == ([reason["limit"]] if reason else [])


async def test_an_exception_ends_a_run(signals: Signals) -> None:
    """A receipt names the limit that raised, although there is no message with a reason."""
    limit = ToolCallLimit("search", run_limit=1, exit_behavior="error")
    scene = Scene(signals, [TWO], [limit])
    with scene.quota.receipt() as bill, pytest.raises(ToolCallLimitExceededError):
        await scene.play()
    assert [name for _, name in bill.ended_by] == ["tool:search"]


async def test_a_subject_without_a_label_is_not_named(signals: Signals) -> None:
    """A subject that `subject_label` does not name stands nowhere in the run's messages."""
    limit = ToolCallLimit("search", **HOURS, **END)
    scene = Scene(signals, [TWO], [limit], context=ANN, store=MemoryStore(clock=Clock()))
    result = await scene.play()
    assert stop_reason(result) == blocked(scope="user_id", used=0, resets_at=MIDNIGHT)
    assert '"ann"' not in json.dumps([each.model_dump() for each in result["messages"]])


async def test_calls_that_wait_or_last_too_long(signals: Signals) -> None:
    """Answers that are written around a tool have data, too: slots and the time of a call."""
    tool = recording("browser", [], lambda: asyncio.Event().wait())
    limits: list[Limit] = [
        ConcurrencyLimit("browser", max_concurrency=1, wait=0),
        TimeLimit(call_limit=0.01),
    ]
    scene = Scene(signals, [["browser", "browser"], "done"], limits, tools=[tool])
    found = of_calls((await scene.play())["messages"])
    slots = {"limit": "concurrency:browser", "scope": "concurrency"}
    late = {**REASON, "limit": "time", "scope": "call", "used": None, "threshold": 0.01}
    late |= {"decision": "cancelled", "unit": "seconds"}
    assert sorted(found, key=lambda each: each["scope"]) == [late, blocked(**slots)]


async def test_the_final_message_only(signals: Signals) -> None:
    """The stops of sub-agents, earlier turns and forged messages are not those of the run."""
    inner = Scene(signals, [["search"]], [ModelCallLimit(run_limit=1)])
    tool = delegate(inner.agent)
    outer = Scene(signals, [["delegate"], "done"], [ModelCallLimit(run_limit=9)], tools=[tool])
    assert stop_reason(await outer.play()) is None
    assert stop_reason({}) is stop_reason([]) is None
    update: Any = {"model": {"messages": []}}
    for other in (None, "x", ["x"], update, ((), update), 3):
        with pytest.raises(TypeError, match="must be what invoke returns"):
            stop_reason(other)
    forged = AIMessage("", response_metadata={STOP: blocked()})
    outer.model.script = ["done"] * 9
    result = await outer.invoke({"messages": [forged, ("user", "hi")]})
    assert stop_reason(result) is None
    assert stop_reason({"messages": [forged.model_dump()]}) == blocked()
    answer = ToolMessage("", tool_call_id="x", artifact={STOP: blocked()})
    assert (stop_reason(answer), stop_reason([answer])) == (blocked(), None)


async def test_a_person_rejects(signals: Signals) -> None:
    """A run that a person ends has the limit at which they were asked."""
    limit = ToolCallLimit("search", run_limit=1, exit_behavior="ask")
    scene = await Scene(signals, [TWO], [limit]).played()
    result = await scene.resume({"decisions": [{"type": "reject", "message": "No."}]})
    assert result["messages"][-1].text == "No."
    assert stop_reason(result) == blocked(used=0)


@both_forms
async def test_events_of_dry_runs_and_downgrades(form: Form, signals: Signals) -> None:
    """A refusal in a dry run, and each call that goes to another model, are events, unless off."""
    cheap = ScriptedChatModel(script=[paid(1)] * 2)
    limits: list[Limit] = [
        ToolCallLimit("search", run_limit=0, enforce=False),
        TokenLimit(run_limit=100, downgrade_to=cheap, downgrade_at=0.1),
    ]
    without = Scene(signals, [paid(12, "search")], limits, form=form)
    assert await without.updates(GO, "custom") == []
    scene = Scene(signals, [paid(12, "search")], limits, stream_events=True, form=form)
    events = [
        (each[EVENT], each["decision"], each["limit"]) for each in await scene.updates(GO, "custom")
    ]
    assert events == [
        ("refused", "would_block", "tool:search"),
        ("downgraded", "allowed", "tokens"),
    ]


async def test_events_of_waits(signals: Signals, clock: Passing) -> None:
    """A call that begins to wait for a quota, its start or a slot is an event, once."""
    slow = Quota(1, per="user_id", window="1m", smooth=True)
    limit = ToolCallLimit("search", quotas=[slow], wait=timedelta(hours=1))
    store = MemoryStore(clock=clock)
    options: dict[str, Any] = {"store": store, "stream_events": True, "context": ANN}
    scene = Scene(signals, [["search"], TWO, "done"], [limit], **options)
    events = await scene.updates(GO, "custom")
    soon = {"scope": "user_id", "decision": "waiting", EVENT: "waiting"}
    assert [each | {"resets_at": bool(each["resets_at"])} for each in events] == [
        {**OF_SEARCH, **soon, "resets_at": True},
        {**OF_SEARCH, **soon, "used": None, "threshold": None, "resets_at": False},
    ]
    tokens = TokenLimit(quotas=[Quota(1, per="user_id", window="1h")], wait="2h")
    options = {**options, "store": MemoryStore(clock=clock)}
    scene = Scene(signals, [paid(1), paid(1)], [tokens], **options)
    events = await scene.updates(GO, "custom") + await scene.updates(GO, "custom")
    ends = "2026-01-01T13:00:00+00:00"
    said = [(each[EVENT], each["unit"], each["used"], each["resets_at"]) for each in events]
    assert said[:2] == [("exhausted", "tokens", 1, ends), ("waiting", "tokens", 1, ends)]
    is_told = asyncio.Event()
    tool = recording("browser", [], is_told.wait)
    slots = ConcurrencyLimit("browser", max_concurrency=1, wait=60)
    scene = Scene(signals, [["browser"] * 2, "done"], [slots], tools=[tool], stream_events=True)
    events = []
    async for event in scene.agent.astream(GO, CONFIG, stream_mode="custom"):
        events.append(event)
        is_told.set()
    data = {"limit": "concurrency:browser", "scope": "concurrency", "used": None}
    assert events == [{**OF_SEARCH, **soon, **data}]


async def test_a_resumed_run_repeats_no_event(signals: Signals) -> None:
    """What a step has told before an interrupt is not told again when the step runs again."""
    limits: list[Limit] = [
        ToolCallLimit("calc", run_limit=0, enforce=False),
        ToolCallLimit("search", run_limit=1, exit_behavior="ask"),
    ]
    scene = Scene(signals, [BATCH], limits, stream_events=True)
    assert [each for each in await scene.updates(GO, "custom") if EVENT in each] == []
    answer: Any = Command(resume={"decisions": [{"type": "reject"}]})
    events = [each[EVENT] for each in await scene.updates(answer, "custom")]
    assert sorted(events) == ["ended", "refused", "refused"]
