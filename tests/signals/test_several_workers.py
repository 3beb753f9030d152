"""Workers that share a port, in prometheus_client's multi-process mode: any one tells of all.

Each is a process of its own, at a time of its own, and has ended when the next one begins.
"""

import asyncio
import json
import os
import signal
import stat
import time
from collections.abc import Sequence
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import httpx
import pytest
from blockbuster import blockbuster_ctx
from langchain_core.messages import BaseMessage
from prometheus_client import REGISTRY, Counter
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.parser import text_string_to_metric_families

from langchain_quota import MemoryStore, Quota, TokenLimit, ToolCallLimit, metrics_app
from langchain_quota.limits import Limit
from langchain_quota.limits.call import Call
from tests.forked import run_python
from tests.scene import Scene
from tests.server.prometheus import eventually
from tests.telemetry import paid, telling

ROOT = Path(__file__).parents[2]
VARIABLE = "PROMETHEUS_MULTIPROC_DIR"
SEARCH = "search"
PARENT = "parent"
USER = "ada@example.org"
LIMITS: list[Limit] = [
    ToolCallLimit("search", thread_limit=10, name="searches"),
    ToolCallLimit("search", quotas=[Quota(10, per="user_id")], name="users"),
    TokenLimit(run_limit=10**6),
]

Step = tuple[str, str, int]
Session = tuple[float, Sequence[Step]]
Samples = dict[str, dict[tuple[str, ...], float]]


def script(messages: Sequence[BaseMessage]) -> Any:
    if messages[-1].type == "human":
        return paid(10, *["search"] * int(messages[-1].text))
    return paid(10)


def waiting_workers(directory: Path) -> list[Path]:
    """The files in which a call waits."""
    files = directory.glob("langchain_quota.*.json")
    return [file for file in files if json.loads(file.read_text().splitlines()[0])[5]]


async def take(steps: Sequence[Step]) -> None:
    """Check calls, as a worker does."""
    signals = telling(registry=REGISTRY, max_exported_threads=2, run_histograms=True)
    scene = Scene(signals, script, LIMITS, store=MemoryStore(), context={"user_id": USER})
    for what, thread, count in steps:
        scene.thread_id = thread
        if what == "reset":
            await scene.reset()
        elif what == "wait":
            with signals.recorder.waiting(None, thread, None):
                if count > 1:
                    eventually(lambda: waiting_workers(Path(os.environ[VARIABLE])))
                if count:
                    os.kill(os.getpid(), signal.SIGKILL)
        elif what == "scrape":
            assert f'thread_id="{thread}"' not in await scrape(scene, count)
        elif what == "pay":
            call = Call("model", agent=None, thread_id=thread)
            signals.recorder.record_spend(
                call, [("money", "nanodollars", count * 10**9)], model="m"
            )
        elif what == "kill":
            # Nobody asks a worker to write: it does so by itself, at most a second later.
            await asyncio.sleep(3)
            os.kill(os.getpid(), signal.SIGKILL)
        else:
            await scene.play(str(count))
    Counter("apples", "Apples.", ["colour"]).labels("red").inc(3)


async def scrape(scene: Scene | None = None, count: int = 0) -> str:
    """What a worker answers; with a scene, calls come when it has read the counters."""
    merge: Any = MultiProcessCollector.merge

    def merged(*files: Any, **options: Any) -> Any:
        counted = merge(*files, **options)
        if scene is not None and count:
            asyncio.run(scene.play(str(count)))
        return counted

    transport = httpx.ASGITransport(metrics_app())
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        with blockbuster_ctx(), pytest.MonkeyPatch.context() as patch:
            patch.setattr(MultiProcessCollector, "merge", staticmethod(merged))
            return (await client.get("/metrics")).text


def work(now: float, sessions: Sequence[Session]) -> None:
    """In a process apart: each session in a fork or the parent; then a scrape a minute later."""

    def live(seconds: float, steps: Sequence[Step]) -> None:
        time.time = lambda: now + seconds
        asyncio.run(take(steps))

    for seconds, steps in sessions:
        if (PARENT, "", 0) in steps:
            live(seconds, steps[1:])
            if steps[1:]:
                eventually(lambda: [*Path(os.environ[VARIABLE]).glob("langchain_quota.*.json")])
        else:
            child = get_context("fork").Process(target=live, args=(seconds, steps))
            child.start()
            child.join()
    time.time = lambda: now + max(seconds for seconds, _ in sessions) + 60
    print(json.dumps(asyncio.run(scrape())))  # noqa: T201 - the result


