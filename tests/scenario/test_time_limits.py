"""Limits of working time: what counts, what does not, and what ends a tool call."""

import asyncio
import gc
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextvars import ContextVar
from functools import partial
from typing import Any

import pytest
from langchain.agents.middleware import HumanInTheLoopMiddleware
from langchain_core.messages import ToolMessage
from langchain_core.tools import StructuredTool
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.types import interrupt

from langchain_quota import ConcurrencyLimit, MemoryStore, Quota, TimeLimit, ToolCallLimit
from langchain_quota.limits import Limit
from langchain_quota.testing import ScriptedChatModel
from tests import scene as scenes
from tests.forked import run_python
from tests.scene import Form, Kind, Scene, both_forms, cancel_at, recording, until
from tests.stores import Clock
from tests.telemetry import Signals
from tests.tokens import spent

TIME = "model.milliseconds"
MINUTE = 60_000
ROOMY = TimeLimit(run_limit="2h", thread_limit="3h")
APPROVED: Any = {"decisions": [{"type": "approve"}]}


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """A clock that moves only when something works, in minutes."""
    clock = Clock(1000.0)
    monkeypatch.setattr("time.monotonic_ns", lambda: int(clock() * 60) * 10**9)
    return clock


def passing(clock: Clock, minutes: float) -> Callable[[], None]:
    """Let time pass."""

    def passes() -> None:
        clock.now += minutes

    return passes


def model(clock: Clock, *turns: Any, minutes: float = 1) -> Callable[[Any], Any]:
    """A script of which each turn takes so long."""
    left = iter(turns)

    def script(_: Any) -> Any:
        clock.now += minutes
        return next(left)

    return script


@scenes.each_kind
async def test_what_counts(kind: Kind, signals: Signals, clock: Clock) -> None:
    """The time of model and tool calls counts; when none is left the next model call is refused."""
    ran: list[str] = []
    search = recording("search", ran, passing(clock, 3))
    script = model(clock, ["search"], ["search"], "done")
    scene = Scene(signals, script, [TimeLimit(run_limit="8m")], kind=kind, tools=[search], ran=ran)
    await scene.play()
    assert scene.last_text() == "Time limits exceeded: run limit (8m/8m)"
    assert (len(scene.model.calls), scene.ran) == (2, ["search"] * 2)
    labels = {"agent": "unnamed", "limit": "time", "model": "none"}
    assert signals.value("langchain_quota_spent_seconds_total", **labels) == 480


@scenes.either
async def test_a_model_call_that_fails(kind: Kind, signals: Signals, clock: Clock) -> None:
    """Its time, and that of the tools before it, counts in the next run of the thread."""
    search = recording("search", [], passing(clock, 3))
    script = model(clock, ["search"], ValueError("overloaded"), "done")
    scene = Scene(signals, script, [ROOMY], kind=kind, tools=[search])
    with pytest.raises(ValueError, match="overloaded"):
        await scene.play()
    await scene.play()
    assert spent(scene, TIME) == (6 * MINUTE, MINUTE)


def asks() -> object:
    return interrupt("Really?")


@pytest.mark.parametrize("who", ["a reviewer", "a tool", "a limit", "a limit in a store"])
async def test_a_person_is_no_work(who: str, signals: Signals, clock: Clock) -> None:
    """While a person is asked, even for hours, no time is counted; the run then goes on."""
    ran, passes = list[str](), passing(clock, 3)
    limits: list[Any] = [ROOMY]
    search = recording("search", ran, lambda: (who == "a tool" and asks(), passes()))
    if who == "a reviewer":
        limits.append(HumanInTheLoopMiddleware[Any, Any]({"search": True}))
    if who.startswith("a limit"):
        limits = [TimeLimit(run_limit="4m", exit_behavior="ask", grant="10m")]
    store = MemoryStore() if "store" in who else None
    script = model(clock, ["search"], "done")
    scene = await Scene(signals, script, limits, tools=[search], ran=ran, store=store).played()
    clock.now += 60
    result = await scene.resume(APPROVED)
    assert (scene.last_text(), scene.ran) == ("done", ["search"])
    assert spent(scene, TIME) == (5 * MINUTE, 5 * MINUTE)
    assert "__interrupt__" not in result


