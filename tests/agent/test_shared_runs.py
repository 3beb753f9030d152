"""Runs that a store counts: a run that goes on after a crash has the budget that it had."""

import math
from collections.abc import Sequence
from typing import Annotated, Any

import pytest
from langchain.agents import create_agent
from langchain_core.messages import BaseMessage
from langchain_core.runnables import RunnableConfig
from langchain_core.tools import InjectedToolCallId, StructuredTool, tool
from langgraph.checkpoint.base import ChannelVersions, Checkpoint, CheckpointMetadata
from langgraph.checkpoint.memory import InMemorySaver

from langchain_quota import InlineQuotaMiddleware, ModelCallLimit, QuotaMiddleware, ToolCallLimit
from langchain_quota.limits import Limit
from langchain_quota.quotas import Quota
from langchain_quota.stores.keys import CountKey
from langchain_quota.stores.memory import MemoryStore
from langchain_quota.testing import ScriptedChatModel, Turn
from tests.agent.conftest import Form, both_forms
from tests.agent.rules import CONFIG, check_history
from tests.agent.shared import Clock, FickleStore, SharedScene, asking, counts, run_counts
from tests.signals import HAS_INLINE, Signals

HOUR = 3600.0
THREAD = "search:thread:thread-1"
KINDS = [QuotaMiddleware, *([InlineQuotaMiddleware] if HAS_INLINE else [])]
kinds = pytest.mark.parametrize("kind", KINDS)


class LossySaver(InMemorySaver):
    """Loses what comes after so many checkpoints, as a process does that is killed before it wrote.

    Args:
        keeps: How many checkpoints it keeps.
        nested: Whether those of sub-agents are meant, and all others kept.
    """

    def __init__(self, keeps: float = math.inf, *, nested: bool = False) -> None:
        super().__init__()
        self.keeps = keeps
        self._nested = nested

    def put(
        self,
        config: RunnableConfig,
        checkpoint: Checkpoint,
        metadata: CheckpointMetadata,
        new_versions: ChannelVersions,
    ) -> RunnableConfig:
        if self._is_meant(config):
            self.keeps -= 1
            if self.keeps < 0:
                lost: Any = {**config["configurable"], "checkpoint_id": checkpoint["id"]}
                return {"configurable": lost}
        return super().put(config, checkpoint, metadata, new_versions)

    def put_writes(
        self,
        config: RunnableConfig,
        writes: Sequence[tuple[str, Any]],
        task_id: str,
        task_path: str = "",
    ) -> None:
        if self.keeps > 0 or not self._is_meant(config):
            super().put_writes(config, writes, task_id, task_path)

    def _is_meant(self, config: RunnableConfig) -> bool:
        return not self._nested or bool(config["configurable"].get("checkpoint_ns"))


class Searches:
    """A tool that remembers which calls have started, and in which the process died.

    Args:
        dies_in: The number of that start, from 1.
    """

    def __init__(self, dies_in: int = 0) -> None:
        self.started: list[str] = []
        self._dies_in = dies_in
        self.tool = StructuredTool.from_function(
            self._run, self._arun, name="search", description="search"
        )

    @property
    def calls(self) -> int:
        """How many calls have started; one that started twice is one."""
        return len(set(self.started))

    def _run(self, call_id: Annotated[str, InjectedToolCallId]) -> str:
        self.started.append(call_id)
        if len(self.started) == self._dies_in:
            raise ConnectionAbortedError
        return "found"

    async def _arun(self, call_id: Annotated[str, InjectedToolCallId]) -> str:
        return self._run(call_id)


def for_ever(_: Sequence[BaseMessage]) -> Turn:
    """A model that never stops."""
    return ["search"]


def scene_of(
    signals: Signals,
    kind: Any,
    limits: Sequence[Limit],
    *,
    store: Any,
    searches: Searches,
    script: Any = for_ever,
    saver: Any = None,
    form: Form = "async",
    **options: Any,
) -> SharedScene:
    """An agent that searches."""
    quota = kind(limits, store=store, telemetry=signals.telemetry, **options)
    quota._clock = Clock()
    return SharedScene(
        signals, script, [quota], tools=[searches.tool], checkpointer=saver, form=form
    )


@kinds
@pytest.mark.parametrize("kept", [2, 3, 4, 5, 7])
async def test_a_run_whose_checkpoints_are_lost(kind: Any, kept: int, signals: Signals) -> None:
    """Wherever the lost checkpoints begin, the resumed run has what is left of its budget."""
    store, saver, searches = MemoryStore(), LossySaver(kept), Searches(dies_in=2)
    limits: list[Limit] = [
        ToolCallLimit("search", run_limit=3, thread_limit=9, exit_behavior="end"),
        ModelCallLimit(run_limit=6),
    ]
    scene = scene_of(signals, kind, limits, store=store, searches=searches, saver=saver)
    with pytest.raises(ConnectionAbortedError):
        await scene.turn()
    saver.keeps = math.inf

    await scene.go_on()

    assert 2 <= searches.calls <= 3
    assert run_counts(store, "search") == [3]
    assert counts(store)[THREAD] == 3
    assert run_counts(store, "model") == [scene.state()["langchain_quota"]["run_model"]]
    assert scene.state()["langchain_quota"]["run_tools"] == {"search": 3}
    scene.check_requests()
    check_history(scene.state()["messages"])


