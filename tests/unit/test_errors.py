"""The exceptions: whoever catches LangChain's catches ours."""

import copy
import multiprocessing
import pickle
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from datetime import UTC, datetime
from typing import Any

import pytest
from langchain_core.messages import AIMessage
from langgraph.runtime import Runtime

from langchain_quota import (
    Call,
    Decision,
    LimitStatus,
    ModelCallLimitExceededError,
    ModelCallLimitMiddleware,
    Outcome,
    QuotaStatus,
    QuotaStoreError,
    QuotaWarning,
    ToolCallLimitExceededError,
    ToolCallLimitMiddleware,
)
from langchain_quota.errors import UnknownPriceError

QUOTA = QuotaStatus("user_id", "ada", 5, 5, 5, datetime(2026, 1, 2, tzinfo=UTC))
STANDING = LimitStatus(
    limit="search",
    exit_behavior="error",
    thread_before=4,
    thread_used=4,
    thread_limit=None,
    run_before=4,
    run_used=4,
    run_limit=3,
    reason="exhausted",
    scope="user_id",
    quotas=(QUOTA,),
)
DECISION = Decision(
    Call("tool", "search", id="call_1", agent="boss", thread_id=7), Outcome.BLOCKED, (STANDING,)
)


class OwnError(ToolCallLimitExceededError):
    """An application's, with arguments of its own."""

    def __init__(self, tenant: str) -> None:
        super().__init__(4, 4, None, 3, "search", message=f"{tenant} has no search left.")
        self.tenant = tenant


ERRORS = [
    ToolCallLimitExceededError(4, 5, None, 3, "search", message="Used up.", decision=DECISION),
    ToolCallLimitExceededError(4, 5, 4, None),
    ModelCallLimitExceededError(4, 5, 4, 3, message="Used up.", decision=DECISION),
    ModelCallLimitExceededError(4, 5, 4, 3),
    OwnError("acme"),
    QuotaStoreError("no answer within 1.0 s", timed_out=True),
    QuotaWarning("forgetful"),
    UnknownPriceError("mine", "azure"),
]


def pickled(value: Any) -> Any:
    return pickle.loads(pickle.dumps(value))  # noqa: S301 - its own


@pytest.mark.parametrize("copied", [pickled, copy.copy, copy.deepcopy])
@pytest.mark.parametrize("error", ERRORS, ids=lambda each: type(each).__name__)
def test_a_copy_is_the_same(error: Exception, copied: Callable[[Any], Any]) -> None:
    """An exception that is pickled or copied keeps its class, its text and all its attributes."""
    error.add_note("seen in production")
    found = copied(error)
    assert found is not error
    assert (type(found), found.args, str(found)) == (type(error), error.args, str(error))
    assert vars(found) == vars(error)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_any_protocol(protocol: int) -> None:
    """Also by a protocol that is older than the one that Python takes."""
    error = ToolCallLimitExceededError(4, 5, None, 3, "search", decision=DECISION)
    found = pickle.loads(pickle.dumps(error, protocol))  # noqa: S301 - its own
    assert (str(found), vars(found)) == (str(error), vars(error))


def exceed(kind: str) -> None:
    """Have a limit raise."""
    if kind == "tool":
        calls = [{"name": "search", "args": {}, "id": f"call_{each}"} for each in range(2)]
        tools = ToolCallLimitMiddleware(tool_name="search", run_limit=1, exit_behavior="error")
        tools.after_model({"messages": [AIMessage("", tool_calls=calls)]}, Runtime())
    else:
        models = ModelCallLimitMiddleware(run_limit=0, exit_behavior="error")
        models.before_model({"messages": []}, Runtime())


def test_a_limit_raises_in_a_pool_of_processes() -> None:
    """What a worker process raises reaches its caller with its decision; the pool goes on."""
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=spawn) as pool:
        with pytest.raises(ToolCallLimitExceededError) as tool:
            pool.submit(exceed, "tool").result()
        with pytest.raises(ModelCallLimitExceededError) as model:
            pool.submit(exceed, "model").result()
    for caught in (tool, model):
        decision = caught.value.decision
        assert decision is not None
        assert decision.outcome is Outcome.BLOCKED
        [status] = decision.refused_by
        assert (status.scope, status.run_limit) == ("run", caught.value.run_limit)
    assert str(tool.value) == "'search' tool call limit reached: run limit exceeded (2/1 calls)."
    assert str(model.value) == "Model call limits exceeded: run limit (0/0)"
