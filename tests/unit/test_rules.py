"""The alert rules, their tests and their runbooks: each alert has all, and nothing is misspelt."""

from copy import deepcopy
from functools import cache
from typing import Any

import yaml
from prometheus_client import CollectorRegistry

from langchain_quota import Call, MemoryStore, Telemetry, ToolCallLimit
from langchain_quota.monitoring import exports
from langchain_quota.telemetry import recorder_of
from tests.judged import Used, judge


@cache
def loaded(text: str) -> Any:
    return yaml.safe_load(text)


def parsed(**options: Any) -> Any:
    [text] = exports.rules(**options).values()
    return deepcopy(loaded(text))


def values() -> dict[str, dict[str, set[str]]]:
    """The values of each label of each series of the code, by their names."""
    registry = CollectorRegistry()
    recorder = recorder_of(Telemetry(registry=registry))
    limit = ToolCallLimit("search", thread_limit=5, run_limit=4)
    for used in range(6):
        call = Call("tool", "search", f"call-{used}", agent="researcher", thread_id="ann")
        decided = judge([limit], {limit.counter: Used(used, 0)}, [call])
        recorder.record(decided.decisions, started=0)
    recorder.record_error("observer", KeyError("x"))
    in_memory = MemoryStore()
    recorder.watch_store(in_memory)
    recorder.observe_store("acquire", "ok", 0.001)
    recorder.record_fallback("researcher", "deny", 1)
    recorder.record_spent("researcher", "ann", [], model="gpt-5", estimated=True)
    found: dict[str, dict[str, set[str]]] = {}
    for family in registry.collect():
        for sample in family.samples:
            labels = found.setdefault(sample.name, {})
            for label, value in sample.labels.items():
                labels.setdefault(label, set()).add(value)
    return found


def example() -> Any:
    [text] = exports.alertmanager().values()
    return yaml.safe_load(text)


def seconds(duration: str) -> int:
    return int(duration[:-1]) * {"s": 1, "m": 60, "h": 3600}[duration[-1]]


def test_the_example_groups_agents() -> None:
    """One message tells of an agent, whatever the number of its limits and threads."""
    [route] = example()["route"]["routes"]
    assert route["group_by"] == ["job", "agent"]


def test_a_refusal_is_notified_within_a_minute() -> None:
    """Half a minute is left for the scrape: the rule is asked often, and has no `for`."""
    [route] = example()["route"]["routes"]
    group = parsed()["groups"][0]
    [rule] = [rule for rule in group["rules"] if rule.get("alert") == "LangChainQuotaLimitBreached"]
    assert "for" not in rule
    assert seconds(group["interval"]) + seconds(route["group_wait"]) <= 30
