"""What a used up quota does: the answers, the exceptions, the last call, what the model reads."""

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from langchain_quota import (
    Decision,
    ModelCallLimit,
    ModelCallLimitExceededError,
    Outcome,
    ToolCallLimit,
    ToolCallLimitExceededError,
)
from langchain_quota.limits import Limit
from langchain_quota.messages import FINALIZED, SKIPPED
from langchain_quota.middleware._model_request import LAST_CALL
from langchain_quota.quotas import Quota
from langchain_quota.stores.memory import MemoryStore
from langchain_quota.testing import captured_decisions
from tests.agent.conftest import Form, both_forms
from tests.agent.shared import (
    ANN,
    DAY,
    RESETS,
    TODAY,
    FickleStore,
    SharedScene,
    asking,
    counts,
    quota,
    texts,
)
from tests.signals import Signals

USER = Quota(2, per="user_id", window=DAY)
MIDNIGHT = datetime(2026, 1, 2, tzinfo=UTC)
SEARCHES = f"search:user_id:ann:{TODAY}"
MODEL_CALLS = f"model:user_id:ann:{TODAY}"


def scene_of(
    signals: Signals, script: Any, *limits: Limit, store: Any, form: Form = "async", **options: Any
) -> SharedScene:
    scene = SharedScene(
        signals, script, [quota(signals, *limits, store=store, **options)], form=form
    )
    scene.context = ANN
    return scene


def last_text(result: dict[str, Any]) -> str:
    return str(result["messages"][-1].content)


async def test_continue(signals: Signals) -> None:
    """A refused call is answered with when the quota resets, and the agent goes on."""
    store = MemoryStore()
    limit = ToolCallLimit("search", quotas=[USER])
    scene = scene_of(signals, asking("search", "calc", "search", "search"), limit, store=store)

    result = await scene.turn()

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
        result = await scene.turn()

    (refused,) = [each for each in decisions if each.outcome is Outcome.BLOCKED]
    assert refused.resets_at == resets
    assert texts(result)[0] == "Tool call limit exceeded. Do not call 'search' again." + (
        "" if resets is None else f" It resets at {RESETS}."
    )


async def test_an_own_message(signals: Signals) -> None:
    """The user's own message gets the time of the reset, and replaces the default text."""

    def message(decision: Decision) -> str:
        assert decision.resets_at is not None
        return f"Come back at {decision.resets_at:%H:%M on %d %B}."

    limit = ToolCallLimit("search", quotas=[USER], message=message)
    scene = scene_of(signals, asking("search", "search", "search"), limit, store=MemoryStore())

    result = await scene.turn()

    assert texts(result)[0] == "Come back at 00:00 on 02 January."


async def test_end(signals: Signals) -> None:
    """A batch over the quota ends the run: none of it runs, and nothing is charged."""
    store = MemoryStore()
    limit = ToolCallLimit("search", quotas=[USER], exit_behavior="end")
    scene = scene_of(signals, asking("search", "search", "search"), limit, store=store)

    result = await scene.turn()

    assert scene.ran == []
    assert counts(store) == {}
    assert last_text(result) == (
        f"'search' tool call limit reached: user_id limit exceeded (3/2 calls; resets at {RESETS})."
    )
    assert texts(result).count(SKIPPED) == 2
    assert scene.metric("tool:search", "allowed") == 0
    scene.check()


async def test_tool_error(signals: Signals) -> None:
    """The exception tells which quota is used up, by how much, and until when."""
    store = MemoryStore()
    limit = ToolCallLimit("search", quotas=[USER], exit_behavior="error")
    scene = scene_of(signals, asking("search", "search"), limit, store=store)
    await scene.turn()

    with pytest.raises(ToolCallLimitExceededError) as caught:
        await scene.turn()

    error = caught.value
    assert error.decision is not None
    leading = error.decision.leading
    assert leading is not None
    assert (leading.scope, leading.used("user_id"), leading.threshold("user_id")) == (
        "user_id",
        2,
        2,
    )
    assert leading.resets_at == error.decision.resets_at == MIDNIGHT
    assert (error.tool_name, error.thread_limit, error.run_limit) == ("search", None, None)
    assert str(error) == (
        f"'search' tool call limit reached: user_id limit exceeded (4/2 calls; resets at {RESETS})."
    )
    assert len(scene.ran) == 2
    assert counts(store) == {SEARCHES: 2}
    scene.check(answered=False)


