"""A person corrects a call at `interrupt_before` with `update_state`: it is charged once."""

import asyncio
from decimal import Decimal
from typing import Any

import pytest
from langchain_core.messages import HumanMessage, ToolMessage
from langgraph.checkpoint.memory import InMemorySaver

from langchain_quota import CostLimit, MemoryStore, ModelCallLimit, ToolCallLimit
from langchain_quota.limits import Limit
from tests.scene import CONFIG, Form, Kind, Scene, asking, both_forms
from tests.stores import counts
from tests.telemetry import Signals, needs_inline

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

    first = worker()
    await first.play()
    for edit in edits:
        values = {"messages": [edit(first.state()["messages"])]}
        await first.agent.aupdate_state(CONFIG, values, as_node=as_node)
    second = first if same else worker()
    for _ in range(3):
        await second.go_on()

    assert len(first.ran) + len(second.ran) * (not same) == ran
    assert second.last_text() == "done"
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
    script = asking(*["search"] * 20)
    options: dict[str, Any] = {"checkpointer": saver, "interrupt_before": ["tools"], "form": form}
    scene = Scene(
        signals, script, [ToolCallLimit("search", thread_limit=20)], store=store, **options
    )
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
