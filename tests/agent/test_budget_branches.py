"""Each branch of a thread is charged what was used on its way, in any process.

A branch begins where a run is repeated from one of its older checkpoints.
"""

from typing import Any

from langchain.agents import create_agent
from langchain_core.messages import AIMessage
from langchain_core.tools import StructuredTool
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.types import StateSnapshot

from langchain_quota import QuotaMiddleware, TokenLimit, usage
from langchain_quota.testing import ScriptedChatModel
from tests.scene import CONFIG
from tests.signals import Signals

TOTAL = "model.total_tokens"
ASKED: Any = {"messages": [("user", "Hi!")]}


def answer(tokens: int, *calls: str) -> AIMessage:
    """An answer that has cost so many tokens."""
    used: Any = {"input_tokens": tokens - 1, "output_tokens": 1, "total_tokens": tokens}
    called = [{"name": name, "args": {}, "id": f"{name}-{tokens}"} for name in calls]
    return AIMessage("Hello.", usage_metadata=used, tool_calls=called)


def search() -> str:
    """Search."""
    return "nothing found"


def agent_of(quota: Any, *script: AIMessage, tool: Any = search, beside: Any = ()) -> Any:
    model = ScriptedChatModel(script=[*script])
    middleware = [quota, *beside]
    return create_agent(model, [tool], middleware=middleware, checkpointer=InMemorySaver())


def quota_of(signals: Signals, kind: Any = QuotaMiddleware, **options: Any) -> Any:
    limit = TokenLimit(run_limit=1000, thread_limit=1000)
    return kind([limit], telemetry=signals.telemetry, **options)


def before_call(agent: Any, calls: int) -> StateSnapshot:
    """The oldest checkpoint with so many answers of the model."""
    *_, found = (
        each
        for each in agent.get_state_history(CONFIG)
        if sum(isinstance(one, AIMessage) for one in each.values.get("messages", ())) == calls
        and each.values["langchain_quota"].get("run")
    )
    return found  # type: ignore[no-any-return]


def spent(agent: Any) -> int:
    """What the thread has used, as its newest state has it."""
    return usage(agent.get_state(CONFIG)).spent[TOTAL]


async def test_models_of_tools_belong_to_their_branch(signals: Signals) -> None:
    """With `charge_all_models` a branch is charged its own tools' models, and no other's."""
    model = ScriptedChatModel(script=[answer(100), answer(200), answer(300)])

    async def ask() -> str:
        return (await model.ainvoke("Hi!")).text

    tool = StructuredTool.from_function(
        coroutine=ask, name="search", description="Search.", return_direct=True
    )
    quota = quota_of(signals, charge_all_models=True)
    script = [answer(10, "search"), answer(20, "search"), answer(3)]
    agent = agent_of(quota, *script, tool=tool)
    await agent.ainvoke(ASKED, CONFIG)

    await agent.ainvoke(None, before_call(agent, 0).config)
    await agent.ainvoke(ASKED, CONFIG)

    assert spent(agent) == 223
