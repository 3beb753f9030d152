"""What the script's replies mean, and which of them are none of its own."""

from typing import Any

import pytest

from langchain_quota.admission import AcquireRequest, AcquireResult, Compensation
from langchain_quota.errors import QuotaStoreError
from langchain_quota.stores import QuotaUsage
from langchain_quota.stores.redis_script import Names, ScriptCall, done, result, uses
from tests.servers.stores import batch, calls, compensating

ASKED = batch({"a": 1}, {"a": 1}, {"a": 1, "b": 1})
HITS: list[list[Any]] = [[1], [0, b"most", b"user_id", b"50 %25", b"run"], [1, b"trial", b"a"]]


def test_result() -> None:
    """A reply has the counts in the order of the counters, and the refusals by name."""
    expected = AcquireResult(
        {"a": 7, "b": 2**53 - 1},
        ({}, {"most": "user_id", "50 %": "run"}, {"trial": "a"}),
        (True, False, True),
    )
    assert result([b"acquired", 0, 0, [7, 2**53 - 1], HITS], ASKED) == expected
    decoded = [[each if isinstance(each, int) else each.decode() for each in hit] for hit in HITS]
    again = result(["acquired", 1, 1, [7, 2**53 - 1], decoded], ASKED)
    assert (again.stopped, again.replayed) == (True, True)
    assert (again.used, again.refused) == (expected.used, expected.refused)


def test_refusals_of_the_whole() -> None:
    """An attempt that was compensated, and an answer to another batch, are told apart."""
    with pytest.raises(QuotaStoreError, match="compensated before it arrived"):
        result([b"refused"], ASKED)
    for used, hits in (([1], HITS), ([1, 2, 3], HITS), ([1, 2], HITS[:2])):
        with pytest.raises(QuotaStoreError, match="another form"):
            result([b"acquired", 1, 0, used, hits], ASKED)


def test_odd_replies_to_acquire() -> None:
    """What the script cannot have said is a ValueError, which the store turns into its own."""
    used = [1, 2]
    odd: list[Any] = [
        None,
        b"acquired",
        [],
        [[]],
        [1, 2],
        [b"\xff\xfe"],
        [b"acquired"],
        [b"again", b"key"],
        [b"acquainted", 0, 0, used, HITS],
        [b"acquired", 2, 0, used, HITS],
        [b"acquired", None, 0, used, HITS],
        [b"acquired", 0, b"0", used, HITS],
        [b"acquired", 0, 0, used],
        [b"acquired", 0, 0, used, HITS, 0],
        [b"acquired", 0, 0, None, HITS],
        [b"acquired", 0, 0, [1], HITS],
        [b"acquired", 0, 0, [1, 2, 3], HITS],
        [b"acquired", 0, 0, [1, -2], HITS],
        [b"acquired", 0, 0, [1, b"2"], HITS],
        [b"acquired", 0, 0, used, None],
        [b"acquired", 0, 0, used, HITS[:2]],
        [b"acquired", 0, 0, used, [*HITS, [1]]],
        [b"acquired", 0, 0, used, [1, 1, 1]],
        [b"acquired", 0, 0, used, [[], [1], [1]]],
        [b"acquired", 0, 0, used, [[3], [1], [1]]],
        [b"acquired", 0, 0, used, [[0, b"most"], [1], [1]]],
        [b"acquired", 0, 0, used, [[0, b"most", 5], [1], [1]]],
        [b"acquired", 0, 0, used, [[0, b"most", b"\xff"], [1], [1]]],
    ]
    for reply in odd:
        with pytest.raises(ValueError):  # noqa: PT011 - whatever it says
            print(result(reply, ASKED))  # noqa: T201 - shown if it is taken for a result


def test_peek_and_reset() -> None:
    """Four numbers for each key; what is kept there and is no count is told apart."""
    names = ["a", "b", "c"]
    found = {"a": QuotaUsage("a", 5, 9, None, 2)}
    assert uses(names, [5, 9, -1, 2, -1, -1, -1, 0, -2, -1, -1, 0]) == (found, ["c"])
    done([])
    odd: list[Any] = [None, [], [5, 9], [5, 9, -1], [5, 9, b"1", 0] * 3, [5, 9, -1, 0] * 4]
    for reply in odd:
        with pytest.raises(ValueError):  # noqa: PT011 - whatever it says
            uses(names, reply)
    with pytest.raises(ValueError, match="not empty"):
        done([1])


def test_asks_no_more_often_than_there_are_attempts() -> None:
    """Keys that an attempt charged are named once; who asks again and again is no script."""
    request = compensating(*(Compensation(each, attempt_id=each) for each in ("one", "two")))
    call = ScriptCall.acquire(Names("test"), request, 60)
    before = call.arguments()[0]
    assert call.again([b"again", b"x", "y"])
    assert call.again([b"again", b"x"])
    count, *keys, _ = call.arguments()
    assert (count, keys[before:]) == (before + 2, [b"x", b"y"])
    with pytest.raises(ValueError, match="again and again"):
        call.again([b"again", b"z"])
    with pytest.raises(ValueError, match="again and again"):
        ScriptCall.acquire(Names("test"), calls("search", 1), 60).again([b"again", b"z"])


def test_what_is_the_same_is_sent_once() -> None:
    """However many calls there are, each threshold and each key travels once."""

    def sent(request: AcquireRequest) -> tuple[int, int]:
        call = ScriptCall.acquire(Names("test"), request, 60)
        return call.arguments()[0], len(call._values["thresholds"])

    assert sent(calls("search", 1)) == sent(calls("search", 50)) == (3, 1)
