"""`langchain-quota replay`, and the log of decisions that it reads."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from langchain_quota import (
    CostLimit,
    MemoryStore,
    ModelCallLimit,
    Quota,
    TokenLimit,
    ToolCallLimit,
    hmac_label,
    log_decisions,
)
from langchain_quota.cli import main
from tests.scene import Scene, delegate
from tests.stores import Clock
from tests.telemetry import Signals, paid, telling

HEAD = "from langchain_quota import *\n"
Replayed = Callable[..., dict[str, Any]]


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "decisions.jsonl"


@pytest.fixture
def replayed(log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Replayed:
    """Replays the log under limits, and returns the report."""

    def replay(limits: str, *logs: Path) -> dict[str, Any]:
        file = tmp_path / "new.py"
        file.write_text(f"{HEAD}limits = {limits}\n")
        capsys.readouterr()
        assert main(["replay", *map(str, logs or [log]), "--limits", str(file), "--json"]) == 0
        report: dict[str, Any] = json.loads(capsys.readouterr().out)
        return report

    return replay


async def play(log: Path, *users: str, limits: Any = (), **options: Any) -> Scene:
    """A run of each user: three answers with two searches each, of ten tokens, cost a dollar."""
    turns = [paid(10, "search", "search") for _ in range(3)]
    script = [turn for _ in users for turn in [*turns, paid(10)]]
    with closing(log_decisions(log, **options)) as writes:
        scene = Scene(
            telling(),
            script,
            limits
            or [
                ToolCallLimit("search", quotas=[Quota(99, per="user_id")]),
                CostLimit(enforce=False),
            ],
            on_decision=writes,
            store=MemoryStore(clock=Clock()),
            prices=lambda used: Decimal(used.total_tokens) / 10,
        )
        for number, user in enumerate(users):
            await scene.play(thread_id=f"thread-{number}", context={"user_id": user})
    return scene


async def test_report(log: Path, tmp_path: Path, replayed: Replayed, capsys: Any) -> None:
    """Who would be refused, when first, and what is saved; calls after a run's end are not made."""
    await play(log, "ann", "bob", "ann")
    limits = "[ToolCallLimit('search', quotas=[Quota(7, per='user_id')], exit_behavior='end')]"
    report = replayed(limits)
    first = {"time": "2026-01-01T12:00:00+00:00", "run": report["blocked"]["first"]["run"]}
    blocked = {
        "calls": 1,
        "runs": 1,
        "subjects": {"global": [""], "thread": ["thread-2"], "user_id": ["ann"]},
        "first": {**first, "global": "", "thread": "thread-2", "user_id": "ann"},
    }
    tokens = {"input_tokens": 30, "output_tokens": 0, "total_tokens": 30}
    assert report == {
        "from": first["time"],
        "to": first["time"],
        "runs": 3,
        # Of Ann's second run, the first batch is stopped, and three more answers are not made.
        "calls": {"checked": 30, "changed": 9, "not_made": 9, "also_made": 0},
        "saved": {"model.nanodollars": 3, **{f"model.{of}": n for of, n in tokens.items()}},
        "blocked": blocked,
        "limits": {"tool:search": blocked},
        "not_replayable": {},
    }
    assert main(["replay", str(log), "--limits", str(tmp_path / "new.py")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split()[:3] == ["tool:search", "1", "1"]
    assert lines[1].endswith("thread-2 ann")
    assert lines[-1].startswith("It is assumed that the agents make the same calls")


async def test_limits_of_the_log(log: Path, replayed: Replayed) -> None:
    """Calls that the log's limits refused would be made; grants and freezes are the log's."""
    store = MemoryStore(clock=Clock())
    limit = ToolCallLimit("search", quotas=[Quota(1, per="user_id")])
    with closing(log_decisions(log)) as writes:
        calls = ["search", "search"]
        scene = Scene(telling(), [calls, "done"] * 3, [limit], store=store, on_decision=writes)
        await scene.play(context={"user_id": "ann"})
        store.grant("search:user_id:ann", 1, window=None, reason="ticket", until=None)
        await scene.play(context={"user_id": "ann"})
        scene.quota.freeze(user_id="ann", reason="ticket")
        await scene.play(context={"user_id": "ann"})
    decided = [call["decision"] for line in lines_of(log) for call in line.get("calls", ())]
    assert decided == ["allowed", "blocked"] * 2 + ["blocked"] * 2
    own = replayed("[ToolCallLimit('search', quotas=[Quota(1, per='user_id')])]")
    assert (own["calls"]["changed"], own["blocked"]["calls"]) == (0, 4)
    loose = replayed("[ToolCallLimit('search', quotas=[Quota(3, per='user_id')])]")
    assert (loose["calls"]["also_made"], loose["blocked"]["calls"]) == (2, 2)
    # A log that begins later has its counts from before.
    write(log, lines_of(log)[1:])
    own = replayed("[ToolCallLimit('search', quotas=[Quota(1, per='user_id')])]")
    assert (own["calls"]["changed"], own["blocked"]["calls"]) == (0, 3)


async def test_calls_of_others(log: Path, replayed: Replayed) -> None:
    """What others have charged meanwhile is in the counts."""
    await play(log, "ann")
    lines = lines_of(log)
    second = [line for line in lines if "tool" in line.get("calls", [{}])[0]][1]
    write(log, [line for line in lines if line != second])
    report = replayed("[ToolCallLimit('search', quotas=[Quota(4, per='user_id')])]")
    assert report["blocked"]["calls"] == 2


async def test_giving_up(log: Path, replayed: Replayed) -> None:
    """The refusals of a run's earlier messages count until its limit gives up."""
    await play(log, "ann")
    report = replayed("[ToolCallLimit('search', run_limit=1, give_up_after=3)]")
    assert (report["blocked"]["calls"], report["calls"]["not_made"]) == (3, 7)


async def test_threads_of_a_graph(log: Path, replayed: Replayed) -> None:
    """A thread's count, which no limit of the log has needed, adds up over its runs."""
    with closing(log_decisions(log)) as writes:
        meter = TokenLimit(enforce=False)
        scene = Scene(telling(), [paid(10)] * 3, [meter], kind="graph", on_decision=writes)
        for _ in range(3):
            await scene.play()
    assert replayed("[TokenLimit(thread_limit=15)]")["blocked"]["calls"] == 1


def lines_of(log: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in log.read_text().splitlines()]


def write(log: Path, lines: Sequence[Any], rest: str = "") -> None:
    log.write_text("".join(f"{json.dumps(line)}\n" for line in lines) + rest)


async def test_blocked_calls_use_nothing(log: Path, replayed: Replayed) -> None:
    """What calls have used that would be blocked leaves room for others."""
    await play(log, "ann", "bob")
    for dollars, calls in ((5, 0), (3, 1)):
        cost = f"CostLimit(quotas=[Quota({dollars}, per='global')])"
        report = replayed(f"[ModelCallLimit(run_limit=2), {cost}]")
        assert report["limits"]["cost"]["calls"] == calls


async def test_a_window_ends_before_the_line(log: Path, replayed: Replayed) -> None:
    """Calls that are checked at the end of a window count there, though their line comes later."""
    limit = ToolCallLimit("search", quotas=[Quota(1, per="global", window="1m")])
    await play(log, "ann", limits=[limit, CostLimit(enforce=False)])
    lines = lines_of(log)
    for line in lines[len(lines) // 2 :]:
        line["time"] += 60
    write(log, lines)
    own = "[ToolCallLimit('search', quotas=[Quota(1, per='global', window='1m')])]"
    assert replayed(own)["calls"]["changed"] == 0


async def test_sub_agents(log: Path, replayed: Replayed) -> None:
    """When the outermost run would have ended, its sub-agents' calls are not made either."""
    with closing(log_decisions(log)) as writes:
        limits = [ToolCallLimit(enforce=False)]
        inner = Scene(telling(), [["search"], "done"] * 2, limits, on_decision=writes)
        ask = delegate(inner.agent)
        outer = Scene(
            telling(), [["delegate"], ["delegate"], "done"], limits, tools=[ask], on_decision=writes
        )
        await outer.play()
    report = replayed("[ToolCallLimit('delegate', run_limit=1, exit_behavior='end')]")
    assert (inner.ran, report["calls"]["not_made"], report["runs"]) == (["search"] * 2, 2, 3)
    # The log does not say that there were no model calls.
    report = replayed("QuotaMiddleware([ModelCallLimit(run_limit=0)])")
    assert report["not_replayable"] == {"model": "the log has no model calls"}


@pytest.mark.parametrize(
    ("limit", "reason"),
    [
        ("ToolCallLimit(run_limit=lambda state, runtime: 3)", "a function gives an amount"),
        ("CostLimit(run_limit=3, tool_prices={'search': float})", "a function gives an amount"),
        ("ToolCallLimit(quotas=[Quota(9, per='user_id', window='1m')], wait=3)", "its calls wait"),
        ("ToolCallLimit(run_limit=3, exit_behavior='ask')", "its calls wait"),
        ("ToolCallLimit(quotas=[Quota(9, per='global', window='1m', smooth=True)])", "it has a s"),
        ("ToolCallLimit(quotas=[Quota(9, per='tenant')])", "the log has no tenant"),
        ("ToolCallLimit(quotas=[Quota(9, per='user_id', window='1m', rollover=3)])", "what rolls"),
        ("TokenLimit(run_limit=9, reserve=3, name='t')", "the log has no t with reserve 3"),
        ("TimeLimit(run_limit=3)", "the log has no model.milliseconds"),
        ("RepeatLimit(3)", "it depends on more than counts"),
        ("ConcurrencyLimit(max_concurrency=3)", "it depends on more than counts"),
    ],
)
async def test_not_replayable(limit: str, reason: str, log: Path, replayed: Replayed) -> None:
    """What a log cannot know is named, and refuses nothing."""
    await play(log, "ann")
    report = replayed(f"[{limit}]")
    [text] = report["not_replayable"].values()
    assert text.startswith(reason)
    assert (report["limits"], report["calls"]["changed"]) == ({}, 0)


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        (None, "No such file or directory"),
        ("limits = [", "was never closed"),
        ("x = 3", "limits must have at least one limit"),
        (f"{HEAD}limits = [Quota(3, per='global')]", "limits must be a sequence of limits"),
        (f"{HEAD}limits = [ToolCallLimit('a', run_limit=-1)]", "run_limit must be"),
        ("raise KeyError('a\\nb')", "a\\nb"),
    ],
)
def test_a_file_that_is_wrong(
    text: str | None, fault: str, log: Path, tmp_path: Path, capsys: Any
) -> None:
    """A file without limits is named, in one line, with the exit code 2."""
    file = tmp_path / "new.py"
    if text is not None:
        file.write_text(text)
    assert main(["replay", str(log), "--limits", str(file)]) == 2
    printed = capsys.readouterr()
    [line] = printed.err.splitlines()
    assert line.startswith(f"langchain-quota replay: --limits '{file}': ")
    assert (fault in line, printed.out) == (True, "")
    file.write_text(f"{HEAD}limits = [ToolCallLimit('a', run_limit=1)]")
    for content, of_log in ((None, "cannot read"), ("{}\n", "no decisions in")):
        if content is not None:
            log.write_text(content)
        assert main(["replay", str(log), "--limits", str(file)]) == 2
        assert of_log in capsys.readouterr().err


async def test_several_files(log: Path, tmp_path: Path, replayed: Replayed, capsys: Any) -> None:
    """Files are read in the order of their times; half a line is skipped, the next is whole."""
    await play(log, "ann", "bob")
    lines, old = lines_of(log), tmp_path / "decisions.jsonl.1"
    write(old, lines[: len(lines) // 2])
    write(log, lines[len(lines) // 2 :], json.dumps(lines[0])[:40])
    await play(log, "ann")
    limits = "[ToolCallLimit('search', quotas=[Quota(6, per='user_id')])]"
    report = replayed(limits, log, old)
    assert (report["runs"], report["calls"]["checked"], report["calls"]["changed"]) == (3, 30, 0)
    assert main(["replay", str(log), "--limits", str(tmp_path / "new.py")]) == 0
    [notice] = capsys.readouterr().err.splitlines()
    assert notice.endswith("1 lines are cut off or no decisions, and are skipped")


async def test_labels_of_subjects(log: Path, replayed: Replayed) -> None:
    """Subjects and threads can be hidden, and are told apart nevertheless."""
    label = hmac_label("a secret of 16 bytes or more")
    await play(log, "ann", "bob", subject_label=label)
    assert not any(name in str(lines_of(log)) for name in ("ann", "bob", "thread-0"))
    report = replayed("[ToolCallLimit('search', quotas=[Quota(5, per='user_id')])]")
    assert report["blocked"]["subjects"]["user_id"] == [label("ann"), label("bob")]


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
    assert signals.value("langchain_quota_errors_total", **labels) == 1


def test_arguments(log: Path) -> None:
    """A log is for on_decision, and says what it needs."""
    with pytest.raises(TypeError, match=r"to must be a path or a logging\.Handler, not 3"):
        log_decisions(3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="subject_label must be a function of the subject"):
        log_decisions(log, subject_label=3)  # type: ignore[arg-type]
    with pytest.raises(OSError, match="No such file"):
        log_decisions(log / "nowhere")
    with closing(log_decisions(log)) as writes, pytest.raises(TypeError, match="on_decision=log_d"):
        writes(None)  # type: ignore[arg-type]


PROGRAM = """
import sys
from langchain.agents import create_agent
from langchain_core.tools import StructuredTool
from langchain_quota import QuotaMiddleware, ToolCallLimit, log_decisions
from langchain_quota.testing import ScriptedChatModel

search = StructuredTool.from_function(lambda: "found", name="search", description="Search.")
quota = QuotaMiddleware([ToolCallLimit(run_limit=2)], on_decision=log_decisions(sys.argv[1]))
model = ScriptedChatModel(script=lambda m: ["search"] * 3 if m[-1].type == "human" else "done")
agent = create_agent(model, [search], middleware=[quota])
while True:
    agent.invoke({"messages": [("user", "go")]})
"""


@pytest.mark.rest
def test_kills(log: Path, replayed: Replayed) -> None:
    """After kills -9, every line but the last of each process is whole."""
    for number in range(1, 4):
        process = subprocess.Popen([sys.executable, "-c", PROGRAM, str(log)])
        deadline = time.monotonic() + 60
        while not log.exists() or log.read_text().count("\n") < number * 50:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    report = replayed("[ToolCallLimit(run_limit=2)]")
    lines = log.read_text().count("\n")
    assert lines - 3 <= report["calls"]["checked"] / 3 <= lines
    assert (report["calls"]["changed"], report["blocked"]["calls"]) == (0, report["runs"])


def moved(line: dict[str, Any], number: int) -> dict[str, Any]:
    """The same line in another run, of one of a hundred users."""
    subjects = {"thread": f"{number}", "user_id": f"{number % 100}"}
    named = {"subjects": subjects} if "calls" in line else {}
    return {**line, **named, "run": f"{number}", "time": line["time"] + number / 10}


@pytest.mark.rest
async def test_100_000_decisions(log: Path, replayed: Replayed) -> None:
    """A log of 100,000 decisions is replayed in less than ten seconds of processor time."""
    meters = [
        ToolCallLimit("search", quotas=[Quota(10**9, per="user_id", window="1m")]),
        ModelCallLimit(enforce=False),
        CostLimit(enforce=False),
    ]
    await play(log, "ann", limits=meters)
    lines = lines_of(log)
    write(log, [moved(line, number) for number in range(10_000) for line in lines])
    began = time.process_time()
    report = replayed(
        "[ToolCallLimit('search', quotas=[Quota(9, per='user_id', window='1h')]), "
        "TokenLimit(run_limit=99), ModelCallLimit(run_limit=9)]"
    )
    seconds = time.process_time() - began
    print(f"{report['calls']['checked']:,} decisions: {seconds:.1f} s")  # noqa: T201
    assert report["calls"]["checked"] == 100_000
    assert seconds < 10
