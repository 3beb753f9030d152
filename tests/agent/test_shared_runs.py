"""Runs that a store counts: a run that goes on after a crash has the budget that it had."""

import math
from collections.abc import Sequence
from typing import Annotated, Any

import pytest
from langchain_core.messages import BaseMessage
from langchain_core.runnables import RunnableConfig
from langchain_core.tools import InjectedToolCallId, StructuredTool
from langgraph.checkpoint.base import ChannelVersions, Checkpoint, CheckpointMetadata
from langgraph.checkpoint.memory import InMemorySaver

from langchain_quota import InlineQuotaMiddleware, ModelCallLimit, QuotaMiddleware, ToolCallLimit
from langchain_quota.limits import Limit
from langchain_quota.stores.memory import MemoryStore
from langchain_quota.testing import Turn
from tests.scene import Form, Scene
from tests.signals import HAS_INLINE, Signals
from tests.stores import Clock, run_counts

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
) -> Scene:
    """An agent that searches."""
    quota = kind(limits, store=store, telemetry=signals.telemetry, **options)
    quota._clock = Clock()
    return Scene(signals, script, [quota], tools=[searches.tool], checkpointer=saver, form=form)


@kinds
async def test_model_calls_whose_checkpoints_are_lost(kind: Any, signals: Signals) -> None:
    """A resumed run makes one model call again, and has no other beyond its limit."""
    store, saver, searches = MemoryStore(), LossySaver(2), Searches(dies_in=3)
    limits = [ModelCallLimit(run_limit=4)]
    scene = scene_of(signals, kind, limits, store=store, searches=searches, saver=saver)
    with pytest.raises(ConnectionAbortedError):
        await scene.play()
    assert len(scene.model.calls) == 3
    saver.keeps = math.inf

    await scene.go_on()

    assert len(scene.model.calls) <= 4 + 1
    assert run_counts(store, "model") == [4]


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
    scene = Scene(signals, for_ever, quotas, tools=[searches.tool], checkpointer=saver)
    with pytest.raises(ConnectionAbortedError):
        await scene.play()
    saver.keeps = math.inf

    await scene.go_on()
    assert searches.calls == 3
    await scene.play()
    assert searches.calls == 6
    assert run_counts(store, "search") == [3, 3]


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
        await scene.play()
    saver.keeps = math.inf
    before = len(scene.model.calls)

    await scene.go_on()

    told = [each.messages[-1].text.split("\n\n") for each in scene.model.calls[before:]]
    assert told == [
        [said, f"Budget: search: {left} of 3 left."] for said, left in (("hi", 1), ("found", 0))
    ]
