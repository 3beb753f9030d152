"""A random thread in an agent with a QuotaMiddleware, and in a loop with a GraphQuota: the same."""

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
    usage,
)
from langchain_quota.limits import Limit
from langchain_quota.testing import captured_decisions
from tests import drawn
from tests.examples import examples
from tests.loops import looped
from tests.scene import CONFIG, Form, Scene, recording
from tests.telemetry import telling

pytestmark = pytest.mark.filterwarnings("ignore:create_react_agent has been moved")

numbers = st.none() | st.integers(0, 4)
batches = st.lists(st.sampled_from([*drawn.TOOLS, "invented"]), max_size=4)


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
        reserve=None if hold is None else lambda _: hold,
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
    has_store: bool
    abandon: set[int]
    """At which interrupts the next turn begins instead of a resume."""
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
    has_store=st.booleans(),
    abandon=st.sets(st.integers(0, 3), max_size=1),
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
    signals = telling(spans="off")
    ran, queue, errors, asked = list[str](), list[list[str]](), list[str](), count()
    said = answers(plan, queue)
    given: dict[str, Any] = {
        **plan.options,
        "form": plan.form,
        "store": MemoryStore() if plan.has_store else None,
        "ran": ran,
        "tools": [
            recording(name, ran, (lambda: interrupt("Sure?")) if name == "ask" else None)
            for name in drawn.TOOLS
        ],
    }

    def script(_: Any) -> AIMessage:
        return next(said)

    if shape == "agent":
        scene = Scene(signals, script, plan.limits, **given)
    else:
        scene = looped(shape, signals, script, plan.limits, **given)
    with captured_decisions() as decisions:
        for turn in plan.turns:
            queue[:] = turn
            step: Any = {"messages": [("user", "hi")]}
            while step is not None:
                try:
                    waiting = (await scene.invoke(step)).get("__interrupt__")
                except (ToolCallLimitExceededError, ModelCallLimitExceededError) as error:
                    errors.append(str(error))
                    waiting = None
                step = None
                if waiting and next(asked) not in plan.abandon:
                    step = Command(resume={each.id: "yes" for each in waiting})
    scene.check_requests()
    snapshot = scene.agent.get_state(CONFIG)
    return {
        "ran": sorted(ran),
        "errors": errors,
        "requests": [
            ([each.content for each in call.messages], call.tools) for call in scene.model.calls
        ],
        "usage": usage(snapshot),
        "history": [
            (each.type, each.content, getattr(each, "tool_call_id", None))
            for each in snapshot.values["messages"]
        ],
        "decisions": [
            (each.call.kind, each.call.tool, each.call.id, each.outcome, each.limits)
            for each in decisions
        ],
        "metrics": {
            key: value for key, value in drawn.metrics(signals).items() if key[0].endswith("_total")
        },
    }


@examples(60)
@given(plan=plans)
async def test_a_loop_and_an_agent_do_the_same(plan: Plan) -> None:
    """Counts, decisions, signals, requests, what ran and the history are equal in every shape."""
    in_agent = await played(plan, "agent")
    assert await played(plan, "chat model") == in_agent
    assert await played(plan, "call_model") == in_agent
    # What a step that fails has used, and a call that its request refuses, only a node can write.
    if in_agent["errors"] or any(getattr(limit, "reserve", None) for limit in plan.limits):
        return
    assert await played(plan, "react") == in_agent
    # An entrypoint saves no run that the user has left.
    if not plan.abandon:
        assert await played(plan, "functional") == in_agent
