"""RepeatLimit in real agents: the loops that it notices, and the repetitions that it lets be."""

import asyncio
import sys
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any
from uuid import uuid4

import pytest
from hypothesis import given
from hypothesis import strategies as st
from langchain.agents import create_agent
from langchain.agents.middleware import (
    AgentMiddleware,
    HumanInTheLoopMiddleware,
    SummarizationMiddleware,
)
from langchain_core.messages import AIMessage, ToolCall
from langchain_core.tools import BaseTool, StructuredTool, ToolException
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.checkpoint.sqlite.aio import AsyncSqliteSaver
from langgraph.types import Command, interrupt
from prometheus_client import CollectorRegistry

from langchain_quota import (
    Decision,
    InlineQuotaMiddleware,
    MemoryStore,
    ModelCallLimit,
    Outcome,
    Quota,
    QuotaMiddleware,
    RepeatLimit,
    Telemetry,
    ToolCallLimit,
    ToolCallLimitExceededError,
    usage,
)
from langchain_quota.testing import ScriptedChatModel, captured_decisions
from tests.agent.conftest import Form, both_forms
from tests.agent.graphs import GraphScene
from tests.agent.rules import CONFIG, Scene, check_history, recording, tool_limiter
from tests.agent.shared import Clock, FickleStore, quota
from tests.examples import examples
from tests.signals import Signals, needs_inline

Args = dict[str, Any]
Answer = Callable[[Args], str]
"""What a tool does."""


def failing(text: str) -> Answer:
    """A tool that fails, with a text that may name its arguments."""

    def fail(args: Args) -> str:
        raise ToolException(text.format(**args))

    return fail


def saying(*texts: str) -> Answer:
    """A tool that says one text after the other, and then the last one for ever."""
    left = list(texts)
    return lambda args: left.pop(0) if len(left) > 1 else left[0]


def numbered(text: str) -> Answer:
    """A tool whose every answer has a new number."""
    numbers = count(1)
    return lambda args: text.format(next(numbers))


def echoing(text: str) -> Answer:
    """A tool whose answer depends on its arguments alone."""
    return lambda args: text.format(**args)


def in_turn(*answers: Answer) -> Answer:
    """A tool that does one thing after the other, and then the last one for ever."""
    left = list(answers)
    return lambda args: (left[0] if len(left) == 1 else left.pop(0))(args)  # noqa: PLW0108


def as_tool(name: str, answer: Answer) -> BaseTool:
    """A tool that takes any arguments; what it raises as a ToolException is an error message."""

    def run(**args: Any) -> str:
        return answer(args)

    async def arun(**args: Any) -> str:
        return answer(args)

    schema = {"title": name, "description": name, "type": "object", "properties": {}}
    return StructuredTool.from_function(
        run, arun, name=name, description=name, args_schema=schema, handle_tool_error=True
    )


Step = list[tuple[str, Args]]
"""The tool calls of one answer of the model."""


async def refusals(
    tools: Sequence[BaseTool], steps: Sequence[Step], *limits: Any
) -> list[tuple[int, int]]:
    """Which calls are refused: the number of the step, and of the call in it, from 1."""
    telemetry = Telemetry(registry=CollectorRegistry(), spans="off")
    middleware = QuotaMiddleware[Any, Any](limits or [RepeatLimit(3)], telemetry=telemetry)
    script: Any = [*steps, "done"]
    agent: Any = create_agent(ScriptedChatModel(script=script), tools, middleware=[middleware])
    with captured_decisions() as found:
        result = await agent.ainvoke({"messages": [("user", "hi")]}, {"recursion_limit": 500})
    decisions = [each for each in found if each.call.kind == "tool"]
    check_history(result["messages"])
    places = [
        (number, index) for number, step in enumerate(steps, 1) for index, _ in enumerate(step, 1)
    ]
    assert len(decisions) == len(places)
    return [
        place
        for place, decision in zip(places, decisions, strict=True)
        if decision.outcome is Outcome.BLOCKED
    ]


def write_file(path: str, content: str) -> str:
    """Write a file."""
    return "written"


Shape = tuple[dict[str, Answer], list[Step], tuple[int, int]]


