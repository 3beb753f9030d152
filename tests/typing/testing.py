"""The helpers for users' tests; checked by mypy and pyright, never run."""

from collections.abc import Sequence
from typing import Any, assert_type

from langchain.agents import create_agent
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, BaseMessage

from langchain_quota import Decision, ModelCallLimit, QuotaMiddleware
from langchain_quota.testing import ScriptedChatModel, captured_decisions

# A script: texts, batches of tool calls, messages, exceptions.
model = ScriptedChatModel(
    script=[
        ["search", ("search", {"query": "x"})],
        AIMessage("Hello."),
        TimeoutError("the provider is slow"),
        "Done.",
    ]
)
as_any_model: BaseChatModel = model
assert_type(model.calls[0].tools, tuple[str, ...])
assert_type(model.calls[0].messages, tuple[BaseMessage, ...])


def answer(messages: Sequence[BaseMessage]) -> str | list[str]:
    return ["search"] if messages[-1].type == "human" else "Done."


agent: Any = create_agent(
    ScriptedChatModel(script=answer, keep_calls=10),
    middleware=[QuotaMiddleware([ModelCallLimit(run_limit=1)])],
)


async def test_my_limits() -> None:
    with captured_decisions() as decisions:
        await agent.ainvoke({"messages": [("user", "hi")]})
    assert_type(decisions, list[Decision])
    assert [each.outcome for each in decisions] == ["allowed", "blocked"]


# Not these.
ScriptedChatModel(["Hello."])  # type: ignore[call-arg,arg-type]  # pyright: ignore[reportCallIssue]
ScriptedChatModel()  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
model.calls = ()  # type: ignore[misc]  # pyright: ignore[reportAttributeAccessIssue]
