"""Repeat limits: their arguments, what counts as the same, and when something is new."""

import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from langchain_core.messages import AIMessage, ToolMessage
from langgraph.checkpoint.serde.jsonplus import JsonPlusSerializer

from langchain_quota import Call, RepeatLimit
from langchain_quota.decision import RUN
from langchain_quota.middleware._history import PendingCalls
from langchain_quota.middleware._repeats import Repeats
from langchain_quota.repeats import (
    MOST_KEPT,
    Made,
    Repeated,
    answer_digest,
    key_digest,
    newest,
    repeated,
    tool_digest,
)
from langchain_quota.resolved import ResolvedLimit, ResolvedLimits


@pytest.mark.parametrize("value", [None, True, 2.5, "3", len])
def test_the_number_is_a_whole_number(value: Any) -> None:
    """Anything else is a TypeError that names the argument and the value."""
    with pytest.raises(TypeError) as caught:
        RepeatLimit(value)
    assert "run_limit must be a whole number" in str(caught.value)
    assert repr(value) in str(caught.value)


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


@pytest.mark.parametrize("options", [{"key": "name"}, {"tools": 5}, {"message": 5}, {"enforce": 1}])
def test_arguments_of_a_wrong_type(options: dict[str, Any]) -> None:
    """They are a TypeError that names the argument and the value."""
    ((argument, value),) = options.items()
    with pytest.raises(TypeError) as caught:
        RepeatLimit(3, **options)
    assert argument in str(caught.value)
    assert repr(value) in str(caught.value)


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


def test_one_argument_of_two_tools() -> None:
    """Calls of two tools are two, whatever their arguments."""
    assert key_of({"a": 1}, "search") != key_of({"a": 1}, "calc")


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


def test_a_key_that_changes_what_it_is_given() -> None:
    """What runs stays as the model has asked for it."""

    def but_the_page(call: Any) -> Any:
        del call["args"]["page"]
        return call["args"]

    args = {"query": "rome", "page": 2}
    key_of(args, limit=RepeatLimit(3, key=but_the_page))
    assert args == {"query": "rome", "page": 2}


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


def test_the_key_is_not_asked_for_other_tools() -> None:
    """A limit of some tools sees what the others do, and its function need not know them."""
    limit = RepeatLimit(3, tools="read", key=lambda call: call["args"]["path"])
    other = key_digest(limit, {"name": "calc", "args": {}, "id": "1"}, matches=False)
    assert other == key_of({}, "calc")


def gist(content: Any, call_id: str = "call_1", *, failed: bool = False) -> str:
    return answer_digest(content, call_id, {}, failed=failed)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("1 failed in 0.12s", "1 failed in 12.34s"),
        ("took 5 ms", "took 17 ms"),
        ("2026-01-02T03:04:05Z ok", "2026-01-02T03:04:59.123+01:00 ok"),
        ("[12:00:01] ok", "[12:00:02,345] ok"),
        ("<Page at 0x7f00aa>", "<Page at 0x7f11bb>"),
        (
            "sent: 0b6a1d6e-6f8e-4b69-9d43-0a5d0d6e3a11",
            "sent: 5d0f5b0a-1c2d-4e3f-8a9b-0c1d2e3f4a5b",
        ),
        ("at 1760000000.25", "at 1760000001.5"),
        ([{"type": "text", "text": "a"}], [{"text": "a", "type": "text"}]),
    ],
    ids=str,
)
def test_answers_that_say_the_same(one: Any, other: Any) -> None:
    """Moments, durations, addresses and UUIDs differ where nothing is new."""
    assert gist(one) == gist(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("45% done", "46% done"),
        ("45 s of 120 s", "50 s of 120 s"),
        ("a", "b"),
        ("created #101", "created #102"),
        ("v1.2.3", "v1.2.4"),
        ("no", "no "),
        ([{"type": "text", "text": "a"}], [{"type": "text", "text": "b"}]),
    ],
    ids=str,
)
def test_answers_that_differ(one: Any, other: Any) -> None:
    """Numbers, small ids and texts are what an answer says."""
    assert gist(one) != gist(other)


def test_an_answer_that_names_its_call() -> None:
    """An answer may: deepagents' does, where it has put a large answer into a file."""
    assert gist("saved as /large/call_1", "call_1") == gist("saved as /large/call_2", "call_2")
    # A short id is not looked for: it is a part of what the answer says.
    assert gist("row 1", "1") != gist("row 2", "2")


def test_errors_that_repeat_the_arguments() -> None:
    """LangGraph's messages do: without them one error is the same for any arguments."""
    text = "Error invoking tool 'write' with kwargs {} with error:\n content: Field required"
    one, other = text.replace("{}", "{'path': 'a'}"), text.replace("{}", "{'path': {'b': 1}}")
    assert gist(one, failed=True) == gist(other, failed=True)
    assert gist(one) != gist(other)


@pytest.mark.parametrize(
    "text", ["with kwargs {" * 3, " with kwargs {} and no more", "} with error:"]
)
def test_errors_that_only_look_like_it(text: str) -> None:
    """They are compared as they are."""
    assert gist(text, failed=True) != gist(f"{text}!", failed=True)