@kinds
async def test_model_calls_whose_checkpoints_are_lost(kind: Any, signals: Signals) -> None:
    """A resumed run makes one model call again, and has no other beyond its limit."""
    store, saver, searches = MemoryStore(), LossySaver(2), Searches(dies_in=3)
    limits = [ModelCallLimit(run_limit=4)]
    scene = scene_of(signals, kind, limits, store=store, searches=searches, saver=saver)
    with pytest.raises(ConnectionAbortedError):
        await scene.turn()
    assert len(scene.model.calls) == 3
    saver.keeps = math.inf

    await scene.go_on()

    assert len(scene.model.calls) <= 4 + 1
    assert run_counts(store, "model") == [4]


async def test_a_run_whose_message_is_lost(signals: Signals) -> None:
    """Sent again, the message begins another run; the thread's limit holds over both."""
    store, saver, searches = MemoryStore(), LossySaver(0), Searches(dies_in=2)
    limits = [ToolCallLimit("search", run_limit=3, thread_limit=4, exit_behavior="end")]
    scene = scene_of(signals, QuotaMiddleware, limits, store=store, searches=searches, saver=saver)
    with pytest.raises(ConnectionAbortedError):
        await scene.turn()
    saver.keeps = math.inf

    await scene.turn()

    assert searches.calls == 4
    assert run_counts(store, "search") == [2, 2]
    assert counts(store)[THREAD] == 4


async def test_a_sub_agent_whose_checkpoints_are_lost(signals: Signals) -> None:
    """A call of a sub-agent that is made again after a crash is the same run."""
    store, saver, searches = MemoryStore(), LossySaver(0, nested=True), Searches(dies_in=2)
    limits = [ToolCallLimit("search", run_limit=3, exit_behavior="end")]

    def quota(*limits: Limit) -> Any:
        return QuotaMiddleware(limits, store=store, telemetry=signals.telemetry)

    child: Any = create_agent(
        ScriptedChatModel(script=for_ever), [searches.tool], middleware=[quota(*limits)]
    )
    asked = {"messages": [("user", "search!")]}

    @tool
    async def ask() -> str:
        """Ask the child."""
        return str((await child.ainvoke(asked))["messages"][-1].text)

    parent = SharedScene(
        signals,
        asking("ask"),
        [quota(ToolCallLimit("ask", run_limit=1))],
        tools=[ask],
        checkpointer=saver,
    )
    with pytest.raises(ConnectionAbortedError):
        await parent.turn()
    saver.keeps = math.inf

    await parent.go_on()
    assert searches.calls == 3
    assert (run_counts(store, "search"), run_counts(store, "ask")) == ([3], [1])
    await parent.turn()
    assert searches.calls == 6
    assert (run_counts(store, "search"), run_counts(store, "ask")) == ([3, 3], [1, 1])


@kinds
async def test_each_run_has_a_count(kind: Any, signals: Signals) -> None:
    """A new turn has a new budget; runs need neither a checkpointer nor a thread."""
    for saver, thread_id in ((InMemorySaver(), "thread-1"), (None, "thread-1"), (None, None)):
        store, searches = MemoryStore(), Searches()
        limits = [ToolCallLimit("search", run_limit=2, exit_behavior="end")]
        scene = scene_of(signals, kind, limits, store=store, searches=searches, saver=saver)
        for _ in range(3):
            await scene.turn(thread_id=thread_id)
        assert searches.calls == 6
        assert run_counts(store, "search") == [2, 2, 2]
        assert counts(store) == {}


async def test_two_middlewares_share_a_run(signals: Signals) -> None:
    """Limits of two middlewares on one tool are thresholds over one count, after a crash, too."""
    store, saver, searches = MemoryStore(), LossySaver(2), Searches(dies_in=2)

    class Second(QuotaMiddleware[Any, Any]):
        """A middleware of another name."""

    quotas = [
        kind(
            [ToolCallLimit("search", run_limit=limit, exit_behavior="end")],
            store=store,
            telemetry=signals.telemetry,
        )
        for kind, limit in ((QuotaMiddleware, 5), (Second, 3))
    ]
    scene = SharedScene(signals, for_ever, quotas, tools=[searches.tool], checkpointer=saver)
    with pytest.raises(ConnectionAbortedError):
        await scene.turn()
    saver.keeps = math.inf

    await scene.go_on()
    assert searches.calls == 3
    await scene.turn()
    assert searches.calls == 6
    assert run_counts(store, "search") == [3, 3]


