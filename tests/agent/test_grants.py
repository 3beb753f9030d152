"""More than limits say: what is granted to a thread or a user is judged, shown and counted."""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import pytest
from langchain.agents import create_agent
from langgraph.checkpoint.memory import InMemorySaver

from langchain_quota import (
    Decision,
    MemoryStore,
    ModelCallLimit,
    Outcome,
    Quota,
    QuotaMiddleware,
    ToolCallLimit,
)
from langchain_quota.testing import ScriptedChatModel
from tests.scene import Form, both_forms
from tests.signals import Signals

SEARCH = ToolCallLimit("search", thread_limit=1)
CONFIG: Any = {"configurable": {"thread_id": "7"}}
DAY = timedelta(days=1)


def search() -> str:
    """Search the web."""
    return "found"


class Scene:
    """An agent with one middleware, and what was decided about its calls."""

    def __init__(
        self,
        signals: Signals,
        *limits: Any,
        script: Sequence[Any] = (["search", "search"], "done") * 9,
        middleware: type[QuotaMiddleware[Any, Any]] = QuotaMiddleware,
        **options: Any,
    ) -> None:
        self.decisions: list[Decision] = []
        options = {"telemetry": signals.telemetry, "store": MemoryStore(), **options}
        self.quota = middleware([*limits], on_decision=self.decisions.append, **options)
        self.agent: Any = create_agent(
            ScriptedChatModel(script=script),
            [search],
            middleware=[self.quota],
            checkpointer=InMemorySaver(),
            name="boss",
            context_schema=dict,
        )

    async def run(self, user: str = "ada", form: Form = "async") -> list[str]:
        """Run once on the thread; what was decided about tool calls, in this run."""
        self.decisions.clear()
        messages = {"messages": [("user", "Go on.")]}
        if form == "sync":
            self.agent.invoke(messages, CONFIG, context={"user_id": user})
        else:
            await self.agent.ainvoke(messages, CONFIG, context={"user_id": user})
        return [str(each.outcome) for each in self.decisions if each.call.kind == "tool"]

    async def grant(self, form: Form, amount: Any, **options: Any) -> Any:
        """Grant the thread more."""
        if form == "sync":
            return self.quota.grant(CONFIG, amount, **options)
        return await self.quota.agrant(CONFIG, amount, **options)


@both_forms
async def test_a_thread_is_granted_more(signals: Signals, form: Form) -> None:
    """So many calls more run, once for an id; decisions, gauges and messages have the new limit."""
    scene = Scene(signals, SEARCH)
    assert await scene.run() == ["allowed", "blocked"]
    first = await scene.grant(form, 2, reason="ticket 4711", by="bo", id="4711")
    assert (first.amount, first.reason, first.by) == (2, "ticket 4711", "bo")
    again = await scene.grant(form, 9, id="4711")
    assert (again.amount, again.reason, again.by) == (2, "ticket 4711", "bo")
    assert await scene.run() == ["allowed", "allowed"]
    assert [each.limits[0].thread_limit for each in scene.decisions if each.limits] == [3, 3]
    assert await scene.run() == ["blocked", "blocked"]
    labels = {"agent": "boss", "limit": "tool:search"}
    assert signals.value("langchain_quota_thread_limit", **labels, thread_id="7") == 3
    assert signals.value("langchain_quota_granted_total", **labels, scope="thread") == 2
    assert signals.value("langchain_quota_limit", **labels, scope="thread") == 1


async def test_a_grant_raises_every_limit_over_its_count(signals: Signals) -> None:
    """Two limits over one count are raised by one grant, and each counts it for itself."""
    trial = ToolCallLimit("search", name="trial", thread_limit=1, enforce=False)
    scene = Scene(signals, SEARCH, trial, ModelCallLimit(thread_limit=9))
    await scene.grant("async", 2, limit="trial")
    assert await scene.run() == ["allowed", "allowed"]
    for limit in ("tool:search", "trial"):
        labels = {"agent": "boss", "limit": limit}
        assert signals.value("langchain_quota_thread_limit", **labels, thread_id="7") == 3
        assert signals.value("langchain_quota_granted_total", **labels, scope="thread") == 2
    model = {"agent": "boss", "limit": "model"}
    assert signals.value("langchain_quota_thread_limit", **model, thread_id="7") == 9


async def test_a_reset_leaves_what_is_granted(signals: Signals) -> None:
    """A thread that is set back has its limit and the grant again."""
    scene = Scene(signals, SEARCH)
    await scene.run()
    await scene.grant("async", 1)
    assert await scene.run() == ["allowed", "blocked"]
    scene.quota.reset(scene.agent, CONFIG)
    assert await scene.run() == ["allowed", "allowed"]


