"""The longest answer that fits into what is left of budgets."""

from bisect import bisect_right
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from langchain.agents.middleware.types import ModelRequest

from langchain_quota.admission import AcquireResult
from langchain_quota.estimates import max_tokens_setting
from langchain_quota.limits import Limit
from langchain_quota.middleware._calls import Request
from langchain_quota.model_usage import ModelUsage


def capped(
    request: ModelRequest[Any],
    asked: Request,
    result: AcquireResult,
    most: Callable[[Limit, object], int],
    *,
    is_last: bool,
) -> ModelRequest[Any] | None:
    """A request for a shorter answer, which fits; `None` if there is none.

    Args:
        request: The request.
        asked: What it has asked of budgets.
        result: The answer, which refuses it.
        most: Converts a bound of a call to the unit of a limit.
        is_last: Whether it is the last call of its budget: then even a short answer is useful.
    """
    refusing = result.refused[0]
    longest: int | None = None
    for each, rows in asked.asked[0].limits:
        limit: Any = each.limit
        if limit.name not in refusing or not limit.enforce:
            continue
        least = 1 if is_last else limit.cap_answers
        has_bound = least is not None and callable(limit.reserve)
        bound = limit.reserve(request) if has_bound else None
        if not isinstance(bound, ModelUsage):
            return None
        left = min(row.most - result.used[row.counter] for row in rows if row.most is not None)

        def needed(answer: int, limit: Limit = limit, bound: ModelUsage = bound) -> int:
            total = bound.input_tokens + answer
            return most(limit, replace(bound, output_tokens=answer, total_tokens=total))

        # A longer answer needs more, so a binary search finds the longest one.
        fitting = bisect_right(range(bound.output_tokens + 1), left, key=needed) - 1
        if fitting < least:
            return None
        longest = fitting if longest is None else min(longest, fitting)
    if longest is None:
        return None
    settings = request.model_settings
    answers = settings.get("n", getattr(request.model, "n", None)) or 1
    setting = max_tokens_setting(request.model)
    shortened = max(1, longest // answers)
    if shortened <= _thinks(request):
        return None
    return request.override(model_settings={**settings, setting: shortened})


def _thinks(request: ModelRequest[Any]) -> int:
    """The tokens that Anthropic lets a model think: the limit of an answer must be higher."""
    thinking = request.model_settings.get("thinking", getattr(request.model, "thinking", None))
    tokens = thinking.get("budget_tokens") if isinstance(thinking, Mapping) else None
    return tokens if isinstance(tokens, int) else 0
