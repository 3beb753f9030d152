"""Inside deepagents: refunds behind its own repair of the history, and what `task` returns."""

from typing import Any
from uuid import uuid4

import pytest
from langchain_core.messages import AIMessage, ToolCall
from langgraph.checkpoint.memory import InMemorySaver

from langchain_quota import (
    ModelCallLimit,
    QuotaMiddleware,
    ToolCallLimit,
    ToolCallLimitExceededError,
    usage,
)
from langchain_quota.limits import Limit
from langchain_quota.testing import ScriptedChatModel
from tests.agent.rules import CONFIG, check_history, recording, tool_limiter
from tests.conftest import Signals

# Among the oldest versions there is none.
deepagents = pytest.importorskip("deepagents")


async def turn(agent: Any) -> dict[str, Any]:
    given = {"messages": [("user", "Go!")]}
    return dict(await agent.ainvoke(given, CONFIG))


def call(tool: str) -> ToolCall:
    return ToolCall(name=tool, args={}, id=uuid4().hex, type="tool_call")


async def test_an_error(signals: Signals) -> None:
    """What an `error` stopped is refunded, though its calls are answered before our hooks run."""
    ran: list[str] = []
    agent = deepagents.create_deep_agent(
        ScriptedChatModel(script=[["search"] * 3, ["search", "search"], "done"]),
        [recording("search", ran)],
        middleware=[
            tool_limiter(signals, "search", run_limit=2, exit_behavior="error"),
            QuotaMiddleware[Any, Any](
                [ToolCallLimit("search", thread_limit=9)], telemetry=signals.telemetry
            ),
        ],
        checkpointer=InMemorySaver(),
    )

    with pytest.raises(ToolCallLimitExceededError):
        await turn(agent)
    result = await turn(agent)

    assert ran == ["search"] * 2
    assert usage(agent.get_state(CONFIG)).tools == {"search": 2}
    check_history(result["messages"])


@pytest.mark.parametrize("own", ["", "So far: nothing."])
@pytest.mark.parametrize(
    "limit",
    [
        ModelCallLimit(run_limit=2, exit_behavior="finalize"),
        ModelCallLimit(run_limit=2),
        ToolCallLimit("search", run_limit=2, exit_behavior="end"),
    ],
    ids=["finalize", "end of model calls", "end of tools"],
)
async def test_a_sub_agent(limit: Limit, own: str, signals: Signals) -> None:
    """A sub-agent that a limit ends returns a text: the last answer's, or the limit's."""
    ran: list[str] = []
    child = ScriptedChatModel(
        script=lambda messages: AIMessage(own, tool_calls=[call("search"), call("search")])
    )
    agent = deepagents.create_deep_agent(
        ScriptedChatModel(
            script=[[("task", {"description": "Find it!", "subagent_type": "finder"})], "done"]
        ),
        subagents=[
            {
                "name": "finder",
                "description": "Finds.",
                "system_prompt": "Find it.",
                "model": child,
                "tools": [recording("search", ran)],
                "middleware": [QuotaMiddleware([limit], telemetry=signals.telemetry)],
            }
        ],
        checkpointer=InMemorySaver(),
    )

    result = await turn(agent)

    (answer,) = [each for each in result["messages"] if each.type == "tool"]
    if own and limit.exit_behavior == "finalize":
        assert answer.text == own
    else:
        assert "limit" in answer.text
    assert len(ran) == (4 if limit.exit_behavior == "end" and limit.kind == "model" else 2)
    for each in child.calls:
        check_history(each.messages)