async def test_a_user_is_granted_more(signals: Signals) -> None:
    """Of a user's day: this user's calls run, with the raised limit in all that is shown."""
    store = MemoryStore()
    limit = ToolCallLimit("search", quotas=[Quota(1, per="user_id", window=DAY)])
    scene = Scene(signals, limit, store=store)
    assert await scene.run() == ["allowed", "blocked"]
    store.grant("search:user_id:ada", 1, window=DAY)
    assert await scene.run() == ["allowed", "blocked"]
    [refused] = [each for each in scene.decisions if each.outcome is Outcome.BLOCKED]
    [quota] = refused.limits[0].quotas
    assert (quota.used, quota.limit) == (2, 2)
    assert await scene.run("bob") == ["allowed", "blocked"]
    labels = {"agent": "boss", "limit": "tool:search", "scope": "user_id"}
    assert signals.value("langchain_quota_granted_total", **labels) == 1
    assert signals.value("langchain_quota_limit", **labels) == 1


@both_forms
async def test_the_model_is_told_of_what_is_granted(signals: Signals, form: Form) -> None:
    """What is left is said with the grant, and what is exhausted no more may be called."""
    model = ScriptedChatModel(script=[["search"], "done", "done"])
    limit = ToolCallLimit("search", thread_limit=1, near=0.5)
    scene = Scene(signals, limit, store=MemoryStore(), tell_model=True, hide_exhausted=True)
    scene.agent = create_agent(
        model, [search], middleware=[scene.quota], checkpointer=InMemorySaver(), name="boss"
    )
    await scene.run(form=form)
    told = str(model.calls[-1].messages[-1].content)
    assert "0 of 1 left" in told
    assert "No tool may be called now" in told
    await scene.grant(form, 1)
    await scene.run(form=form)
    told = str(model.calls[-1].messages[-1].content)
    assert "1 of 2 left" in told
    assert "No tool may be called now" not in told


@both_forms
async def test_a_thread_is_granted_more_before_it_runs_and_while_it_waits(
    signals: Signals, form: Form
) -> None:
    """A store needs no run to grant more, and no run to be at rest."""
    scene = Scene(signals, SEARCH, script=[["search", "search"], ["search"], "done"])
    await scene.grant(form, 1)
    scene.agent.interrupt_before_nodes = ["tools"]
    assert await scene.run(form=form) == ["allowed", "allowed"]
    await scene.grant(form, 1)
    scene.agent.interrupt_before_nodes = []
    await scene.agent.ainvoke(None, CONFIG, context={"user_id": "ada"})
    assert [each.outcome for each in scene.decisions if each.limits] == [Outcome.ALLOWED] * 3


class TestErrors:
    """What cannot be granted is refused, and named."""

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"limit": "model"}, "limit must name one with a thread_limit, not 'model'"),
            ({"limit": "search too"}, "not 'search too': 'tool:search', 'again'"),
            ({}, "limit must name one with a thread_limit, not None"),
        ],
    )
    async def test_limits(self, signals: Signals, options: Any, message: str) -> None:
        """The limit is one with a thread limit, and named where there are several."""
        again = ToolCallLimit("publish", name="again", thread_limit=5)
        scene = Scene(signals, SEARCH, again, ModelCallLimit(run_limit=9))
        with pytest.raises(ValueError, match=message):
            await scene.grant("async", 1, **options)

    async def test_no_thread(self, signals: Signals) -> None:
        """Without a thread, the error says how to name one."""
        scene = Scene(signals, SEARCH)
        with pytest.raises(ValueError, match="config names no thread"):
            scene.quota.grant({}, 1)

    @both_forms
    async def test_no_store(self, signals: Signals, form: Form) -> None:
        """Only a store gives grants; without one, the error says how to have one."""
        scene = Scene(signals, SEARCH, store=None)
        await scene.run()
        with pytest.raises(TypeError, match=r"needs a store that gives grants, not None: pass sto"):
            await scene.grant(form, 1)

    async def test_a_store_that_gives_none(self, signals: Signals) -> None:
        """A user's own store need not give grants; the error of a grant says so."""
        store = MemoryStore()

        class Own:
            """Keeps counts alone."""

            acquire, aacquire = store.acquire, store.aacquire
            peek, apeek, reset, areset = store.peek, store.apeek, store.reset, store.areset

        scene = Scene(signals, SEARCH, store=Own())
        with pytest.raises(TypeError, match="needs a store that gives grants, not <"):
            await scene.grant("async", 1)
