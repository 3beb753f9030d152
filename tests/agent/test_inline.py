"""InlineQuotaMiddleware in the situations in which QuotaMiddleware is tested, by the same tests."""

from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest

from langchain_quota import InlineQuotaMiddleware
from tests import stores
from tests.agent import (
    test_quota,
    test_quota_beside,
    test_quota_ends,
    test_quota_finalize,
    test_quota_give_up,
    test_quota_observers,
    test_quota_situations,
    test_quota_telling,
    test_quota_usage,
    test_shared_refunds,
    test_shared_reruns,
    test_shared_threads,
)
from tests.signals import needs_inline

pytestmark = needs_inline

# Whole modules where its own way of writing a step can tell.
MODULES: list[ModuleType] = [
    test_quota_beside,
    test_quota_ends,
    test_quota_finalize,
    test_quota_situations,
    test_quota_usage,
    test_shared_refunds,
    test_shared_reruns,
]
# Of the others, what is not in the plans of `test_inline_properties.py`, where it is compared with
# QuotaMiddleware in all that one can see.
SINGLE_TESTS: dict[ModuleType, list[str]] = {
    test_quota: ["test_limits_that_cannot_stand_together", "test_the_strongest_exit"],
    test_quota_give_up: ["test_a_structured_answer_goes_first"],
    test_quota_observers: ["test_an_async_one_under_invoke", "test_one_that_raises"],
    test_quota_telling: ["test_the_tool_of_the_structured_answer_stays"],
    test_shared_threads: ["test_reset"],
}

NOT_AS_IS = {
    # What an exception takes with it: the model's message, and the charge of its call.
    # A step that runs again calls the model again.
    "test_another_decision_on_resume",
    "test_observers_of_a_cancelled_hook",
    # Other middlewares' after_model hooks come after it, human review among them.
    "test_review_without_running",
    "test_review_edited",
    # They name a node that it does not have, or count nodes.
    "test_judged_twice_over_the_edge_of_a_window",
    # They subclass QuotaMiddleware.
    "test_a_crash_while_the_store_is_down",
}
"""Tests of QuotaMiddleware that say something else of InlineQuotaMiddleware, or nothing."""


def situations(module: ModuleType) -> dict[str, Any]:
    """The tests of a module, under names that say where they are from."""
    _, _, source = module.__name__.rpartition(".test_")
    names = SINGLE_TESTS.get(module) or [
        name for name in vars(module) if name.startswith("test_") and name not in NOT_AS_IS
    ]
    return {f"{name}__{source}": getattr(module, name) for name in names}


for each in (*MODULES, *SINGLE_TESTS):
    # As tests of the package, the modules themselves are collected elsewhere.
    globals().update(situations(each))


@pytest.fixture(autouse=True, scope="module")
def _inline() -> Iterator[None]:
    """What the tests know as QuotaMiddleware is the inline one."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (stores, *MODULES, *SINGLE_TESTS):
            if hasattr(module, "QuotaMiddleware"):
                patch.setattr(module, "QuotaMiddleware", InlineQuotaMiddleware)
        yield