def loops() -> dict[str, Shape]:
    """Loops that agents fall into, and the first call that is one too many."""
    read, search = ("read_file", {"path": "a"}), ("search", {"query": "rome"})
    found, got = ("memory_search", {"query": "x"}), ("memory_get", {"id": 7})
    edit = ("edit_file", {"path": "a", "old": "x"})
    run_tests = ("execute", {"command": "pytest"})
    todos: tuple[str, Args] = ("write_todos", {"todos": []})
    return {
        "a directory is listed over and over": (
            {"ls": echoing("a b c")},
            [[("ls", {"path": "/"})]] * 5,
            (4, 1),
        ),
        "a missing file is read over and over": (
            {"read_file": failing("File {path} not found")},
            [[read]] * 5,
            (4, 1),
        ),
        "a tool that does not exist is tried with ever new arguments": (
            {"search": echoing("-")},
            [[("hex", {"value": number})] for number in range(5)],
            (4, 1),
        ),
        "an empty plan is written again and again": (
            {"write_todos": echoing("Updated todo list to {todos}")},
            [[todos]] * 5,
            (4, 1),
        ),
        "two calls in turns": (
            {"memory_search": echoing("id 7"), "memory_get": echoing("nothing")},
            [[found], [got]] * 4,
            (7, 1),
        ),
        "three calls in turns: read, an edit that fails, a test that fails": (
            {
                "read_file": echoing("text"),
                "edit_file": failing("String not found in {path}"),
                "execute": echoing("1 failed in 0.1s"),
            },
            [[read], [edit], [run_tests]] * 4,
            (10, 1),
        ),
        "one search, its arguments in another order and with other numbers": (
            {"search": echoing("-")},
            [
                [("search", {"query": "rome", "limit": 5})],
                [("search", {"limit": 5, "query": "rome"})],
                [("search", {"limit": 5.0, "query": "rome"})],
                [("search", {"query": "rome", "limit": 5})],
            ],
            (4, 1),
        ),
        "one message with the same call many times": (
            {"search": echoing("-")},
            [[search] * 5],
            (1, 4),
        ),
        "an argument is left out of every call": (
            {},
            [[("write_file", {"path": f"{number}.txt"})] for number in range(5)],
            (4, 1),
        ),
        "an edit fails whatever is tried, between readings of the same file": (
            {"read_file": echoing("text"), "edit_file": failing("String not found")},
            [
                step
                for number in range(4)
                for step in ([("edit_file", {"path": "a", "old": f"x{number}"})], [read])
            ],
            (7, 1),
        ),
        "one message is sent again and again, each time under a new id": (
            {"send": lambda args: f"sent: {uuid4()}"},
            [[("send", {"text": "Done!"})]] * 5,
            (4, 1),
        ),
        "tests are run again without a change, and take another time": (
            {"execute": numbered("1 failed in 0.{}1s")},
            [[run_tests]] * 5,
            (4, 1),
        ),
        "one task is delegated over and over": (
            {"task": echoing("I could not find it.")},
            [[("task", {"description": "Find it", "subagent_type": "any"})]] * 5,
            (4, 1),
        ),
        "a pair of calls in every message": (
            {"search": echoing("-"), "ls": echoing("a")},
            [[search, ("ls", {})]] * 5,
            (4, 1),
        ),
        "a loop after long good work": (
            {"search": echoing("about {query}")},
            [[("search", {"query": str(number)})] for number in range(30)] + [[search]] * 5,
            (34, 1),
        ),
        "a service that is down is asked for ever new things": (
            {"search": failing("503 Service Unavailable")},
            [[("search", {"query": str(number)})] for number in range(5)],
            (4, 1),
        ),
    }


@pytest.mark.parametrize(("tools", "steps", "first"), loops().values(), ids=loops().keys())
async def test_loops(tools: dict[str, Answer], steps: list[Step], first: tuple[int, int]) -> None:
    """Each is noticed at the first call that is one too many, and from there on."""
    made = [as_tool(name, answer) for name, answer in tools.items()]
    refused = await refusals([*made, StructuredTool.from_function(write_file)], steps)
    assert refused[0] == first
    places = [(n, i) for n, step in enumerate(steps, 1) for i, _ in enumerate(step, 1)]
    assert refused == places[places.index(first) :]


Harmless = tuple[dict[str, Answer], list[Step]]


def harmless() -> dict[str, Harmless]:
    """What looks like a loop, and is none."""

    def each(tool: str, **args: Sequence[Any]) -> list[Step]:
        rows = zip(*args.values(), strict=True)
        return [[(tool, dict(zip(args, row, strict=True)))] for row in rows]

    run_tests, status = ("execute", {"command": "pytest"}), ("execute", {"command": "git status"})
    search, read = ("search", {"query": "rome"}), ("read_file", {"path": "a"})
    edits = each("edit_file", old=range(8))
    numbers = list(range(8))
    return {
        "polling, each time from where it was": (
            {"poll": echoing("pending")},
            each("poll", since=numbers),
        ),
        "polling with one call, while there is progress": (
            {"poll": numbered("{}0% done")},
            [[("poll", {"job": 7})]] * 8,
        ),
        "paging": ({"search": echoing("results")}, each("search", query=["x"] * 8, page=numbers)),
        "paging without arguments": ({"next_page": numbered("page {}")}, [[("next_page", {})]] * 8),
        "retries after an error that changed": (
            {"execute": numbered("line {}: syntax error")},
            [[run_tests]] * 8,
        ),
        "retries of an error that changes, with other arguments": (
            {"edit_file": failing("{old} not found")},
            edits,
        ),
        "different files": ({"read_file": echoing("text")}, each("read_file", path=numbers)),
        "parts of one file": (
            {"read_file": echoing("text")},
            each("read_file", path=["a"] * 8, offset=numbers),
        ),
        "different searches that all find nothing": (
            {"search": echoing("nothing found")},
            each("search", query=numbers),
        ),
        "missing files that are asked for together, and then one more": (
            {"read_file": failing("not found")},
            [[("read_file", {"path": number}) for number in numbers], [read], [("ls", {})]],
        ),
        "tests after each edit, which fail as before": (
            {"edit_file": echoing("replaced {old}"), "execute": echoing("1 failed")},
            [step for edit in edits for step in (edit, [run_tests])],
        ),
        "tests in one message with each edit": (
            {"edit_file": echoing("replaced {old}"), "execute": echoing("1 failed")},
            [[*edit, run_tests] for edit in edits],
        ),
        "the same search after each edit": (
            {"edit_file": echoing("ok"), "search": echoing("3 matches")},
            [step for edit in edits for step in (edit, [search])],
        ),
        "a file that is read after each change to it": (
            {"edit_file": echoing("ok"), "read_file": numbered("text {}")},
            [step for edit in edits for step in (edit, [read])],
        ),
        "a clean status after each commit": (
            {"commit": echoing("1 file changed"), "execute": echoing("nothing to commit")},
            [step for one in each("commit", message=numbers) for step in (one, [status])],
        ),
        "a file that is read again in the course of other work": (
            {"read_file": echoing("text"), "search": echoing("about {query}")},
            [step for one in each("search", query=numbers) for step in (one, one, [read])],
        ),
        "a plan that moves on": (
            {"write_todos": echoing("Updated todo list to {todos}")},
            each("write_todos", todos=[[f"step {number}"] for number in numbers]),
        ),
        "one call three times": ({"search": echoing("-")}, [[search]] * 3),
        "one argument of several tools": (
            {name: echoing("ok") for name in ("a", "b", "c", "d")},
            [[(name, {"path": "x"})] for name in ("a", "b", "c", "d")],
        ),
        "code that differs by its indentation only": (
            {"edit_file": failing("String not found")},
            [[("edit_file", {"old": " " * number + "x"})] for number in range(3)]
            + [[("read_file", {"path": "a"})], [("edit_file", {"old": "    x"})]],
        ),
        "an error that is met again after progress": (
            {"search": failing("rate limited"), "read_file": echoing("{path}")},
            [
                step
                for one in each("read_file", path=numbers)
                for step in (one, [("search", {"query": one[0][1]["path"]})])
            ],
        ),
        "days and customers of whom nothing is known": (
            {"search": failing("Nothing on {day} of {customer}")},
            each(
                "search",
                day=[f"2026-01-0{number + 1}" for number in numbers],
                customer=[str(uuid4()) for _ in numbers],
            ),
        ),
        "two random numbers in every message": (
            {"roll": numbered("rolled {}")},
            [[("roll", {"sides": 6})] * 2] * 4,
        ),
        "a random number": ({"roll": numbered("rolled {}")}, [[("roll", {"sides": 6})]] * 8),
        "a call that fails, then succeeds": (
            {"search": in_turn(failing("busy"), failing("busy"), echoing("rome"))},
            [[search]] * 3 + [[("search", {"query": "turin"})]],
        ),
    }


