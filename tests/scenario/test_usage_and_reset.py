"""Reading and resetting what a thread has used."""

import json
from types import SimpleNamespace
from typing import Any

import pytest
from langchain_core.tools import tool
from langgraph.types import interrupt

from langchain_quota import ModelCallLimit, QuotaMiddleware, TokenLimit, ToolCallLimit, usage
from langchain_quota.limits import Limit
from tests.scene import Form, Kind, Scene, both_forms, either, recording
from tests.telemetry import Signals


@tool(return_direct=True)
def report() -> str:
    """Report at once."""
    return "reported"


def scene_of(signals: Signals, script: Any, **search: Any) -> Scene:
    form, kind = search.pop("form", "async"), search.pop("kind", "quota")
    limits: list[Limit] = [
        ModelCallLimit(thread_limit=9),
        ToolCallLimit("search", **(search or {"thread_limit": 2})),
        ToolCallLimit(thread_limit=9),
    ]
    ask = recording("ask", [], lambda: interrupt("what?"))
    return Scene(signals, script, limits, kind=kind, form=form, tools=["search", report, ask])


@pytest.mark.parametrize("given", [None, 5, {"messages": []}, "thread-1"], ids=repr)
def test_usage_is_read_from_a_state(given: Any) -> None:
    """What a run gives, and what is no state, is a TypeError that says where a state is from."""
    with pytest.raises(TypeError, match=r"agent\.get_state\(config\) gives, not ") as caught:
        usage(given)
    assert str(caught.value).endswith(repr(given))


async def test_the_state_is_plain_json(signals: Signals) -> None:
    """In the middle of a run, too: so any serializer of checkpoints reads back what it wrote."""
    scene = await scene_of(signals, [["search", "search", "ask", "search"], "done"]).played()
    for _ in range(2):
        state = {key: value for key, value in scene.state().items() if key != "messages"}
        assert state["langchain_quota"]
        assert json.loads(json.dumps(state)) == state
        await scene.resume("that")
    assert scene.ran == ["search", "search"]


async def test_model_calls_are_counted_beside_a_budget_alone(signals: Signals) -> None:
    """With nothing but a budget the model calls of a thread and of its run are counted."""
    scene = Scene(signals, [["search"], "done"] * 2, [TokenLimit(run_limit=10**6)])
    for turn in (1, 2):
        await scene.play()
        assert (scene.usage().model, scene.usage().run_model) == (2 * turn, 2)


@both_forms
@either
async def test_reset_gives_the_quota_back(form: Form, kind: Kind, signals: Signals) -> None:
    """After a reset the thread can use its whole limit again, and no run is pending.

    Nor is one whose last run ended with a tool's answer.
    """
    script = [["search", "search"], "done", ["search"], "done", ["report"], "done"]
    scene = await scene_of(signals, script, form=form, kind=kind).played()
    messages = len(scene.state()["messages"])
    labels = {"agent": "unnamed", "limit": "tool:search"}
    assert signals.value("langchain_quota_thread_used", **labels, thread_id="thread-1") == 2
    await scene.reset()
    assert (scene.usage().model, dict(scene.usage().tools)) == (0, {})
    snapshot = scene.agent.get_state(scene.config)
    assert (snapshot.next, len(snapshot.values["messages"])) == ((), messages)
    # The thread counts as used up no more.
    assert signals.value("langchain_quota_thread_used", **labels, thread_id="thread-1") == 0
    assert signals.value("langchain_quota_thread_limit", **labels, thread_id="thread-1") == 2
    exhausted = {**labels, "scope": "thread", "state": "exhausted", "shown": "true"}
    assert signals.value("langchain_quota_subjects", **exhausted) == 0
    await scene.play()
    assert dict(scene.usage().tools) == {"search": 1, "__all__": 1}
    await scene.play()
    await scene.reset()
    assert scene.agent.get_state(scene.config).next == ()
    assert scene.usage().model == 0


def broken(_state: Any, _runtime: Any) -> int:
    raise ConnectionError("no plan")


@both_forms
@pytest.mark.parametrize(
    ("script", "limit", "match"),
    [
        ([], {}, "thread 'thread-1' has no state"),
        ([["search", "ask"]], {}, "waits in mid-run before tools"),
        ([["search"], ConnectionError("down")], {}, "waits in mid-run before model"),
        (["done"], {"thread_limit": broken}, "waits in mid-run before"),
    ],
    ids=["fresh", "interrupted", "failed", "failed in our own node"],
)
async def test_a_thread_that_cannot_be_reset(
    form: Form, script: Any, limit: Any, match: str, signals: Signals
) -> None:
    """A thread without a state, or whose run has ended neither by itself nor at a limit."""
    scene = scene_of(signals, script, form=form, **limit)
    if script:
        try:
            await scene.play()
        except ConnectionError:
            assert "failed" not in match
    before = scene.usage()
    with pytest.raises(RuntimeError, match=match):
        await scene.reset()
    assert scene.usage() == before


@both_forms
async def test_reset_elsewhere(form: Form, signals: Signals) -> None:
    """What is no agent of this process, or does not have the middleware, is refused by name."""
    scene = scene_of(signals, ["done"], form=form)
    agent, scene.agent = scene.agent, SimpleNamespace(nodes={})
    with pytest.raises(TypeError, match="not a SimpleNamespace: do this where the agent runs"):
        await scene.reset()
    scene.agent = agent
    scene.quota = type("Other", (QuotaMiddleware,), {})([ToolCallLimit(run_limit=1)])
    with pytest.raises(ValueError, match="does not have the middleware Other"):
        await scene.reset()
