"""The log lines about limits: when, how severe, and what they say; and the log of decisions."""

import json
import logging
import re
from collections.abc import Sequence
from contextlib import closing, suppress
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from langchain_quota import (
    ConcurrencyLimit,
    CostLimit,
    MemoryStore,
    ModelCallLimit,
    Quota,
    ToolCallLimit,
    hmac_label,
    log_decisions,
)
from langchain_quota.limits import Limit
from tests.scene import Scene, asking
from tests.telemetry import Signals, attributes, paid, telling

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
    calls = ModelCallLimit(quotas=[Quota(9, per="user_id")])
    scene = Scene(signals, ["Hi!"] * 5, [calls], store=MemoryStore(max_keys=5))
    logged = []
    for user in range(5):
        await scene.play(context={"user_id": str(user)})
        logged.append(sum("nearly full" in each.message for each in log.records))
    assert logged == [0, 0, 0, 1, 1]
    line = "WARNING the store is nearly full: 4 of at most 5 counts cannot be dropped"
    assert line in lines(log.records)


PAGE = (Path(__file__).parents[2] / "docs/limits.md").read_text()
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
    labels = {"component": "observer", "error_type": "OSError"}
    assert signals.value("langchain_quota_errors_total", **labels) == 2


def test_arguments(tmp_path: Path) -> None:
    """A log says what it needs."""
    with pytest.raises(TypeError, match=r"to must be a path or a logging\.Handler, not 3"):
        log_decisions(3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="subject_label must be a function of the subject"):
        log_decisions(tmp_path / "log", subject_label=3)  # type: ignore[arg-type]
    with pytest.raises(OSError, match="No such file"):
        log_decisions(tmp_path / "no/where")