def worked(directory: Path, *sessions: Session, logged: list[str] | None = None) -> str:
    """What a scrape answers behind these sessions."""
    program = f"from {__name__} import work\nwork({time.time()!r}, {sessions!r})"
    done = run_python(program, env=os.environ | {VARIABLE: str(directory)}, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    if logged is not None:
        logged += done.stderr.splitlines()
    return str(json.loads(done.stdout))


def shown(text: str) -> Samples:
    """The samples that are not 0, by name and labels; times in seconds since the first process."""
    found: Samples = {}
    families = list(text_string_to_metric_families(text))
    assert len({each.name for each in families}) == len(families)
    for family in families:
        for each in family.samples:
            if each.value:
                labels = tuple(value for _, value in sorted(each.labels.items()))
                found.setdefault(each.name, {})[labels] = each.value
    return found


OF_T1 = ("unnamed", "searches", "t1")


def one(samples: Samples, name: str, key: tuple[str, ...] = OF_T1) -> float | None:
    return samples.get(f"langchain_quota_{name}", {}).get(key)


def searched(seconds: float, count: int, thread: str = "t1") -> Session:
    return seconds, [(SEARCH, thread, count)]


FORKS: Step = (PARENT, "", 0)
RESET: Sequence[Step] = [(SEARCH, "t1", 0), ("reset", "t1", 0)]
MERGED: list[tuple[str, list[Session], tuple[float | None, ...]]] = [
    ("the newest decision", [searched(10, 5), searched(0, 3)], (5, None)),
    ("refusals are summed", [searched(0, 12), searched(1, 11)], (10, 3)),
    ("reset by another", [searched(0, 11), (5, RESET)], (None, 1)),
    ("refused before and after", [searched(0, 11), searched(9, 11), (5, RESET)], (10, 2)),
    ("a parent's", [(0, [FORKS, (SEARCH, "t1", 11)]), searched(5, 11)], (10, 2)),
    ("killed", [(0, [(SEARCH, "t1", 11), ("kill", "t1", 0)]), searched(5, 11)], (10, 2)),
]


@pytest.mark.rest
@pytest.mark.parametrize(
    ("sessions", "expected"), [row[1:] for row in MERGED], ids=[row[0] for row in MERGED]
)
def test_what_workers_know_together(
    sessions: list[Session], expected: tuple[float | None, ...], tmp_path: Path
) -> None:
    """The newest decision holds, refusals and amounts are summed, and a user counts once."""
    found = shown(worked(tmp_path, *sessions))
    blocked = one(found, "thread_blocked_total", (*OF_T1[:2], "thread", "t1"))
    assert (one(found, "thread_used"), blocked) == expected
    calls = [1 + bool(count) for _, steps in sessions for what, _, count in steps if what == SEARCH]
    spent = one(found, "thread_spent_tokens_total", ("unnamed", "tokens", "t1"))
    assert spent == 10 * sum(calls)
    subjects = found["langchain_quota_subjects"].items()
    assert sum(value for key, value in subjects if "user_id" in key) == 1
    assert "langchain_quota_errors_total" not in found


def test_any_worker_answers_for_all(tmp_path: Path) -> None:
    """Also one that has checked nothing: all is summed, threads are shown, no event loop waits."""
    found = shown(worked(tmp_path, searched(0, 9), searched(1, 3, "t2")))
    assert found["apples_total"] == {("red",): 6}
    assert found["langchain_quota_thread_used"] == {OF_T1: 9, (*OF_T1[:2], "t2"): 3}
    calls = ("unnamed", "allowed", "tool", "search")
    assert found["langchain_quota_calls_total"][calls] == 12
    assert found["langchain_quota_run_used_count"]["unnamed", "searches"] == 2
    assert found["langchain_quota_run_used_sum"]["unnamed", "searches"] == 12
    assert one(found, "build_info", next(iter(found["langchain_quota_build_info"]))) == 1


def test_series_stay_whoever_answers(tmp_path: Path) -> None:
    """What one worker has exported, another one goes on to export, and not two newer threads."""
    first = (0, [*((SEARCH, thread, 1) for thread in ("t1", "t2")), ("scrape", "", 0)])
    found = shown(worked(tmp_path, first, searched(5, 1, "t3"), searched(6, 1, "t4")))
    assert {labels[2] for labels in found["langchain_quota_thread_used"]} == {"t1", "t2"}


@pytest.mark.rest
def test_the_files_of_workers(tmp_path: Path) -> None:
    """They are private and name no user; what is old or corrupt is left out, and left there."""
    worked(tmp_path, searched(0, 11))
    (file,) = tmp_path.glob("langchain_quota.*")
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert file.suffix == ".json"
    assert USER not in file.read_text()
    os.utime(file, (time.time() - 3700,) * 2)
    corrupt = [file.with_stem(f"{file.stem}{each}") for each in (1, 2)]
    for path, text in zip(corrupt, ("nonsense", "[1, 2, 3, 4]"), strict=True):
        path.write_text(text)
    found = shown(worked(tmp_path, searched(0, 3, "t2")))
    assert found["langchain_quota_thread_used"] == {(*OF_T1[:2], "t2"): 3}
    assert all(map(Path.is_file, corrupt))


@pytest.mark.parametrize("lives", [0, 1])
def test_quotas_in_the_memory_of_several_workers(lives: int, tmp_path: Path) -> None:
    """A second worker says once, if the first lives, that each of them allows the whole quota."""
    logged, steps = list[str](), [(SEARCH, "t1", 1)]
    worked(tmp_path, (0, [*[FORKS] * lives, *steps]), (5, steps * 2), logged=logged)
    # So does the first one, if it writes its file while the second one lives.
    said = sum("write store=RedisStore()" in line for line in logged)
    assert said in ((1, 2) if lives else (0,))


LINKED = """
import asyncio, os, sys, time
from pathlib import Path
from prometheus_client import REGISTRY
from langchain_quota import ToolCallLimit
from tests.scene import Scene, asking
from tests.telemetry import telling
limit = ToolCallLimit("search", thread_limit=9)
scene = Scene(telling(registry=REGISTRY), asking("search"), [limit], form="sync")
asyncio.run(scene.play())
directory, ends = Path(os.environ["PROMETHEUS_MULTIPROC_DIR"]), time.monotonic() + 60
while not (files := [*directory.glob("langchain_quota.*.json")]) and time.monotonic() < ends:
    time.sleep(0.01)
files[0].with_suffix(".new").symlink_to(sys.argv[1])
asyncio.run(scene.play())
"""


@pytest.mark.rest
def test_a_link_in_place_of_a_file(tmp_path: Path) -> None:
    """A worker whose directory others may write to writes into no file that they link to."""
    directory, theirs = tmp_path / "shared", tmp_path / "theirs"
    directory.mkdir()
    theirs.write_text("precious")
    env = os.environ | {VARIABLE: str(directory)}
    done = run_python(LINKED, str(theirs), env=env, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert theirs.read_text() == "precious"
    (file,) = directory.glob("langchain_quota.*")
    assert (file.suffix, file.is_symlink(), stat.S_IMODE(file.stat().st_mode)) == (
        *(".json", False, 0o600),
    )


PAGE_OF_ALL = """
import json, os, sys, time
from urllib.request import urlopen
from langchain_quota import start_metrics_server
with start_metrics_server(0) as server, urlopen(server.page_url + "quota.json") as answer:
    print(answer.read().decode())
"""


def test_the_page_of_several_workers(tmp_path: Path) -> None:
    """Any process shows what all know: counts and costs are summed, who has died waits not."""
    paying = (0, [(SEARCH, "t1", 12), ("pay", "t1", 3)])
    worked(tmp_path, paying, paying, (0, [("wait", "searches", 2)]))
    assert len(waiting_workers(tmp_path)) == 1
    done = run_python(PAGE_OF_ALL, env=os.environ | {VARIABLE: str(tmp_path)}, cwd=ROOT)
    found = json.loads(done.stdout)
    scraped = worked(tmp_path, (0, [FORKS, ("wait", "searches", 0)]))
    assert shown(scraped).get("langchain_quota_waiting_calls", {}) == {}
    assert 'langchain_quota_waiting_calls{agent="unnamed"' in scraped
    (row,) = [row for row in found["threads"]["rows"] if row["id"] == "t1"]
    assert (found["processes"], row["blocked"], row["blocked_by"]["scope"]) == (3, 8, "thread")
    assert (found["totals"]["waiting"], found["totals"]["cost"]["dollars"]) == (0, 6)
    assert [sum(calls) for calls in found["totals"]["calls"].values()] == [24, 4, 0]
    assert [each["limit"] for each in row["refusals"]] == ["users", "searches"] * 4


def test_no_thread_is_ahead(tmp_path: Path) -> None:
    """A scrape has no call of a thread that its counters do not have."""
    worked(tmp_path, (0, [(PARENT, "", 0), ("scrape", "t1", 11)]))


EMPTY_FILE = """
import sys
from pathlib import Path
from urllib.request import urlopen
from langchain_quota import Telemetry, start_metrics_server
Telemetry()
Path(sys.argv[1], "counter_1.db").touch()
Path(sys.argv[1], "gauge_livesum_1.db").symlink_to("removed meanwhile")
with start_metrics_server(0) as server, urlopen(server.url) as answer:
    assert b"langchain_quota_build_info" in answer.read()
"""


@pytest.mark.rest
def test_files_of_workers_that_come_and_go(tmp_path: Path) -> None:
    """A worker's file may be empty, or gone when it is read: the scrape has what others know."""
    done = run_python(EMPTY_FILE, str(tmp_path), env=os.environ | {VARIABLE: str(tmp_path)})
    assert (done.returncode, done.stderr) == (0, "")