@pytest.mark.parametrize(("tools", "steps"), harmless().values(), ids=harmless().keys())
async def test_harmless_repetitions(tools: dict[str, Answer], steps: list[Step]) -> None:
    """None of their calls is refused."""
    assert await refusals([as_tool(*each) for each in tools.items()], steps) == []


LONG = "x y " * 250_000
"""A megabyte."""


def long_loops() -> dict[str, Shape]:
    """Loops of calls with long arguments or answers: what differs is not compared."""
    texts = [f"{LONG}{number}{LONG}" for number in range(5)]
    moments = [f"2026-01-0{number + 1}" for number in range(5)]
    rows = [[*range(50_000), number, *range(50_000)] for number in range(5)]
    told = [f"{LONG}{day}{LONG}" for day in moments]
    search: Step = [("search", {"query": "rome"})]
    return {
        "answers with another middle": ({"search": saying(*texts)}, [search] * 5, (4, 1)),
        "answers with other moments": (
            {"search": saying(*(f"{day}\n{LONG}\n{day}" for day in moments))},
            [search] * 5,
            (4, 1),
        ),
        "texts with another middle": (
            {"save": echoing("saved")},
            [[("save", {"content": each, "path": "a"})] for each in texts],
            (4, 1),
        ),
        "lists with another middle": (
            {"save": echoing("saved")},
            [[("save", {"rows": each, "path": "a"})] for each in rows],
            (4, 1),
        ),
        "errors that name what is far inside of the arguments": (
            {"save": lambda args: failing(args["text"].strip("x y\n") + " is taken")(args)},
            [[("save", {"text": each})] for each in told],
            (4, 1),
        ),
        "one error of long arguments": (
            {"save": failing("Error invoking tool 'save' with kwargs {{{text}}} with error:\n no")},
            [[("save", {"text": LONG * number})] for number in range(1, 6)],
            (4, 1),
        ),
    }


@pytest.mark.parametrize(("tools", "steps", "first"), long_loops().values(), ids=long_loops())
async def test_long_loops(
    tools: dict[str, Answer], steps: list[Step], first: tuple[int, int]
) -> None:
    """Of long texts and lists a part is compared: what differs beyond it does not hide a loop."""
    refused = await refusals([as_tool(*each) for each in tools.items()], steps)
    assert refused[0] == first


@pytest.mark.parametrize(
    "answers",
    [
        pytest.param([f"{number}{LONG}" for number in range(5)], id="beginning"),
        pytest.param([f"{LONG}{number}" for number in range(5)], id="end"),
        pytest.param([LONG + "x" * number + LONG for number in range(5)], id="length"),
    ],
)
async def test_long_answers_that_differ(answers: list[str]) -> None:
    """The beginning, the end and the length of a long text are compared, as answer and argument."""
    tools = [as_tool("search", saying(*answers)), as_tool("save", echoing("saved"))]
    searches: list[Step] = [[("search", {})]] * 5
    assert await refusals(tools, searches) == []
    saves: list[Step] = [[("save", {"text": each, "path": "a"})] for each in answers]
    assert await refusals(tools, saves) == []


