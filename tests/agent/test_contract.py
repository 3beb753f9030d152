"""What LangChain's limiters promise holds for ours: the same assertions run on both."""

import inspect
import re
import typing
from importlib.metadata import version
from typing import Any

import langchain.agents.middleware.model_call_limit as langchain_model
import langchain.agents.middleware.tool_call_limit as langchain_tool
import pytest
from hypothesis import given
from hypothesis import strategies as st
from langchain.agents import create_agent
from langchain_core.messages import AIMessage, AnyMessage, HumanMessage, ToolCall, ToolMessage
from langchain_core.tools import tool
from langgraph.runtime import Runtime

import langchain_quota
from langchain_quota.testing import ScriptedChatModel
from tests.agent.conftest import Form

State = dict[str, Any]

# Before 1.3.18, LangChain's "end" does not answer other pending calls.
ANSWERS_PENDING = tuple(map(int, version("langchain").split(".")[:3])) >= (1, 3, 18)
from_1_3_18 = pytest.mark.skipif(
    not ANSWERS_PENDING, reason="LangChain answers what `end` leaves pending since 1.3.18"
)
each_tool_limiter = pytest.mark.parametrize(
    "limiter",
    [langchain_tool.ToolCallLimitMiddleware, langchain_quota.ToolCallLimitMiddleware],
    ids=["langchain", "ours"],
)
each_ending_tool_limiter = pytest.mark.parametrize(
    "limiter",
    [
        pytest.param(langchain_tool.ToolCallLimitMiddleware, marks=from_1_3_18),
        langchain_quota.ToolCallLimitMiddleware,
    ],
    ids=["langchain", "ours"],
)
each_model_limiter = pytest.mark.parametrize(
    "limiter",
    [langchain_model.ModelCallLimitMiddleware, langchain_quota.ModelCallLimitMiddleware],
    ids=["langchain", "ours"],
)
each_tool_error = pytest.mark.parametrize(
    "error",
    [langchain_tool.ToolCallLimitExceededError, langchain_quota.ToolCallLimitExceededError],
    ids=["langchain", "ours"],
)
each_model_error = pytest.mark.parametrize(
    "error",
    [langchain_model.ModelCallLimitExceededError, langchain_quota.ModelCallLimitExceededError],
    ids=["langchain", "ours"],
)
counterparts = pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        (langchain_tool.ToolCallLimitMiddleware, langchain_quota.ToolCallLimitMiddleware),
        (langchain_model.ModelCallLimitMiddleware, langchain_quota.ModelCallLimitMiddleware),
    ],
    ids=["tool", "model"],
)

SEARCH_REFUSED = "Tool call limit exceeded. Do not call 'search' again."
ALL_REFUSED = "Tool call limit exceeded. Do not make additional tool calls."


@tool
def search(query: str = "") -> str:
    """Search."""
    return "found"


async def hook(
    limiter: Any, name: str, state: State, runtime: Any = None, form: Form = "async"
) -> Any:
    if form == "sync":
        return getattr(limiter, name)(state, runtime)
    return await getattr(limiter, f"a{name}")(state, runtime)


def asking(*tools: str, prefix: str = "call") -> AIMessage:
    """An AIMessage that calls tools, with ids `call0`, `call1` ..."""
    calls = [
        ToolCall(name=name, args={}, id=f"{prefix}{index}", type="tool_call")
        for index, name in enumerate(tools)
    ]
    return AIMessage("", tool_calls=calls)


def tool_state(*tools: str, thread: State | None = None, run: State | None = None) -> State:
    return {
        "messages": [HumanMessage("hi"), asking(*tools)],
        "thread_tool_call_count": thread or {},
        "run_tool_call_count": run or {},
    }


def counts(update: State) -> tuple[State, State]:
    return update["thread_tool_call_count"], update["run_tool_call_count"]


