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
    test_quota_shadow,
    test_quota_situations,
    test_quota_telling,
    test_quota_usage,
    test_shared_refunds,
    test_shared_reruns,
    test_shared_threads,
)
from tests.conftest import needs_inline

pytestmark = needs_inline

MODULES: list[ModuleType] = [
    test_quota,
    test_quota_beside,
    test_quota_dynamic,
    test_quota_ends,
    test_quota_finalize,
    test_quota_give_up,
    test_quota_observers,
    test_quota_shadow,
    test_quota_situations,
    test_quota_telling,
    test_quota_usage,
    test_shared_refunds,
    test_shared_reruns,
    test_shared_threads,
]

NOT_AS_IS = {
    # What an exception takes with it: the model's message, and the charge of its call.
    "test_a_stopped_batch_is_charged_to_none",
    "test_a_provider_that_fails_every_turn_is_stopped",
    "test_a_turn_after_a_failed_one",
    "test_after_one_that_raised",
    # A step that runs again calls the model again.
    "test_another_verdict_on_resume",
    "test_a_hook_that_runs_again",
    "test_a_cancelled_run",
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
    "test_supersteps",
    # They subclass QuotaMiddleware.
    "test_a_subclass_with_one_form",
    "test_a_subclass_that_forgets_super",
    "test_hooks_that_crash_again_and_again",
    "test_a_crash_in_the_last_of_the_quota",
    "test_a_refusal_that_crashed",
    "test_a_crash_and_a_new_turn",
    "test_a_crash_while_the_store_is_down",
    # Random ones have a file of their own.
    "test_a_stack_never_runs_more",
    "test_a_stack_agrees_where_no_call_matches_two_limits",
}
"""Tests of QuotaMiddleware that say something else of InlineQuotaMiddleware, or nothing."""


def situations(module: ModuleType) -> dict[str, Any]:
    """The tests of a module, under names that say where they are from."""
    _, _, source = module.__name__.rpartition(".test_")
    return {
        f"{name}__{source}": test
        for name, test in vars(module).items()
        if name.startswith("test_") and name not in NOT_AS_IS and callable(test)
    }


for each in MODULES:
    # As tests of the package, the modules themselves are collected elsewhere.
    globals().update(situations(each))


@pytest.fixture(autouse=True, scope="module")
def _inline() -> Iterator[None]:
    """What the tests know as QuotaMiddleware is the inline one."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (shared, *MODULES):
            if hasattr(module, "QuotaMiddleware"):
                patch.setattr(module, "QuotaMiddleware", InlineQuotaMiddleware)
        yield


def test_what_is_left_out_exists() -> None:
    """Each test that is left out is a test of one of the modules."""
    known = {name for module in MODULES for name in vars(module)}
    assert NOT_AS_IS - known == set()
