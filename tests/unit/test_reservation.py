"""The one rule by which calls are admitted."""

from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from langchain_quota.reservation import Cap, Grant, Reservation, Slot, admit


def asked(
    slots: list[Slot], *charges: Mapping[int, int], stops: Mapping[str, int] | None = None
) -> Reservation:
    return Reservation("id", "attempt", tuple(slots), charges, stops or {})


def slot(*limits: int, name: str = "limit", enforced: bool = True, key: str | None = None) -> Slot:
    return Slot(key, caps=tuple(Cap(name, limit, enforced=enforced) for limit in limits))


@pytest.mark.parametrize(
    ("used", "admitted"),
    [(0, (True, True, False)), (1, (True, False, False)), (2, (False,) * 3), (9, (False,) * 3)],
)
def test_up_to_the_limit(used: int, admitted: tuple[bool, ...]) -> None:
    """A limit of 2 admits the second call, and not the third, whoever made those before."""
    grant = admit(asked([slot(2)], {0: 1}, {0: 1}, {0: 1}), [used])
    assert grant == Grant((used,), admitted)


def test_refused_call_is_charged_nowhere() -> None:
    """A call that one count refuses leaves the others to the calls after it."""
    reservation = asked([slot(0), slot(1)], {0: 1, 1: 1}, {1: 1})
    grant = admit(reservation, [0, 0])
    assert grant.admitted == (False, True)
    assert grant.charged(reservation) == (0, 1)


def test_dear_call_leaves_room() -> None:
    """A call that does not fit does not keep a cheaper one out."""
    reservation = asked([slot(3)], {0: 2}, {0: 2}, {0: 1})
    grant = admit(reservation, [0])
    assert grant.admitted == (True, False, True)
    assert grant.charged(reservation) == (3,)


def test_smallest_cap_refuses() -> None:
    """Every cap on a count must admit."""
    assert admit(asked([slot(5, 1, 3)], {0: 1}, {0: 1}), [0]).admitted == (True, False)


def test_unenforced_cap() -> None:
    """A cap that is only looked at refuses nothing."""
    reservation = asked([slot(0, enforced=False)], {0: 1})
    assert admit(reservation, [7]).admitted == (True,)
    assert admit(reservation, [7]).charged(reservation) == (1,)


def test_negative_limit() -> None:
    """A negative limit refuses every call."""
    assert admit(asked([slot(-1)], {0: 1}), [0]).admitted == (False,)


def test_call_without_limits() -> None:
    """A call that charges nothing is admitted."""
    assert admit(asked([slot(-1)], {}), [0]).admitted == (True,)


@pytest.mark.parametrize(("after", "stopped"), [(1, True), (2, True), (3, False)])
def test_stops(after: int, stopped: bool) -> None:  # noqa: FBT001 - a parameter
    """Refusals stop a batch from the named number on, and what is stopped charges nothing."""
    reservation = asked([slot(1)], {0: 1}, {0: 1}, {0: 1}, stops={"limit": after})
    grant = admit(reservation, [0])
    assert grant == Grant((0,), (True, False, False), stopped)
    assert grant.charged(reservation) == (0 if stopped else 1,)


def test_refusals_are_counted_by_limit() -> None:
    """A call refused by one limit at two counts is one refusal; another's do not count."""
    slots = [slot(0), slot(0), slot(0, name="other")]
    reservation = asked(slots, {0: 1, 1: 1}, {2: 1}, stops={"limit": 2, "absent": 1})
    assert not admit(reservation, [0, 0, 0]).stopped


def test_shared() -> None:
    """A reservation is shared if a store keeps one of its counts."""
    assert not asked([slot(1)]).shared
    assert asked([slot(1), slot(1, key="k")]).shared


@given(
    limits=st.lists(st.integers(0, 5), min_size=1, max_size=3),
    charges=st.lists(st.dictionaries(st.integers(0, 2), st.integers(1, 3)), max_size=6),
)
def test_never_over_a_limit(limits: list[int], charges: list[dict[int, int]]) -> None:
    """Whatever is asked, no count exceeds its cap, and no refused call would have fitted."""
    slots = [slot(limit) for limit in limits]
    fitting = [{i: n for i, n in charge.items() if i < len(slots)} for charge in charges]
    reservation = asked(slots, *fitting)
    grant = admit(reservation, [0] * len(slots))
    counts = [0] * len(slots)
    for charge, admitted in zip(fitting, grant.admitted, strict=True):
        after = [count + charge.get(index, 0) for index, count in enumerate(counts)]
        fits = all(a <= limits[i] for i, a in enumerate(after) if i in charge)
        assert admitted == fits
        counts = after if admitted else counts
    assert grant.charged(reservation) == tuple(counts)
