"""What LangChain's limiters promise holds for ours: the same assertions run on both."""

import inspect
import re
import typing
from importlib.metadata import version
from typing import Any

import langchain.agents.middleware.model_call_limit as langchain_model
import langchain.agents.middleware.tool_call_limit as langchain_tool
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from langchain_core.messages import AIMessage, ToolCall, ToolMessage

import langchain_quota
from tests.scene import Form, Scene
from tests.telemetry import Signals

State = dict[str, Any]

# Before 1.3.18, LangChain's "end" does not answer other pending calls.
ANSWERS_PENDING = tuple(map(int, version("langchain").split(".")[:3])) >= (1, 3, 18)
from_1_3_18 = pytest.mark.skipif(
    not ANSWERS_PENDING, reason="LangChain answers what `end` leaves pending since 1.3.18"
)
THEIR_TOOL = langchain_tool.ToolCallLimitMiddleware
THEIR_MODEL = langchain_model.ModelCallLimitMiddleware
OURS: dict[Any, Any] = {
    THEIR_TOOL: langchain_quota.ToolCallLimitMiddleware,
    THEIR_MODEL: langchain_quota.ModelCallLimitMiddleware,
}
counterparts = pytest.mark.parametrize(("theirs", "ours"), OURS.items(), ids=["tool", "model"])

SEARCH_REFUSED = "Tool call limit exceeded. Do not call 'search' again."
ALL_REFUSED = "Tool call limit exceeded. Do not make additional tool calls."


async def hook(limiter: Any, name: str, state: State, form: Form) -> Any:
    if form == "sync":
        return getattr(limiter, name)(state, None)
    return await getattr(limiter, f"a{name}")(state, None)


def asking(*tools: str, prefix: str) -> AIMessage:
    """An AIMessage that calls tools, with ids that follow each other."""
    calls = [ToolCall(name=name, args={}, id=f"{prefix}{n}") for n, name in enumerate(tools)]
    return AIMessage("", tool_calls=calls)


@counterparts
def test_keyword_arguments_and_defaults_are_kept(theirs: Any, ours: Any) -> None:
    """Each argument of LangChain's constructor is one of ours: keyword-only, same default."""
    expected = inspect.signature(theirs.__init__).parameters
    found = inspect.signature(ours.__init__).parameters
    for name, parameter in expected.items():
        assert (found[name].kind, found[name].default) == (parameter.kind, parameter.default)
    added = [found[name] for name in found.keys() - expected.keys()]
    assert all(each.kind is inspect.Parameter.KEYWORD_ONLY for each in added)
    assert all(each.default is not inspect.Parameter.empty for each in added)


@counterparts
def test_limiter_declares_its_state(theirs: Any, ours: Any) -> None:
    """Each `state_schema` is public under LangChain's name, and has its keys, of the same types."""
    assert ours.state_schema is getattr(langchain_quota, theirs.state_schema.__name__)
    expected, found = (typing.get_type_hints(each.state_schema) for each in (theirs, ours))
    assert {key: found[key] for key in expected} == expected


NO_NUMBER = "At least one limit must be specified (thread_limit or run_limit)"


@pytest.mark.parametrize(
    ("theirs", "arguments", "fragment"),
    [
        (THEIR_TOOL, {}, NO_NUMBER),
        (THEIR_TOOL, {"run_limit": 1, "exit_behavior": "stop"}, "Invalid exit_behavior"),
        (THEIR_TOOL, {"thread_limit": 3, "run_limit": 5}, "(5) cannot exceed thread_limit (3)"),
        (THEIR_MODEL, {}, NO_NUMBER),
        (THEIR_MODEL, {"run_limit": 1, "exit_behavior": "continue"}, "Invalid exit_behavior"),
    ],
)
def test_wrong_arguments_are_refused(theirs: Any, arguments: State, fragment: str) -> None:
    """Wrong arguments of a limiter are a ValueError with the known words."""
    for limiter in (theirs, OURS[theirs]):
        with pytest.raises(ValueError, match=re.escape(fragment)):
            limiter(**arguments)


@pytest.mark.parametrize("limiter", [THEIR_MODEL, OURS[THEIR_MODEL]], ids=["langchain", "ours"])
async def test_agent_with_model_limiter(limiter: Any, signals: Signals) -> None:
    """An agent takes either model limiter, and ends with the same words."""
    script = [["search"], "never"]
    scene = await Scene(signals, script, [limiter(run_limit=1)], checkpointer=None).played()
    assert scene.result["messages"][-1].content == "Model call limits exceeded: run limit (1/1)"
    assert set(scene.result) == {"messages"}


tool_names = st.sampled_from(["search", "calc", "write"])
thresholds = st.none() | st.integers(0, 5)
forms = st.sampled_from(["sync", "async"])
steps = st.lists(
    st.tuples(st.booleans(), forms, st.lists(tool_names, max_size=4)), min_size=1, max_size=6
)
"""Whether a new run begins, in which form, and with what batch."""


