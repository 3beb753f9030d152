"""Under a supervisor: whatever a limit ends, the supervisor's history stays valid."""

from typing import Any

import pytest
from langchain.agents import create_agent
from langgraph.checkpoint.memory import InMemorySaver

from langchain_quota import ModelCallLimit, QuotaMiddleware, ToolCallLimit
from langchain_quota.limits import Limit
from langchain_quota.testing import ScriptedChatModel
from tests.agent.rules import CONFIG, check_history
from tests.conftest import Signals

# Among the oldest versions there is none.
langgraph_supervisor = pytest.importorskip("langgraph_supervisor")

# It is built on it.
pytestmark = pytest.mark.filterwarnings("ignore:create_react_agent has been moved")

LIMITS: dict[str, Limit] = {
    "finalize": ModelCallLimit(run_limit=2, exit_behavior="finalize"),
    "end of model calls": ModelCallLimit(run_limit=2),
    "end of tools": ToolCallLimit(run_limit=1, exit_behavior="end"),
    "give_up_after": ToolCallLimit(run_limit=1, give_up_after=1),
}


def search() -> str:
    """Search the web."""
    return "nothing found"


@pytest.mark.parametrize("limit", LIMITS.values(), ids=LIMITS.keys())
@pytest.mark.parametrize("output_mode", ["last_message", "full_history"])
async def test_an_agent_that_a_limit_ends(limit: Limit, output_mode: Any, signals: Signals) -> None:
    """The supervisor reads what the limit says, and is never sent an answer without its call."""
    worker = create_agent(
        ScriptedChatModel(script=lambda messages: ["search", "search"]),
        [search],
        middleware=[QuotaMiddleware([limit], telemetry=signals.telemetry)],
        name="worker",
    )
    model = ScriptedChatModel(script=[["transfer_to_worker"], "Sorry.", "Bye."])
    supervisor = langgraph_supervisor.create_supervisor(
        [worker], model=model, output_mode=output_mode
    ).compile(checkpointer=InMemorySaver())

    for text in ("Go!", "And?"):
        given = {"messages": [("user", text)]}
        result = await supervisor.ainvoke(given, CONFIG)

    assert len(model.calls) == 3
    for call in model.calls:
        check_history(call.messages)
    check_history(result["messages"])
    assert any("limit" in each.text for each in model.calls[1].messages if each.type == "ai")