def answers(update: State) -> list[tuple[str, str | None, str, str]]:
    return [
        (each.tool_call_id, each.name, each.status, str(each.content))
        for each in update.get("messages", [])
        if isinstance(each, ToolMessage)
    ]


# Construction


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


@each_tool_limiter
def test_tool_limiter_attributes(limiter: Any) -> None:
    """A tool limiter shows its arguments, and the defaults, as attributes."""
    given_all = limiter(tool_name="search", thread_limit=5, run_limit=3, exit_behavior="end")
    assert vars_of(given_all, "tool_name", "thread_limit", "run_limit", "exit_behavior") == (
        "search",
        5,
        3,
        "end",
    )
    given_one = limiter(run_limit=3)
    assert vars_of(given_one, "tool_name", "thread_limit", "run_limit", "exit_behavior") == (
        None,
        None,
        3,
        "continue",
    )


@each_model_limiter
def test_model_limiter_attributes(limiter: Any) -> None:
    """A model limiter shows its arguments, and the defaults, as attributes."""
    given_all = limiter(thread_limit=5, run_limit=9, exit_behavior="error")
    assert vars_of(given_all, "thread_limit", "run_limit", "exit_behavior") == (5, 9, "error")
    given_one = limiter(thread_limit=5)
    assert vars_of(given_one, "thread_limit", "run_limit", "exit_behavior") == (5, None, "end")


def vars_of(limiter: Any, *names: str) -> tuple[Any, ...]:
    return tuple(getattr(limiter, name) for name in names)


@each_tool_limiter
def test_tool_limiter_name(limiter: Any) -> None:
    """The name is the class's, with the tool in brackets; a subclass has its own."""
    assert limiter(run_limit=1).name == "ToolCallLimitMiddleware"
    assert limiter(run_limit=1, tool_name="search").name == "ToolCallLimitMiddleware[search]"
    assert type("Mine", (limiter,), {})(run_limit=1, tool_name="search").name == "Mine[search]"


@each_model_limiter
def test_model_limiter_name(limiter: Any) -> None:
    """The name is the class's; a subclass has its own."""
    assert limiter(run_limit=1).name == "ModelCallLimitMiddleware"
    assert type("Mine", (limiter,), {})(run_limit=1).name == "Mine"


@each_tool_limiter
@pytest.mark.parametrize(
    ("arguments", "fragment"),
    [
        ({}, "At least one limit must be specified (thread_limit or run_limit)"),
        ({"tool_name": "search"}, "At least one limit must be specified"),
        ({"run_limit": 1, "exit_behavior": "stop"}, "Invalid exit_behavior"),
        ({"thread_limit": 3, "run_limit": 5}, "run_limit (5) cannot exceed thread_limit (3)"),
    ],
)
def test_tool_limiter_refuses_arguments(limiter: Any, arguments: State, fragment: str) -> None:
    """Wrong arguments of a tool limiter are a ValueError with the known words."""
    with pytest.raises(ValueError, match=re.escape(fragment)):
        limiter(**arguments)


@each_model_limiter
@pytest.mark.parametrize(
    ("arguments", "fragment"),
    [
        ({}, "At least one limit must be specified (thread_limit or run_limit)"),
        ({"run_limit": 1, "exit_behavior": "continue"}, "Invalid exit_behavior"),
    ],
)
def test_model_limiter_refuses_arguments(limiter: Any, arguments: State, fragment: str) -> None:
    """Wrong arguments of a model limiter are a ValueError with the known words."""
    with pytest.raises(ValueError, match=re.escape(fragment)):
        limiter(**arguments)


@each_model_limiter
def test_model_run_limit_may_exceed_thread_limit(limiter: Any) -> None:
    """Only the tool limiter compares its two limits."""
    assert limiter(thread_limit=1, run_limit=2).run_limit == 2


@each_tool_limiter
def test_equal_tool_limits_are_accepted(limiter: Any) -> None:
    """A run may be given the whole limit of the thread."""
    assert limiter(thread_limit=3, run_limit=3).thread_limit == 3


# Public names


