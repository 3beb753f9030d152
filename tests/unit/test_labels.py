"""Label values are bounded, printable and safe to render, whatever they are made from."""

import hashlib
import uuid
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from langchain_quota import Telemetry, hmac_label
from langchain_quota.telemetry.labels import BoundedLabels, described, label, tool_labels
from tests.calls import calls_made

KEY = "0123456789abcdef"
ANY_TEXT = st.text(st.characters(exclude_categories=[]))
"""Text with every code point: control characters and lone surrogates too."""


def sha256(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


@pytest.mark.parametrize("text", ["a", "t" * 64, "two words", 'quo"te\\', "Grüße 你好", "~"])
def test_short_printable_text_is_its_own_label(text: str) -> None:
    """Up to 64 printable characters are kept as they are."""
    assert label(text) == text


def test_values_of_other_types_are_labelled_by_their_text() -> None:
    """Thread ids come as they are: ints and UUIDs read as their text."""
    id_ = uuid.UUID(int=5)
    assert label(17) == "17"
    assert label(id_) == str(id_)


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("t" * 65, "t" * 40),
        ("x" * 10_000, "x" * 40),
        ("two\nlines", "twolines"),
        ("\n" * 50 + "y" * 50, "y" * 40),
        ("\ud800", ""),
        ("a\ud800b", "ab"),
        ("", ""),
        ("\u202eoverride", "override"),
    ],
)
def test_other_text_is_cut_and_hashed(text: str, kept: str) -> None:
    """The first 40 printable characters, `~`, and 12 hex digits of the SHA-256."""
    assert label(text) == f"{kept}~{sha256(text)[:12]}"


@given(text=ANY_TEXT)
def test_every_label_is_safe(text: str) -> None:
    """A label is never empty, printable, encodable, at most 64 characters, and repeatable."""
    found = label(text)
    assert 0 < len(found) <= 64
    assert found.isprintable()
    assert found.encode()
    assert label(text) == found


@given(first=ANY_TEXT, second=ANY_TEXT, padding=st.integers(64, 100))
def test_long_values_stay_distinct(first: str, second: str, padding: int) -> None:
    """Distinct long values have distinct labels, also where their beginnings are equal."""
    one, other = "p" * padding + first, "p" * padding + second
    assert (label(one) == label(other)) == (one == other)


@given(first=ANY_TEXT, second=ANY_TEXT)
def test_unprintable_values_stay_distinct(first: str, second: str) -> None:
    """What cannot be printed still tells values apart."""
    one, other = f"\n{first}", f"\n{second}"
    assert (label(one) == label(other)) == (one == other)


@pytest.mark.parametrize("text", ["x", "\n", "é\u202e", "\ud800"])
@pytest.mark.parametrize(
    "render",
    [label, hmac_label(KEY), lambda text: described(ValueError(text))],
    ids=["label", "hmac_label", "described"],
)
def test_a_megabyte_is_no_more_work_than_a_kilobyte(
    render: Callable[[str], str], text: str
) -> None:
    """However long a value is, only its beginning is looked at character by character."""
    short, long = text * 1_000, text * 1_000_000
    assert calls_made(lambda: render(long)) <= calls_made(lambda: render(short)) < 1_000


def test_the_text_of_an_exception_is_bounded_and_printable() -> None:
    """What an exception says is shown without what moves a terminal's cursor, and not for ever."""
    assert described(ValueError("a\x1b[2J\nb")) == "a[2Jb"
    assert described(ValueError("x" * 10_000)) == "x" * 256


@pytest.mark.parametrize("name", [None, ""])
def test_an_agent_without_a_name_is_unnamed(name: str | None) -> None:
    """No label is empty."""
    assert BoundedLabels(0).label(name) == "unnamed"


def test_an_agents_name_is_bounded() -> None:
    """An agent's name passes the one rule for labels."""
    agents = BoundedLabels(2)
    assert agents.label("boss") == "boss"
    assert agents.label("b" * 100) == label("b" * 100)


