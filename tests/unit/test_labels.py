"""Label values are bounded, printable and safe to render, whatever they are made from."""

from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from langchain_quota import Telemetry, hmac_label
from langchain_quota.telemetry.labels import BoundedLabels, label, tool_labels

KEY = "0123456789abcdef"


def test_an_agents_name_is_bounded() -> None:
    """An agent's name passes the one rule for labels."""
    agents = BoundedLabels(2)
    assert agents.label("boss") == "boss"
    assert agents.label("b" * 100) == label("b" * 100)


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


@pytest.mark.parametrize("name", ["", "s" * 65, "two words", "a\n", "süß", "\ud800", "a/b"])
def test_unusual_tool_names_are_other(name: str) -> None:
    """A name that no provider allows is the model's invention."""
    assert tool_labels(10).label(name, "boss") == "_other"


def test_the_key_is_not_shown_in_a_conflict() -> None:
    """The error about two Telemetry with different keys shows neither key."""
    registry = CollectorRegistry()
    Telemetry(registry=registry, thread_label=hmac_label(KEY))
    with pytest.raises(ValueError, match="thread_label") as caught:
        Telemetry(registry=registry, thread_label=hmac_label("f" * 16))
    assert KEY not in str(caught.value)
    assert "f" * 16 not in str(caught.value)
