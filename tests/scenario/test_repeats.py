"""RepeatLimit in real agents: the loops that it notices, and the repetitions that it lets be."""

import asyncio
import json
from collections.abc import Callable, Sequence
from typing import Any
from uuid import uuid4

import pytest
from langchain.agents.middleware import SummarizationMiddleware
from langchain_core.tools import BaseTool, StructuredTool, ToolException
from langgraph.checkpoint.sqlite.aio import AsyncSqliteSaver
from langgraph.types import interrupt

from langchain_quota import (
    MemoryStore,
    Quota,
    RepeatLimit,
    ToolCallLimit,
    ToolCallLimitExceededError,
)
from langchain_quota.core.decision import Outcome
from langchain_quota.limits import Limit
from langchain_quota.testing import ScriptedChatModel, captured_decisions
from tests.calls import calls_made
from tests.scene import Kind, Middleware, Scene, check_history, recording, tool_limiter
from tests.stores import FickleStore, quota
from tests.telemetry import Signals, needs_inline, telling

Args = dict[str, Any]
Answer = Callable[[Args], str]
"""What a tool does."""


def failing(text: str) -> Answer:
    """A tool that fails, with a text that may name its arguments."""

    def fail(args: Args) -> str:
        raise ToolException(text.format(**args))

    return fail


def in_turn(*answers: Answer) -> Answer:
    """A tool that does one thing after the other, and then the last one for ever."""
    left = list(answers)
    return lambda args: (left[0] if len(left) == 1 else left.pop(0))(args)  # noqa: PLW0108


def echoing(text: str) -> Answer:
    """A tool whose answer depends on its arguments alone."""
    return lambda args: text.format(**args)


def as_tool(name: str, answer: Answer) -> BaseTool:
    """A tool that takes any arguments; what it raises as a ToolException is an error message."""

    async def run(**args: Any) -> str:
        return answer(args)

    schema = {"title": name, "description": name, "type": "object", "properties": {}}
    return StructuredTool.from_function(
        coroutine=run, name=name, description=name, args_schema=schema, handle_tool_error=True
    )


Step = list[tuple[str, Args]]
"""The tool calls of one answer of the model."""


async def refusals(
    tools: Sequence[BaseTool], steps: Sequence[Step], *limits: Any
) -> list[tuple[int, int]]:
    """Which calls are refused: the number of the step, and of the call in it, from 1."""
    kept: dict[str, Any] = {"tools": tools, "checkpointer": None}
    scene = Scene(telling(spans="off"), [*steps, "done"], limits or [RepeatLimit(3)], **kept)
    with captured_decisions() as found:
        result = await scene.play()
    decisions = [each for each in found if each.call.kind == "tool"]
    check_history(result["messages"])
    places = [(n, i) for n, step in enumerate(steps, 1) for i, _ in enumerate(step, 1)]
    checked = zip(places, decisions, strict=True)
    return [place for place, decision in checked if decision.outcome is Outcome.BLOCKED]


def each(tool: str, **args: Sequence[Any]) -> list[Step]:
    """A call for each row of arguments."""
    rows = zip(*args.values(), strict=True)
    return [[(tool, dict(zip(args, row, strict=True)))] for row in rows]


def between(steps: Sequence[Step], *others: tuple[str, Args]) -> list[Step]:
    """Other calls after each step."""
    return [one for step in steps for one in (step, *([other] for other in others))]


NUMBERS = list(range(8))
RUN: tuple[str, Args] = ("execute", {"command": "pytest"})
READ, SEARCH = ("read_file", {"path": "a"}), ("search", {"query": "rome"})
EDITS = each("edit_file", old=NUMBERS)
ONE_SEARCH: list[Step] = [
    *([("search", {"query": "rome", "limit": 5})], [("search", {"limit": 5, "query": "rome"})]),
    *([("search", {"limit": 5, "query": "rome"})], [("search", {"query": "rome", "limit": 5})]),
]


async def check(answers: dict[str, Answer], steps: list[Step], first: int | None = None) -> None:
    """Assert that of the calls, numbered from 1, all are refused from the first one on, or none."""
    tools = [as_tool(*each) for each in answers.items()]
    places = [(n, i) for n, step in enumerate(steps, 1) for i, _ in enumerate(step, 1)]
    assert await refusals(tools, steps) == ([] if first is None else places[first - 1 :])


