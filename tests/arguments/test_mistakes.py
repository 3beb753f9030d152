"""Likely mistakes: each gives one line that says what to write."""

import re
from collections.abc import Callable
from typing import Any

import pytest
from langchain.agents import create_agent
from langchain.agents.middleware import ToolCallLimitMiddleware as LangChainsLimiter
from langchain.messages import HumanMessage

from langchain_quota import (
    ConcurrencyLimit,
    CostLimit,
    GraphQuota,
    MemoryStore,
    ModelCallLimit,
    ModelCallLimitMiddleware,
    Price,
    Quota,
    QuotaMiddleware,
    RepeatLimit,
    TimeLimit,
    TokenLimit,
    ToolCallLimit,
)
from langchain_quota.testing import ScriptedChatModel

SEARCH = ToolCallLimit("search", run_limit=5)
QUOTA = Quota(5, per="user_id")
TOOL = 'write ToolCallLimit("search", run_limit=5)'
MONTHLY = 'write Quota(500, per="user_id", window="month")'
AGENT: Any = QuotaMiddleware([SEARCH])
PRICES = {"another-model": Price(input=1, output=1)}
NO_MIDDLEWARE = "is no middleware: write middleware=[QuotaMiddleware("
QUOTED = ModelCallLimit(run_limit=9)
DROP_IN = ModelCallLimitMiddleware[Any, Any](run_limit=2)
FREE = QuotaMiddleware([CostLimit(run_limit=1)], prices=PRICES)
PRICED = 'give QuotaMiddleware prices= as a function, such as prices=lambda usage: Decimal("0.01")'


def agent(*middleware: Any) -> object:
    model = ScriptedChatModel(script=["done"])
    return create_agent(model, middleware=middleware).invoke({"messages": [HumanMessage("hi")]})


ROWS: list[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any], str]] = [
    (ToolCallLimit, ("search", 5), {}, f"arguments but 3 were given: {TOOL}"),
    (ToolCallLimit, (5,), {}, "not 5: to limit the calls of a run, write run_limit=5"),
    *(
        (ToolCallLimit, (), {name: 5}, f"'{name}' (did you mean {meant}?): {TOOL}")
        for name, meant in {
            "limit": "run_limit",
            "max_calls": "run_limit",
            "tool": "tool_name",
            "exit_behaviour": "exit_behavior",
        }.items()
    ),
    (ModelCallLimit, (5,), {}, "but 2 were given: write ModelCallLimit(run_limit=10)"),
    (ModelCallLimitMiddleware, (5,), {}, "write ModelCallLimitMiddleware(run_limit=10)"),
    (TokenLimit, (), {"max_tokens": 9}, "(did you mean run_limit?): write TokenLimit(run_limit="),
    (CostLimit, (0.5,), {}, 'write CostLimit(run_limit="0.50")'),
    (TimeLimit, (), {"timeout": 9}, '(did you mean run_limit?): write TimeLimit(run_limit="5m")'),
    (RepeatLimit, (), {}, "argument: 'run_limit': write RepeatLimit(3)"),
    (RepeatLimit, (0,), {}, "must be 1 or more, not 0: write 1 to block every repetition"),
    (ConcurrencyLimit, (), {"limit": 2}, "(did you mean max_concurrency?): write Concurrency"),
    (Price, (), {"prompt": 1, "output": 2}, "'prompt' (did you mean input?): write Price(input="),
    (Quota, (), {"timezone": "UTC"}, f"'timezone' (did you mean tz?): {MONTHLY}"),
    (Quota, (5,), {"per": "team", "window": 60}, 'or None, not 60: write "60s"'),
    (Quota, (5,), {"per": "team", "window": "monthly"}, "not 'monthly': write \"month\""),
    (Quota, (5,), {"per": "team", "window": "1 day"}, "not '1 day': write \"day\""),
    (QuotaMiddleware, ([QUOTA],), {}, 'write ToolCallLimit("search", quotas=[Quota(…)])'),
    (QuotaMiddleware, ([LangChainsLimiter(run_limit=1)],), {}, "list it in middleware= of create"),
    (QuotaMiddleware, (SEARCH, SEARCH), {}, f"{TOOL[:6]}QuotaMiddleware([{TOOL[6:]}])"),
    (QuotaMiddleware, ([SEARCH, SEARCH],), {}, "'tool:search': of two numbers for the same calls"),
    (QuotaMiddleware, ([SEARCH],), {"store": MemoryStore}, "the class: write store=MemoryStore()"),
    (QuotaMiddleware, ([SEARCH],), {"on_store_error": "allow"}, "'allow' needs a store: add store"),
    (agent, (GraphQuota([SEARCH]),), {}, "GraphQuota is no middleware: write middleware=[Quota"),
    (agent, (SEARCH,), {}, f"ToolCallLimit {NO_MIDDLEWARE}[ToolCallLimit(…)])]"),
    (agent, (QUOTA,), {}, f"Quota {NO_MIDDLEWARE}[ToolCallLimit(quotas=[Quota(…)])])]"),
    (agent, (FREE,), {}, PRICED),
    (agent, (AGENT, QuotaMiddleware([QUOTED])), {}, "two of the name 'QuotaMiddleware': put their"),
    (agent, (AGENT, AGENT), {}, "two of the name 'QuotaMiddleware': put their limits into one"),
    (agent, (DROP_IN, ModelCallLimitMiddleware(run_limit=9)), {}, "a limit_name= of its own"),
    (AGENT.reset, (), {}, "reset() missing 1 required positional argument: 'agent"),
    (AGENT.agrant, (), {}, "agrant() missing 2 required positional arguments: 'name"),
]


@pytest.mark.parametrize(("call", "args", "options", "said"), ROWS)
def test_a_mistake_says_what_to_write(
    call: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any], said: str
) -> None:
    """The error is one line, with the call or the argument to write instead."""
    errors = (TypeError, ValueError, LookupError, AttributeError)
    with pytest.raises(errors, match=re.escape(said)) as caught:
        call(*args, **options)
    assert "\n" not in str(caught.value)