@pytest.mark.parametrize("other", ["aa", "path"])
@pytest.mark.parametrize(
    "long",
    [LONG, ["x y"] * 100_000, {str(n): n for n in range(100_000)}],
    ids=["text", "list", "mapping"],
)
async def test_short_arguments_beside_long_ones(long: Any, other: str) -> None:
    """However long one argument is, a short one beside it makes calls different."""
    tools = [as_tool("save", echoing("saved"))]
    steps: list[Step] = [[("save", {"content": long, other: str(number)})] for number in range(5)]
    assert await refusals(tools, steps) == []
    assert await refusals(tools, [steps[0]] * 4) == [(4, 1)]


async def calls_made_for(rows: Any, answer: str) -> int:
    """How many functions this library calls in a run with a repeated call."""
    found = 0

    def count_call(frame: Any, event: str, _: object) -> None:
        nonlocal found
        ours = frame.f_globals.get("__name__", "").startswith("langchain_quota.")
        found += ours and event in {"call", "c_call"}

    steps: list[Step] = [[("search", {"rows": rows})]] * 3
    before = sys.getprofile()
    sys.setprofile(count_call)
    try:
        assert await refusals([as_tool("search", lambda _: answer)], steps) == []
    finally:
        sys.setprofile(before)
    return found


async def test_the_work_is_bounded() -> None:
    """With a hundred times the arguments and the answer, as many functions are called."""
    row, moment = {"name": "x", "values": [1, 2.5, "y"]}, "2026-01-02T03:04:05Z "
    # What is made at the first run in a process is not counted.
    await calls_made_for([row], moment)
    some = await calls_made_for([row] * 2_000, moment * 2_000)
    many = await calls_made_for([row] * 20_000, moment * 200_000)
    assert many < some * 1.1


async def test_excluded_tools() -> None:
    """They are never refused, and what they say is nothing new."""
    tools = [as_tool("think", echoing("{thought}")), as_tool("search", echoing("-"))]
    thoughts: list[Step] = []
    for number in range(5):
        thoughts += [[("think", {"thought": number})], [("search", {})]]
    same: list[Step] = [[("think", {"thought": 1})]] * 6
    limit = RepeatLimit(3, exclude="think")
    assert await refusals(tools, thoughts, limit) == [(8, 1), (10, 1)]
    assert await refusals(tools, thoughts, RepeatLimit(3)) == []
    assert await refusals(tools, same, limit) == []


async def test_some_tools() -> None:
    """Only their calls are refused; what others say is new all the same."""
    tools = [as_tool("edit", echoing("{old}")), as_tool("test", echoing("1 failed"))]
    edits: list[Step] = []
    for number in range(5):
        edits += [[("edit", {"old": number})], [("test", {})]]
    others: list[Step] = [[("edit", {"old": 1})]] * 5
    limit = RepeatLimit(2, tools="test")
    assert await refusals(tools, edits, limit) == []
    assert await refusals(tools, others, limit) == []
    assert await refusals(tools, [[("test", {})]] * 4, limit) == [(3, 1), (4, 1)]


async def test_the_usage_of_some_tools(signals: Signals) -> None:
    """What is shown is what may be refused: calls of other tools are not in it."""
    script = [["search"], *[["calc"]] * 4, "done"]
    scene = scene_of(signals, script, RepeatLimit(2, tools="search"))
    await scene.turn()
    assert usage(scene.agent.get_state(CONFIG)).repeats == {"repeats": 1}


async def test_a_key_of_the_users_own() -> None:
    """What has one key is one call, and without one a call is left out."""
    tools = [as_tool("read", echoing("{path} {offset}")), as_tool("wait", echoing("waited"))]
    steps: list[Step] = [[("read", {"path": "a", "offset": 0})], [("wait", {})]] * 5
    limit = RepeatLimit(3, key=lambda call: call["args"].get("path"))
    assert await refusals(tools, steps, limit) == [(7, 1), (9, 1)]


@pytest.mark.parametrize("most", [1, 2])
async def test_small_numbers(most: int) -> None:
    """With 1 no call is made twice in a run; but a tool may fail in the same way twice."""
    tools = [as_tool("edit", echoing("{old}")), as_tool("get", failing("no"))]
    edits: list[Step] = [[("edit", {"old": number % 3})] for number in range(6)]
    fails: list[Step] = [[("get", {"id": number})] for number in range(4)]
    refused = await refusals(tools, edits, RepeatLimit(most))
    assert refused == ([(4, 1), (5, 1), (6, 1)] if most == 1 else [])
    assert await refusals(tools, fails, RepeatLimit(most)) == [(3, 1), (4, 1)]


SEARCH: Step = [("search", {"query": "rome"})]


def scene_of(signals: Signals, script: Any, *limits: Any, **options: Any) -> Scene:
    middleware = QuotaMiddleware[Any, Any](limits, telemetry=signals.telemetry)
    return Scene(signals, script, [middleware], **options)


def texts(result: dict[str, Any]) -> list[str]:
    """What was answered in place of tools."""
    return [str(m.content) for m in result["messages"] if getattr(m, "status", "") == "error"]


REPEATED = (
    "This call was not run: 'search' was called 2 times with the same arguments, and nothing new "
    "came of it. Do not repeat this call: use the answer that you have, change the arguments, do "
    "something else, or say what you cannot do."
)


@both_forms
async def test_the_model_reads_that_it_repeats_itself(form: Form, signals: Signals) -> None:
    """The answer of a refused call says so, and what to do instead; the run goes on."""
    scene = scene_of(signals, [["search"]] * 3 + [["calc"], "done"], RepeatLimit(2), form=form)
    result = await scene.turn()
    assert texts(result) == [REPEATED]
    assert scene.ran == ["search", "search", "calc"]
    check_history(result["messages"])