def test_a_long_answer() -> None:
    """Moments in the part that is compared are left out there, too."""
    one, other = "at 12:00:01 ", "at 12:00:02 "
    assert gist(one * 100) == gist(other * 100)
    assert gist(one * 2_000) == gist(other * 2_000) != gist(one * 2_001)


def test_equal_keys_of_different_types() -> None:
    """A mapping may have them if a user's function makes it: it has a key all the same."""
    one, two = key_of({"a": {1: [], "1": {}}}), key_of({"a": {1: [], "1": []}})
    assert one != two


def test_an_error_is_no_answer() -> None:
    """One text as an error and as an answer are two things."""
    assert gist("no", failed=True) != gist("no")


Log = list[tuple[int, str, str, str]]
"""Calls as step, tool, key and what they gave."""


def plain(log: Log) -> Repeated:
    """How often things came, by looking back: the definition, with no state carried along."""
    steps = sorted({each[0] for each in log})

    def thing(each: tuple[int, str, str, str]) -> tuple[str, str]:
        _, tool, key, gave = each
        return (tool if gave.startswith("!") else key, gave)

    def is_new(each: tuple[int, str, str, str]) -> bool:
        before = [one for one in log if one[0] < each[0]]
        if not each[3]:
            return all(one[2] != each[2] for one in before)
        return all(thing(one) != thing(each) for one in before)

    newest = max((each[0] for each in log if is_new(each)), default=-1)
    calls: dict[str, int] = {}
    for key in {each[2] for each in log}:
        at_newest = [each for each in log if each[2] == key and each[0] == newest]
        since = sum(each[2] == key and each[0] > newest for each in log)
        first = min(each[0] for each in log if each[2] == key)
        answers = {each[3] for each in at_newest if is_new(each)}
        start = len(at_newest) - len(answers) + 1 if answers else int(first <= newest)
        calls[key] = start + since
    failures: dict[str, int] = {}
    for tool, gave in {(each[1], each[3]) for each in log if each[3].startswith("!")}:
        came = [
            step for step in steps if any(e[0] == step and e[1::2] == (tool, gave) for e in log)
        ]
        count = int(came[0] <= newest) + sum(step > newest for step in came)
        failures[tool] = max(count, failures.get(tool, 0))
    return Repeated(calls, failures)


one_call = st.tuples(
    st.integers(0, 9),
    st.sampled_from("ST"),
    st.sampled_from("abc"),
    st.sampled_from(["", "+1", "+2", "!1", "!2"]),
).map(lambda each: (each[0], each[1], each[1] + each[2], each[3]))


@given(st.lists(one_call, max_size=25))
def test_counts_equal_those_of_the_definition(log: Log) -> None:
    """Whatever was called and answered, in whatever batches."""
    log = sorted(log, key=lambda each: each[0])
    found = repeated(Made(*each) for each in log)
    assert (dict(found.calls), dict(found.failures)) == plain(log)


def judged(
    limit: RepeatLimit, state: dict[str, Any], message: AIMessage
) -> tuple[Repeats, ResolvedLimits, list[Call]]:
    """What a limit knows of the calls of a message."""
    calls = [Call("tool", each["name"], each["id"]) for each in message.tool_calls]
    pending = PendingCalls(message, tuple(message.tool_calls), structured=False)
    repeats = Repeats((limit,), state, pending, calls, middleware="Quota")
    return repeats, ResolvedLimits([ResolvedLimit.of(limit)]), calls


def many(step: int, count: int) -> AIMessage:
    made = [
        {"name": "search", "args": {"query": f"{step}/{index}"}, "id": f"call_{'x' * 24}_{index}"}
        for index in range(count)
    ]
    return AIMessage("", id=f"m{step}", tool_calls=made)


def test_what_is_remembered_is_bounded() -> None:
    """However many calls a run makes, a limit keeps about 5 kB in the state, digests only."""
    limit = RepeatLimit(3)
    messages: list[Any] = []
    state: dict[str, Any] = {"messages": messages}
    for step in range(12):
        message = many(step, 30)
        messages.append(message)
        repeats, _, calls = judged(limit, state, message)
        state["langchain_quota"] = {"repeats": repeats.noted([True] * len(calls))}
        messages += [
            ToolMessage(each["id"], tool_call_id=each["id"]) for each in message.tool_calls
        ]
    record = state["langchain_quota"]["repeats"]["Quota"]["repeats"]
    assert len(record["made"]) == MOST_KEPT
    assert json.loads(json.dumps(record)) == record
    _, made = JsonPlusSerializer().dumps_typed(record["made"])
    assert len(made) < 5_000
    assert "search" not in str(record)


def test_what_may_never_come_twice_is_remembered() -> None:
    """However many calls of other tools come in between."""
    limit = RepeatLimit(1, tools="send")
    send, other = tool_digest("send"), tool_digest("search", matches=False)
    made = [Made(0, send, "sent", "+"), *(Made(n, other, str(n), "+") for n in range(1, 200))]
    kept = newest(limit, made)
    assert len(kept) == MOST_KEPT
    assert kept == [made[0], *made[-MOST_KEPT + 1 :]]
    assert newest(RepeatLimit(2, tools="send"), made) == made[-MOST_KEPT:]


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