@pytest.mark.parametrize(
    "name",
    [
        "ToolCallLimitMiddleware",
        "ToolCallLimitState",
        "ToolCallLimitExceededError",
        "ExitBehavior",
        "ModelCallLimitMiddleware",
        "ModelCallLimitState",
        "ModelCallLimitExceededError",
    ],
)
def test_public_names_are_kept(name: str) -> None:
    """What can be imported from LangChain's two modules can be imported from ours."""
    assert hasattr(langchain_tool, name) or hasattr(langchain_model, name)
    assert name in langchain_quota.__all__


def test_exit_behaviors_are_equal() -> None:
    """`ExitBehavior` names the same three behaviours."""
    ours = typing.get_args(langchain_quota.ExitBehavior)
    assert set(ours) == set(typing.get_args(langchain_tool.ExitBehavior))


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        (langchain_tool.ToolCallLimitState, langchain_quota.ToolCallLimitState),
        (langchain_model.ModelCallLimitState, langchain_quota.ModelCallLimitState),
    ],
    ids=["tool", "model"],
)
def test_state_has_langchains_keys(theirs: Any, ours: Any) -> None:
    """Our state resolves at run time and has LangChain's keys, of the same types."""
    expected, found = typing.get_type_hints(theirs), typing.get_type_hints(ours)
    assert {key: found[key] for key in expected} == expected


@counterparts
def test_limiter_declares_its_state(theirs: Any, ours: Any) -> None:
    """Each limiter's `state_schema` is the state class of its own module, by the same name."""
    assert ours.state_schema.__name__ == theirs.state_schema.__name__
    assert ours.state_schema is getattr(langchain_quota, theirs.state_schema.__name__)


# Hooks


@pytest.mark.parametrize(
    ("kind", "name", "jumps"),
    [
        ("ToolCallLimitMiddleware", "after_model", ["end"]),
        ("ToolCallLimitMiddleware", "aafter_model", ["end"]),
        ("ModelCallLimitMiddleware", "before_model", ["end"]),
        ("ModelCallLimitMiddleware", "abefore_model", ["end"]),
        ("ModelCallLimitMiddleware", "after_model", None),
        ("ModelCallLimitMiddleware", "aafter_model", None),
    ],
)
def test_hooks_have_langchains_signature(kind: str, name: str, jumps: list[str] | None) -> None:
    """A hook takes `state` and `runtime` by these names, and declares the same jumps."""
    theirs: Any = getattr(langchain_tool, kind, None) or getattr(langchain_model, kind)
    for limiter in (theirs, getattr(langchain_quota, kind)):
        method = vars(limiter)[name]
        assert list(inspect.signature(method).parameters)[:3] == ["self", "state", "runtime"]
        assert getattr(method, "__can_jump_to__", None) == jumps
        assert inspect.iscoroutinefunction(method) == name.startswith(("aafter", "abefore"))


@each_tool_limiter
@pytest.mark.parametrize(("tool_name", "key"), [(None, "__all__"), ("search", "search")])
async def test_counts_under_known_keys(limiter: Any, tool_name: str | None, key: str) -> None:
    """A counted call leaves exactly one entry in each count, and no message."""
    update = await hook(
        limiter(tool_name=tool_name, thread_limit=2, run_limit=2),
        "after_model",
        tool_state("search"),
    )
    assert counts(update) == ({key: 1}, {key: 1})
    assert "messages" not in update
    assert "jump_to" not in update


@each_tool_limiter
async def test_state_without_counts(limiter: Any) -> None:
    """Counts that the state does not have yet begin at zero."""
    state = {"messages": [asking("search")]}
    update = await hook(limiter(run_limit=1), "after_model", state)
    assert counts(update) == ({"__all__": 1}, {"__all__": 1})