async def test_the_model_reads_that_a_tool_keeps_failing(signals: Signals) -> None:
    """That text is another one, and an observer sees the reason."""
    seen: list[Decision] = []
    tools = [as_tool("get", failing("no"))]
    middleware = QuotaMiddleware[Any, Any](
        [RepeatLimit(2)], on_decision=seen.append, telemetry=signals.telemetry
    )
    script: Any = [[("get", {"id": number})] for number in range(3)]
    scene = Scene(signals, [*script, "done"], [middleware], tools=tools, form="sync")
    result = await scene.turn()
    assert texts(result)[-1] == (
        "This call was not run: 'get' has failed in the same way 2 times. Do not try it again "
        "before you have learnt something new: read what the error says, look at what it is about "
        "with another tool, or say what you cannot do."
    )
    judged = [each.outcome for each in seen if each.call.kind == "tool"]
    assert judged == ["allowed", "allowed", "blocked"]
    (status,) = next(each for each in seen if each.outcome is Outcome.BLOCKED).limits
    assert (status.reason, status.scope, status.run_before) == ("failing", "run", 2)


async def test_a_call_that_fails_and_is_repeated(signals: Signals) -> None:
    """What is wrong with it is said first: it is the same call."""
    scene = scene_of(
        signals,
        [["search"]] * 3 + ["done"],
        RepeatLimit(2),
        tools=[as_tool("search", failing("no"))],
    )
    assert texts(await scene.turn()) == ["no", "no", REPEATED]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"message": "No."}, "No."),
        ({"message": lambda decision: f"{decision.call.tool}!"}, "search!"),
        ({"key": lambda call: "x"}, "This call was not run: 'search' was called 2 times in the "),
    ],
    ids=["text", "function", "key"],
)
async def test_other_words(options: dict[str, Any], text: str, signals: Signals) -> None:
    """They are the user's own, or do not speak of arguments where these do not matter."""
    scene = scene_of(signals, [["search"]] * 3 + ["done"], RepeatLimit(2, **options))
    (answer,) = texts(await scene.turn())
    assert answer.startswith(text)


async def test_one_message_with_equal_calls(signals: Signals) -> None:
    """As many as the limit has are admitted, others beside them too."""
    batch = ["search", "calc", "search", "search", "search", "search"]
    scene = scene_of(signals, [batch, ["search"], "done"], RepeatLimit(3))
    await scene.turn()
    assert sorted(scene.ran) == ["calc", "search", "search", "search"]
    assert scene.metric("repeats", "allowed") == 4
    assert scene.metric("repeats", "blocked", "run") == 3


async def test_the_end_of_a_run(signals: Signals) -> None:
    """With `"end"` the run ends with a text, and what was called beside it does not run."""
    limit = RepeatLimit(1, exit_behavior="end")
    scene = scene_of(signals, [["search"], ["calc", "search"]], limit, ToolCallLimit(run_limit=9))
    result = await scene.turn()
    assert scene.ran == ["search"]
    final = "'search' was already called with the same arguments."
    assert result["messages"][-1].text == final
    check_history(result["messages"])


async def test_an_exception(signals: Signals) -> None:
    """With `"error"` it says what repeats first, and how often it was asked for."""
    limit = RepeatLimit(1, exit_behavior="error")
    script = [["search", "calc"], ["search", "search", "calc"]]
    scene = scene_of(signals, script, limit)
    with pytest.raises(ToolCallLimitExceededError, match="'search' was already called") as caught:
        await scene.turn()
    assert (caught.value.run_count, caught.value.run_limit) == (3, 1)
    assert caught.value.decision is not None


async def test_giving_up(signals: Signals) -> None:
    """After so many refusals the run ends, of whichever calls they were."""
    script = [["search", "calc"], ["search"], ["calc"]]
    scene = scene_of(signals, script, RepeatLimit(1, give_up_after=2))
    result = await scene.turn()
    assert result["messages"][-1].text.startswith("'calc' was already called")
    assert (
        scene.signals.value("langchain_quota_runs_ended_total", agent="unnamed", limit="repeats")
        == 1
    )


async def test_on_trial(signals: Signals) -> None:
    """A limit that is not enforced refuses nothing, and shows what it would refuse."""
    scene = scene_of(signals, [["search"]] * 4 + ["done"], RepeatLimit(2, enforce=False))
    await scene.turn()
    assert scene.ran == ["search"] * 4
    assert scene.metric("repeats", "would_block", "run") == 2
    assert scene.metric("repeats", "allowed") == 2


async def test_two_limits(signals: Signals) -> None:
    """A limit on trial and an enforced one work side by side; each has its own memory."""
    scene = scene_of(
        signals,
        [["search"]] * 5 + ["done"],
        RepeatLimit(4, name="hard"),
        RepeatLimit(2, name="soft", enforce=False),
        ToolCallLimit("search", run_limit=9),
    )
    await scene.turn()
    assert scene.ran == ["search"] * 4
    assert scene.metric("soft", "would_block", "run") == 3
    assert scene.metric("hard", "blocked", "run") == 1
    state = scene.agent.get_state(CONFIG)
    assert usage(state).repeats == {"hard": 4, "soft": 4}
    assert usage(state).run_tools == usage(state).tools == {"search": 4}


