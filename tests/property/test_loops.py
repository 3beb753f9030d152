"""A random thread in an agent whose limits are inline, and in graphs: the same."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count, cycle
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from langchain_core.messages import AIMessage
from langgraph.types import Command, interrupt

from langchain_quota import (
    MemoryStore,
    ModelCallLimit,
    ModelCallLimitExceededError,
    TokenLimit,
    ToolCallLimit,
    ToolCallLimitExceededError,
)
from langchain_quota.limits import Limit
from langchain_quota.testing import captured_decisions
from tests import drawn
from tests.examples import examples
from tests.loops import SHAPES, looped
from tests.scene import CONFIG, Form, Scene, check_history, recording
from tests.telemetry import needs_inline, telling

pytestmark = [
    pytest.mark.filterwarnings("ignore:create_react_agent has been moved"),
    needs_inline,
]

numbers = st.none() | st.integers(0, 4)
# A node of tools runs its batch again when a tool of it has waited: so that one is alone.
batches = st.lists(st.sampled_from([*drawn.TOOLS, "invented"]), max_size=4).map(
    lambda batch: ["ask"] if "ask" in batch else batch
)


@st.composite
def tool_limits(draw: st.DrawFn) -> Limit:
    run = draw(numbers)
    thread = draw(st.integers(0, 9) if run is None else st.none() | st.integers(run, 9))
    exit_behavior: Any = draw(st.sampled_from(["continue", "continue", "end", "error"]))
    return ToolCallLimit(
        draw(st.sampled_from([None, "search", "calc"])),
        run_limit=run,
        thread_limit=thread,
        exit_behavior=exit_behavior,
        give_up_after=draw(numbers.filter(bool)) if exit_behavior == "continue" else None,
    )


model_limits = st.builds(
    ModelCallLimit,
    run_limit=st.integers(0, 4),
    thread_limit=st.none() | st.integers(4, 9),
    exit_behavior=st.sampled_from(["end", "error", "finalize"]),
)


@st.composite
def budgets(draw: st.DrawFn) -> Limit:
    run, more = draw(st.none() | st.integers(2, 100)), draw(st.integers(2, 100))
    hold = draw(st.none() | st.integers(1, 40))
    exit_behavior: Any = draw(st.sampled_from(["end", "error", "finalize"]))
    return TokenLimit(
        run_limit=run,
        thread_limit=more + (run or 0),
        exit_behavior=exit_behavior,
        keep=draw(st.integers(1, (run or more) - 1)) if exit_behavior == "finalize" else None,
        # A number is held earlier in a graph than in an agent.
        reserve=None if hold is None else lambda request: hold + len(request.tools),
    )


@dataclass(frozen=True)
class Plan:
    """What happens on a thread."""

    limits: list[Limit]
    turns: list[list[list[str]]]
    """A batch for each model call of a turn; an empty one, and the model is done."""
    tokens: list[int]
    """What the model calls use, one after the other, over and over."""
    options: dict[str, bool]
    form: Form


plans = st.builds(
    Plan,
    limits=st.builds(
        lambda tools, model, tokens: [*tools, *model, *tokens],
        st.lists(tool_limits(), min_size=1, max_size=3, unique_by=lambda limit: limit.name),
        st.lists(model_limits, max_size=1),
        st.lists(budgets(), max_size=1),
    ),
    turns=st.lists(st.lists(batches, max_size=4), min_size=1, max_size=3),
    tokens=st.lists(st.integers(1, 60), min_size=1, max_size=4),
    options=st.fixed_dictionaries({"tell_model": st.booleans(), "hide_exhausted": st.booleans()}),
    form=st.sampled_from(["sync", "async"]),
)


def answers(plan: Plan, queue: list[list[str]]) -> Iterator[AIMessage]:
    """What the model answers: the batches of a queue, and that it is done where it is empty."""
    ids = count(1)
    for used in cycle(plan.tokens):
        batch = queue.pop(0) if queue else []
        yield AIMessage(
            "" if batch else "done",
            tool_calls=[{"name": name, "args": {}, "id": f"call_{next(ids)}"} for name in batch],
            usage_metadata={"input_tokens": used, "output_tokens": 0, "total_tokens": used},
        )


async def played(plan: Plan, shape: str) -> dict[str, Any]:
    """All that became of a plan in an agent, or in a loop of a shape."""
    signals, store = telling(spans="off"), MemoryStore()
    ran, queue, last = list[str](), list[list[str]](), list[str]()
    errors: list[str] = []
    said = answers(plan, queue)
    given: dict[str, Any] = {
        **plan.options,
        "form": plan.form,
        "store": store,
        "ran": ran,
        "tools": [
            recording(name, ran, (lambda: interrupt("Sure?")) if name == "ask" else None)
            for name in drawn.TOOLS
        ],
    }

    def script(_: Any) -> AIMessage:
        return next(said)

    if shape == "agent":
        scene = Scene(signals, script, plan.limits, kind="inline", **given)
    else:
        scene = looped(shape, signals, script, plan.limits, **given)
    with captured_decisions() as decisions:
        for turn in plan.turns:
            queue[:] = turn
            step: Any = {"messages": [("user", "hi")]}
            while step is not None:
                try:
                    result = await scene.invoke(step)
                    waiting = result.get("__interrupt__")
                    last += [] if waiting else [result["messages"][-1].text]
                except (ToolCallLimitExceededError, ModelCallLimitExceededError) as error:
                    errors.append(str(error))
                    waiting = None
                step = None
                if waiting:
                    step = Command(resume={each.id: "yes" for each in waiting})
    scene.check_requests()
    if not errors:
        check_history(scene.agent.get_state(CONFIG).values["messages"])
    # A limit that ends the run leaves the calls that it stops out of the history of a graph.
    ends = any(each.exit_behavior != "continue" or each.give_up_after for each in plan.limits)
    return {
        "ran": sorted(ran),
        "errors": errors,
        "last": last,
        "requests": not ends
        and [([each.content for each in call.messages], call.tools) for call in scene.model.calls],
        "counts": sorted(
            (each.key.split(":")[:2], each.used)
            for each in store.usages()
            if each.used and "root_run" not in each.key
        ),
        "decisions": [
            # A graph has no state that counts a thread where no limit does.
            (
                (each.call.kind, each.call.tool, each.call.id, each.outcome),
                [(one.limit, one.count_of("run"), one.scope) for one in each.limits],
            )
            for each in decisions
        ],
        "metrics": {
            key: value for key, value in drawn.metrics(signals).items() if key[0].endswith("_total")
        },
    }


@examples(60)
@given(plan=plans)
async def test_a_graph_and_an_agent_do_the_same(plan: Plan) -> None:
    """Counts, decisions, signals, requests and what ran are equal in every shape."""
    in_agent = await played(plan, "agent")
    for shape in SHAPES:
        in_graph = await played(plan, shape)
        for what, found in in_agent.items():
            assert in_graph[what] == found, (shape, what)
