"""Mistakes of the first hour that no agent is needed for, and the sentence each leads to."""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from langchain_quota import (
    CostLimit,
    MemoryStore,
    ModelCallLimit,
    Quota,
    QuotaMiddleware,
    RedisStore,
    TokenLimit,
    ToolCallLimit,
    with_limits,
)
from langchain_quota.cli import main
from tests.troubleshooting import begins, messages, raised

SEARCH = ToolCallLimit("search", run_limit=9)


@dataclass
class Bench:
    """What a mistake is made with."""

    capsys: pytest.CaptureFixture[str]
    monkeypatch: pytest.MonkeyPatch
    path: Path

    def command(self, *arguments: str) -> str:
        """The last line that the command writes, which says why it did nothing."""
        try:
            code: Any = main(arguments)
        except SystemExit as ended:
            code = ended.code
        assert code == 2
        return self.capsys.readouterr().err.splitlines()[-1]


Mistake = Callable[[Bench], str]
MISTAKES: dict[str, Mistake] = {}
"""What a user sees of each mistake, by how the page says that it begins."""


def sees(message: str) -> Callable[[Mistake], Mistake]:
    def register(mistake: Mistake) -> Mistake:
        MISTAKES[message] = mistake
        return mistake

    return register


def refused(error: type[Exception], make: Callable[[], Any]) -> Mistake:
    return lambda _: raised(error, make)


def of_sub_agents(*, middleware: Any = (), subagents: Any = ()) -> None:
    """Takes what `create_deep_agent` takes."""


# What the type checker would refuse is made all the same.
tool_limit: Any = ToolCallLimit
cost_limit: Any = CostLimit
quotas: Any = QuotaMiddleware
quota: Any = Quota

MISTAKES |= {
    "At least one limit must be specified: thread_limit, run_limit, quotas or at_once": refused(
        ValueError, lambda: ToolCallLimit("search")
    ),
    "run_limit must be 0 or more, not …": refused(
        ValueError, lambda: ToolCallLimit("search", run_limit=-1)
    ),
    "thread_limit must be a whole number or None, not …": refused(
        TypeError, lambda: tool_limit("search", thread_limit="3")
    ),
    "run_limit (…) cannot exceed thread_limit (…)": refused(
        ValueError, lambda: ToolCallLimit("search", run_limit=5, thread_limit=3)
    ),
    "Invalid exit_behavior: …. Choose one of …": refused(
        ValueError, lambda: tool_limit("search", run_limit=1, exit_behavior="finalize")
    ),
    "ToolCallLimit takes numbers by name: …": refused(TypeError, lambda: tool_limit("search", 3)),
    "tool_name must be a string, several strings or None, not …": refused(
        TypeError, lambda: tool_limit(main, run_limit=3)
    ),
    "limits must be a sequence of limits, such as [ToolCallLimit(…)], not …": refused(
        TypeError, lambda: quotas(SEARCH)
    ),
    "limits must be ToolCallLimit, ModelCallLimit, TokenLimit, CostLimit or "
    "RepeatLimit, not …": refused(TypeError, lambda: quotas([Quota(3)])),
    "run_limit must not be a float, which holds … only nearly: write it as a string, …": refused(
        TypeError, lambda: cost_limit(run_limit=0.1)
    ),
    "run_limit must have at most six decimal places, not …": refused(
        ValueError, lambda: CostLimit(run_limit="0.0000001")
    ),
    "keep=… must be at least reserve=…": refused(
        ValueError,
        lambda: TokenLimit(run_limit=9, exit_behavior="finalize", keep=2, reserve=3),
    ),
    "charge_all_models=True needs a budget to charge: …": refused(
        ValueError, lambda: QuotaMiddleware([SEARCH], charge_all_models=True)
    ),
    "exit_behavior='ask' cannot be used with reserve=…": refused(
        ValueError, lambda: TokenLimit(run_limit=9, exit_behavior="ask", reserve=2)
    ),
    "grant=… needs exit_behavior='ask'": refused(
        ValueError, lambda: ToolCallLimit("search", run_limit=9, grant=5)
    ),
    "exit_behavior='finalize' needs keep: …": refused(
        ValueError, lambda: CostLimit(run_limit=1, exit_behavior="finalize")
    ),
    "QuotaMiddleware takes the limits in one list": refused(
        TypeError, lambda: quotas(SEARCH, ModelCallLimit(run_limit=9))
    ),
    "QuotaMiddleware.__init__() got an unexpected keyword argument": refused(
        TypeError, lambda: quotas(run_limit=3)
    ),
    "… limits are named …": refused(
        ValueError, lambda: quotas([SEARCH, ToolCallLimit("search", thread_limit=9)])
    ),
    "limit … can never be reached": refused(
        ValueError, lambda: quotas([SEARCH, ToolCallLimit("search", run_limit=10, name="late")])
    ),
    "limit … has quotas: give a store": refused(
        ValueError, lambda: quotas([ToolCallLimit("search", quotas=[Quota(3)])])
    ),
    "store must be a QuotaStore or None, not …": refused(
        TypeError, lambda: quotas([SEARCH], store=MemoryStore)
    ),
    "name must not be 'run': it has a meaning of its own": refused(
        ValueError, lambda: Quota(3, per="run")
    ),
    "window=… cannot be used with per='root_run'": refused(
        ValueError, lambda: Quota(3, per="root_run", window=timedelta(days=1))
    ),
    "quota has no store, so each agent would count for itself": refused(
        ValueError, lambda: with_limits(of_sub_agents, QuotaMiddleware([SEARCH]))
    ),
    "per must not be 'run', under which a store counts runs": refused(
        ValueError, lambda: Quota(5, per="run", name="job")
    ),
    "per, without a name, must match [a-z_]{1,32}, not …": refused(
        ValueError, lambda: Quota(5, per="userId")
    ),
    "thread_limit must be a function of state and runtime, as in …": refused(
        TypeError, lambda: tool_limit("search", thread_limit=lambda state: 3)
    ),
    "window must be a timedelta or None, not …": refused(
        TypeError, lambda: quota(5, window=86_400)
    ),
    "the URL of Redis must be redis://": refused(ValueError, lambda: RedisStore("localhost:6379")),
}


@pytest.mark.parametrize("message", MISTAKES)
def test_a_mistake_leads_to_a_sentence(
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """The mistake, made for real, shows a message that the page explains."""
    assert message in messages()
    assert begins(MISTAKES[message](Bench(capsys, monkeypatch, tmp_path)), message)


def test_the_way_out_is_told_of_a_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """Given as a store, a URL is not shown, which may hold a password, and the remedy is."""
    seen = raised(TypeError, lambda: quotas([SEARCH], store="redis://:secret@127.0.0.1/0"))
    assert seen.endswith("not a string: RedisStore(url) is one")


def test_a_string_is_no_list_of_limits() -> None:
    """A name in place of limits is shown as a whole, and not letter by letter."""
    assert raised(TypeError, lambda: quotas("search")).endswith("not 'search'")