async def test_a_call_that_another_limit_refuses(signals: Signals) -> None:
    """It did not run, and so is nothing that could be repeated."""
    scene = scene_of(
        signals,
        [["search"]] * 5 + ["done"],
        RepeatLimit(3, give_up_after=1),
        ToolCallLimit("search", run_limit=1),
    )
    result = await scene.turn()
    assert result["messages"][-1].text == "done"
    assert scene.metric("repeats", "blocked", "run") == 0
    assert scene.metric("tool:search", "blocked", "run") == 4


async def test_a_call_that_another_middleware_refuses(signals: Signals) -> None:
    """Nor did a call that it let through, and that a limiter refuses which judges later."""
    middleware = QuotaMiddleware[Any, Any](
        [RepeatLimit(2, give_up_after=1)], telemetry=signals.telemetry
    )
    scene = Scene(
        signals,
        [*[["search"]] * 4, *[[("search", {"n": number})] for number in range(4)], "done"],
        [tool_limiter(signals, "search", run_limit=1), middleware],
    )
    result = await scene.turn()
    assert result["messages"][-1].text == "done"
    assert usage(scene.agent.get_state(CONFIG)).repeats == {"repeats": 1}


async def test_a_call_that_waits_in_vain(signals: Signals) -> None:
    """It is to be tried again later, so it is neither a repetition nor a failure."""
    opened, may_end = asyncio.Event(), asyncio.Event()

    async def browser(url: str = "") -> str:
        """Open a page."""
        opened.set()
        await may_end.wait()
        return "seen"

    def scene(script: Any) -> Scene:
        cap = ToolCallLimit("browser", at_once=1, wait=0)
        repeats = RepeatLimit(2, give_up_after=1)
        tool = StructuredTool.from_function(coroutine=browser)
        return scene_of(signals, script, cap, repeats, tools=[tool])

    busy = asyncio.create_task(scene([["browser"], "seen"]).turn())
    await opened.wait()
    pages = [[("browser", {"url": str(number)})] for number in range(4)]
    waiting = scene([*[["browser"]] * 4, *pages, "done"])
    result = await waiting.turn()
    assert result["messages"][-1].text == "done"
    assert usage(waiting.agent.get_state(CONFIG)).repeats == {"repeats": 0}
    may_end.set()
    await busy


async def test_a_new_run(signals: Signals) -> None:
    """It may repeat what the one before did."""
    script = [["search"], ["search"], "done", ["search"], ["search"], ["search"], "done"]
    scene = scene_of(signals, script, RepeatLimit(2))
    assert texts(await scene.turn()) == []
    assert usage(scene.agent.get_state(CONFIG)).repeats == {"repeats": 2}
    assert texts(await scene.turn()) == [REPEATED]


async def test_what_is_shown(signals: Signals) -> None:
    """Its span and its metrics are those of a run limit, with the count of the refused call."""
    scene = scene_of(signals, [["calc"], ["search"], ["search"], "done"], RepeatLimit(1))
    await scene.turn()
    spans = [dict(each.attributes or {}) for each in signals.spans()]
    (refusal,) = [each for each in spans if each["langchain_quota.decision"] == "blocked"]
    assert refusal["langchain_quota.limit"] == "repeats"
    assert refusal["langchain_quota.scope"] == "run"
    assert refusal["langchain_quota.run.used"] == 1
    assert (
        signals.value("langchain_quota_limit", agent="unnamed", limit="repeats", scope="run") == 1
    )


async def test_what_the_model_is_told(signals: Signals) -> None:
    """Before the call that is one too many, and not beside what else is near; no tool is hidden."""
    middleware = QuotaMiddleware[Any, Any](
        [RepeatLimit(2), ToolCallLimit("calc", run_limit=1), RepeatLimit(1, name="once")],
        tell_model=True,
        hide_exhausted=True,
        telemetry=signals.telemetry,
    )
    script = [[("search", {"n": 1})], [("search", {"n": 2})], ["calc"], "done"]
    tools = [as_tool("search", echoing("-")), as_tool("calc", echoing("-"))]
    scene = Scene(signals, script, [middleware], tools=tools)
    await scene.turn()
    notes = [call.messages[-1].text.partition("Budget: ")[2] for call in scene.model.calls]
    assert notes == ["", "", "", "calc: 0 of 1 left."]

    near = Scene(
        signals,
        [["search"], ["search"], "done"],
        [QuotaMiddleware[Any, Any]([RepeatLimit(2)], tell_model=True, hide_exhausted=True)],
    )
    await near.turn()
    notes = [call.messages[-1].text.partition("Budget: ")[2] for call in near.model.calls]
    assert notes == ["", "", "the same call or failure came 2 of 2 times."]
    assert near.model.calls[-1].tools == ("search", "calc")


async def test_a_review_and_its_edits(signals: Signals) -> None:
    """Listed first: the arguments that run count, a rejected call does not, a resume goes on."""
    ran: list[Any] = []

    def search(query: str = "") -> str:
        """Search."""
        ran.append(query)
        return "-"

    asked = {"query": "rome"}
    edit = {"type": "edit", "edited_action": {"name": "search", "args": {"query": "turin"}}}
    scene = Scene(
        signals,
        [[("search", asked)]] * 3 + [[("search", {"query": "turin"})], "done"],
        [
            QuotaMiddleware[Any, Any]([RepeatLimit(2)], telemetry=signals.telemetry),
            HumanInTheLoopMiddleware({"search": True}),
        ],
        tools=[StructuredTool.from_function(search)],
    )
    await scene.turn()
    for decision in (edit, {"type": "reject"}, edit, {"type": "approve"}):
        result = await scene.resume({"decisions": [decision]})
    assert ran == ["turin", "turin"]
    assert texts(result)[-1] == REPEATED


