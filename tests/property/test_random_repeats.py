"""RepeatLimit in random agents: what runs is what its definition admits."""

from collections.abc import Callable, Sequence
from itertools import count
from typing import Any

from hypothesis import example, given
from hypothesis import strategies as st
from langchain_core.tools import BaseTool, StructuredTool, ToolException

from langchain_quota import RepeatLimit
from langchain_quota.core.decision import Outcome
from langchain_quota.testing import captured_decisions
from tests.examples import examples
from tests.scene import Scene
from tests.telemetry import telling

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


def tool(name: str, answer: Callable[[], str]) -> BaseTool:
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
calls = st.tuples(names, st.sampled_from("ab"))
worlds = st.lists(st.lists(calls, min_size=1, max_size=4), min_size=1, max_size=9)
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
        tool("same", lambda: "-"),
        tool("other", lambda: said(answers[now[0]])),
        tool("broken", lambda: said("fails")),
    ]
    scene = Scene(telling(spans="off"), script, [RepeatLimit(most)], tools=tools)

    with captured_decisions() as decisions:
        await scene.play()

    outcomes = [each.outcome for each in decisions if each.call.kind == "tool"]
    assert [each is Outcome.ALLOWED for each in outcomes] == expected
    scene.check_requests()