@each_tool_limiter
async def test_given_state_is_not_changed(limiter: Any) -> None:
    """The hook returns new counts and leaves those of the state as they are."""
    state = tool_state("search", "search", thread={"search": 1}, run={"search": 1})
    await hook(limiter(tool_name="search", run_limit=2), "after_model", state)
    assert counts(state) == ({"search": 1}, {"search": 1})


@each_tool_limiter
async def test_other_counts_are_kept(limiter: Any) -> None:
    """Counts of other tools are carried along unchanged."""
    state = tool_state("search", thread={"calc": 7, "__all__": 9}, run={"calc": 2})
    update = await hook(limiter(tool_name="search", run_limit=2), "after_model", state)
    assert counts(update) == ({"calc": 7, "__all__": 9, "search": 1}, {"calc": 2, "search": 1})


@each_tool_limiter
@pytest.mark.parametrize(
    "messages",
    [
        [],
        [HumanMessage("hi")],
        [asking("calc"), AIMessage("done")],
        [HumanMessage("hi"), asking("calc", "calc")],
    ],
    ids=["empty", "no answer yet", "no calls", "other tools"],
)
async def test_nothing_to_judge(limiter: Any, messages: list[AnyMessage]) -> None:
    """Where no call of the limited tool waits, the hook returns `None`."""
    state = {"messages": messages}
    judged = await hook(limiter(tool_name="search", run_limit=0), "after_model", state)
    assert judged is None


@each_tool_limiter
async def test_no_messages_key(limiter: Any) -> None:
    """A state without messages is nothing to judge."""
    assert await hook(limiter(run_limit=0), "after_model", {}) is None


@each_tool_limiter
async def test_thread_count_leaves_blocked_calls_out(limiter: Any) -> None:
    """Three parallel calls at a run limit of 1 leave a thread count of 1 and a run count of 3."""
    state = tool_state("search", "search", "search")
    update = await hook(limiter(thread_limit=9, run_limit=1), "after_model", state)
    assert counts(update) == ({"__all__": 1}, {"__all__": 3})


@each_tool_limiter
@pytest.mark.parametrize(
    ("tool_name", "text"), [(None, ALL_REFUSED), ("search", SEARCH_REFUSED)], ids=["all", "search"]
)
async def test_continue_answers_blocked_calls(
    limiter: Any, tool_name: str | None, text: str
) -> None:
    """`continue` answers each call over the limit with one error message, and does not jump."""
    state = tool_state("search", "search", "search")
    update = await hook(limiter(tool_name=tool_name, run_limit=1), "after_model", state)
    assert answers(update) == [
        ("call1", "search", "error", text),
        ("call2", "search", "error", text),
    ]
    assert len(update["messages"]) == 2
    assert "jump_to" not in update


@each_tool_limiter
async def test_continue_leaves_other_tools_alone(limiter: Any) -> None:
    """`continue` answers no call of another tool, and charges none."""
    state = tool_state("calc", "search", "calc", "search")
    update = await hook(limiter(tool_name="search", run_limit=1), "after_model", state)
    assert answers(update) == [("call3", "search", "error", SEARCH_REFUSED)]
    assert counts(update) == ({"search": 1}, {"search": 2})


@each_tool_limiter
async def test_end_stops_the_batch(limiter: Any) -> None:
    """`end` jumps, answers the call, tells both exceeded limits, and charges the thread nothing."""
    state = tool_state("search", thread={"search": 2}, run={"search": 2})
    end = limiter(tool_name="search", thread_limit=2, run_limit=2, exit_behavior="end")
    update = await hook(end, "after_model", state)
    assert update["jump_to"] == "end"
    assert answers(update) == [("call0", "search", "error", SEARCH_REFUSED)]
    assert counts(update) == ({"search": 2}, {"search": 3})
    assert isinstance(update["messages"][-1], AIMessage)
    assert update["messages"][-1].content == (
        "'search' tool call limit reached: thread limit exceeded (3/2 calls) "
        "and run limit exceeded (3/2 calls)."
    )


