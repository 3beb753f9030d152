"""RepeatLimit in real agents: what is the same, what is new, and what a refusal says.

Loops and harmless repetitions are drawn: what runs is what the definition admits.
"""

import re
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from langchain.agents.middleware import SummarizationMiddleware
from langchain_core.tools import BaseTool, StructuredTool, ToolException
from langgraph.checkpoint.memory import InMemorySaver
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
from tests.examples import examples
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
SEARCH = ("search", {"query": "rome"})
TIMES = [echoing(f"1 failed in 0.{number}1s") for number in NUMBERS]
LONG = "x y " * 100_000
TOLD = "Error invoking tool 'search' with kwargs {{'a': {}}} with error:\n content: Field required"


async def test_what_is_the_same_call() -> None:
    """The order of keys does not matter; all else is compared exactly, however long it is."""

    async def is_same_call(one: Args, other: Args) -> bool:
        tools = [as_tool("save", echoing("saved"))]
        return await refusals(tools, [[("save", one)], [("save", other)]], RepeatLimit(1)) != []

    same: list[tuple[Args, Args]] = [
        ({"a": 1, "b": {"c": 2, "d": 3}}, {"b": {"d": 3, "c": 2}, "a": 1}),
        ({"a": LONG}, {"a": LONG}),
    ]
    different: list[tuple[Args, Args]] = [
        *(({"a": 1}, {"a": other}) for other in (1.5, "1", True, None, [1])),
        *(({"a": "x = 1"}, {"a": other}) for other in ("  x = 1", "X = 1")),
        *(({"a": other}, {}) for other in (None, float("nan"), 10**400, "\ud800")),
        ({"a": [1, 2]}, {"a": [2, 1]}),
        ({"a": f"{LONG}1{LONG}"}, {"a": f"{LONG}2{LONG}"}),
    ]
    assert [await is_same_call(*pair) for pair in same] == [True] * len(same)
    assert [await is_same_call(*pair) for pair in different] == [False] * len(different)


@pytest.mark.parametrize(
    ("one", "other", "saying", "refused"),
    [
        ("no", "no ", echoing, []),
        (f"{LONG}1{LONG}", f"{LONG}2{LONG}", echoing, []),
        (TOLD.format(1), TOLD.format(2), echoing, []),
        (TOLD.format(1), TOLD.format(2), failing, [(3, 1)]),
        ("no", "never", failing, []),
    ],
    ids=["a space", "the middle", "a text of an error", "arguments in an error", "an error"],
)
async def test_what_is_news(
    one: str, other: str, saying: Callable[[str], Answer], refused: list[tuple[int, int]]
) -> None:
    """All that an answer says is compared, but for the arguments that LangGraph's errors repeat."""
    says = (saying(text.replace("{", "{{").replace("}", "}}")) for text in (one, other))
    tools = [as_tool("search", in_turn(*says))]
    assert await refusals(tools, [[("search", {})]] * 3, RepeatLimit(2)) == refused


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
    """What has one key is one call, or one answer; without one a call is left out."""

    def key(call: Any) -> Any:
        call["args"].pop("offset", None)
        return call["args"].get("path")

    tools = [as_tool("read", echoing("{path} {offset}")), as_tool("wait", echoing("waited"))]
    parts = each("read", path=["a"] * 5, offset=NUMBERS[:5])
    steps = between(parts, ("wait", {}))
    assert await refusals(tools, steps, RepeatLimit(3, key=key)) == [(7, 1), (9, 1)]

    def without_times(call: Any) -> Any:
        return [call["args"], re.sub(r"[\d.]+s", "", call.get("answer", ""))]

    down = [failing(f"down since {number}s") for number in NUMBERS]
    done = [echoing(f"{number} done in 0.1s") for number in NUMBERS]
    for answers, refused in ((TIMES, [(4, 1), (5, 1)]), (down, [(4, 1), (5, 1)]), (done, [])):
        tools, limit = [as_tool("execute", in_turn(*answers))], RepeatLimit(3, key=without_times)
        assert await refusals(tools, [[RUN]] * 5, limit) == refused

    scene = Scene(signals, [["search"]], [RepeatLimit(2, key=lambda call: call["x"], name="mine")])
    with pytest.raises(KeyError) as caught:
        await scene.play()
    assert "'mine'" in str(caught.value.__notes__)
    assert scene.ran == []


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
        scene = await Scene(signals, [*[["search"]] * 4, *numbered_calls, "done"], items).played()
        assert scene.last_text() == "done"


