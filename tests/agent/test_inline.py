"""InlineQuotaMiddleware in the situations in which QuotaMiddleware is tested, by the same tests."""

from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest

from langchain_quota import InlineQuotaMiddleware
from tests.agent import (
    shared,
    test_quota,
    test_quota_beside,
    test_quota_dynamic,
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
    test_quota: [
        "test_a_batch_over_two_limits_is_answered_once",
        "test_a_charge_is_in_the_state_before_the_call",
        "test_limits_that_cannot_stand_together",
        "test_the_drop_ins_state_keys",
        "test_the_strongest_exit",
    ],
    test_quota_dynamic: ["test_one_that_raises", "test_the_state_of_the_moment"],
    test_quota_give_up: ["test_a_structured_answer_goes_first", "test_an_interrupted_run_is_not"],
    test_quota_observers: [
        "test_an_async_one_under_invoke",
        "test_before_an_error",
        "test_before_the_agent_goes_on",
        "test_one_that_raises",
    ],
    test_quota_telling: [
        "test_never_in_the_history",
        "test_no_tool_is_demanded_where_none_may_be_called",
        "test_the_tool_of_the_structured_answer_stays",
        "test_told_and_hidden",
        "test_what_a_stream_shows",
    ],
    test_shared_threads: [
        "test_a_dropped_count_comes_back_as_all_runs_left_it",
        "test_an_agent_inside_a_tool",
        "test_concurrent_runs",
        "test_reset",
        "test_the_state_is_a_mirror",
    ],
}

NOT_AS_IS = {
    # What an exception takes with it: the model's message, and the charge of its call.
    "test_a_turn_after_a_failed_one",
    # A step that runs again calls the model again.
    "test_another_decision_on_resume",
    "test_observers_of_a_cancelled_hook",
    "test_cancelled_while_telling",
    # Other middlewares' after_model hooks come after it, human review among them.
    "test_a_jump_to_the_tools",
    "test_a_jump_to_the_end",
    "test_review_without_running",
    "test_review_edited",
    "test_an_approval_abandoned",
    "test_a_review_before_it",
    "test_an_abandoned_review",
    # They name a node that it does not have, or count nodes.
    "test_a_checkpoint_that_failed",
    "test_judged_twice_over_the_edge_of_a_window",
    "test_a_replay",
    # They subclass QuotaMiddleware.
    "test_hooks_that_crash_again_and_again",
    "test_a_crash_in_the_last_of_the_quota",
    "test_a_refusal_that_crashed",
    "test_a_crash_and_a_new_turn",
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
        for module in (shared, *MODULES, *SINGLE_TESTS):
            if hasattr(module, "QuotaMiddleware"):
                patch.setattr(module, "QuotaMiddleware", InlineQuotaMiddleware)
        yield


def test_what_is_left_out_exists() -> None:
    """Each test that is left out is a test of one of the modules."""
    known = {name for module in MODULES for name in vars(module)}
    assert NOT_AS_IS - known == set()
