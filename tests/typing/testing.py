"""Helpers for users' tests, and a thread's usage; checked by mypy and pyright, never run."""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from decimal import Decimal
from typing import assert_type

from langchain.agents import create_agent
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.memory import InMemorySaver

from langchain_quota import Decision, ModelCallLimit, QuotaMiddleware, usage
from langchain_quota.testing import ScriptedChatModel, captured_decisions


def answer(messages: Sequence[BaseMessage]) -> str | list[str]:
    return ["search"] if messages[-1].type == "human" else "Done."


batch = ["search", ("search", {"query": "x"})]
model = ScriptedChatModel(script=[batch, AIMessage("Hello."), TimeoutError("slow"), "Done."])
as_any_model: BaseChatModel = ScriptedChatModel(script=answer, keep_calls=10)
assert_type(model.calls[0].tools, tuple[str, ...])
assert_type(model.calls[0].messages, tuple[BaseMessage, ...])

quota = QuotaMiddleware([ModelCallLimit(thread_limit=10)])
agent = create_agent(as_any_model, middleware=[quota], checkpointer=InMemorySaver())
config: RunnableConfig = {"configurable": {"thread_id": "7"}}
used = usage(agent.get_state(config))
assert_type((used.model, used.run_model), tuple[int, int])
assert_type(used.tools, Mapping[str, int])
assert_type(used.run_tools.get("search", 0), int)


async def asynchronously() -> None:
    with captured_decisions() as decisions:
        await agent.ainvoke({"messages": []}, config)
    assert_type(decisions, list[Decision])
    assert_type(usage(await agent.aget_state(config)).model, int)
    await quota.areset(agent, config)
    assert_type((await quota.aleft("model", thread=7)).left, int | Decimal)
    assert_type((await quota.agrant("model", 5, thread=7, reason="more")).id, str)
    await quota.areset("model", user_id="ada", quota="daily", prefix="acme")


assert_type(quota.left("cost", tenant="acme", limit="2.50").left, int | Decimal)
assert_type(quota.grant("cost", 50, tenant="acme", until=datetime.now(UTC), by="bo").id, str)
if revoked := quota.revoke("cost", "4711", tenant="acme"):
    assert_type(revoked.amount, int)
quota.reset("cost", tenant="acme")
quota.reset(agent, config)

# Not these.
ScriptedChatModel(["Hello."])  # type: ignore[call-arg,arg-type]  # pyright: ignore[reportCallIssue]
model.calls = ()  # type: ignore[misc]  # pyright: ignore[reportAttributeAccessIssue]
usage(config)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
quota.left("cost", tenant=1.5)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
quota.grant("cost", tenant="acme")  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
quota.reset(agent, "7")  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType]
quota.reset(quota, config)  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType]
used.tools["search"] = 0  # type: ignore[index]  # pyright: ignore[reportIndexIssue]
