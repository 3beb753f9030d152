"""How large one request may be: it is stopped before the provider says that it is too large."""

from dataclasses import replace
from typing import Any

import pytest
from langchain.agents.middleware import before_model
from langchain_core.messages import HumanMessage, RemoveMessage
from langchain_core.tools import tool
from langgraph.graph.message import REMOVE_ALL_MESSAGES

from langchain_quota import (
    MemoryStore,
    ModelCallLimit,
    ModelCallLimitExceededError,
    Quota,
    TokenLimit,
    ToolCallLimit,
    stop_reason,
)
from langchain_quota.limits import Limit
from tests.scene import ANN, Kind, Scene, each_kind, either
from tests.stores import counts
from tests.telemetry import Signals, paid

CEILING = TokenLimit(call_limit=1000, tokens="input")
TOO_LARGE = "Token limits exceeded: call limit (0/1000 tokens, the call may need"


@tool
def read_file() -> str:
    """Read a file that is larger than anybody thought."""
    return "word " * 1000


@each_kind
async def test_a_request_that_has_grown(kind: Kind, signals: Signals) -> None:
    """A tool's answer makes the next request too large: the provider does not get it."""
    script = [["read_file"], "never"]
    scene = Scene(signals, script, [CEILING], kind=kind, tools=[read_file])
    reason: Any = stop_reason(await scene.play())
    assert (reason["limit"], reason["scope"], reason["threshold"]) == ("input_tokens", "call", 1000)
    assert scene.last_text().startswith(TOO_LARGE)
    assert len(scene.model.calls) == 1
    assert scene.metric("input_tokens", "blocked", "call") == 1
    scene.check_requests()


@either
async def test_it_goes_on_after_a_summary(kind: Kind, signals: Signals) -> None:
    """It is the request that counts, not what was reported before: a shorter history fits again."""
    wanted = False

    @before_model
    def summarize(state: Any, runtime: Any) -> dict[str, Any] | None:
        cut = [RemoveMessage(id=REMOVE_ALL_MESSAGES), HumanMessage("In short: a file.")]
        return {"messages": cut} if wanted else None

    script = [paid(70, "read_file"), paid(30)]
    limits: list[Any] = [summarize, CEILING]
    scene = Scene(signals, script, limits, kind=kind, tools=[read_file])
    assert stop_reason(await scene.play()) is not None
    wanted = True
    assert stop_reason(await scene.play("Go on.")) is None
    assert len(scene.model.calls) == 2
    scene.check_requests()


@each_kind
async def test_the_estimate_follows_reports(kind: Kind, signals: Signals) -> None:
    """A provider that counts more tokens than the estimate makes the next estimate larger."""
    # About 100 tokens by its bytes, and a little more with each answer.
    text = "abc" * 100
    limits: list[Limit] = [TokenLimit(call_limit=400, tokens="input"), ModelCallLimit(run_limit=9)]
    script = [paid(390, "search"), "never"]
    scene = Scene(signals, script, limits, kind=kind)
    assert stop_reason(await scene.play(text)) is not None
    assert len(scene.model.calls) == 1
    fewer = Scene(signals, [paid(90, "search"), paid(95)], limits, kind=kind)
    assert stop_reason(await fewer.play(text)) is None
    assert len(fewer.model.calls) == 2
    assert fewer.usage().run_model == 2 if kind != "graph" else True


async def test_what_a_provider_adds_is_not_scaled(signals: Signals) -> None:
    """A report far above the estimate is of a prompt that the provider adds to each request."""
    limits = [TokenLimit(call_limit=2500, tokens="input")]
    scene = Scene(signals, [paid(1000), paid(2400), "never"], limits)
    assert stop_reason(await scene.play()) is None
    assert stop_reason(await scene.play("word " * 250)) is None
    assert stop_reason(await scene.play("word " * 100)) is not None
    assert len(scene.model.calls) == 2


async def test_no_report_of_a_caller_counts(signals: Signals) -> None:
    """A history that a caller has written makes the estimate neither smaller nor larger."""
    scene = Scene(signals, ["done"], [CEILING])
    forged = [HumanMessage("hi"), paid(10**6), HumanMessage("word " * 100)]
    await scene.invoke({"messages": forged})
    assert len(scene.model.calls) == 1
    large = [HumanMessage("hi"), paid(1), HumanMessage("word " * 1000)]
    result = await Scene(signals, ["never"], [CEILING]).invoke({"messages": large})
    assert stop_reason(result) is not None


async def test_an_error(signals: Signals) -> None:
    """It raises as other limits do, with the work so far."""
    limit = replace(CEILING, exit_behavior="error")
    scene = Scene(signals, [["read_file"], "never"], [limit], tools=[read_file])
    with pytest.raises(ModelCallLimitExceededError, match="call limit") as raised:
        await scene.play()
    assert len(raised.value.messages or ()) >= 3


async def test_a_dry_run(signals: Signals) -> None:
    """It makes the call, and says what it would have done."""
    limit = replace(CEILING, enforce=False)
    scene = await Scene(signals, [["read_file"], "done"], [limit], tools=[read_file]).played()
    models = [each.outcome for each in scene.decisions if each.call.kind == "model"]
    assert models == ["allowed", "would_block"]
    assert scene.metric("input_tokens", "would_block", "call") == 1


async def test_beside_other_numbers(signals: Signals) -> None:
    """With a quota and a reserve in a store, a blocked request is charged and holds nothing."""
    store = MemoryStore()
    quotas = [Quota(10_000, per="user_id")]
    limit = TokenLimit(call_limit=1000, tokens="input", quotas=quotas, reserve=50)
    limits: list[Limit] = [limit, ModelCallLimit(run_limit=5), ToolCallLimit(run_limit=5)]
    script = [paid(60, "read_file"), "never"]
    scene = Scene(signals, script, limits, store=store, context=ANN, tools=[read_file])
    await scene.play()
    assert scene.last_text().startswith(TOO_LARGE)
    assert counts(store)["model.input_tokens:user_id:ann"] == 60
    assert scene.usage().run_model == 1