async def test_interrupts_in_a_tool(signals: Signals) -> None:
    """A run that is resumed goes on with its counts; the call that was interrupted is one."""

    def ask() -> str:
        return str(interrupt("?"))

    ran: list[str] = []
    tools = [recording("search", ran, ask)]
    scene = scene_of(signals, [["search"]] * 4 + ["done"], RepeatLimit(2), tools=tools, ran=ran)
    await scene.turn()
    for _ in range(2):
        result = await scene.resume("same")
    assert ran == ["search"] * 2
    assert len(texts(result)) == 2


async def test_another_process_goes_on(signals: Signals, sqlite_saver: AsyncSqliteSaver) -> None:
    """The counts are in the checkpoint: another agent on it resumes with them."""

    def agent(*script: Any) -> Any:
        middleware = QuotaMiddleware[Any, Any]([RepeatLimit(2)], telemetry=signals.telemetry)
        return create_agent(
            ScriptedChatModel(script=script),
            [as_tool("search", echoing("-")), recording("ask", [], lambda: interrupt("?"))],
            middleware=[middleware],
            checkpointer=sqlite_saver,
        )

    first = agent(["search"], ["search"], ["ask"])
    await first.ainvoke({"messages": [("user", "hi")]}, CONFIG)
    result = await agent(["search"], ["ask"], "done").ainvoke(Command(resume="x"), CONFIG)
    # What the user has said is new.
    assert texts(result) == []
    result = await agent(["search"], "done").ainvoke(Command(resume="x"), CONFIG)
    assert texts(result) == [REPEATED]


async def test_a_history_that_is_summarized(signals: Signals) -> None:
    """Messages that are deleted are remembered."""
    summarizer = ScriptedChatModel(script=["In short."] * 9)
    scene = Scene(
        signals,
        [["search"]] * 5 + ["done"],
        [
            QuotaMiddleware[Any, Any]([RepeatLimit(3)], telemetry=signals.telemetry),
            SummarizationMiddleware(summarizer, trigger=("messages", 3), keep=("messages", 2)),
        ],
    )
    await scene.turn()
    assert scene.ran == ["search"] * 3
    assert len(scene.state()["messages"]) < 8


async def test_a_model_that_fails(signals: Signals) -> None:
    """A run that goes on after a failure goes on with its counts."""
    script = [["search"], ["search"], RuntimeError("down"), ["search"], "done"]
    scene = scene_of(signals, script, RepeatLimit(2))
    with pytest.raises(RuntimeError):
        await scene.turn()
    assert texts(await scene.go_on()) == [REPEATED]


async def test_calls_that_share_an_id(signals: Signals) -> None:
    """The calls of a model that gives all calls one id are counted."""
    call = {"name": "search", "args": {}, "id": "same", "type": "tool_call"}
    scene = scene_of(signals, [[call]] * 3 + ["done"], RepeatLimit(2))
    assert texts(await scene.turn()) == [REPEATED]


async def test_calls_without_an_id(signals: Signals) -> None:
    """They are given one, under which their answers are found."""
    call = ToolCall(name="search", args={}, id=None)
    script = [AIMessage("", tool_calls=[call]) for _ in range(3)]
    scene = scene_of(signals, [*script, "done"], RepeatLimit(2))
    assert texts(await scene.turn()) == [REPEATED]


async def test_a_key_that_raises(signals: Signals) -> None:
    """The run fails with what the function raised, before a tool runs."""
    scene = scene_of(signals, [["search"]], RepeatLimit(2, key=lambda call: call["args"]["x"]))
    with pytest.raises(KeyError):
        await scene.turn()
    assert scene.ran == []


async def test_beside_a_store(signals: Signals) -> None:
    """One step judges what a store counts and what repeats: a refused call is charged nowhere."""
    store = MemoryStore()
    emails = ToolCallLimit("search", thread_limit=9, quotas=[Quota(9, per="global")])
    middleware = quota(signals, emails, RepeatLimit(2), store=store, clock=Clock())
    scene = Scene(signals, [["search"]] * 4 + ["done"], [middleware])
    result = await scene.turn()
    assert texts(result) == [REPEATED] * 2
    assert {each.used for each in store.usages()} == {2}
    assert not any("repeats" in each.key for each in store.usages())


@pytest.mark.parametrize("fallback", ["deny", "allow"])
async def test_a_store_that_does_not_answer(fallback: Any, signals: Signals) -> None:
    """What repeats is known without it."""
    store = FickleStore(MemoryStore())
    middleware = quota(
        signals,
        ToolCallLimit("search", quotas=[Quota(9, per="global")]),
        RepeatLimit(2),
        store=store,
        on_store_error=fallback,
    )
    scene = Scene(signals, [["calc", "search"]] * 3 + ["done"], [middleware])
    store.down = True
    await scene.turn()
    ran = ["calc"] * 2 + (["search"] * 2 if fallback == "allow" else [])
    assert sorted(scene.ran) == ran


async def test_two_middlewares(signals: Signals) -> None:
    """Each has limits of its own, which may have one name."""
    scene = Scene(
        signals,
        [["search"]] * 4 + ["done"],
        [
            QuotaMiddleware[Any, Any]([RepeatLimit(3)], telemetry=signals.telemetry),
            type("Second", (QuotaMiddleware,), {})([RepeatLimit(2)], telemetry=signals.telemetry),
        ],
    )
    await scene.turn()
    assert scene.ran == ["search"] * 2


