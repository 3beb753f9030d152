"""The log lines about limits: when, how severe, and what they say; and the log of decisions.

What reads decisions sees every refusal, and cannot break an agent.
"""

import asyncio
import json
import logging
import re
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from decimal import Decimal
from logging.handlers import QueueHandler
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple

import httpx
import pytest
from langchain.agents.middleware import (
    ModelCallLimitMiddleware,
    ToolCallLimitMiddleware,
    after_model,
)
from langchain_core.messages import AIMessage, ToolCall
from langchain_core.tools import BaseTool, StructuredTool
from langgraph.types import interrupt

from langchain_quota import (
    ConcurrencyLimit,
    CostLimit,
    Decision,
    MemoryStore,
    ModelCallLimit,
    Quota,
    QuotaWarning,
    RepeatLimit,
    TokenLimit,
    ToolCallLimit,
    hmac_label,
    log_decisions,
    quota_app,
    stop_reason,
)
from langchain_quota.limits import Limit
from langchain_quota.testing import captured_decisions
from tests.scene import Kind, Scene, asking, recording, texts
from tests.stores import FickleStore
from tests.telemetry import HAS_INLINE, Signals, attributes, paid, telling
from tests.tokens import answer

SEARCHES = asking(*["search"] * 4)
Log = pytest.LogCaptureFixture
ADA = {"user_id": "ada@example.org"}


@pytest.fixture
def log(caplog: Log) -> Log:
    """What is logged, also for developers."""
    caplog.set_level(logging.DEBUG, logger="langchain_quota")
    return caplog


def lines(log: Sequence[logging.LogRecord]) -> list[str]:
    """The level and text of each line, without what is the same in all."""
    same = "agent 'unnamed', thread 'thread-1', "
    return [f"{each.levelname} {each.getMessage().replace(same, '')}" for each in log]


NEAR = "limit 'tool:search' near:"
LINES: list[tuple[str, Limit, list[str]]] = [
    (
        "a run",
        ToolCallLimit("search", run_limit=3, near=0.5),
        [
            f"INFO {NEAR} 2 of 3 (run_limit)",
            "WARNING limit 'tool:search' exhausted: 3 of 3 (run_limit)",
            "DEBUG limit 'tool:search' refused: 3 of 3 (run_limit)",
        ],
    ),
    ("a thread", ToolCallLimit("search", thread_limit=5), [f"INFO {NEAR} 4 of 5 (thread_limit)"]),
    (
        "dry run",
        ToolCallLimit("search", run_limit=3, enforce=False, name="trial"),
        ["DEBUG limit 'trial' would refuse: 4 of 3 (run_limit)"],
    ),
    (
        "a quota",
        ToolCallLimit("search", quotas=[Quota(3, per="user_id")]),
        [
            "WARNING limit 'tool:search' exhausted: 3 of 3 (quota 'user_id')",
            "DEBUG limit 'tool:search' refused: 3 of 3 (quota 'user_id')",
        ],
    ),
    ("far away", ToolCallLimit("search", run_limit=99), []),
    (
        "at once",
        ConcurrencyLimit("search", max_concurrency=3, wait=0),
        ["DEBUG limit 'concurrency:search' refused: 4 of 3 (concurrency)"],
    ),
]


@pytest.mark.parametrize(
    ("limit", "told"), [row[1:] for row in LINES], ids=[row[0] for row in LINES]
)
async def test_lines(limit: Limit, told: list[str], log: Log, signals: Signals) -> None:
    """Near is INFO, used up is WARNING, a refusal is DEBUG; each names the limit, and no user."""
    await Scene(signals, SEARCHES, [limit], store=MemoryStore(), context=ADA).play()
    assert lines(log.records) == told
    assert not any("ada@" in repr(vars(each)) for each in log.records)