async def test_loops() -> None:
    """Each is noticed at the first call that is one too many, and from there on."""
    nothing = {"search": echoing("-")}
    # A tool that does not exist is tried with ever new arguments.
    await check(nothing, each("hex", value=NUMBERS), 4)
    # One search, its arguments in another order; many in one message.
    await check(nothing, ONE_SEARCH, 4)
    await check(nothing, [[SEARCH] * 5], 4)
    # A loop after long good work.
    good = each("search", query=range(30))
    await check({"search": echoing("about {query}")}, [*good, *[[SEARCH]] * 5], 34)
    # Tests are run again without a change, and take another time.
    times = [echoing(f"1 failed in 0.{number}1s") for number in NUMBERS]
    await check({"execute": in_turn(*times)}, [[RUN]] * 5, 4)
    # An edit fails whatever is tried, between readings of the same file; with a test, too.
    files = {"read_file": echoing("text"), "edit_file": failing("not found")}
    await check(files, between(EDITS[:4], READ), 7)
    files |= {"edit_file": failing("{old} not found"), "execute": echoing("1 failed in 0.1s")}
    await check(files, between([[READ]] * 4, ("edit_file", {"old": "x"}), RUN), 10)


async def test_harmless_repetitions() -> None:
    """What looks like a loop, and is none: no call is refused."""
    # Polling with one call, while there is progress.
    done = [echoing(f"{number}0% done") for number in NUMBERS]
    await check({"poll": in_turn(*done)}, [[("poll", {"job": 7})]] * 8)
    # A call that fails, then succeeds.
    busy = in_turn(failing("busy"), failing("busy"), echoing("rome"))
    await check({"search": busy}, [*[[SEARCH]] * 3, [("search", {"query": "turin"})]])
    # Days of which nothing is known.
    days = each("search", day=[f"2026-01-0{number + 1}" for number in NUMBERS])
    await check({"search": failing("Nothing on {day}")}, days)
    # Missing files that are asked for together, and then one more.
    together: Step = [("read_file", {"path": number}) for number in NUMBERS]
    await check({"read_file": failing("not found")}, [together, [READ], [("ls", {})]])
    # An error that is met again after progress.
    limited = {"search": failing("rate limited"), "read_file": echoing("{path}")}
    await check(limited, between(each("read_file", path=NUMBERS), SEARCH))
    # Tests after each edit, which fail as before.
    edits = {"edit_file": echoing("replaced {old}"), "execute": echoing("1 failed")}
    await check(edits, between(EDITS, RUN))
    # Code that differs by its indentation only.
    tried = each("edit_file", old=["x", " x", "  x", "   x"])
    await check({"edit_file": failing("String not found")}, [*tried[:3], [READ], tried[3]])


async def is_same_call(one: Args, other: Args) -> bool:
    """Whether a call with other arguments repeats the first one."""
    tools = [as_tool("save", echoing("saved"))]
    return await refusals(tools, [[("save", one)], [("save", other)]], RepeatLimit(1)) == [(2, 1)]


async def is_news(one: str, other: str, saying: Callable[[str], Answer] = echoing) -> bool:
    """Whether another answer to the same call says something new."""
    tool = in_turn(*(saying(each.replace("{", "{{").replace("}", "}}")) for each in (one, other)))
    steps: list[Step] = [[("search", {})]] * 3
    return await refusals([as_tool("search", tool)], steps, RepeatLimit(2)) == []


LONG = "x y " * 100_000


async def test_what_is_the_same_call() -> None:
    """The order of keys does not matter; all else is compared exactly, however long it is."""
    same: list[tuple[Args, Args]] = [
        ({"a": 1, "b": {"c": 2, "d": 3}}, {"b": {"d": 3, "c": 2}, "a": 1}),
        ({"a": LONG}, {"a": LONG}),
    ]
    different: list[tuple[Args, Args]] = [
        *(({"a": 1}, {"a": other}) for other in (1.5, "1", True, None, [1])),
        *(({"a": "x = 1"}, {"a": other}) for other in ("  x = 1", "X = 1")),
        *(({"a": other}, {}) for other in (None, float("nan"), 10**400, "\ud800")),
        ({"a": [1, 2]}, {"a": [2, 1]}),
        *(({"a": LONG}, {"a": other}) for other in (f"1{LONG}", f"{LONG}1", f"1{LONG[1:]}")),
        ({"a": f"{LONG}1{LONG}"}, {"a": f"{LONG}2{LONG}"}),
        ({"a": [*range(50_000), 1, *range(50_000)]}, {"a": [*range(50_000), 2, *range(50_000)]}),
    ]
    assert [await is_same_call(*pair) for pair in same] == [True] * len(same)
    assert [await is_same_call(*pair) for pair in different] == [False] * len(different)