def test_hmac_label_is_computable_by_whoever_has_the_key() -> None:
    """Same key, same label; another key or id, another label; the id is not seen in it."""
    hide = hmac_label(KEY)
    found = hide("ada@example.org")
    assert found == hmac_label(KEY.encode())("ada@example.org")
    assert found != hmac_label(KEY + "x")("ada@example.org")
    assert found != hide("bob@example.org")
    assert len(found) == 20
    assert set(found) <= set("0123456789abcdef")


@given(thread_id=st.one_of(ANY_TEXT, st.integers(), st.uuids()))
def test_hmac_label_takes_any_id(thread_id: object) -> None:
    """Ids of any type and text, surrogates too, have a label that needs no cutting."""
    found = hmac_label(KEY)(thread_id)
    assert label(found) == found


def test_hmac_labels_of_one_key_are_equal() -> None:
    """Two Telemetry on one registry may each make theirs; those of two keys conflict."""
    assert hmac_label(KEY) == hmac_label(KEY)
    assert hash(hmac_label(KEY)) == hash(hmac_label(KEY))
    assert hmac_label(KEY) != hmac_label(KEY + "x")


def test_hmac_label_hides_its_key() -> None:
    """The key is not in the text of the object, which error messages show."""
    assert KEY not in repr(hmac_label(KEY))
    assert KEY not in str(hmac_label(KEY))


@pytest.mark.parametrize("key", ["", "k" * 15, b"k" * 15])
def test_a_short_key_is_refused(key: str | bytes) -> None:
    """A key that can be guessed is a ValueError, which does not show it."""
    with pytest.raises(ValueError, match="at least 16 bytes") as caught:
        hmac_label(key)
    assert "kk" not in str(caught.value)


@pytest.mark.parametrize("key", [32, None, ["secret"]])
def test_a_key_of_a_wrong_type_is_refused(key: Any) -> None:
    """What is neither text nor bytes is a TypeError: 32 is not taken for 32 zero bytes."""
    with pytest.raises(TypeError):
        hmac_label(key)


def test_a_key_is_measured_in_bytes() -> None:
    """Eight two-byte characters make a key of 16 bytes."""
    assert hmac_label("ü" * 8)("a")


def test_a_model_call_has_no_tool() -> None:
    """The tool label of a model call says that there is none."""
    assert tool_labels(10).label(None, "boss") == "none"


@pytest.mark.parametrize("name", ["search", "a.b-c_D9", "s" * 64])
def test_usual_tool_names_are_kept(name: str) -> None:
    """Names as providers allow them are labels as they are."""
    assert tool_labels(10).label(name, "boss") == name


@pytest.mark.parametrize("name", ["", "s" * 65, "two words", "a\n", "süß", "\ud800", "a/b"])
def test_unusual_tool_names_are_other(name: str) -> None:
    """A name that no provider allows is the model's invention."""
    assert tool_labels(10).label(name, "boss") == "_other"


def test_invented_names_are_bounded() -> None:
    """Beyond the bound new names are `_other`, and the known ones keep theirs."""
    tools = tool_labels(2)
    found = [tools.label(name, "boss") for name in ("a", "b", "c", "a", "d", "b")]
    assert found == ["a", "b", "_other", "a", "_other", "b"]


def test_the_bound_is_per_agent() -> None:
    """One agent's inventions do not use up another agent's names."""
    tools = tool_labels(1)
    assert tools.label("a", "boss") == "a"
    assert tools.label("b", "clerk") == "b"
    assert tools.label("b", "boss") == "_other"


def test_tools_that_limits_name_keep_their_names() -> None:
    """A limited tool is labelled by its name at any number of names, and uses up none."""
    tools = tool_labels(1)
    tools.keep(("search", "two words"))
    assert tools.label("search", "boss") == "search"
    assert tools.label("two words", "boss") == "two words"
    assert tools.label("a", "boss") == "a"
    assert tools.label("b", "boss") == "_other"
    assert tools.label("search", "boss") == "search"