async def test_tools_at_the_same_time(signals: Signals, clock: Clock) -> None:
    """Tools of one step count as wall-clock time, not as a sum; one of them asks a person."""
    ran, begun = list[str](), list[str]()
    ends, others_end = {"calc": 3, "search": 4, "ask": 9}, {"calc": 0, "search": 3, "ask": 4}

    async def work(name: str) -> None:
        begun.append(name)
        await until(lambda: len(begun) >= 3 and clock.now >= 1000 + others_end[name])
        clock.now = max(clock.now, 1000 + ends[name])
        if name == "ask":
            asks()
            clock.now += 5

    script = model(clock, [*ends], "done", minutes=0)
    tools = [recording(name, ran, partial(work, name)) for name in ends]
    scene = await Scene(signals, script, [ROOMY], tools=tools, ran=ran).played()
    clock.now += 60
    await scene.resume("yes")
    assert scene.ran == [*ends]
    assert spent(scene, TIME) == (14 * MINUTE, 14 * MINUTE)


@pytest.mark.parametrize(("asking", "least"), [("search", "7m"), ("calc", "4m")])
@pytest.mark.parametrize("stored", [True, False])
async def test_a_run_that_is_resumed_elsewhere(
    signals: Signals, clock: Clock, *, asking: str, least: str, stored: bool
) -> None:
    """What tools have worked since the last model call, another process knows from a store only."""
    passes = passing(clock, 3)
    search = recording("search", [], lambda: (passes(), asking == "search" and asks()))
    calc = recording("calc", [], asks)
    script = model(clock, ["search", "calc"] if asking == "calc" else ["search"], "done")
    store, limit = MemoryStore() if stored else None, TimeLimit(run_limit=least)
    shared: Any = {"tools": [search, calc], "store": store, "checkpointer": InMemorySaver()}
    here, elsewhere = (Scene(signals, script, [limit], **shared) for _ in range(2))
    await here.play()
    clock.now += 60
    await elsewhere.resume("yes")
    refused = f"Time limits exceeded: run limit ({least}/{least})"
    assert elsewhere.last_text() == (refused if stored else "done")


@pytest.mark.parametrize("during", ["model", "tool"])
async def test_a_cancelled_run(during: str, signals: Signals, clock: Clock) -> None:
    """What a cancelled run has worked counts for its thread, not for the next run."""
    started, hangs = asyncio.Event(), [True]

    async def work() -> None:
        clock.now += 2
        if hangs:
            started.set()
            await asyncio.sleep(60)

    class Model(ScriptedChatModel):
        async def _agenerate(self, *args: Any, **options: Any) -> Any:
            if during == "model":
                await work()
            return await super()._agenerate(*args, **options)

    playing, tools = Model(script=[["search"], "done", "done"]), [recording("search", [], work)]
    scene = Scene(signals, playing, [ROOMY], tools=tools)
    await cancel_at(started, scene.play())
    hangs.clear()
    result = await scene.play()
    in_run = 6 * MINUTE if during == "model" else 0
    assert spent(scene, TIME) == (in_run + 2 * MINUTE, in_run)
    assert result["messages"][-1].text == "done"


@both_forms
async def test_a_tree_of_agents(form: Form, signals: Signals, clock: Clock) -> None:
    """A root run's quota counts the time of sub-agents once; their callers' runs count it, too."""
    store = MemoryStore()
    limit = TimeLimit(run_limit="2h", quotas=[Quota("10m", per="root_run")])
    some: dict[str, Any] = {"store": store, "form": form}
    own: Any = {"tools": [recording("search", [], passing(clock, 2))], "checkpointer": None}
    child = Scene(signals, model(clock, *[["search"], "done"] * 2), [limit], **own, **some)
    script = model(clock, ["delegate"], ["delegate"], "done")
    scene = Scene(signals, script, [limit], tools=[scenes.delegate(child.agent)], **some)
    await scene.play()
    # Two minutes of the parent's model, and twice four of its tools.
    assert scene.last_text() == "Time limits exceeded: root_run limit (10m/10m)"
    assert spent(scene, TIME)[1] == 10 * MINUTE
    assert [each.used for each in store.usages(f"{TIME}:root_run:*")] == [10 * MINUTE]
    runs = sorted(each.used for each in store.usages(f"{TIME}:run:*"))
    assert runs == [4 * MINUTE, 4 * MINUTE, 10 * MINUTE]