async def test_a_line_names_the_customer(log: Log) -> None:
    """With a label, what is near, exhausted or refused of a quota says whose it is."""
    signals = telling(subject_label={"user_id": lambda user: user[:3]})
    limits = [ToolCallLimit("search", quotas=[Quota(3, per="user_id")], near=0.5)]
    scene = Scene(signals, SEARCHES, limits, store=MemoryStore())
    for user in ("ada", "bob"):
        log.clear()
        await scene.play(context={"user_id": f"{user}@example.org"})
        ends = [f"{n} of 3 (quota 'user_id' of '{user}')" for n in (2, 3, 3)]
        assert [each.split(": ")[1] for each in lines(log.records)] == ends
        assert {vars(each)["quota_subject"] for each in log.records} == {user}


async def test_no_name_can_forge_a_line(log: Log, signals: Signals) -> None:
    """Line breaks in the name of a thread, a tool or an agent stay within the line."""
    forged = "x\nWARNING langchain_quota: all is well\u2028"
    call = {"name": forged, "args": {}, "id": "a", "type": "tool_call"}
    limits = [ToolCallLimit(forged, thread_limit=0)]
    await Scene(signals, asking(call), limits, name=forged, thread_id=forged).play()
    assert [len(each.getMessage().splitlines()) for each in log.records] == [1, 1]


async def test_logs_and_spans_name_every_agent(log: Log) -> None:
    """The bound on labels of agents bounds metrics; logs and spans name the agent itself."""
    signals = telling(max_agents=0)
    limits: list[Limit] = [ToolCallLimit("serach", run_limit=1), ModelCallLimit(run_limit=1)]
    await Scene(signals, asking("search"), limits, name="boss").play()
    assert len(log.records) >= 2
    assert all("agent 'boss'" in each.getMessage() for each in log.records)
    assert {attributes(each)["gen_ai.agent.name"] for each in signals.decision_spans()} == {"boss"}


async def test_a_store_that_is_nearly_full(log: Log, signals: Signals) -> None:
    """At 80% of what cannot be dropped there is one line, before a call is refused for it."""
    # What a run has used can be dropped, be it calls or tokens.
    limits: Any = [ModelCallLimit(quotas=[Quota(9, per="user_id")]), TokenLimit(run_limit=10**6)]
    scene = Scene(signals, ["Hi!"] * 5, limits, store=MemoryStore(max_keys=5))
    logged = []
    for user in range(5):
        await scene.play(context={"user_id": str(user)})
        logged.append(sum("nearly full" in each.message for each in log.records))
    assert logged == [0, 0, 0, 1, 1]
    line = "WARNING the store is nearly full: 4 of at most 5 counts cannot be dropped"
    assert line in lines(log.records)


PAGE = (Path(__file__).parents[2] / "docs/observability.md").read_text()
QUERIES = re.findall(r"^jq .*?'(.+)'", PAGE, re.MULTILINE)
"""The queries of the docs."""


def lines_of(log: Path) -> list[dict[str, Any]]:
    """What is written in whole lines."""
    return [json.loads(line) for line in log.read_text().splitlines() if line.endswith("}")]


async def play(log: Path, **options: Any) -> list[dict[str, Any]]:
    """The lines of a run with two searches, of which the second one is refused."""
    limits: list[Limit] = [
        ToolCallLimit("search", run_limit=9, quotas=[Quota(1, per="user_id")]),
        ModelCallLimit(run_limit=1, enforce=False),
        CostLimit(enforce=False),
    ]
    with closing(log_decisions(log, **options)) as writes:
        made: dict[str, Any] = {"name": "agent", "store": MemoryStore(), "on_decision": writes}
        script, prices = [paid(5, "search", "search"), paid(5)], lambda used: Decimal(3)
        scene = Scene(telling(), script, limits, prices=prices, **made)
        await scene.play(context={"user_id": "ann"})
    return lines_of(log)