@each_ending_tool_limiter
async def test_end_of_all_tools(limiter: Any) -> None:
    """`end` of a limit on all tools leaves a thread count of 0, and names no tool."""
    state = tool_state("search", "calc")
    update = await hook(limiter(run_limit=1, exit_behavior="end"), "after_model", state)
    assert counts(update) == ({"__all__": 0}, {"__all__": 2})
    assert (
        update["messages"][-1].content == "Tool call limit reached: run limit exceeded (2/1 calls)."
    )


@each_ending_tool_limiter
async def test_end_answers_pending_calls_in_order(limiter: Any) -> None:
    """`end` answers refused calls first and then all others, each in the order of the batch."""
    state = tool_state("calc", "search", "write", "search", "calc")
    end = limiter(tool_name="search", run_limit=1, exit_behavior="end")
    update = await hook(end, "after_model", state)
    assert [(call_id, status) for call_id, _, status, _ in answers(update)] == [
        ("call3", "error"),
        ("call0", "error"),
        ("call1", "error"),
        ("call2", "error"),
        ("call4", "error"),
    ]
    texts = [text for _, _, _, text in answers(update)]
    assert texts[0] == SEARCH_REFUSED
    assert SEARCH_REFUSED not in texts[1:]
    assert counts(update) == ({"search": 0}, {"search": 2})


@each_tool_limiter
async def test_error_raises_hypothetical_counts(limiter: Any) -> None:
    """`error` raises, with the counts as if the refused calls had run."""
    state = tool_state("search", "search", "search", thread={"search": 1}, run={"search": 1})
    error = limiter(tool_name="search", thread_limit=3, run_limit=2, exit_behavior="error")
    with pytest.raises(langchain_tool.ToolCallLimitExceededError) as caught:
        await hook(error, "after_model", state)
    assert numbers(caught.value) == {
        "thread_count": 4,
        "run_count": 4,
        "thread_limit": 3,
        "run_limit": 2,
        "tool_name": "search",
    }
    assert str(caught.value) == (
        "'search' tool call limit reached: thread limit exceeded (4/3 calls) "
        "and run limit exceeded (4/2 calls)."
    )


@each_tool_error
def test_tool_error_is_made_by_keyword(error: Any) -> None:
    """The exception can be made by keyword, without a tool too, and says what was exceeded."""
    made = error(thread_count=1, run_count=2, thread_limit=None, run_limit=1)
    assert made.tool_name is None
    assert str(made) == "Tool call limit reached: run limit exceeded (2/1 calls)."
    named = error(thread_count=3, run_count=2, thread_limit=2, run_limit=None, tool_name="search")
    assert vars_of(named, "thread_count", "run_count", "thread_limit", "run_limit") == (
        3,
        2,
        2,
        None,
    )


@each_model_error
def test_model_error_is_made_by_keyword(error: Any) -> None:
    """The exception can be made by keyword, and says what was exceeded."""
    made = error(thread_count=2, run_count=1, thread_limit=2, run_limit=1)
    assert vars_of(made, "thread_count", "run_count", "thread_limit", "run_limit") == (2, 1, 2, 1)
    assert str(made) == "Model call limits exceeded: thread limit (2/2), run limit (1/1)"


@each_model_limiter
@pytest.mark.parametrize(
    "state",
    [
        {"messages": []},
        {"messages": [], "thread_model_call_count": 1, "run_model_call_count": 0},
        {"messages": [HumanMessage("hi")], "thread_model_call_count": 0},
    ],
)
async def test_model_under_limit(limiter: Any, state: State) -> None:
    """Under the limit `before_model` returns exactly `None`."""
    under = limiter(thread_limit=2, run_limit=1)
    assert await hook(under, "before_model", state, Runtime()) is None
    assert await hook(under, "before_model", state, None) is None


