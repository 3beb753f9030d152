"""Frozen records that fill their slots directly are what `dataclass` makes."""

import inspect
import pickle
from dataclasses import FrozenInstanceError, dataclass, field, replace

import pytest

from langchain_quota.frozen import quick_init


@quick_init
@dataclass(frozen=True, slots=True)
class Quick:
    name: str
    amount: int = 1
    counts: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Plain:
    name: str
    amount: int = 1
    counts: dict[str, int] = field(default_factory=dict)


def test_arguments_and_defaults() -> None:
    """Arguments go by position and by name; each record gets a default value of its own."""
    first, second = Quick("a"), Quick(amount=2, name="b", counts={"x": 1})
    assert (first.name, first.amount, first.counts) == ("a", 1, {})
    assert (second.name, second.amount, second.counts) == ("b", 2, {"x": 1})
    assert first.counts is not Quick("a").counts
    assert list(inspect.signature(Quick).parameters) == list(inspect.signature(Plain).parameters)
    assert Quick.__init__.__annotations__ == Plain.__init__.__annotations__


@pytest.mark.parametrize("arguments", [(), ("a", 1, {}, "more")])
def test_wrong_arguments(arguments: tuple[object, ...]) -> None:
    """A missing argument is refused, and one too many."""
    with pytest.raises(TypeError, match=r"Quick\.__init__"):
        Quick(*arguments)  # type: ignore[arg-type]


def test_it_stays_frozen() -> None:
    """A record cannot be changed; it is compared, copied and pickled as others are."""
    made = Quick("a", 2)
    with pytest.raises(FrozenInstanceError):
        made.amount = 3  # type: ignore[misc]
    assert replace(made, amount=3) == Quick("a", 3)
    assert pickle.loads(pickle.dumps(made)) == made  # noqa: S301 - our own
    assert repr(made) == "Quick(name='a', amount=2, counts={})"