async def test_what_is_news() -> None:
    """Moments, durations, addresses and UUIDs differ where nothing is new; all else is news."""
    told = "Error invoking tool 'search' with kwargs {{{}}} with error:\n content: Field required"
    same = [
        ("1 failed in 0.12s", "1 failed in 12.34s"),
        ("took 5 ms", "took 17 ms"),
        ("2026-01-02T03:04:05Z ok", "2026-01-02T03:04:59.123+01:00 ok"),
        ("[12:00:01] ok", "[12:00:02,345] ok"),
        ("<Page at 0x7f00aa>", "<Page at 0x7f11bb>"),
        (f"sent: {uuid4()}", f"sent: {uuid4()}"),
        ("at 1760000000.25", "at 1760000001.5"),
        (f"12:00:01 {LONG}1{LONG}", f"12:00:02 {LONG}2{LONG}"),
    ]
    news = [
        *(("45% done", "46% done"), ("45 s of 120 s", "50 s of 120 s"), ("a", "b"), ("no", "no ")),
        *(("created #101", "created #102"), ("v1.2.3", "v1.2.4"), (LONG, f"{LONG}1")),
        (told.format("'a'"), told.format("'b'")),
    ]
    assert [await is_news(*pair) for pair in same] == [False] * len(same)
    assert [await is_news(*pair) for pair in news] == [True] * len(news)
    # LangGraph's errors repeat the arguments.
    assert not await is_news(told.format("'a'"), told.format("'b'"), failing)
    assert await is_news("no", "never", failing)


def test_the_work_is_bounded() -> None:
    """With ten times the arguments and the answer, as many functions are called."""

    def play(rows: int) -> int:
        step: Step = [("search", {"rows": [{"name": "x", "values": [1, 2.5]}] * rows})]
        tools = [as_tool("search", echoing("2026-01-02T03:04:05Z " * rows))]
        return calls_made(lambda: asyncio.run(refusals(tools, [step] * 3)))

    # What is made at the first run in a process is not counted.
    play(10)
    assert play(20_000) < play(2_000) * 1.1


async def test_some_tools() -> None:
    """Only their calls are refused; what others say is new all the same, but for excluded ones."""
    tools = [as_tool("think", echoing("{thought}")), as_tool("search", echoing("-"))]
    thoughts = between(each("think", thought=NUMBERS[:5]), ("search", {}))
    same: list[Step] = [[("think", {"thought": 1})]] * 6
    only, but = RepeatLimit(3, tools="search"), RepeatLimit(3, exclude="think")
    for limit in (only, RepeatLimit(3)):
        assert await refusals(tools, thoughts, limit) == []
    assert await refusals(tools, thoughts, but) == [(8, 1), (10, 1)]
    for limit in (only, but):
        assert await refusals(tools, same, limit) == []
        assert await refusals(tools, [[("search", {})]] * 4, limit) == [(4, 1)]


async def test_a_key_of_the_users_own(signals: Signals) -> None:
    """What has one key is one call, without one a call is left out, and what raises is told."""

    def key(call: Any) -> Any:
        call["args"].pop("offset", None)
        return call["args"].get("path")

    tools = [as_tool("read", echoing("{path} {offset}")), as_tool("wait", echoing("waited"))]
    steps: list[Step] = [[("read", {"path": "a", "offset": 0})], [("wait", {})]] * 5
    assert await refusals(tools, steps, RepeatLimit(3, key=key)) == [(7, 1), (9, 1)]

    scene = Scene(signals, [["search"]], [RepeatLimit(2, key=lambda call: call["x"], name="mine")])
    with pytest.raises(KeyError) as caught:
        await scene.play()
    assert "'mine'" in str(caught.value.__notes__)
    assert scene.ran == []


async def test_small_numbers() -> None:
    """With 1 no call is made twice in a run; but a tool may fail in the same way twice."""
    tools = [as_tool("edit", echoing("{old}")), as_tool("get", failing("no"))]
    edits, fails = each("edit", old=[0, 1, 2, 0, 1, 2]), each("get", id=range(4))
    for most, refused in ((1, [(4, 1), (5, 1), (6, 1)]), (2, [])):
        assert await refusals(tools, edits, RepeatLimit(most)) == refused
        assert await refusals(tools, fails, RepeatLimit(most)) == [(3, 1), (4, 1)]


def errors(result: dict[str, Any]) -> list[str]:
    """What was answered in place of tools."""
    return [str(m.content) for m in result["messages"] if getattr(m, "status", "") == "error"]


REPEATED = (
    "This call was not run: 'search' was called 2 times with the same arguments, and nothing new "
    "came of it. Do not repeat this call: use the answer that you have, change the arguments, do "
    "something else, or say what you cannot do."
)


@pytest.mark.parametrize("kind", ["quota", "graph", pytest.param("inline", marks=needs_inline)])
async def test_the_model_reads_that_it_repeats_itself(kind: Kind, signals: Signals) -> None:
    """The answer of a blocked call says so, and what to do instead; a new run begins anew."""
    script = [["search"]] * 3 + [["calc"], "done"]
    scene = Scene(signals, script * 2, [RepeatLimit(2)], kind=kind)
    for run in (1, 2):
        assert errors(await scene.play()) == [REPEATED] * run
        assert scene.ran == ["search", "search", "calc"] * run
    assert scene.metric("repeats", "blocked", "run") == 2
    check_history(scene.state()["messages"])


