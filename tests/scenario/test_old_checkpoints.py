"""Runs that go on at an old checkpoint: with a store, whatever runs again is charged again."""

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import pytest
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.types import Command, interrupt

from langchain_quota import MemoryStore, ModelCallLimit, Quota, ToolCallLimit
from langchain_quota.testing import ScriptedChatModel
from tests.scene import ANN, CONFIG, Kind, Scene, asking, each_kind, recording
from tests.stores import counts
from tests.telemetry import Signals

SEARCHES, MODEL_CALLS = "search:user_id:ann", "model:user_id:ann"

HOW: dict[str, Any] = {
    "replayed": None,
    "resumed": Command(resume="yes"),
    "updated": Command(update={"messages": []}),
    "led to tools": Command(goto="tools"),
}
"""What a caller sends with the id of a checkpoint."""

processes = pytest.mark.parametrize("same", [True, False], ids=["one process", "several"])


class Workers:
    """Processes that share a checkpointer and a store, and what they ran."""

    def __init__(self, signals: Signals, *searches: str, **options: Any) -> None:
        self.ran, self.store = list[str](), MemoryStore()
        self.model = ScriptedChatModel(script=asking(*searches or ("search", "search")))
        quotas = [Quota(99, per="user_id")]
        limits = ToolCallLimit("search", quotas=quotas), ModelCallLimit(quotas=quotas)
        shared: Any = {"store": self.store, "checkpointer": InMemorySaver(), "ran": self.ran}
        scene = partial(Scene, signals, self.model, limits, context=ANN, **shared, **options)
        self.start: Callable[[], Scene] = scene
        """Start a new process."""
        self.scene = self.start()

    async def history(self) -> list[Any]:
        """The checkpoints of a run."""
        await self.scene.play()
        return [each async for each in self.scene.agent.aget_state_history(CONFIG)]

    async def go_on(self, given: Any, config: Any, *, same: bool = True) -> None:
        """Go on at a checkpoint, in this process or in another one."""
        self.scene = self.scene if same else self.start()
        await self.scene.agent.ainvoke(given, config, context=ANN)

    def counted(self) -> tuple[int, int]:
        """What the store counts, of model and tool calls."""
        found = counts(self.store)
        return found[MODEL_CALLS], found.get(SEARCHES, 0)


@processes
@each_kind
@pytest.mark.parametrize("how", HOW)
async def test_what_runs_again(*, same: bool, kind: Kind, how: str, signals: Signals) -> None:
    """From whichever checkpoint of a run, and however often: what ran is what is counted."""
    workers = Workers(signals, kind=kind)
    steps = [each for each in await workers.history() if each.metadata["step"] > 0]
    for at in [each for each in steps if each.next] * 2:
        # A graph that is led to tools where there are none to call fails.
        with suppress(ValueError):
            await workers.go_on(HOW[how], at.config, same=same)
        models, tools = workers.counted()
        assert tools == len(workers.ran), at.next
        assert models - len(workers.model.calls) in ({0} if how != "led to tools" else range(9)), (
            at.next
        )
    assert len(workers.ran) > 4


@processes
@pytest.mark.parametrize("cut", ["failed", "interrupted", "stopped"])
@pytest.mark.parametrize("named", [True, False], ids=["its checkpoint", "the newest"])
async def test_a_step_cut_off(*, same: bool, cut: str, named: bool, signals: Signals) -> None:
    """What never came to its end is charged once, also where a caller names its checkpoint."""
    failing = [cut == "failed"]

    def body() -> None:
        if failing.pop() if failing else False:
            raise ConnectionError
        if cut == "interrupted":
            interrupt("Sure?")

    ran: list[str] = []
    stops: Any = {"interrupt_before": ["tools"]} if cut == "stopped" else {}
    workers = Workers(signals, "search", tools=[recording("search", ran, body)], **stops)
    with suppress(ConnectionError):
        await workers.scene.play()
    given: Any = Command(resume="yes") if cut == "interrupted" else None
    at = workers.scene.agent.get_state(CONFIG).config if named and cut != "failed" else CONFIG
    await workers.go_on(given, at, same=same)
    assert (ran, workers.counted()) == (["search"], (2, 1))


async def test_a_copy_that_is_not_saved(signals: Signals) -> None:
    """Another process charges again also where the copy of the checkpoint is saved at the end."""
    workers = Workers(signals)
    (at,) = [each.config for each in await workers.history() if each.next == ("tools", "tools")]
    await workers.start().agent.ainvoke(None, at, context=ANN, durability="exit")
    assert (workers.counted(), len(workers.ran)) == ((3, 4), 4)