async def test_a_count_that_the_store_has_dropped(signals: Signals) -> None:
    """A run that waits for longer than a day goes on with the count in its state."""
    clock = Clock()
    store, searches = MemoryStore(clock=clock), Searches()
    limits = [ToolCallLimit("search", run_limit=3, exit_behavior="end")]
    quota: Any = QuotaMiddleware(limits, store=store, telemetry=signals.telemetry)
    scene = SharedScene(
        signals, for_ever, [quota], tools=[searches.tool], interrupt_before=["tools"]
    )
    await scene.turn()
    await scene.go_on()
    assert run_counts(store, "search") == [2]
    clock.now += 25 * HOUR
    assert run_counts(store, "search") == []

    while scene.agent.get_state(CONFIG).next:
        await scene.go_on()

    assert searches.calls == 3
    assert run_counts(store, "search") == [3]


async def test_a_run_in_an_outage(signals: Signals) -> None:
    """Denied, a limit of runs alone refuses; allowed, the state judges, and the store hears."""
    for action, ran in (("deny", 0), ("allow", 2)):
        store, searches = FickleStore(MemoryStore()), Searches()
        limits = [ToolCallLimit("search", run_limit=2, exit_behavior="end", name=action)]
        scene = scene_of(
            signals,
            QuotaMiddleware,
            limits,
            store=store,
            searches=searches,
            saver=InMemorySaver(),
            on_store_error=action,
        )
        store.down = True
        await scene.turn()
        assert searches.calls == ran
        assert scene.metric(action, "blocked", "store" if action == "deny" else "run") == 1
        assert scene.state()["langchain_quota"]["run_tools"].get("search", 0) == ran

        store.down = False
        await scene.turn()
        assert searches.calls == ran + 2
        assert run_counts(store, "search") == [2] * (1 + ran // 2)
        scene.check_requests()


async def test_what_the_model_is_told_of_its_run(signals: Signals) -> None:
    """A note has the store's count of the run, though the state has lost it."""
    store, saver, searches = MemoryStore(), LossySaver(2), Searches(dies_in=2)
    limits = [ToolCallLimit("search", run_limit=3, exit_behavior="end", near=0.5)]
    scene = scene_of(
        signals,
        QuotaMiddleware,
        limits,
        store=store,
        searches=searches,
        saver=saver,
        tell_model=True,
    )
    with pytest.raises(ConnectionAbortedError):
        await scene.turn()
    saver.keeps = math.inf
    before = len(scene.model.calls)

    await scene.go_on()

    told = [each.messages[-1].text.split("\n\n") for each in scene.model.calls[before:]]
    assert told == [
        [said, f"Budget: search: {left} of 3 left."] for said, left in (("hi", 1), ("found", 0))
    ]


@both_forms
async def test_a_reset_forgets_the_run(form: Form, signals: Signals) -> None:
    """After a reset no run is known; the next has a count and a budget of its own."""
    store, searches = MemoryStore(), Searches()
    limits = [ToolCallLimit("search", run_limit=2, thread_limit=3, exit_behavior="end")]
    scene = scene_of(
        signals,
        QuotaMiddleware,
        limits,
        store=store,
        searches=searches,
        saver=InMemorySaver(),
        form=form,
    )
    await scene.turn()
    quota: Any = QuotaMiddleware(limits, store=store, telemetry=signals.telemetry)
    if form == "sync":
        quota.reset(scene.agent, CONFIG)
    else:
        await quota.areset(scene.agent, CONFIG)

    assert scene.state()["langchain_quota"]["run"] is None
    assert counts(store) == {}
    await scene.turn()
    assert searches.calls == 4
    assert run_counts(store, "search") == [2, 2]


async def test_an_old_run_goes_on_in_the_state(signals: Signals) -> None:
    """A run that began before runs had a name is counted by the state until its end."""
    store, searches = MemoryStore(), Searches()
    limits = [ToolCallLimit("search", run_limit=2, exit_behavior="end")]
    scene = scene_of(
        signals,
        QuotaMiddleware,
        limits,
        store=store,
        searches=searches,
        saver=InMemorySaver(),
    )
    before = {"run_tools": {"search": 1}, "batch": None}
    scene.agent.update_state(
        CONFIG,
        {"messages": [("user", "hi")], "langchain_quota": before},
        as_node="QuotaMiddleware.before_agent",
    )

    await scene.go_on()

    assert searches.calls == 1
    assert store.usages() == []


async def test_a_quota_beside_a_run(signals: Signals) -> None:
    """What a run has used up is charged to no quota, nor the other way round."""
    store, searches = MemoryStore(), Searches()
    limits = [ToolCallLimit("search", run_limit=2, quotas=[Quota(3, per="global")])]

    def script(messages: Sequence[BaseMessage]) -> Turn:
        return ["search"] * 3 if messages[-1].type == "human" else "done"

    scene = scene_of(
        signals,
        QuotaMiddleware,
        limits,
        store=store,
        searches=searches,
        script=script,
        saver=InMemorySaver(),
    )
    for _ in range(2):
        await scene.turn()

    assert searches.calls == 3
    assert counts(store) == {str(CountKey("search", "global", "")): 3}
    assert run_counts(store, "search") == [1, 2]