async def test_another_process_goes_on(signals: Signals) -> None:
    """The counts are in the checkpoint: another agent on it resumes with them."""
    saver = InMemorySaver()

    def scene(*script: Any) -> Scene:
        tools: list[Any] = ["search", recording("ask", [], lambda: interrupt("?"))]
        kept: dict[str, Any] = {"tools": tools, "checkpointer": saver}
        return Scene(signals, list(script), [RepeatLimit(2)], **kept)

    await scene(["search"], ["search"], ["ask"]).play()
    # What the user has said is new.
    assert errors(await scene(["search"], ["ask"], "done").resume("x")) == []
    assert errors(await scene(["search"], "done").resume("x")) == [REPEATED]


async def test_a_history_that_is_summarized(signals: Signals) -> None:
    """Where the run's first message is gone, calls since the summary count; no failure forgets."""
    summarizer = ScriptedChatModel(script=["In short."] * 9)
    summaries = SummarizationMiddleware(summarizer, trigger=("messages", 6), keep=("messages", 4))
    script: list[Any] = [["calc"], ["search"], ["search"], RuntimeError("down"), ["search"], "done"]
    scene = Scene(signals, script, [RepeatLimit(2), summaries])
    with pytest.raises(RuntimeError):
        await scene.play()
    await scene.go_on()
    assert len(summarizer.calls) > 0
    assert scene.ran == ["calc", "search", "search"]


@pytest.mark.parametrize("fallback", ["answers", "block", "allow"])
async def test_beside_a_store(fallback: Any, signals: Signals) -> None:
    """What repeats is known without the store, and a blocked call is charged nowhere."""
    store = FickleStore(MemoryStore())
    store.down = fallback != "answers"
    searches = ToolCallLimit("search", quotas=[Quota(9, per="global")])
    options = {"on_store_error": fallback} if store.down else {}
    middleware = quota(signals, searches, RepeatLimit(2), store=store, **options)
    scene = await Scene(signals, [["calc", "search"]] * 3 + ["done"], [middleware]).played()
    assert sorted(scene.ran) == ["calc"] * 2 + ([] if fallback == "block" else ["search"] * 2)
    assert [each.used for each in store.usages()] == ([] if store.down else [2])


@pytest.mark.parametrize(("others", "refused"), [(98, 1), (99, 0)])
async def test_the_newest_calls_are_compared(others: int, refused: int) -> None:
    """They are 100 in a run, without those of tools whose calls are never refused."""
    tools = [as_tool(name, echoing("about {query}")) for name in ("search", "think")]
    searches = [("search", {"query": f"{number}"}) for number in range(others)]
    steps: list[Step] = [[SEARCH], [("search", {"query": "-"})], searches, [SEARCH]]
    assert len(await refusals(tools, steps, RepeatLimit(1))) == refused
    thoughts = [("think", args) for _, args in searches]
    steps[2] = thoughts * 2
    assert len(await refusals(tools, steps, RepeatLimit(1, tools="search"))) == 1


Made = tuple[int, str, str, str]
"""A call that ran: the number of its message, its tool, its query and what it gave."""


