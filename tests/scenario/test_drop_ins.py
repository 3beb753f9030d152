"""The drop-ins: what LangChain's limiters promise holds for ours, and what ours make visible."""

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
from opentelemetry.trace import StatusCode

import langchain_quota
from tests.scene import Form, Scene, tool_limiter
from tests.telemetry import Signals, attributes

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
THEIR_ERRORS = (
    langchain_tool.ToolCallLimitExceededError,
    langchain_model.ModelCallLimitExceededError,
)
counterparts = pytest.mark.parametrize(("theirs", "ours"), OURS.items(), ids=["tool", "model"])


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
    """Each `state_schema` has LangChain's name, and its keys, of the same types."""
    assert ours.state_schema.__name__ == theirs.state_schema.__name__
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
Steps = list[tuple[bool, Form, list[str]]]
steps = st.lists(
    st.tuples(st.booleans(), forms, st.lists(tool_names, max_size=4)), min_size=1, max_size=8
)
"""Whether a new run begins, in which form, and with what batch."""
model_limits = st.fixed_dictionaries(
    {"thread_limit": thresholds, "run_limit": thresholds},
    optional={"exit_behavior": st.sampled_from(["end", "error"])},
).filter(lambda each: each["thread_limit"] is not None or each["run_limit"] is not None)


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


async def checked(limiter: Any, name: str, form: Form, state: State) -> tuple[Any, State]:
    """What a hook does, the update that it returns or what it raises; and the state after it."""
    try:
        if form == "sync":
            returned = getattr(limiter, name)(state, None)
        else:
            returned = await getattr(limiter, f"a{name}")(state, None)
    except THEIR_ERRORS as error:
        ours = ("decision", "messages", "usage")
        numbers = {name: value for name, value in vars(error).items() if name not in ours}
        return (str(error), numbers), state
    update = returned or {}
    counts = {key: each for key, each in update.items() if key.endswith("_call_count")}
    messages = update.get("messages", [])
    told = [
        (each.tool_call_id, each.name, each.status, each.content)
        if isinstance(each, ToolMessage)
        else (type(each), each.content)
        for each in messages
    ]
    after = {**state, **counts, "messages": [*state["messages"], *messages]}
    return (returned is not None, counts, update.get("jump_to"), told), after


async def agree(theirs: Any, arguments: State, steps: Steps) -> None:
    """Assert that both limiters do the same at each step: the model's is asked and told."""
    limiters = theirs(**arguments), OURS[theirs](**arguments)
    states: list[State] = [{"messages": []}, {"messages": []}]
    for number, (new_run, form, batch) in enumerate(steps):
        outcomes: list[Any] = [[], []]
        calls = [ToolCall(name=name, args={}, id=f"{number}.{n}") for n, name in enumerate(batch)]
        for state, limiter, outcome in zip(states, limiters, outcomes, strict=True):
            if new_run:
                state.pop("run_tool_call_count", None)
                state.pop("run_model_call_count", None)
            if theirs is THEIR_TOOL:
                state["messages"] = [*state["messages"], AIMessage("", tool_calls=calls)]
            for hook in (
                ("before_model", "after_model") if theirs is THEIR_MODEL else ("after_model",)
            ):
                said, after = await checked(limiter, hook, form, state)
                outcome.append(said)
                state.update(after)
                if said[0]:
                    break
        assert outcomes[0] == outcomes[1]


@from_1_3_18
@given(arguments=tool_limits(), steps=steps)
# Both limits are the same, and reached at once, beside a call of another tool.
@example(
    arguments={"tool_name": "search", "thread_limit": 2, "run_limit": 2, "exit_behavior": "end"},
    steps=[(True, "async", ["search", "search"]), (False, "async", ["search", "calc"])],
)
async def test_tool_limiters_agree(arguments: State, steps: Steps) -> None:
    """Fed with the same calls, both tool limiters count, answer, jump and raise alike."""
    await agree(THEIR_TOOL, arguments, steps)


@given(arguments=model_limits, steps=steps)
# The error of the second call.
@example(
    arguments={"thread_limit": 9, "run_limit": 1, "exit_behavior": "error"},
    steps=[(True, "async", []), (False, "async", [])],
)
async def test_model_limiters_agree(arguments: State, steps: Steps) -> None:
    """Asked before and told after the same calls, both model limiters answer and count alike."""
    await agree(THEIR_MODEL, arguments, steps)


async def test_on_pending_raise(signals: Signals) -> None:
    """`on_pending="raise"` refuses to end a run with calls of other tools pending."""
    limiter = tool_limiter(signals, "search", run_limit=0, exit_behavior="end", on_pending="raise")
    scene = Scene(signals, [["search", "calc"]], [limiter])
    with pytest.raises(NotImplementedError, match="calc"):
        await scene.play()
    assert scene.state().get("thread_tool_call_count", {}).get("search", 0) == 0
    assert (scene.calls("blocked", "search"), scene.calls("skipped", "calc")) == (1, 1)
    spans = [(attributes(each)["decision"], each.status.status_code) for each in signals.spans()]
    assert dict(spans) == {"blocked": StatusCode.ERROR, "skipped": StatusCode.UNSET}
    assert len(spans) == 2
