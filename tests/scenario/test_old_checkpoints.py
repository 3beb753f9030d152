"""Runs that go on at an old checkpoint: with a store, whatever runs again is charged again.

A call that a person corrects at `interrupt_before`, with `update_state`, is charged once.
"""

import asyncio
from contextlib import suppress
from decimal import Decimal
from functools import partial
from typing import Any

import pytest
from langchain_core.messages import HumanMessage, ToolMessage
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.types import Command, interrupt

from langchain_quota import CostLimit, MemoryStore, ModelCallLimit, Quota, TokenLimit, ToolCallLimit
from langchain_quota.limits import Limit
from langchain_quota.testing import ScriptedChatModel
from tests.scene import ANN, CONFIG, Form, Kind, Scene, asking, both_forms, each_kind, recording
from tests.stores import counts
from tests.telemetry import Signals, needs_inline

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

    def __init__(self, signals: Signals, *searches: str, more: Any = (), **options: Any) -> None:
        self.ran, self.store = list[str](), MemoryStore()
        self.model = ScriptedChatModel(script=asking(*searches or ("search", "search")))
        quotas = [Quota(99, per="user_id")]
        limits = ToolCallLimit("search", quotas=quotas), ModelCallLimit(quotas=quotas), *more
        shared: Any = {"store": self.store, "checkpointer": InMemorySaver(), "ran": self.ran}
        self.start = partial(Scene, signals, self.model, limits, context=ANN, **shared, **options)
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
        most = 8 if how == "led to tools" else 0
        assert 0 <= models - len(workers.model.calls) <= most, at.next
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


async def test_a_reserve_refuses_what_runs_again(signals: Signals) -> None:
    """A model call that runs again for another user, and gets no reserve, is charged to nobody."""
    workers = Workers(signals, more=[TokenLimit(thread_limit=9_000, reserve=9_000)])
    at = [each.config for each in await workers.history() if each.next == ("model",)][-1]
    await workers.scene.agent.ainvoke(None, at, context={"user_id": "bob"})
    assert (workers.counted(), "model:user_id:bob" in counts(workers.store)) == ((1, 2), False)


LIMITS: list[Limit] = [
    ToolCallLimit("search", thread_limit=1),
    ModelCallLimit(thread_limit=2),
    CostLimit(thread_limit=2, tool_prices={"search": 1}),
]
FREE: dict[str, Any] = {"prices": lambda _: Decimal(0)}


def arguments(messages: Any) -> Any:
    called = [{**call, "args": {"query": "better"}} for call in messages[-1].tool_calls]
    return messages[-1].model_copy(update={"tool_calls": called})


def question(messages: Any) -> Any:
    return HumanMessage("Go, please.", id=messages[0].id)


def answer(messages: Any) -> Any:
    return ToolMessage("by hand", name="search", tool_call_id=messages[-1].tool_calls[0]["id"])


@pytest.mark.parametrize("kind", ["quota", pytest.param("inline", marks=needs_inline)])
@pytest.mark.parametrize("same", [True, False], ids=["one process", "several"])
@pytest.mark.parametrize(
    ("at", "edits", "as_node", "ran"),
    [
        ("tools", [arguments], None, 1),
        ("tools", [question, arguments], "model", 1),
        ("tools", [answer], "tools", 0),
        ("model", [question, question], None, 1),
    ],
)
async def test_charged_once(
    *, kind: Kind, same: bool, at: str, edits: Any, as_node: Any, ran: int, signals: Signals
) -> None:
    """Whoever edits which message, and how often, the call that was checked runs, and no more."""
    store, saver = MemoryStore(), InMemorySaver()

    def worker() -> Scene:
        shared: Any = {"store": store, "checkpointer": saver, "interrupt_before": [at], **FREE}
        return Scene(signals, asking("search"), LIMITS, kind=kind, **shared)

    first = await worker().played()
    for edit in edits:
        values = {"messages": [edit(first.state()["messages"])]}
        await first.agent.aupdate_state(CONFIG, values, as_node=as_node)
    second = first if same else worker()
    for _ in range(3):
        await second.go_on()

    assert (len(first.ran) + len(second.ran) * (not same), second.last_text()) == (ran, "done")
    charged = {"search": 1, "model": 2, "model.nanodollars": 10**9}
    assert counts(store) == {f"{name}:thread:thread-1": amount for name, amount in charged.items()}


class SlowSaver(InMemorySaver):
    """A saver that counts how often it is read; a read takes its time, and may fail."""

    reads = 0
    failing: int | None = None

    def get_tuple(self, config: Any) -> Any:
        self.reads += 1
        return super().get_tuple(config)

    async def aget_tuple(self, config: Any) -> Any:
        found, number = self.get_tuple(config), self.reads
        await asyncio.sleep(0.01)
        if number == self.failing:
            raise ConnectionError
        return found


@both_forms
@pytest.mark.parametrize("edits", [0, 1])
async def test_the_checkpointer_is_read_once_a_step(
    form: Form, edits: int, signals: Signals
) -> None:
    """Many calls share one read of their checkpoint; if it fails, the others read themselves."""
    saver, store = SlowSaver(), MemoryStore()
    options: dict[str, Any] = {"checkpointer": saver, "interrupt_before": ["tools"], "form": form}
    limits = [ToolCallLimit("search", thread_limit=20)]
    scene = Scene(signals, asking(*["search"] * 20), limits, store=store, **options)
    for turn in ("a", "b"):
        await scene.play(thread_id=turn)
        for _ in range(edits):
            scene.agent.update_state(scene.config, {"messages": []})
        saver.reads = 0
        if form == "async" and turn == "b":
            saver.failing = 2
            with pytest.raises(ConnectionError):
                await scene.go_on()
        await scene.go_on()
        assert turn == "b" or saver.reads == 2 + edits
        assert scene.answers() == [("search", "success")] * 20
