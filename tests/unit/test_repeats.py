"""Repeat limits: their arguments, what counts as the same, and when something is new."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from langchain_core.messages import AIMessage

from langchain_quota import Call, RepeatLimit
from langchain_quota.decision import RUN
from langchain_quota.middleware._history import PendingCalls
from langchain_quota.middleware._repeats import Repeats
from langchain_quota.repeats import (
    answer_digest,
    key_digest,
    tool_digest,
)
from langchain_quota.resolved import ResolvedLimit, ResolvedLimits


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"run_limit": 0}, "run_limit must be 1 or more, not 0"),
        ({"run_limit": 101}, "run_limit must be 100 or less, .* not 101"),
        ({"give_up_after": 0}, "give_up_after must be 1 or more, not 0"),
        ({"near": 2.0}, "near must be above 0 and at most 1, not 2.0"),
        ({"exit_behavior": "finalize"}, "Invalid exit_behavior: 'finalize'"),
        ({"exit_behavior": "ask"}, "Invalid exit_behavior: 'ask'. Choose one of continue"),
        ({"tools": "a", "exclude": "b"}, "needs all tools: leave tools out"),
        ({"tools": ""}, "tools must be the name of a tool, not ''"),
        ({"give_up_after": 2, "exit_behavior": "end"}, "needs exit_behavior='continue'"),
        ({"give_up_after": 2, "enforce": False}, "needs exit_behavior='continue'"),
        ({"name": "a\nb"}, "name must have 1 to 64 printable characters"),
    ],
    ids=str,
)
def test_arguments_out_of_bounds(options: dict[str, Any], message: str) -> None:
    """They are a ValueError that names the argument and the value."""
    with pytest.raises(ValueError, match=message):
        RepeatLimit(**{"run_limit": 3, **options})


def key_of(args: dict[str, Any], name: str = "search", limit: RepeatLimit | None = None) -> Any:
    """The digest of a call."""
    call = {"name": name, "args": args, "id": "1"}
    return key_digest(limit or RepeatLimit(3), call, matches=True)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"a": 1, "b": {"c": 2, "d": 3}}, {"b": {"d": 3, "c": 2}, "a": 1}),
        ({"a": 1}, {"a": 1.0}),
        ({"a": [1, 2.0]}, {"a": [1.0, 2]}),
        ({"a": (1, 2)}, {"a": [1, 2]}),
    ],
)
def test_equal_arguments(one: dict[str, Any], other: dict[str, Any]) -> None:
    """The order of keys does not matter, nor how a number is written."""
    assert key_of(one) == key_of(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"a": 1}, {"a": 1.5}),
        ({"a": 1}, {"a": "1"}),
        ({"a": 1}, {"a": True}),
        ({"a": [1, 2]}, {"a": [2, 1]}),
        ({"a": "x = 1"}, {"a": "  x = 1"}),
        ({"a": "Rome"}, {"a": "rome"}),
        ({"a": None}, {}),
    ],
)
def test_different_arguments(one: dict[str, Any], other: dict[str, Any]) -> None:
    """Strings are compared exactly: whitespace and case can matter to a tool."""
    assert key_of(one) != key_of(other)


@pytest.mark.parametrize("args", [{"a": "\ud800"}, {"a": float("nan")}, {"a": 10**400}, {"a": b""}])
def test_any_argument_has_a_key(args: dict[str, Any]) -> None:
    """Whatever a model or a reviewer puts into the arguments, different calls stay different."""
    assert key_of(args) == key_of(dict(args)) != key_of({})


def test_a_key_of_the_users_own() -> None:
    """It replaces tool and arguments."""
    limit = RepeatLimit(3, key=lambda call: call["args"]["path"])
    one = key_of({"path": "a", "offset": 0}, "read", limit)
    assert one == key_of({"path": "a", "offset": 9}, "edit", limit)
    assert one != key_of({"path": "b", "offset": 0}, "read", limit)


def test_a_key_of_none_leaves_a_call_out() -> None:
    """Such a call has no counts, and is nothing new."""
    assert key_of({}, limit=RepeatLimit(3, key=lambda call: None)) is None


def test_a_key_that_is_no_json() -> None:
    """It might not be the same in another process: a TypeError names the limit and the value."""
    limit = RepeatLimit(3, key=lambda call: {1, 2}, name="mine")
    with pytest.raises(TypeError, match=r"key of limit 'mine' must give .* not \{1, 2\}"):
        key_of({}, limit=limit)


def test_a_key_that_raises() -> None:
    """The exception says which limit and which tool it was for."""
    limit = RepeatLimit(3, key=lambda call: call["args"]["path"], name="mine")
    with pytest.raises(KeyError) as caught:
        key_of({}, "search", limit)
    assert caught.value.__notes__ == ["raised by the key of limit 'mine' for tool 'search'"]


def gist(content: Any, call_id: str = "call_1", *, failed: bool = False) -> str:
    return answer_digest(content, call_id, {}, failed=failed)


def test_a_long_answer() -> None:
    """Moments in the part that is compared are left out there, too."""
    one, other = "at 12:00:01 ", "at 12:00:02 "
    assert gist(one * 100) == gist(other * 100)
    assert gist(one * 2_000) == gist(other * 2_000) != gist(one * 2_001)


def judged(
    limit: RepeatLimit, state: dict[str, Any], message: AIMessage
) -> tuple[Repeats, ResolvedLimits, list[Call]]:
    """What a limit knows of the calls of a message."""
    calls = [Call("tool", each["name"], each["id"]) for each in message.tool_calls]
    pending = PendingCalls(message, tuple(message.tool_calls), structured=False)
    repeats = Repeats((limit,), state, pending, calls, middleware="Quota")
    return repeats, ResolvedLimits([ResolvedLimit.of(limit)]), calls


@pytest.mark.parametrize("made_by", [lambda n: n, lambda n: n - 1])
def test_a_message_that_is_judged_again(made_by: Callable[[int], int]) -> None:
    """Its calls count once; those that are answered by then stay counted."""
    limit = RepeatLimit(3)
    message = AIMessage(
        "", id="m", tool_calls=[{"name": "search", "args": {}, "id": str(n)} for n in range(3)]
    )
    state: dict[str, Any] = {"messages": [message]}
    repeats, _, _ = judged(limit, state, message)
    state["langchain_quota"] = {"repeats": repeats.noted([True] * 3)}
    rest = message.model_copy(update={"tool_calls": message.tool_calls[: made_by(3)]})

    again, limits, calls = judged(limit, state, rest)

    again.ask([limits.asked(call) for call in calls])
    assert set(again.used.values()) == {0}
    record = again.noted([True] * len(calls))["Quota"]["repeats"]
    assert sorted(record["waiting"]) == ["0", "1", "2"]
    assert record["step"] == 1


def test_one_call_asks_for_one_count() -> None:
    """Equal calls of a message ask for one count, others for others; what is left out for none."""
    limit = RepeatLimit(3, key=lambda call: call["args"].get("query"))
    made: Sequence[dict[str, Any]] = [{"query": "a"}, {"query": "a"}, {"query": "b"}, {}]
    message = AIMessage(
        "",
        id="m",
        tool_calls=[{"name": "search", "args": args, "id": str(n)} for n, args in enumerate(made)],
    )
    repeats, limits, calls = judged(limit, {"messages": [message]}, message)
    asked = repeats.ask([limits.asked(call) for call in calls])
    counters = [list(each.hits.amounts) for each in asked]
    assert [len(each) for each in counters] == [1, 1, 1, 0]
    assert counters[0] == counters[1] != counters[2]
    assert [len(each.limits) for each in asked] == [1, 1, 1, 0]
    (threshold,) = asked[0].hits.thresholds
    assert (threshold.limit, threshold.scope, threshold.most) == ("repeats", RUN, 3)
    assert tool_digest("search") not in counters[0][0]