async def test_a_line(tmp_path: Path) -> None:
    """It says what was decided about whose call, by which limits; the docs query such fields."""
    lines = await play(tmp_path / "log")
    assert all(abs(line.pop("time") - 1.8e9) < 1e9 for line in lines)
    who = {"agent": "agent", "thread": "thread-1"}
    search = {"tool": "search", "subjects": {**who, "user_id": "ann"}}
    counts = {"tool:search": {"run": [1, 9], "user_id": [1, 1]}}
    refused = {"id": "search-1", "refused_by": {"tool:search": "user_id"}}
    models = [{"model": {"run": [n, 1]}, "cost": {"run": [3 * (n - 1), None]}} for n in (1, 2)]
    assert lines == [
        {"decision": "allowed", "subjects": who, "counts": models[0]},
        {"decision": "allowed", "id": "search-0", **search, "counts": counts},
        {"decision": "blocked", **refused, **search, "counts": counts},
        {
            "decision": "would_block",
            "refused_by": {"model": "run"},
            "subjects": who,
            "counts": models[1],
        },
    ]
    fields = {field for query in QUERIES for field in re.findall(r"[.{]\w+|\w+[,}]", query)}
    named = {field.strip(".{,}") for field in fields}
    assert (len(QUERIES), named - {"time", *lines[2], *lines[2]["subjects"]}) == (2, set())
    assert named > {"decision", "refused_by", "subjects", "user_id"}


async def test_labels_of_subjects(tmp_path: Path) -> None:
    """Agents, threads and users can be hidden, and are told apart nevertheless."""
    label = hmac_label("a secret of 16 bytes or more")
    lines = await play(tmp_path / "log", subject_label=label)
    who = {"agent": "agent", "thread": "thread-1", "user_id": "ann"}
    assert lines[1]["subjects"] == {per: label(of) for per, of in who.items()}


async def test_after_a_kill(tmp_path: Path) -> None:
    """After a part of a line that a killed process has left, every line is whole."""
    log = tmp_path / "log"
    log.write_text('{"time":1,"dec')
    assert len(await play(log)) == 4


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
async def test_a_full_disk(signals: Signals) -> None:
    """What cannot be written is counted, and the run goes on."""
    limits, writes = [ToolCallLimit("search", run_limit=1)], log_decisions("/dev/full")
    scene = Scene(signals, [["search", "search"], "done"], limits, on_decision=writes)
    await scene.play()
    with suppress(OSError):  # what is left to write fails again
        writes.close()
    scene.check()
    assert signals.errors("observer", "OSError") == 2


def test_arguments(tmp_path: Path) -> None:
    """A log says what it needs."""
    with pytest.raises(TypeError, match=r"to must be a path or a logging\.Handler, not 3"):
        log_decisions(3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="subject_label must be a function of the subject"):
        log_decisions(tmp_path / "log", subject_label=3)  # type: ignore[arg-type]
    with pytest.raises(OSError, match="No such file"):
        log_decisions(tmp_path / "no/where")


KINDS: list[Kind] = ["quota", "graph", "inline"] if HAS_INLINE else ["quota", "graph"]
ASKED: Any = {"messages": [("user", "hi")]}
HOURLY = [Quota(1, per="global", window="hour")]
TWICE, THRICE = [["search"] * 2, "done"], [["search"] * 3, "done"]


class Row(NamedTuple):
    """A kind of refusal: a limit, what the model plays, how many calls are refused, a store."""

    limit: Limit
    script: Sequence[Any]
    refusals: int = 1
    make_store: Callable[[], Any] = MemoryStore


