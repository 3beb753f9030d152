"""What reads decisions sees every refusal, and cannot break an agent."""

import asyncio
from typing import Any

import pytest
from langchain_core.messages import AIMessage, ToolCall
from langchain_core.tools import BaseTool, StructuredTool

from langchain_quota import ConcurrencyLimit, Decision, MemoryStore, Quota, ToolCallLimit
from langchain_quota.testing import captured_decisions
from tests.scene import Kind, Scene, texts
from tests.telemetry import HAS_INLINE, Signals

KINDS: list[Kind] = ["quota", "graph", "inline"] if HAS_INLINE else ["quota", "graph"]


class Busy:
    """The tool `search`, whose first call runs until so many others are refused."""

    def __init__(self, refusals: int) -> None:
        self._refusals, self._enough = refusals, asyncio.Event()
        self.seen: list[str] = []

    def __call__(self, decision: Decision) -> None:
        """Note a decision."""
        self.seen.append(str(decision.outcome))
        if self.seen.count("blocked") == self._refusals:
            self._enough.set()

    @property
    def tool(self) -> BaseTool:
        async def search() -> str:
            await self._enough.wait()
            return "found"

        return StructuredTool.from_function(coroutine=search, name="search", description="Look.")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("names", [("search", "calc"), ("calc", "search")])
async def test_a_receipt_of_calls_with_one_id(
    names: tuple[str, str], kind: Kind, signals: Signals
) -> None:
    """Calls that share an id are blocked with the one that a limit refuses, and named by it."""
    calls = [ToolCall(name=name, args={}, id="same") for name in names]
    limits: list[Any] = [ToolCallLimit("search", run_limit=0), ToolCallLimit(run_limit=9)]
    script = [AIMessage("", tool_calls=calls), "done"]
    scene = Scene(signals, script, limits, kind=kind, stream_events=True)
    with scene.quota.receipt() as bill, captured_decisions() as captured:
        await scene.play()
    assert (scene.last_text(), scene.ran) == ("done", [])
    assert bill.total("tool").blocked == {"tool:search": 2}
    assert [str(decision.outcome) for decision in captured].count("blocked") == 2


@pytest.mark.parametrize(
    "part",
    [
        "telemetry.receipts.Receipt.add_decisions",
        "telemetry.receipts.Receipt.refund",
        "telemetry.recorder.open_receipts",
        "telemetry.stream.get_stream_writer",
        "telemetry.stream.reason_of",
    ],
)
async def test_a_reader_that_fails(
    part: str, signals: Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is allowed, refused and refunded stays so, and the failure is counted."""

    def fail(*_: object, **__: object) -> Any:
        raise LookupError("a bug of this reader")

    limits: list[Any] = [
        ToolCallLimit("search", quotas=[Quota(2, per="global")]),
        ConcurrencyLimit("search", max_concurrency=1, wait=0),
    ]
    busy = Busy(2)
    options: dict[str, Any] = {"store": MemoryStore(), "on_decision": busy, "stream_events": True}
    scene = Scene(signals, [["search"] * 3, "done"], limits, tools=[busy.tool], **options)
    with scene.quota.receipt():
        monkeypatch.setattr(f"langchain_quota.{part}", fail)
        result = await scene.play()
        monkeypatch.undo()
    assert texts(result).count("found") == 1
    assert (scene.last_text(), scene.metric("tool:search", "refunded")) == ("done", 1)
    counted = signals.samples("langchain_quota_errors_total", error_type="LookupError")
    assert counted.keys() == {("observer",)}