@needs_inline
@both_forms
async def test_inline(form: Form, signals: Signals) -> None:
    """InlineQuotaMiddleware refuses the same calls."""
    middleware = InlineQuotaMiddleware[Any, Any](
        [RepeatLimit(2), ModelCallLimit(run_limit=9)], telemetry=signals.telemetry
    )
    script = [["search"], ["calc"]] * 3 + ["done"]
    scene = Scene(signals, script, [middleware], form=form)
    result = await scene.turn()
    assert scene.ran == ["search", "calc"] * 2
    assert texts(result)[0] == REPEATED
    assert usage(scene.agent.get_state(CONFIG)).repeats == {"repeats": 2}


@both_forms
async def test_a_graph(form: Form, signals: Signals) -> None:
    """So does GraphQuota, in any StateGraph; a new run begins anew."""
    script = [["search"], ["calc"]] * 3 + ["done", ["search"], "done"]
    scene = GraphScene(signals, script, [RepeatLimit(2)], form=form)
    result = await scene.turn()
    assert scene.ran == ["search", "calc"] * 2
    assert texts(result)[0] == REPEATED
    await scene.turn()
    assert scene.ran == ["search", "calc"] * 2 + ["search"]


async def test_an_agent_without_such_a_limit(signals: Signals) -> None:
    """Nothing is written for it."""
    script = [["search"], "done"] * 2
    scene = scene_of(signals, script, ToolCallLimit("search", run_limit=9))
    await scene.turn()
    await scene.turn()
    assert "repeats" not in scene.state()["langchain_quota"]


class Reference:
    """What a limit admits, by looking back at all that was called and answered in the run."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.log: list[tuple[int, str, str, str]] = []

    def step(self, batch: Sequence[tuple[str, str]]) -> list[bool]:
        """Which calls of an answer run."""
        log = self.log
        runs = []
        admitted: list[tuple[str, str]] = []
        for tool, query in batch:
            fails = self._since(
                log, {e for e in log if e[1] == tool and e[3] == "fails"}, once=True
            )
            made = self._since(log, {e for e in log if e[1:3] == (tool, query)})
            own = admitted.count((tool, query))
            runs.append(made + own < self.most and fails < max(2, self.most))
            if runs[-1]:
                admitted.append((tool, query))
        return runs

    def _since(
        self, log: list[tuple[int, str, str, str]], those: set[Any], *, once: bool = False
    ) -> int:
        """How many calls there were since the newest one that brought something new."""

        def new(each: tuple[int, str, str, str]) -> bool:
            earlier = [one for one in log if one[0] < each[0]]
            if each[3] == "fails":
                return not any(one[1] == each[1] and one[3] == "fails" for one in earlier)
            return each[1:] not in [one[1:] for one in earlier]

        newest = max((each[0] for each in log if new(each)), default=0)
        came = [each for each in log if each in those]
        if once:
            return len({e[0] for e in came if e[0] > newest}) + any(e[0] <= newest for e in came)
        at_newest = [each for each in came if each[0] == newest]
        first = len(at_newest) if any(map(new, at_newest)) else any(e[0] <= newest for e in came)
        return first + sum(each[0] > newest for each in came)


calls = st.tuples(st.sampled_from(["same", "other", "broken"]), st.sampled_from("ab"))
worlds = st.lists(st.lists(calls, min_size=1, max_size=4), min_size=1, max_size=9)


@examples(60)
@given(
    batches=worlds,
    most=st.integers(1, 3),
    answers=st.lists(st.sampled_from("xy"), min_size=9, max_size=9),
)
async def test_what_runs_is_what_the_reference_admits(
    batches: list[list[tuple[str, str]]], most: int, answers: list[str]
) -> None:
    """In real agents, for any batches of calls: some always answer the same, some change, fail."""
    reference = Reference(most)
    now = [0]
    changing: Answer = lambda args: answers[now[0]]  # noqa: E731 - one of many
    tools = [
        as_tool("same", echoing("-")),
        as_tool("other", changing),
        as_tool("broken", failing("no")),
    ]
    expected: list[bool] = []
    gives: dict[str, Callable[[], str]] = {
        "same": lambda: "-",
        "other": lambda: answers[now[0]],
        "broken": lambda: "fails",
    }

    numbers = count()

    def script(_messages: Any) -> Any:
        number = next(numbers)
        if number == len(batches):
            return "done"
        now[0] = number
        batch = batches[number]
        runs = reference.step(batch)
        expected.extend(runs)
        for (tool, query), run in zip(batch, runs, strict=True):
            if run:
                reference.log.append((number + 1, tool, query, gives[tool]()))
        return [(tool, {"query": query}) for tool, query in batch]

    middleware: AgentMiddleware[Any, Any, Any] = QuotaMiddleware(
        [RepeatLimit(most)],
        telemetry=Telemetry(registry=CollectorRegistry(), spans="off"),
    )
    agent: Any = create_agent(
        ScriptedChatModel(script=script),
        tools,
        middleware=[middleware],
        checkpointer=InMemorySaver(),
    )
    with captured_decisions() as decisions:
        result = await agent.ainvoke({"messages": [("user", "hi")]}, CONFIG)
    outcomes = [each.outcome for each in decisions if each.call.kind == "tool"]
    assert [each is Outcome.ALLOWED for each in outcomes] == expected
    check_history(result["messages"])
