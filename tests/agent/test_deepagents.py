"""Inside deepagents: its tools and sub-agents under limits, its reviews, repairs and summaries."""

from typing import Any

import pytest
from langgraph.checkpoint.memory import InMemorySaver

from langchain_quota import (
    QuotaMiddleware,
    ToolCallLimit,
    ToolCallLimitExceededError,
    usage,
)
from langchain_quota.testing import ScriptedChatModel
from tests.scene import CONFIG, check_history, recording, tool_limiter
from tests.signals import Signals

# Among the oldest versions there is none.
deepagents = pytest.importorskip("deepagents")


async def turn(agent: Any) -> dict[str, Any]:
    given = {"messages": [("user", "Go!")]}
    return dict(await agent.ainvoke(given, CONFIG))


@pytest.mark.filterwarnings("ignore:the sub-agents that the tool 'task'")
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


TASK = "Find it!"


def task(name: str = "general-purpose") -> tuple[str, dict[str, Any]]:
    return "task", {"description": TASK, "subagent_type": name}