@each_model_limiter
@pytest.mark.parametrize(
    ("thread", "run", "text"),
    [
        (2, 1, "Model call limits exceeded: thread limit (2/2), run limit (1/1)"),
        (2, 0, "Model call limits exceeded: thread limit (2/2)"),
        (1, 1, "Model call limits exceeded: run limit (1/1)"),
        (5, 4, "Model call limits exceeded: thread limit (5/2), run limit (4/1)"),
    ],
)
async def test_model_end(limiter: Any, thread: int, run: int, text: str) -> None:
    """At the limit `end` jumps with one message that names the limits reached, and no more."""
    state = {"messages": [], "thread_model_call_count": thread, "run_model_call_count": run}
    end = limiter(thread_limit=2, run_limit=1)
    update = await hook(end, "before_model", state, Runtime())
    assert update["jump_to"] == "end"
    assert [(each.type, each.content) for each in update["messages"]] == [("ai", text)]


@each_model_limiter
async def test_model_error(limiter: Any) -> None:
    """At the limit `error` raises, with the counts so far."""
    state = {"messages": [], "thread_model_call_count": 2, "run_model_call_count": 1}
    error = limiter(thread_limit=2, run_limit=1, exit_behavior="error")
    with pytest.raises(langchain_model.ModelCallLimitExceededError) as caught:
        await hook(error, "before_model", state, Runtime())
    assert numbers(caught.value) == {
        "thread_count": 2,
        "run_count": 1,
        "thread_limit": 2,
        "run_limit": 1,
    }


@each_model_limiter
@pytest.mark.parametrize(
    ("state", "thread", "run"),
    [
        ({"messages": []}, 1, 1),
        ({"messages": [], "thread_model_call_count": 4, "run_model_call_count": 2}, 5, 3),
    ],
)
async def test_model_counts(limiter: Any, state: State, thread: int, run: int) -> None:
    """`after_model` adds 1 to both counts, and writes nothing else of LangChain's."""
    update = await hook(limiter(run_limit=1), "after_model", state, Runtime())
    assert update["thread_model_call_count"] == thread
    assert update["run_model_call_count"] == run
    assert not {"messages", "jump_to"} & update.keys()


# In an agent


@each_tool_limiter
async def test_agent_with_tool_limiter(limiter: Any) -> None:
    """An agent takes either tool limiter, and its history comes out the same."""
    agent: Any = create_agent(
        ScriptedChatModel(script=[["search", "search"], "done"]),
        [search],
        middleware=[limiter(tool_name="search", run_limit=1)],
    )
    inputs = {"messages": [HumanMessage("hi")]}
    result = await agent.ainvoke(inputs)
    assert sorted(answers(result)) == [
        ("call_1", "search", "success", "found"),
        ("call_2", "search", "error", SEARCH_REFUSED),
    ]
    assert result["messages"][-1].content == "done"


@each_model_limiter
async def test_agent_with_model_limiter(limiter: Any) -> None:
    """An agent takes either model limiter, and ends with the same words."""
    agent: Any = create_agent(
        ScriptedChatModel(script=[["search"], "never"]),
        [search],
        middleware=[limiter(run_limit=1)],
    )
    inputs = {"messages": [HumanMessage("hi")]}
    result = await agent.ainvoke(inputs)
    assert result["messages"][-1].content == "Model call limits exceeded: run limit (1/1)"
    assert set(result) == {"messages"}


@each_tool_limiter
def test_subclass(limiter: Any) -> None:
    """A subclass that overrides the sync hook is honoured by `invoke`."""
    seen = []

    class Billed(limiter):  # type: ignore[misc]  # the base class is a parameter
        def after_model(self, state: Any, runtime: Any) -> Any:
            update = super().after_model(state, runtime)
            seen.append(update and counts(update))
            return update

    agent: Any = create_agent(
        ScriptedChatModel(script=[["search", "search"], "done"]),
        [search],
        middleware=[Billed(run_limit=1)],
    )
    result = agent.invoke({"messages": [HumanMessage("hi")]})
    assert seen == [({"__all__": 1}, {"__all__": 2}), None]
    assert [status for _, _, status, _ in sorted(answers(result))] == ["success", "error"]


