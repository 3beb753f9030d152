"""What the script's replies mean, and which of them are none of its own."""

from typing import Any

import pytest

from langchain_quota.admission import Compensation
from langchain_quota.errors import QuotaStoreError
from langchain_quota.stores import QuotaUsage
from langchain_quota.stores.redis_script import Names, ScriptCall, done, result, uses
from tests.servers.stores import batch, calls, compensating

ASKED = batch({"a": 1}, {"a": 1}, {"a": 1, "b": 1})
HITS = b"1,0 most user_id 50%20%25 run,1 trial a"


def test_refusals_of_the_whole() -> None:
    """An attempt that was compensated, and an answer to another batch, are told apart."""
    with pytest.raises(QuotaStoreError, match="compensated before it arrived"):
        result(b"refused", ASKED)
    for used, hits in ((b"1", HITS), (b"1 2 3", HITS), (b"1 2", b"1,1")):
        with pytest.raises(QuotaStoreError, match="another form"):
            result(b"acquired 1 0\n" + used + b"\n" + hits, ASKED)


def test_odd_replies_to_acquire() -> None:
    """What the script cannot have said is a ValueError, which the store turns into its own."""
    odd: list[Any] = [
        None,
        1,
        b"",
        [],
        [b"acquired"],
        [b"again", b"key"],
        b"\xff\xfe",
        b"acquired",
        b"acquainted 0 0\n1 2\n" + HITS,
        b"acquired 2 0\n1 2\n" + HITS,
        b"acquired 0\n1 2\n" + HITS,
        b"acquired 0 0 0\n1 2\n" + HITS,
        b"acquired 0 0\n1 2",
        b"acquired 0 0\n\n" + HITS,
        b"acquired 0 0\n1\n" + HITS,
        b"acquired 0 0\n1 2 3\n" + HITS,
        b"acquired 0 0\n1 -2\n" + HITS,
        b"acquired 0 0\n1 2.5\n" + HITS,
        b"acquired 0 0\n1  2\n" + HITS,
        b"acquired 0 0\n1 2\n",
        b"acquired 0 0\n1 2\n1,1",
        b"acquired 0 0\n1 2\n1,1,1,1",
        b"acquired 0 0\n1 2\n,1,1",
        b"acquired 0 0\n1 2\n3,1,1",
        b"acquired 0 0\n1 2\n0 most,1,1",
        b"acquired 0 0\n1 2\n0 most \xff,1,1",
        b"acquired 0 0\n1 2\n1,1,1\n0",
        b"acquired 0 0\n1 2\n1,1,1\n0 0\n0",
        b"acquired 0 0\n1 2\n1,1,1\n0 0\n0 0\n0 0",
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
    count, *others = call.arguments()
    assert (count, others[before:count]) == (before + 2, [b"x", b"y"])
    with pytest.raises(ValueError, match="again and again"):
        call.again([b"again", b"z"])
    with pytest.raises(ValueError, match="again and again"):
        ScriptCall.acquire(Names("test"), calls("search", 1), 60).again([b"again", b"z"])