async def test_model_error(signals: Signals) -> None:
    """The model is not called, and the exception tells of the quota."""
    store = MemoryStore()
    limit = ModelCallLimit(quotas=[USER], exit_behavior="error")
    scene = scene_of(signals, asking("search"), limit, store=store)
    await scene.turn()

    with pytest.raises(ModelCallLimitExceededError) as caught:
        await scene.turn(thread_id="thread-2")

    error = caught.value
    assert error.decision is not None
    leading = error.decision.leading
    assert leading is not None
    assert (leading.scope, leading.used("user_id"), leading.threshold("user_id")) == (
        "user_id",
        2,
        2,
    )
    assert error.decision.resets_at == MIDNIGHT
    assert str(error) == f"Model call limits exceeded: user_id limit (2/2; resets at {RESETS})"
    assert len(scene.model.calls) == 2
    assert counts(store) == {MODEL_CALLS: 2}


async def test_model_end(signals: Signals) -> None:
    """A model limit with nothing but quotas ends the run, and tells which ones are used up."""
    store = MemoryStore()
    limit = ModelCallLimit(quotas=[USER, Quota(2, per="global")])
    scene = scene_of(signals, lambda messages: ["search"], limit, store=store)

    result = await scene.turn()

    assert len(scene.model.calls) == 2
    assert last_text(result) == (
        f"Model call limits exceeded: user_id limit (2/2; resets at {RESETS}), global limit (2/2)"
    )
    assert counts(store) == {MODEL_CALLS: 2, "model:global:": 2}
    assert scene.metric("model", "blocked", "user_id") == 1
    scene.check()


async def test_finalize(signals: Signals) -> None:
    """The user's last model call is told so, on whichever thread; a later one is refused."""
    store = MemoryStore()
    limit = ModelCallLimit(quotas=[Quota(3, per="user_id")], exit_behavior="finalize")
    scene = scene_of(signals, lambda messages: ["search"], limit, store=store)
    other = scene_of(signals, asking("search"), limit, store=store)

    await other.turn(thread_id="thread-2")
    result = await scene.turn()

    assert len(other.model.calls) == 2
    assert len(scene.model.calls) == 1
    assert newest(scene) == [f"hi\n\n{LAST_CALL}"]
    assert scene.model.calls[0].tools == ()
    assert texts(result) == [FINALIZED]
    assert scene.ran == []
    result = await scene.turn()
    assert len(scene.model.calls) == 1
    assert last_text(result) == "Model call limits exceeded: user_id limit (3/3)"
    assert counts(store) == {"model:user_id:ann": 3}


async def test_give_up_after(signals: Signals) -> None:
    """After so many refusals by the quota the run ends; a new run is given a new chance."""
    store = MemoryStore()
    limit = ToolCallLimit("search", quotas=[Quota(1, per="user_id")], give_up_after=2)
    scene = scene_of(signals, lambda messages: ["search"], limit, store=store)

    result = await scene.turn()

    assert scene.ran == ["search"]
    assert len(newest(scene)) == 3
    assert last_text(result) == (
        "'search' tool call limit reached: user_id limit exceeded (2/1 calls)."
    )
    await scene.turn(thread_id="thread-2")
    assert len(newest(scene)) == 5
    assert counts(store) == {"search:user_id:ann": 1}


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

    await scene.turn()

    assert scene.ran == []
    assert counts(store) == {}
    scene.check()


async def test_a_quota_that_is_tried_out(signals: Signals) -> None:
    """With `enforce=False` all calls run and are counted; `would_block` marks the others."""
    store = MemoryStore()
    limit = ToolCallLimit("search", quotas=[USER], enforce=False)
    scene = scene_of(signals, asking("search", "search", "search"), limit, store=store)

    with captured_decisions() as decisions:
        await scene.turn()

    assert scene.ran == ["search"] * 3
    assert counts(store) == {SEARCHES: 3}
    outcomes = [each.outcome for each in decisions if each.call.kind == "tool"]
    assert outcomes == [Outcome.ALLOWED, Outcome.ALLOWED, Outcome.WOULD_BLOCK]
    assert scene.metric("tool:search", "would_block", "user_id") == 1
    assert scene.metric("tool:search", "blocked", "user_id") == 0


