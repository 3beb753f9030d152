"""What waits in a middleware, and what is decided about it, without an agent."""

import time
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.scenes import UNREACHED
from langchain_quota.core.decide import Verdict
from langchain_quota.core.plans import LimitSet, Place, Places, Rule, demands_of, thread_counter
from langchain_quota.limits.call import Call
from langchain_quota.limits.calls import ToolCallLimit
from langchain_quota.middleware.calls import Step
from langchain_quota.middleware.context import CallContext
from langchain_quota.middleware.resolver import fixed
from langchain_quota.middleware.state import Ledger


def unreached(limits: int) -> list[Rule]:
    """So many limits of a tool, on threads and runs."""
    most: Any = {"thread_limit": UNREACHED, "run_limit": UNREACHED}
    return [fixed(ToolCallLimit("search", name=f"limit-{n}", **most)) for n in range(limits)]


def verdict(rules: Sequence[Rule], thread: str = "thread-1", used: int = 7) -> Verdict:
    """What is decided about a tool call of a thread that has used so much of each limit."""
    call = Call("tool", "search", "call_1", agent="benchmark", thread_id=thread)
    counts = {meter.counter: used for rule in rules for meter in rule.meters}
    verdicts, _ = _step(LimitSet(rules), {}, call, counts).by_state().decide()
    return verdicts[0]


def request() -> Step:
    """A tool call by one limit, whose count a store keeps."""
    limit = ToolCallLimit("search", thread_limit=UNREACHED)
    rule = Rule.of(limit, thread=UNREACHED, run=None)
    places = {thread_counter(limit): Place("search:thread:7")}
    limits = LimitSet([rule.stored(rule.meters, places)])
    return _step(limits, places, Call("tool", "search", "call_1"), {})


def _step(limits: LimitSet, places: Places, call: Call, used: Mapping[str, int]) -> Step:
    calls, plans = [call], [limits.plan_for(call)]
    demands, index_of = demands_of(calls, plans)
    return Step(
        state={},
        runtime=None,
        ledger=Ledger(),
        context=CallContext(),
        task="QuotaMiddleware",
        limits=limits,
        places=places,
        calls=calls,
        plans=plans,
        demands=demands,
        index_of=index_of,
        used={**dict.fromkeys(demands[0].amounts, 0), **used},
        stops=limits.stops,
        started=time.time_ns(),
        original_limits=limits,
    )