async def test_what_waits_for_its_turn_does_not_work(signals: Signals, clock: Clock) -> None:
    """A call that waits under a limit of calls at once counts when it runs."""
    limits: list[Limit] = [ROOMY, ConcurrencyLimit("search", max_concurrency=1)]
    search = recording("search", [], passing(clock, 2))
    scene = Scene(signals, model(clock, ["search"] * 3, "done"), limits, tools=[search])
    await scene.play()
    assert spent(scene, TIME)[1] == 8 * MINUTE


CALL_LIMIT = 0.05
LONG = TimeLimit(call_limit=CALL_LIMIT)


class ToolStarts:
    """Ends a call's time when its tool has started: threads start late on a busy machine."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._started = threading.Semaphore(0)
        self._timers: list[tuple[asyncio.AbstractEventLoop, asyncio.Timeout]] = []
        timeout, result = asyncio.timeout, Future.result

        def timer(seconds: float | None) -> asyncio.Timeout:
            if seconds != CALL_LIMIT:
                return timeout(seconds)
            self._timers.append((asyncio.get_running_loop(), timeout(None)))
            return self._timers[-1][1]

        def wait(future: Future[Any], seconds: float | None = None) -> Any:
            if seconds != CALL_LIMIT:
                return result(future, seconds)
            while not (future.done() or self._started.acquire(timeout=0.001)):
                pass
            return result(future, 0)

        patch.setattr("asyncio.timeout", timer)
        patch.setattr(Future, "result", wait)

    def __call__(self) -> None:
        self._started.release()
        for loop, timer in self._timers[-1:]:
            loop.call_soon_threadsafe(timer.reschedule, 0)


def outcomes(signals: Signals) -> dict[str, float]:
    """The calls that took too long, by what became of them."""
    found = signals.samples("langchain_quota_long_tool_calls_total", agent="unnamed")
    return {outcome: value for (_, outcome), value in found.items() if value}


@pytest.mark.parametrize(
    ("form", "runs", "kind"),
    [
        *(("async", "loop", "quota"), ("async", "thread", "quota"), ("sync", "thread", "quota")),
        ("async", "loop", "graph"),
    ],
)
async def test_a_call_that_takes_too_long(
    form: Form, runs: str, kind: Kind, signals: Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error answers it, and the run goes on; an async tool is cancelled, a sync one runs on."""
    ended, may_end = threading.Event(), threading.Event()
    starts = ToolStarts(monkeypatch)

    async def run_async() -> None:
        starts()
        try:
            await asyncio.sleep(60)
        finally:
            ended.set()

    def run() -> None:
        starts()
        may_end.wait(60)
        ended.set()

    how: Any = {"coroutine": run_async} if runs == "loop" else {"func": run}
    tool = StructuredTool.from_function(**how, name="search", description="Search.")
    # The shortest of two ends the call.
    limits: list[Any] = [
        TimeLimit(call_limit="1h", name="patient"),
        ToolCallLimit("search", run_limit=9),
        *(LONG, ConcurrencyLimit("search", max_concurrency=1, wait=0)),
    ]
    script = [["search"], ["search"], "done"]
    scene = Scene(signals, script, limits, kind=kind, form=form, tools=[tool])
    await scene.play()
    first, second = (each for each in scene.state()["messages"] if isinstance(each, ToolMessage))
    assert scene.last_text() == "done"
    assert first.status == "error"
    assert "took longer than 0.05s, and " in first.text
    assert ended.is_set() == (runs == "loop")
    assert scene.used(limits[1])[1] == 2
    if runs == "loop":
        assert "was stopped" in second.text
        assert outcomes(signals) == {"cancelled": 2}
    else:
        assert "is no longer waited for. It may still run. It may have done" in first.text
        # The first one still has the only place.
        assert "may run at the same time" in second.text
        assert outcomes(signals) == {"left_running": 1}
    may_end.set()
    assert await asyncio.to_thread(ended.wait, 60)


