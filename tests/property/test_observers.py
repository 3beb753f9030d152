"""Random agents of `make compare`: whoever watches them sees the same calls.

Each draws its form, limits, observers, shared and missing ids, edits of the state, outages, and
middlewares that jump, retry or drop calls, all together.
"""

import ast
import json
import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from tests.examples import DEPTH
from tests.telemetry import needs_inline
from tools.compare import ROOT, played

pytest.importorskip("genai_prices")
AGENTS = {"quick": 20, "deep": 480, "explore": 2_000}[DEPTH]
FIRST = random.randrange(10**6) if DEPTH == "explore" else 0  # noqa: S311 - no secret
ERRORS = "langchain_quota_errors_total"


def samples(metrics: dict[str, int], name: str) -> Iterator[tuple[dict[str, str], int]]:
    """The labels and values of a metric's series above 0."""
    for series, value in metrics.items():
        start, _, labels = series.partition(" ")
        if start == name and value:
            yield ast.literal_eval(labels), value


def call_of(decision: Any) -> tuple[str, str]:
    """The kind of a decision's call, and its tool."""
    return decision["call"]["kind"], decision["call"]["tool"] or "none"


def check(seen: dict[str, Any]) -> None:
    """Check what was seen of one agent."""
    (decisions,), (metrics,), (receipt,) = seen["decisions"], seen["metrics"], seen["receipt"]
    decided = Counter((*call_of(each), each["outcome"]) for each in decisions)
    counted = Counter[tuple[str, str, str]]()
    for labels, value in samples(metrics, "langchain_quota_calls_total"):
        counted[labels["kind"], labels["tool"], labels["decision"]] += value
    assert counted == decided

    traced = Counter[tuple[str, str, str]]()
    for name, *_, attributes, _ in seen.get("spans", ()):
        outcome = attributes.get("langchain_quota.decision")
        # Two spans decide nothing: of the first check of a call that waits, and of its later start.
        checked_by = attributes.get("langchain_quota.limits")
        is_start = not checked_by and "langchain_quota.limit" in attributes
        if name.startswith("check_quota") and outcome != "waiting" and not is_start:
            tool = attributes.get("gen_ai.tool.name", "none")
            traced[attributes["langchain_quota.kind"], tool, outcome] += 1
    refused = {key: number for key, number in decided.items() if key[2] != "allowed"}
    # Telemetry(spans=) may leave out those of allowed calls, or all.
    assert traced in (decided, refused, {})

    blocked = [each for each in decisions if each["outcome"] == "blocked"]
    billed = Counter[tuple[str, str]]()
    for line in receipt["lines"]:
        tool = "none" if line["kind"] == "model" else line["name"]
        billed[line["kind"], tool] += sum(line["blocked"].values())
    assert +billed == Counter(map(call_of, blocked))

    # Several limits may refuse one call; that a store fails is no limit's doing.
    refusals = [
        (each["call"]["thread_id"], status["limit"])
        for each in blocked
        for status in each["limits"]
        if status["enforced"] and status["reason"] not in {None, "store"}
    ]
    limits, threads = Counter[str](), Counter[tuple[str, str]]()
    for labels, value in samples(metrics, "langchain_quota_limit_decisions_total"):
        limits[labels["limit"]] += value * (labels["decision"] == "blocked")
    assert +limits == Counter(limit for _, limit in refusals)
    for labels, value in samples(metrics, "langchain_quota_thread_blocked_total"):
        threads[labels["thread_id"], labels["limit"]] += value
    # Threads without calls for long are forgotten.
    assert threads <= Counter(refusals)

    # Of the store and the observer that fail on purpose.
    errors = {labels["error_type"] for labels, _ in samples(metrics, ERRORS)}
    assert errors <= {"QuotaStoreError", "RuntimeError"}


@needs_inline
@pytest.mark.hypothesis
@pytest.mark.parametrize("first", range(0, AGENTS, 40))
def test_all_observers_agree(first: int) -> None:
    """Captures, counters, spans, receipts and counts of threads; nothing fails but what must."""
    seeds = range(FIRST + first, FIRST + min(first + 40, AGENTS))
    for seed, line in zip(seeds, played(ROOT / "src", seeds, 1), strict=True):
        try:
            check(json.loads(line))
        except AssertionError as error:
            error.add_note(f"agent {seed}")
            raise
