"""RepeatLimit in real agents: the loops that it notices, and the repetitions that it lets be."""

import asyncio
import sys
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any
from uuid import uuid4

import pytest
from hypothesis import strategies as st
from langchain.agents import create_agent
from langchain_core.tools import BaseTool, StructuredTool, ToolException
from prometheus_client import CollectorRegistry

from langchain_quota import (
    Outcome,
    QuotaMiddleware,
    RepeatLimit,
    Telemetry,
    ToolCallLimit,
    ToolCallLimitExceededError,
    usage,
)
from langchain_quota.testing import ScriptedChatModel, captured_decisions
from tests.scene import CONFIG, Form, Scene, both_forms, check_history, tool_limiter
from tests.signals import Signals

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


async def test_the_usage_of_some_tools(signals: Signals) -> None:
    """What is shown is what may be refused: calls of other tools are not in it."""
    script = [["search"], *[["calc"]] * 4, "done"]
    scene = scene_of(signals, script, RepeatLimit(2, tools="search"))
    await scene.play()
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


async def test_the_end_of_a_run(signals: Signals) -> None:
    """With `"end"` the run ends with a text, and what was called beside it does not run."""
    limit = RepeatLimit(1, exit_behavior="end")
    scene = scene_of(signals, [["search"], ["calc", "search"]], limit, ToolCallLimit(run_limit=9))
    result = await scene.play()
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
        await scene.play()
    assert (caught.value.run_count, caught.value.run_limit) == (3, 1)
    assert caught.value.decision is not None


async def test_giving_up(signals: Signals) -> None:
    """After so many refusals the run ends, of whichever calls they were."""
    script = [["search", "calc"], ["search"], ["calc"]]
    scene = scene_of(signals, script, RepeatLimit(1, give_up_after=2))
    result = await scene.play()
    assert result["messages"][-1].text.startswith("'calc' was already called")
    assert (
        scene.signals.value("langchain_quota_runs_ended_total", agent="unnamed", limit="repeats")
        == 1
    )


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
    result = await scene.play()
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

    busy = asyncio.create_task(scene([["browser"], "seen"]).play())
    await opened.wait()
    pages = [[("browser", {"url": str(number)})] for number in range(4)]
    waiting = scene([*[["browser"]] * 4, *pages, "done"])
    result = await waiting.play()
    assert result["messages"][-1].text == "done"
    assert usage(waiting.agent.get_state(CONFIG)).repeats == {"repeats": 0}
    may_end.set()
    await busy


async def test_a_new_run(signals: Signals) -> None:
    """It may repeat what the one before did."""
    script = [["search"], ["search"], "done", ["search"], ["search"], ["search"], "done"]
    scene = scene_of(signals, script, RepeatLimit(2))
    assert texts(await scene.play()) == []
    assert usage(scene.agent.get_state(CONFIG)).repeats == {"repeats": 2}
    assert texts(await scene.play()) == [REPEATED]


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
    await scene.play()
    notes = [call.messages[-1].text.partition("Budget: ")[2] for call in scene.model.calls]
    assert notes == ["", "", "", "calc: 0 of 1 left."]

    near = Scene(
        signals,
        [["search"], ["search"], "done"],
        [QuotaMiddleware[Any, Any]([RepeatLimit(2)], tell_model=True, hide_exhausted=True)],
    )
    await near.play()
    notes = [call.messages[-1].text.partition("Budget: ")[2] for call in near.model.calls]
    assert notes == ["", "", "the same call or failure came 2 of 2 times."]
    assert near.model.calls[-1].tools == ("search", "calc")


async def test_a_key_that_raises(signals: Signals) -> None:
    """The run fails with what the function raised, before a tool runs."""
    scene = scene_of(signals, [["search"]], RepeatLimit(2, key=lambda call: call["args"]["x"]))
    with pytest.raises(KeyError):
        await scene.play()
    assert scene.ran == []


@both_forms
async def test_a_graph(form: Form, signals: Signals) -> None:
    """So does GraphQuota, in any StateGraph; a new run begins anew."""
    script = [["search"], ["calc"]] * 3 + ["done", ["search"], "done"]
    scene = Scene(signals, script, [RepeatLimit(2)], form=form, kind="graph")
    result = await scene.play()
    assert scene.ran == ["search", "calc"] * 2
    assert texts(result)[0] == REPEATED
    await scene.play()
    assert scene.ran == ["search", "calc"] * 2 + ["search"]


calls = st.tuples(st.sampled_from(["same", "other", "broken"]), st.sampled_from("ab"))