@pytest.mark.parametrize("kind", ["tool", "model"])
async def test_a_quota_of_0(kind: str, signals: Signals) -> None:
    """A quota of 0 forbids, and leaves no trace in the store."""
    store = MemoryStore()
    nothing = Quota(0, per="user_id")
    limit: Limit = (
        ToolCallLimit("search", quotas=[nothing])
        if kind == "tool"
        else ModelCallLimit(quotas=[nothing])
    )
    scene = scene_of(signals, asking("search"), limit, store=store)

    await scene.turn()

    assert scene.ran == []
    assert len(scene.model.calls) == (2 if kind == "tool" else 0)
    assert counts(store) == {}


def newest(scene: SharedScene) -> list[str]:
    """The newest message of each request."""
    return [call.messages[-1].text for call in scene.model.calls]


async def test_telling_the_model(signals: Signals) -> None:
    """The model is told what is left to the user, of calls on other threads as well."""
    store = MemoryStore()
    limits: list[Limit] = [
        ToolCallLimit("search", quotas=[Quota(5, per="user_id")], run_limit=9),
        ModelCallLimit(quotas=[Quota(20, per="user_id")]),
    ]
    other = scene_of(signals, asking("search", "search", "search"), *limits, store=store)
    await other.turn(thread_id="thread-2")
    scene = scene_of(signals, asking("search"), *limits, store=store, tell_model=True)

    await scene.turn()

    assert newest(scene) == [
        "hi",
        "search ran\n\nBudget: search: 1 of 5 left; this is model call 4 of 20.",
    ]
    assert "Budget" not in str(scene.state())


async def test_hiding_what_is_used_up(signals: Signals) -> None:
    """A tool that the user has used up on another thread is not offered; in a new window it is."""
    store = MemoryStore()
    limit = ToolCallLimit("search", quotas=[USER])
    await scene_of(signals, asking("search", "search"), limit, store=store).turn(
        thread_id="thread-2"
    )
    middleware = quota(signals, limit, store=store, hide_exhausted=True)
    scene = SharedScene(signals, asking("calc"), [middleware])

    await scene.turn(context=ANN)
    middleware._clock = MIDNIGHT.timestamp
    await scene.turn()

    assert [set(each.tools) for each in scene.model.calls] == [{"calc"}] * 2 + [
        {"calc", "search"}
    ] * 2


async def test_another_users_tools_are_offered(signals: Signals) -> None:
    """What one user has used up is offered to another."""
    store = MemoryStore()
    limit = ToolCallLimit("search", quotas=[USER])
    scene = scene_of(signals, asking("search", "search"), limit, store=store, hide_exhausted=True)

    await scene.turn()
    await scene.turn(context={"user_id": "bob"})

    offered = [set(each.tools) for each in scene.model.calls]
    assert offered == [{"calc", "search"}, {"calc"}] * 2


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
    await scene_of(signals, asking("search"), *limits, store=store, form=form).turn()
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

    result = await scene.turn(thread_id="thread-2")

    assert last_text(result) == "done"
    assert scene.ran == (["calc"] if allowed else [])
    offered = {"search"} if allowed else {"calc", "search"}
    assert [set(each.tools) for each in scene.model.calls] == [{"calc", "search"}, offered]
    answer = newest(scene)[1]
    assert newest(scene)[0] == "hi"
    assert answer.partition("\n\n")[2] == ("Budget: calc: 0 of 1 left." if allowed else "")
    name = "langchain_quota_store_seconds_count"
    assert signals.value(name, operation="peek", outcome="error") == 2


@pytest.mark.parametrize("on_store_error", ["deny", "allow"])
async def test_finalizing_while_the_store_is_down(on_store_error: Any, signals: Signals) -> None:
    """With "deny" a run ends and says why; with "allow" its own last call is told so."""
    store = FickleStore(MemoryStore())
    store.down = True
    limit = ModelCallLimit(run_limit=1, quotas=[Quota(1, per="user_id")], exit_behavior="finalize")
    scene = scene_of(
        signals,
        lambda messages: ["search"],
        limit,
        store=store,
        on_store_error=on_store_error,
    )

    result = await scene.turn()

    assert scene.ran == []
    if on_store_error == "deny":
        assert last_text(result) == "Model call limit could not be checked: try again later."
        assert scene.model.calls == ()
    else:
        assert texts(result) == [FINALIZED]
        assert newest(scene) == [f"hi\n\n{LAST_CALL}"]