ROWS = {
    "before the model": Row(ModelCallLimit(run_limit=1), [["calc"]]),
    "before the model, in a wait": Row(ModelCallLimit(quotas=HOURLY, wait=0.01), [["calc"]]),
    "around the model": Row(TokenLimit(run_limit=100, reserve=80), [answer(60, "calc")]),
    "after the model": Row(ToolCallLimit("search", run_limit=1), THRICE, 2),
    "after the model, as the end": Row(
        ToolCallLimit("search", run_limit=1, exit_behavior="end"), TWICE
    ),
    "after the model, in a wait": Row(ToolCallLimit("search", quotas=HOURLY, wait=0.01), TWICE),
    "after the model, repeated": Row(RepeatLimit(1), [["search"], ["search"], "done"]),
    "around the tool": Row(ConcurrencyLimit("search", max_concurrency=1, wait=0), THRICE, 2),
    "around the tool, in a wait": Row(
        ConcurrencyLimit("search", max_concurrency=1, wait=0.01), TWICE
    ),
    "around the tool, by leases": Row(
        ConcurrencyLimit("search", max_concurrency=1, wait=0),
        THRICE,
        2,
        lambda: FickleStore(MemoryStore()),
    ),
}


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
        "telemetry.receipts.OpenReceipt.add_verdicts",
        "telemetry.receipts.OpenReceipt.refund",
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


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
async def test_a_refusal_is_seen_by_all(
    row: Row, kind: Kind, signals: Signals, caplog: pytest.LogCaptureFixture
) -> None:
    """Wherever calls are refused, all who read decisions see each one blocked, and only once."""
    caplog.set_level(logging.DEBUG, "langchain_quota")
    log: SimpleQueue[logging.LogRecord] = SimpleQueue()
    busy = Busy(row.refusals)
    tools = [busy.tool if isinstance(row.limit, ConcurrencyLimit) else "search", "calc"]
    options: dict[str, Any] = {"store": row.make_store(), "stream_events": True, "kind": kind}
    options["on_decision"] = [busy, log_decisions(QueueHandler(log))]
    scene = Scene(signals, row.script, [row.limit], tools=tools, **options)
    with scene.quota.receipt() as bill, captured_decisions() as captured:
        stream = scene.agent.astream(ASKED, scene.config, stream_mode="custom")
        events = [event["langchain_quota_event"] async for event in stream]
    page = httpx.ASGITransport(quota_app(signals.registry))
    async with httpx.AsyncClient(transport=page, base_url="http://page") as client:
        (shown,) = (await client.get("/quota.json")).json()["threads"]["rows"]
    lines = [json.loads(log.get().getMessage()) for _ in range(log.qsize())]
    reasons = [(each.type, stop_reason(each)) for each in scene.state()["messages"]]
    stops = Counter(kind for kind, why in reasons if why and why["decision"] == "blocked")
    blocked: Mapping[str, Any] = {"decision": "blocked"}
    seen = {
        "on_decision": busy.seen.count("blocked"),
        "captures": [str(decision.outcome) for decision in captured].count("blocked"),
        "receipt": sum(sum(line.blocked.values()) for line in bill.lines),
        "stream": events.count("refused"),
        "messages": max(stops.values()),
        "log": [getattr(each, "quota_event", "") for each in caplog.records].count("refused"),
        "decision log": [line["decision"] for line in lines].count("blocked"),
        "page": shown["blocked"],
        "thread": sum(signals.samples("langchain_quota_thread_blocked_total").values()),
        **{
            name: sum(signals.samples(f"langchain_quota_{name}_total", **blocked).values())
            for name in ("calls", "limit_decisions")
        },
        "spans": [attributes(each)["decision"] for each in signals.decision_spans()].count(
            "blocked"
        ),
    }
    assert seen == dict.fromkeys(seen, row.refusals)
    ran = [str(decision.outcome) for decision in captured].count("allowed")
    assert ran == sum(signals.samples("langchain_quota_calls_total", decision="allowed").values())