def test_a_kept_name_is_still_a_safe_label() -> None:
    """A limited tool's name is cut and hashed like any other value."""
    tools = tool_labels(1)
    tools.keep(("s" * 100, "\ud800"))
    assert tools.label("s" * 100, "boss") == label("s" * 100)
    assert tools.label("\ud800", "boss") == label("\ud800")


def test_0_names_of_others() -> None:
    """With a bound of 0 only the tools that limits name are told apart."""
    tools = tool_labels(0)
    tools.keep(("search",))
    assert [tools.label(name, "boss") for name in ("search", "calc")] == ["search", "_other"]


def test_the_bound_holds_under_threads() -> None:
    """Agents in many threads together do not pass the bound."""
    tools = tool_labels(50)
    with ThreadPoolExecutor(8) as pool:
        found = set(pool.map(lambda index: tools.label(f"t{index}", "boss"), range(2000)))
    assert len(found - {"_other"}) == 50


def test_the_key_is_not_shown_in_a_conflict() -> None:
    """The error about two Telemetry with different keys shows neither key."""
    registry = CollectorRegistry()
    Telemetry(registry=registry, thread_label=hmac_label(KEY))
    with pytest.raises(ValueError, match="thread_label") as caught:
        Telemetry(registry=registry, thread_label=hmac_label("f" * 16))
    assert KEY not in str(caught.value)
    assert "f" * 16 not in str(caught.value)


def offer(tools: BoundedLabels, names: Iterable[str]) -> None:
    """An agent shows its tools before its model invents others."""
    for name in names:
        tools.label(name, "boss")


def test_offered_tools_come_before_invented_ones() -> None:
    """The tools that an agent really has are labels, whatever its model invents meanwhile."""
    tools = tool_labels(3)
    offer(tools, ["search", "calc"])
    found = [tools.label(name, "boss") for name in ("made-up", "also-made-up", "calc", "search")]
    assert found == ["made-up", "_other", "calc", "search"]


def test_offered_tools_are_bounded() -> None:
    """Of more tools than the bound the first are labels; what was known before keeps its place."""
    tools = tool_labels(3)
    tools.label("early", "boss")
    for _ in range(2):
        offer(tools, (f"t{index}" for index in range(1000)))
    found = [tools.label(name, "boss") for name in ("early", "t0", "t1", "t2", "t999")]
    assert found == ["early", "t0", "t1", "_other", "_other"]


def test_offered_tools_are_bounded_by_agent() -> None:
    """What one agent has uses up no other agent's names, and is not the other's."""
    tools = tool_labels(1)
    offer(tools, ["search"])
    assert [tools.label(name, "clerk") for name in ("made-up", "search")] == ["made-up", "_other"]


def test_odd_names_that_are_offered_are_left_out() -> None:
    """A name that cannot be a label takes no room, and is still `_other`."""
    tools = tool_labels(1)
    offer(tools, ["", "two words", "s" * 65, "\ud800", "search"])
    found = [tools.label(name, "boss") for name in ("made-up", "two words", "search")]
    assert found == ["_other", "_other", "search"]


def test_offered_tools_that_limits_name_use_up_no_room() -> None:
    """The bound is beside the limited tools, also when an agent is known to have them."""
    tools = tool_labels(1)
    tools.keep(("search",))
    offer(tools, ["search", "calc"])
    found = [tools.label(name, "boss") for name in ("made-up", "calc", "search")]
    assert found == ["_other", "calc", "search"]


def test_nothing_fits_into_no_room() -> None:
    """With a bound of 0 the tools that an agent has are no labels either."""
    tools = tool_labels(0)
    offer(tools, ["search"])
    assert tools.label("search", "boss") == "_other"
