"""The counts in the graph state: merging, reading, charging and taking back."""

from typing import Any

import pytest

from langchain_quota.middleware._tool_counts import ToolCounts
from langchain_quota.state import (
    usage,
)


def acquired_counts() -> ToolCounts:
    """Two calls, one that two middlewares had a store charge, and a refund that waits."""
    return ToolCounts(
        {"search": 2},
        {"search": 2},
        {call_id: {"search": {"Quota": {"tool:search": 1}}} for call_id in ("a", "b")},
        {
            "a": {"Quota": {"user": 1, "all": 1}, "Other": {"user": 1, "tenant": 1}},
            "b": {"Quota": {"user": 1}},
        },
        {"earlier": {"user": 2}},
    )


def test_a_call_that_is_judged_again_is_charged_anew() -> None:
    """Its old charge is forgotten and returned; others keep what is not under the same keys."""
    counts = acquired_counts()
    assert counts.renew("a", "Quota", {"user", "all"}) == {"user": 2, "all": 1}
    assert counts.acquired["a"] == {"Other": {"tenant": 1}}
    assert counts.renew("a", "Quota", {"user", "all"}) == {}
    assert counts.renew("never charged", "Quota", {"user"}) == {}
    assert counts.pending_refunds == {"earlier": {"user": 2}}


@pytest.mark.parametrize("given", [None, 5, {"messages": []}, "thread-1"], ids=repr)
def test_usage_is_read_from_a_state(given: Any) -> None:
    """What a run gives, and what is no state, is a TypeError that says where a state is from."""
    with pytest.raises(TypeError, match=r"agent\.get_state\(config\) gives, not ") as caught:
        usage(given)
    assert str(caught.value).endswith(repr(given))
