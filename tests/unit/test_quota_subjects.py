"""Whose calls a quota counts together: from the runtime to the subject's text."""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import pytest

from langchain_quota.middleware.origin import Origin
from langchain_quota.middleware.subjects import checked_subject, subject_of

WHAT = "quota 'daily' of limit 'tool:email'"
ID = UUID("12345678-1234-5678-1234-567812345678")
CALLER = Origin("boss", None, run_thread_id=7)


@dataclass(frozen=True)
class Runtime:
    context: Any


@dataclass(frozen=True)
class User:
    user_id: Any


def test_all_are_one_subject() -> None:
    """What is global has one subject without a name, whatever the run has."""
    assert subject_of(WHAT, "global", None, Origin()) == ""


def test_a_thread_is_the_runs() -> None:
    """A thread is that of the whole run, also inside another agent's tool; its id is a text."""
    assert subject_of(WHAT, "thread", None, CALLER) == "7"
    assert subject_of(WHAT, "thread", None, Origin(run_thread_id=ID)) == str(ID)


def test_an_agent_is_known_by_its_name() -> None:
    """Agents of one name count together."""
    assert subject_of(WHAT, "agent", None, CALLER) == "boss"


@pytest.mark.parametrize(
    "context",
    [{"user_id": "ann"}, User("ann"), SimpleNamespace(user_id="ann", other=1)],
    ids=["a dict", "a dataclass", "an object"],
)
def test_a_value_of_the_context(context: object) -> None:
    """A name is looked up in the context, whether it is a mapping or has attributes."""
    assert subject_of(WHAT, "user_id", Runtime(context), CALLER) == "ann"


def test_a_mapping_is_read_by_key_only() -> None:
    """The methods of a dict are no values of the context."""
    with pytest.raises(ValueError, match=r"needs 'items' in runtime\.context"):
        subject_of(WHAT, "items", Runtime({"user_id": "ann"}), CALLER)


@pytest.mark.parametrize(
    "runtime",
    [None, Runtime(None), Runtime({}), Runtime({"user_id": None}), Runtime(User(None)), Runtime(5)],
    ids=["no runtime", "no context", "no value", "None", "None as attribute", "a number"],
)
def test_a_context_without_the_value_is_refused(runtime: object) -> None:
    """Nobody is counted as somebody: the error names the quota, the value and what to do."""
    with pytest.raises(
        ValueError, match=r"needs 'user_id' in runtime\.context: .*context="
    ) as caught:
        subject_of(WHAT, "user_id", runtime, CALLER)
    assert WHAT in str(caught.value)


def test_a_run_without_a_thread_is_refused() -> None:
    """A quota per thread needs one, and the error says how to give it."""
    with pytest.raises(ValueError, match=r"this run has none: .*thread_id") as caught:
        subject_of(WHAT, "thread", None, Origin("boss"))
    assert WHAT in str(caught.value)


@pytest.mark.parametrize("name", [None, ""])
def test_an_agent_without_a_name_is_refused(name: str | None) -> None:
    """Unnamed agents are not counted as one."""
    with pytest.raises(ValueError, match=r"create_agent\(name=") as caught:
        subject_of(WHAT, "agent", None, Origin(name, run_thread_id=7))
    assert WHAT in str(caught.value)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("ann", "ann"),
        (" ann ", " ann "),
        (0, "0"),
        (-7, "-7"),
        (10**30, str(10**30)),
        (ID, str(ID)),
    ],
)
def test_the_text_of_a_subject(value: object, text: str) -> None:
    """Strings are kept as they are; numbers and UUIDs, of which equal ones have one text, too."""
    assert checked_subject(WHAT, value) == text
    assert subject_of(WHAT, "user_id", Runtime({"user_id": value}), CALLER) == text


@pytest.mark.parametrize(
    "value", [True, 2.5, b"ann", ["ann"], {"id": 1}, User("ann"), float("nan")], ids=repr
)
def test_a_subject_of_a_wrong_type_is_refused(value: object) -> None:
    """The error names the quota and the type, and not the value, which may be anybody's."""
    with pytest.raises(TypeError, match="a string, a whole number or a UUID") as caught:
        checked_subject(WHAT, value)
    assert WHAT in str(caught.value)
    assert str(caught.value).endswith(f"not {type(value).__name__}")
    with pytest.raises(TypeError) as in_context:
        subject_of(WHAT, "user_id", Runtime({"user_id": value}), CALLER)
    assert str(in_context.value) == str(caught.value)


def test_an_empty_subject_is_refused() -> None:
    """A user without an id is not everybody."""
    with pytest.raises(ValueError, match="must not be empty") as caught:
        checked_subject(WHAT, "")
    assert WHAT in str(caught.value)