@pytest.mark.parametrize("kind", KINDS)
async def test_a_call_with_a_slot_is_decided_once(kind: Kind, signals: Signals) -> None:
    """Its decision has all limits, also those in a dry run, and is no other when it runs again."""
    limits: list[Any] = [
        ToolCallLimit("search", run_limit=1, enforce=False),
        ConcurrencyLimit("search", max_concurrency=1),
    ]
    asked: list[str] = []

    def ask_first() -> None:
        if not asked:
            asked.append("Really?")
            interrupt(*asked)

    tool = recording("search", [], ask_first)
    scene = Scene(signals, TWICE, limits, kind=kind, tools=[tool])
    with captured_decisions() as captured:
        await scene.play()
        await scene.resume("Yes.")
    outcomes = Counter(str(decision.outcome) for decision in captured)
    assert outcomes == {"allowed": 1, "would_block": 1}
    names = [limit.name for limit in limits]
    assert [[status.limit for status in each.limits] for each in captured] == [names] * 2
    assert {name: scene.calls(name, "search") for name in outcomes} == outcomes
    spans = Counter(attributes(span)["decision"] for span in signals.decision_spans())
    assert spans == outcomes | {"waiting": 2}


@after_model(can_jump_to=["tools"])
def jumping(state: Any, runtime: Any) -> Any:
    """Go straight to the tools after the model."""
    return {"jump_to": "tools"} if state["messages"][-1].tool_calls else None


async def test_a_jump_over_the_limits(caplog: pytest.LogCaptureFixture) -> None:
    """Where calls of an agent with limits jump over them, the line about it names the order."""
    signals = telling(count_unchecked_calls=True)
    await Scene(signals, THRICE, [ToolCallLimit("search", run_limit=1), jumping]).play()
    assert signals.samples("langchain_quota_unchecked_calls_total")["unnamed", "tool"] == 3
    assert "list QuotaMiddleware after a middleware whose after_model jumps" in caplog.text


@pytest.mark.parametrize("kind", [*KINDS, "drop-in"])
async def test_series_begin_with_the_first_run(kind: Kind, signals: Signals) -> None:
    """Before a tool is called for the first time, what counts its refusals is there, at 0."""
    limits: list[Any] = [ToolCallLimit("search", run_limit=1), ToolCallLimit(run_limit=9)]
    limits += [] if kind == "drop-in" else [ConcurrencyLimit(max_concurrency=9, name="at once")]
    await Scene(signals, ["Hello."], limits, kind=kind).play()
    for limit in limits:
        found = signals.samples("langchain_quota_limit_decisions_total", limit=limit.name)
        scope = "concurrency" if limit.name == "at once" else "run"
        assert found.pop(("unnamed", scope, "blocked")) == 0
    assert [*signals.samples("langchain_quota_waiting_calls").values()] == [0] * (kind in KINDS)
    for name in ("calls_total", "crossings_total", "runs_ended_total"):
        found = signals.samples(f"langchain_quota_{name}")
        assert any("search" in "".join(labels) for labels in found)
        assert {*found.values()} == {0}


@pytest.mark.parametrize("kind", ["quota", "drop-in", *(["inline"] if HAS_INLINE else [])])
async def test_langchains_limiters_beside_ours(kind: Kind, signals: Signals) -> None:
    """Where both count under one key of the state, the first run warns; other pairs are right."""
    named: Any = ToolCallLimitMiddleware(tool_name="search", thread_limit=4)
    every: Any = ToolCallLimitMiddleware(thread_limit=4)
    models: Any = ModelCallLimitMiddleware(thread_limit=4)
    tool, all_tools = ToolCallLimit("search", run_limit=9), ToolCallLimit(run_limit=9, name="all")
    model = ModelCallLimit(run_limit=9, name="model calls")
    for theirs, ours, is_shared in (
        (every, all_tools, True),
        (named, tool, True),
        (models, model, True),
        (every, tool, False),
        (named, all_tools, False),
        (models, all_tools, False),
    ):
        scene = Scene(signals, [["search"], "done"] * 2, [theirs, ours], kind=kind)
        with warnings.catch_warnings(record=True, action="always") as caught:
            for _ in range(2):
                await scene.play()
        told = [str(each.message) for each in caught if each.category is QuotaWarning]
        assert [text.startswith(f"LangChain's {theirs.name} and") for text in told] == [
            True
        ] * is_shared