@both_forms
async def test_context_variables_of_a_limited_call(form: Form, signals: Signals) -> None:
    """A tool in a thread of its own sees the context variables of the caller."""
    tenant, seen = ContextVar("tenant", default=""), list[str]()
    search = recording("search", [], lambda: seen.append(tenant.get()))
    limits = [TimeLimit(call_limit="1h")]
    scene = Scene(signals, [["search"], "done"], limits, form=form, tools=[search])
    tenant.set("acme")
    await scene.play()
    assert seen == ["acme"]


ENDLESS = """
import threading
from langchain_quota import TimeLimit
from tests.scene import Scene, recording
from tests.telemetry import telling

options = {"tools": [recording("search", [], threading.Event().wait)], "form": "sync"}
scene = Scene(telling(), [["search"], "done"], [TimeLimit(call_limit=0.05)], **options)
print(scene.agent.invoke({"messages": [("user", "hi")]}, scene.config)["messages"][-1].text)
"""


def test_a_tool_that_never_ends() -> None:
    """The process ends nevertheless: the thread in which a sync run has left it does not count."""
    done = run_python(ENDLESS)
    assert (done.stdout, done.stderr) == ("done\n", "")
    assert done.returncode == 0


@both_forms
async def test_what_is_not_ended(form: Form, signals: Signals) -> None:
    """A tool's own TimeoutError stays one; a dry-run limit ends nothing, and counts it."""

    def fail() -> None:
        time.sleep(0.005)
        raise TimeoutError("its own")

    limits = [TimeLimit(call_limit="1h"), TimeLimit(call_limit=0.001, enforce=False, name="trial")]
    scene = Scene(signals, [["search"]], limits, form=form, tools=[recording("search", [], fail)])
    with pytest.raises(TimeoutError, match="its own"):
        await scene.play()
    assert outcomes(signals) == {"dry_run": 1}


async def test_a_run_that_is_cancelled_in_a_limited_call(signals: Signals) -> None:
    """A run that is cancelled from outside ends; its call gets no answer."""
    started = asyncio.Event()

    async def run() -> None:
        started.set()
        await asyncio.sleep(60)

    tool = recording("search", [], run)
    scene = Scene(signals, [["search"], "done"], [TimeLimit(call_limit="50s")], tools=[tool])
    await cancel_at(started, scene.play())
    assert scene.answers() == []
    assert outcomes(signals) == {}


# LangGraph cannot end its own tasks in a loop that is closed.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_call_that_is_collected_as_garbage(
    signals: Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The garbage collector may end an abandoned call while another one is timed: none waits."""
    began, ended = asyncio.Event(), list[str]()

    async def forever() -> None:
        began.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("abandoned")

    tools = [recording("search", [], forever)]
    abandoned = Scene(signals, [["search"]], [ROOMY], tools=tools)
    loop = asyncio.new_event_loop()
    loop.set_exception_handler(lambda *_: None)  # it tells of the task that is destroyed
    task = loop.create_task(abandoned.play())
    loop.run_until_complete(began.wait())
    loop.close()
    del abandoned, task, loop
    timed = time.monotonic_ns

    def collecting() -> int:
        if not ended:
            gc.collect()
        return timed()

    monkeypatch.setattr("time.monotonic_ns", collecting)
    scene = Scene(signals, ["done"], [ROOMY], form="sync")
    thread = threading.Thread(target=lambda: asyncio.run(scene.play()), daemon=True)
    thread.start()
    thread.join(20)
    assert (scene.last_text(), ended) == ("done", ["abandoned"])