class Reference:
    """What a limit admits, by looking back at all that was called and answered in the run."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.log: list[Made] = []

    def step(self, batch: Sequence[tuple[str, str]]) -> list[bool]:
        """Which calls of a message run."""
        runs: list[bool] = []
        admitted: list[tuple[str, str]] = []
        for tool, query in batch:
            fails = self._since(
                {e for e in self.log if e[1] == tool and e[3] == "fails"}, once=True
            )
            made = self._since({e for e in self.log if e[1:3] == (tool, query)})
            own = admitted.count((tool, query))
            runs.append(made + own < self.most and fails < max(2, self.most))
            if runs[-1]:
                admitted.append((tool, query))
        return runs

    def _since(self, those: set[Made], *, once: bool = False) -> int:
        """How many calls there were since the newest one that brought something new."""

        def new(each: Made) -> bool:
            earlier = [one for one in self.log if one[0] < each[0]]
            if each[3] == "fails":
                return not any(one[1] == each[1] and one[3] == "fails" for one in earlier)
            return each[1:] not in [one[1:] for one in earlier]

        newest = max((each[0] for each in self.log if new(each)), default=0)
        came = [each for each in self.log if each in those]
        if once:
            return len({e[0] for e in came if e[0] > newest}) + any(e[0] <= newest for e in came)
        at_newest = [each for each in came if each[0] == newest]
        first = len(at_newest) if any(map(new, at_newest)) else any(e[0] <= newest for e in came)
        return first + sum(each[0] > newest for each in came)


def answering(name: str, answer: Callable[[], str]) -> BaseTool:
    """A tool that takes a query; what it raises as a ToolException is an error message."""

    async def run(query: str) -> str:
        return answer()

    return StructuredTool.from_function(
        coroutine=run, name=name, description=name, handle_tool_error=True
    )


def said(answer: str) -> str:
    if answer == "fails":
        raise ToolException("no")
    return answer


# No agent has a tool that is missing.
names = st.sampled_from(["same", "other", "broken", "missing"])
asked = st.tuples(names, st.sampled_from("ab"))
worlds = st.lists(st.lists(asked, min_size=1, max_size=4), min_size=1, max_size=9)
# Of one message, failures are one: the model has not read the first.
FAILS = [[("broken", each) for each in batch] for batch in ("a", "ba", "b", "a")]


@examples(60)
@given(
    batches=worlds,
    most=st.integers(1, 3),
    answers=st.lists(st.sampled_from(["x", "y", "fails"]), min_size=9, max_size=9),
    same_ids=st.booleans(),
)
@example(batches=FAILS, most=3, answers=["x"] * 9, same_ids=False)
# It is polled, and answers under the same id as before.
@example(batches=[[("other", "a")]] * 5, most=3, answers=["x", "y", "z", *"abcdef"], same_ids=True)
async def test_what_runs_is_what_the_reference_admits(
    batches: list[list[tuple[str, str]]], most: int, answers: list[str], *, same_ids: bool
) -> None:
    """For any batches of calls: some always answer the same, some change, some fail."""
    reference, now, numbers = Reference(most), [0], count()
    expected: list[bool] = []

    def script(_messages: Any) -> Any:
        number = next(numbers)
        if number == len(batches):
            return "done"
        now[0] = number
        gives = {"same": "-", "other": answers[number], "broken": "fails", "missing": "fails"}
        runs = reference.step(batches[number])
        expected.extend(runs)
        for (name, query), run in zip(batches[number], runs, strict=True):
            if run:
                reference.log.append((number + 1, name, query, gives[name]))
        return [
            {"name": name, "args": {"query": query}, "id": f"{0 if same_ids else number}-{index}"}
            for index, (name, query) in enumerate(batches[number])
        ]

    tools = [
        answering("same", lambda: "-"),
        answering("other", lambda: said(answers[now[0]])),
        answering("broken", lambda: said("fails")),
    ]
    scene = Scene(telling(spans="off"), script, [RepeatLimit(most)], tools=tools)

    with captured_decisions() as decisions:
        await scene.play()

    outcomes = [each.outcome for each in decisions if each.call.kind == "tool"]
    assert [each is Outcome.ALLOWED for each in outcomes] == expected
    scene.check_requests()