@st.composite
def tool_limits(draw: st.DrawFn) -> State:
    """Valid arguments of a tool limiter."""
    thread_limit, run_limit = draw(thresholds), draw(thresholds)
    if thread_limit is None and run_limit is None:
        run_limit = draw(st.integers(0, 5))
    if thread_limit is not None and run_limit is not None:
        run_limit, thread_limit = sorted((run_limit, thread_limit))
    return {
        "tool_name": draw(st.none() | tool_names),
        "thread_limit": thread_limit,
        "run_limit": run_limit,
        "exit_behavior": draw(st.sampled_from(["continue", "end", "error"])),
    }


async def checked(limiter: Any, name: str, form: Form, state: State) -> tuple[str, Any]:
    """What a hook does: the update that it returns, or what it raises."""
    try:
        return "returned", await hook(limiter, name, state, form)
    except (
        langchain_tool.ToolCallLimitExceededError,
        langchain_model.ModelCallLimitExceededError,
    ) as error:
        numbers = {name: value for name, value in vars(error).items() if name != "decision"}
        return "raised", (str(error), numbers)


def comparable(update: State | None) -> Any:
    """An update without our own key, and without the words for calls that were only skipped."""
    if update is None:
        return None
    refusals = {SEARCH_REFUSED.replace("search", each) for each in ("search", "calc", "write")}
    refusals.add(ALL_REFUSED)
    return {
        "counts": {key: each for key, each in update.items() if key.endswith("_call_count")},
        "jump_to": update.get("jump_to"),
        "messages": [
            (each.tool_call_id, each.name, each.status, each.content in refusals and each.content)
            if isinstance(each, ToolMessage)
            else (type(each), each.content)
            for each in update.get("messages", [])
        ],
    }


def next_state(state: State, update: State | None) -> State:
    """The state after an update of LangChain's own keys."""
    update = update or {}
    written = {key: each for key, each in update.items() if key.endswith("_call_count")}
    return {**state, **written, "messages": [*state["messages"], *update.get("messages", [])]}


@from_1_3_18
@given(arguments=tool_limits(), batches=steps)
# Both limits are reached at once, and what they admit is the same.
@example(
    arguments={"tool_name": "search", "thread_limit": 2, "run_limit": 2, "exit_behavior": "end"},
    batches=[(True, "async", ["search", "search"]), (False, "async", ["search"])],
)
async def test_tool_limiters_agree(
    arguments: State, batches: list[tuple[bool, Form, list[str]]]
) -> None:
    """Fed with the same calls, both tool limiters count, answer, jump and raise alike."""
    limiters = [THEIR_TOOL(**arguments), OURS[THEIR_TOOL](**arguments)]
    states: list[State] = [{"messages": []}, {"messages": []}]
    for step, (new_run, form, batch) in enumerate(batches):
        outcomes = []
        for index, limiter in enumerate(limiters):
            state = {**states[index]}
            if new_run:
                state.pop("run_tool_call_count", None)
            state["messages"] = [*state["messages"], asking(*batch, prefix=f"step{step}call")]
            kind, result = await checked(limiter, "after_model", form, state)
            returned = kind == "returned"
            states[index] = next_state(state, result if returned else None)
            outcomes.append((kind, comparable(result) if returned else result))
        assert outcomes[0] == outcomes[1]


@given(
    arguments=st.fixed_dictionaries(
        {"thread_limit": thresholds, "run_limit": thresholds},
        optional={"exit_behavior": st.sampled_from(["end", "error"])},
    ).filter(lambda each: each["thread_limit"] is not None or each["run_limit"] is not None),
    calls=st.lists(st.tuples(st.booleans(), forms), max_size=8),
)
# The error of the second call.
@example(
    arguments={"thread_limit": 9, "run_limit": 1, "exit_behavior": "error"},
    calls=[(True, "async"), (False, "async")],
)
async def test_model_limiters_agree(arguments: State, calls: list[tuple[bool, Form]]) -> None:
    """Asked before and told after the same calls, both model limiters answer and count alike."""
    limiters = [THEIR_MODEL(**arguments), OURS[THEIR_MODEL](**arguments)]
    states: list[State] = [{"messages": []}, {"messages": []}]
    for new_run, form in calls:
        outcomes: list[Any] = []
        for index, limiter in enumerate(limiters):
            state = {**states[index]}
            if new_run:
                state.pop("run_model_call_count", None)
            kind, result = await checked(limiter, "before_model", form, state)
            before = kind, comparable(result) if kind == "returned" else result
            after = None
            if before == ("returned", None):
                update = await hook(limiter, "after_model", state, form)
                state = next_state(state, update)
                after = comparable(update)
            states[index] = state
            outcomes.append((before, after))
        assert outcomes[0] == outcomes[1]