async def test_exits(signals: Signals) -> None:
    """`end` and giving up end the run with a text, `error` says how often it was asked for."""
    script: list[Any] = [["search", "calc"], ["search", "search", "calc"]]
    end = Scene(signals, script, [RepeatLimit(1, exit_behavior="end", name="end")])
    await end.play()
    assert end.last_text() == "'search' was already called with the same arguments."
    assert sorted(end.ran) == ["calc", "search"]

    fails = Scene(signals, script, [RepeatLimit(1, exit_behavior="error", name="error")])
    with pytest.raises(ToolCallLimitExceededError, match="'search' was already called") as caught:
        await fails.play()
    assert (caught.value.run_count, caught.value.run_limit) == (3, 1)
    assert caught.value.decision is not None

    tries: list[Any] = [["search", "calc"], ["search"], ["calc"]]
    gives_up = Scene(signals, tries, [RepeatLimit(1, give_up_after=2)])
    await gives_up.play()
    assert gives_up.last_text().startswith("'calc' was already called")


async def test_a_call_that_another_middleware_refuses(signals: Signals) -> None:
    """A call that another limit or limiter refuses is nothing that could be repeated."""
    numbered_calls = [[("search", {"n": number})] for number in range(4)]
    repeats = RepeatLimit(2, give_up_after=1)
    stacks: list[list[Limit | Middleware]] = [
        [repeats, ToolCallLimit("search", run_limit=1)],
        [tool_limiter(signals, "search", run_limit=1), repeats],
    ]
    for items in stacks:
        scene = Scene(signals, [*[["search"]] * 4, *numbered_calls, "done"], items)
        await scene.play()
        assert scene.last_text() == "done"


async def test_another_process_goes_on(signals: Signals, sqlite_saver: AsyncSqliteSaver) -> None:
    """The counts are in the checkpoint: another agent on it resumes with them."""

    def scene(*script: Any) -> Scene:
        tools: list[Any] = ["search", recording("ask", [], lambda: interrupt("?"))]
        kept: dict[str, Any] = {"tools": tools, "checkpointer": sqlite_saver}
        return Scene(signals, list(script), [RepeatLimit(2)], **kept)

    await scene(["search"], ["search"], ["ask"]).play()
    # What the user has said is new.
    assert errors(await scene(["search"], ["ask"], "done").resume("x")) == []
    assert errors(await scene(["search"], "done").resume("x")) == [REPEATED]


async def test_a_history_that_is_summarized(signals: Signals) -> None:
    """Messages that are deleted are remembered, and so is all after a failure of the model."""
    summarizer = ScriptedChatModel(script=["In short."] * 9)
    summaries = SummarizationMiddleware(summarizer, trigger=("messages", 3), keep=("messages", 2))
    script = [["search"], ["search"], RuntimeError("down"), ["search"], ["search"], "done"]
    scene = Scene(signals, script, [RepeatLimit(3), summaries])
    with pytest.raises(RuntimeError):
        await scene.play()
    await scene.go_on()
    assert scene.ran == ["search"] * 3
    assert len(scene.state()["messages"]) < 8


@pytest.mark.parametrize("fallback", ["answers", "block", "allow"])
async def test_beside_a_store(fallback: Any, signals: Signals) -> None:
    """What repeats is known without the store, and a blocked call is charged nowhere."""
    store = FickleStore(MemoryStore())
    store.down = fallback != "answers"
    searches = ToolCallLimit("search", quotas=[Quota(9, per="global")])
    options = {"on_store_error": fallback} if store.down else {}
    middleware = quota(signals, searches, RepeatLimit(2), store=store, **options)
    scene = Scene(signals, [["calc", "search"]] * 3 + ["done"], [middleware])
    await scene.play()
    assert sorted(scene.ran) == ["calc"] * 2 + ([] if fallback == "block" else ["search"] * 2)
    assert [each.used for each in store.usages()] == ([] if store.down else [2])


async def test_what_is_remembered_is_bounded(signals: Signals) -> None:
    """However many calls a run makes, a limit keeps about 10 kB in the state, digests only."""
    steps: list[Step] = [[("search", {"query": f"{n}/{i}"}) for i in range(30)] for n in range(12)]
    tools = [as_tool("search", echoing("about {query}"))]
    scene = Scene(signals, [*steps, [SEARCH] * 4, "done"], [RepeatLimit(3)], tools=tools)
    result = await scene.play()
    kept = json.dumps(scene.state()["langchain_quota"]["own"]["repeats"])
    assert len(kept) < 10_000
    assert "rome" not in kept
    assert len(errors(result)) == 1