# Side by side

tool_names = st.sampled_from(["search", "calc", "write"])
thresholds = st.none() | st.integers(0, 5)
steps = st.lists(
    st.tuples(
        st.booleans(),  # whether a new run begins
        st.sampled_from(["sync", "async"]),
        st.lists(tool_names, max_size=4),
    ),
    min_size=1,
    max_size=6,
)


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


async def judged(limiter: Any, name: str, form: Form, state: State) -> tuple[str, Any]:
    """What a hook does: the update that it returns, or what it raises."""
    try:
        return "returned", await hook(limiter, name, state, form=form)
    except (
        langchain_tool.ToolCallLimitExceededError,
        langchain_model.ModelCallLimitExceededError,
    ) as error:
        return "raised", (str(error), numbers(error))


def numbers(error: Exception) -> dict[str, Any]:
    """What LangChain's exceptions carry."""
    return {name: value for name, value in vars(error).items() if name != "decision"}


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


def next_state(state: State, update: State | None, keys: tuple[str, ...]) -> State:
    """The state after an update of LangChain's own keys."""
    if update is None:
        return state
    written = {key: update[key] for key in keys if key in update}
    return {**state, **written, "messages": [*state["messages"], *update.get("messages", [])]}


@from_1_3_18
@given(arguments=tool_limits(), batches=steps)
async def test_tool_limiters_agree(
    arguments: State, batches: list[tuple[bool, Form, list[str]]]
) -> None:
    """Fed with the same calls, both tool limiters count, answer, jump and raise alike."""
    keys = ("thread_tool_call_count", "run_tool_call_count")
    limiters: list[Any] = [
        langchain_tool.ToolCallLimitMiddleware(**arguments),
        langchain_quota.ToolCallLimitMiddleware(**arguments),
    ]
    states: list[State] = [{"messages": []}, {"messages": []}]
    for step, (new_run, form, batch) in enumerate(batches):
        outcomes = []
        for index, limiter in enumerate(limiters):
            state = {**states[index]}
            if new_run:
                state.pop("run_tool_call_count", None)
            asked = asking(*batch, prefix=f"step{step}call")
            state["messages"] = [*state["messages"], asked]
            kind, result = await judged(limiter, "after_model", form, state)
            returned = kind == "returned"
            states[index] = next_state(state, result if returned else None, keys)
            outcomes.append((kind, comparable(result) if returned else result))
        assert outcomes[0] == outcomes[1]


@given(
    arguments=st.fixed_dictionaries(
        {"thread_limit": thresholds, "run_limit": thresholds},
        optional={"exit_behavior": st.sampled_from(["end", "error"])},
    ).filter(lambda each: each["thread_limit"] is not None or each["run_limit"] is not None),
    calls=st.lists(st.tuples(st.booleans(), st.sampled_from(["sync", "async"])), max_size=8),
)
async def test_model_limiters_agree(arguments: State, calls: list[tuple[bool, Form]]) -> None:
    """Asked before and told after the same calls, both model limiters answer and count alike."""
    keys = ("thread_model_call_count", "run_model_call_count")
    limiters: list[Any] = [
        langchain_model.ModelCallLimitMiddleware(**arguments),
        langchain_quota.ModelCallLimitMiddleware(**arguments),
    ]
    states: list[State] = [{"messages": []}, {"messages": []}]
    for new_run, form in calls:
        outcomes: list[Any] = []
        for index, limiter in enumerate(limiters):
            state = {**states[index]}
            if new_run:
                state.pop("run_model_call_count", None)
            kind, result = await judged(limiter, "before_model", form, state)
            before = kind, comparable(result) if kind == "returned" else result
            after = None
            if before == ("returned", None):
                update = await hook(limiter, "after_model", state, form=form)
                state = next_state(state, update, keys)
                after = {key: update[key] for key in keys}
            states[index] = state
            outcomes.append((before, after))
        assert outcomes[0] == outcomes[1]
