"""What a used up quota does: the answers, the exceptions, the last call, what the model reads."""

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from langchain_quota import (
    ModelCallLimit,
    Outcome,
    ToolCallLimit,
)
from langchain_quota.limits import Limit
from langchain_quota.messages import SKIPPED
from langchain_quota.quotas import Quota
from langchain_quota.stores.memory import MemoryStore
from langchain_quota.testing import captured_decisions
from tests.scene import ANN, Form, Scene, asking, both_forms, texts
from tests.signals import Signals
from tests.stores import DAY, RESETS, TODAY, FickleStore, counts, quota

USER = Quota(2, per="user_id", window=DAY)
MIDNIGHT = datetime(2026, 1, 2, tzinfo=UTC)
SEARCHES = f"search:user_id:ann:{TODAY}"
MODEL_CALLS = f"model:user_id:ann:{TODAY}"


def scene_of(
    signals: Signals, script: Any, *limits: Limit, store: Any, form: Form = "async", **options: Any
) -> Scene:
    scene = Scene(signals, script, [quota(signals, *limits, store=store, **options)], form=form)
    scene.context = ANN
    return scene


def last_text(result: dict[str, Any]) -> str:
    return str(result["messages"][-1].content)


async def test_continue(signals: Signals) -> None:
    """A refused call is answered with when the quota resets, and the agent goes on."""
    store = MemoryStore()
    limit = ToolCallLimit("search", quotas=[USER])
    scene = scene_of(signals, asking("search", "calc", "search", "search"), limit, store=store)

    result = await scene.play()

    assert sorted(scene.ran) == ["calc", "search", "search"]
    assert last_text(result) == "done"
    refused = f"Tool call limit exceeded. Do not call 'search' again. It resets at {RESETS}."
    assert texts(result).count(refused) == 1
    assert counts(store) == {SEARCHES: 2}
    scene.check()


WINDOWS = {
    "minute": Quota(2, per="user_id", window=timedelta(minutes=1), name="minute"),
    "day": Quota(2, per="user_id", window=DAY, name="day"),
    "ever": Quota(2, per="user_id", name="ever"),
}


@pytest.mark.parametrize("apart", [True, False], ids=["two limits", "one limit"])
@pytest.mark.parametrize(
    ("windows", "resets"),
    [
        (("minute", "day"), MIDNIGHT),
        (("day", "minute"), MIDNIGHT),
        (("day", "ever"), None),
        (("ever", "day"), None),
    ],
    ids=str,
)
async def test_the_reset_of_two_quotas(
    windows: tuple[str, str], resets: datetime | None, *, apart: bool, signals: Signals
) -> None:
    """Of two exhausted quotas the message has the later reset; none if one has no reset."""
    quotas = [WINDOWS[each] for each in windows]
    limits = (
        [ToolCallLimit("search", quotas=[each], name=each.name) for each in quotas]
        if apart
        else [ToolCallLimit("search", quotas=quotas)]
    )
    script = asking("search", "search", "search")
    scene = scene_of(signals, script, *limits, store=MemoryStore())

    with captured_decisions() as decisions:
        result = await scene.play()

    (refused,) = [each for each in decisions if each.outcome is Outcome.BLOCKED]
    assert refused.resets_at == resets
    assert texts(result)[0] == "Tool call limit exceeded. Do not call 'search' again." + (
        "" if resets is None else f" It resets at {RESETS}."
    )


async def test_end(signals: Signals) -> None:
    """A batch over the quota ends the run: none of it runs, and nothing is charged."""
    store = MemoryStore()
    limit = ToolCallLimit("search", quotas=[USER], exit_behavior="end")
    scene = scene_of(signals, asking("search", "search", "search"), limit, store=store)

    result = await scene.play()

    assert scene.ran == []
    assert counts(store) == {}
    assert last_text(result) == (
        f"'search' tool call limit reached: user_id limit exceeded (3/2 calls; resets at {RESETS})."
    )
    assert texts(result).count(SKIPPED) == 2
    assert scene.metric("tool:search", "allowed") == 0
    scene.check()


async def test_model_end(signals: Signals) -> None:
    """A model limit with nothing but quotas ends the run, and tells which ones are used up."""
    store = MemoryStore()
    limit = ModelCallLimit(quotas=[USER, Quota(2, per="global")])
    scene = scene_of(signals, lambda messages: ["search"], limit, store=store)

    result = await scene.play()

    assert len(scene.model.calls) == 2
    assert last_text(result) == (
        f"Model call limits exceeded: user_id limit (2/2; resets at {RESETS}), global limit (2/2)"
    )
    assert counts(store) == {MODEL_CALLS: 2, "model:global:": 2}
    assert scene.metric("model", "blocked", "user_id") == 1
    scene.check()


async def test_giving_up_charges_nothing_of_the_batch(signals: Signals) -> None:
    """The batch whose refusals are one too many does not run, and the store charges none of it."""
    store = MemoryStore()
    scene = scene_of(
        signals,
        asking("search", "calc", "search"),
        ToolCallLimit("search", quotas=[Quota(1, per="user_id")], give_up_after=1),
        ToolCallLimit("calc", quotas=[Quota(1, per="user_id")]),
        store=store,
    )

    await scene.play()

    assert scene.ran == []
    assert counts(store) == {}
    scene.check()


def newest(scene: Scene) -> list[str]:
    """The newest message of each request."""
    return [call.messages[-1].text for call in scene.model.calls]


@both_forms
@pytest.mark.parametrize("on_store_error", ["deny", "allow"])
async def test_requests_while_the_store_is_down(
    form: Form, on_store_error: Any, signals: Signals
) -> None:
    """While the store is silent, only the state's counts are shown, and only they hide tools.

    Denied, nothing runs that the state could know of.
    """
    store = FickleStore(MemoryStore())
    limits: list[Limit] = [
        ToolCallLimit("search", quotas=[Quota(1, per="user_id")]),
        ToolCallLimit("calc", run_limit=1),
    ]
    allowed = on_store_error == "allow"
    await scene_of(signals, asking("search"), *limits, store=store, form=form).play()
    store.down = True
    scene = scene_of(
        signals,
        asking("calc"),
        *limits,
        store=store,
        on_store_error=on_store_error,
        tell_model=True,
        hide_exhausted=True,
        form=form,
    )

    result = await scene.play(thread_id="thread-2")

    assert last_text(result) == "done"
    assert scene.ran == (["calc"] if allowed else [])
    offered = {"search"} if allowed else {"calc", "search"}
    assert [set(each.tools) for each in scene.model.calls] == [{"calc", "search"}, offered]
    answer = newest(scene)[1]
    assert newest(scene)[0] == "hi"
    assert answer.partition("\n\n")[2] == ("Budget: calc: 0 of 1 left." if allowed else "")
    name = "langchain_quota_store_seconds_count"
    assert signals.value(name, operation="peek", outcome="error") == 2
