"""The demo's agent, its limits, and the conversations that run into them."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from uuid import uuid4

from langchain.agents import create_agent
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, ToolCall
from langchain_core.messages.ai import UsageMetadata
from langchain_core.tools import BaseTool, tool
from langgraph.checkpoint.base import BaseCheckpointSaver

from langchain_quota.budgets import TokenLimit
from langchain_quota.limits import ModelCallLimit, ToolCallLimit
from langchain_quota.middleware.quota import QuotaMiddleware
from langchain_quota.repeats import RepeatLimit
from langchain_quota.stores.memory import MemoryStore
from langchain_quota.telemetry import Telemetry
from langchain_quota.testing import ScriptedChatModel

AGENT = "support"

SEARCH = ToolCallLimit("search", thread_limit=8, run_limit=3)
ALL_TOOLS = ToolCallLimit(thread_limit=16, run_limit=6)
MODEL = ModelCallLimit(thread_limit=20, run_limit=6)
TOKENS = TokenLimit(thread_limit=6_000)
LIMITS = (SEARCH, ALL_TOOLS, MODEL, TOKENS)
"""The limits per thread, which the table shows."""

Request = tuple[str, dict[str, Any]]

_GREEDY = "Search for oak, ash, elm and pine boards, one search each, then for their prices."
_MODEST = "What is the weather in Oslo? Can you deliver today?"
_STEADY = "Search for walnut boards, and convert 40 EUR to NOK for me."
_RESTLESS = "Convert 1, 2, 3, 4, 5, 6 and 7 EUR to NOK, one after the other."
_LOOPING = "Convert 40 EUR to NOK again and again, until the rate is better."

_CUSTOMERS: tuple[tuple[str, ...], ...] = (
    (_GREEDY, _GREEDY, _MODEST, _GREEDY, _GREEDY),
    (_MODEST, _STEADY, _MODEST, _MODEST, _STEADY),
    (_STEADY, _GREEDY, _STEADY, _STEADY, _STEADY),
    (_RESTLESS, _MODEST, _LOOPING, _MODEST, _LOOPING),
)

TURNS = len(_CUSTOMERS[0])
"""How many turns each conversation has."""

_WOODS = [("search", {"query": wood}) for wood in ("oak", "ash", "elm", "pine")]
_SCRIPT: Mapping[str, Sequence[Sequence[Request]]] = {
    _GREEDY: (_WOODS, [("search", {"query": "prices"}), ("weather", {"city": "Oslo"})]),
    _MODEST: ([("weather", {"city": "Oslo"})],),
    _STEADY: ([("search", {"query": "walnut"}), ("convert", {"amount": 40})],),
    _RESTLESS: tuple([("convert", {"amount": amount})] for amount in range(1, 8)),
    _LOOPING: tuple([("convert", {"amount": 40})] for _ in range(5)),
}


def questions(number: int) -> tuple[str, ...]:
    """What a customer asks, turn by turn; customers are numbered from 0."""
    return _CUSTOMERS[number % len(_CUSTOMERS)]


def scripted_model() -> BaseChatModel:
    """A model that knows the questions: its answer depends on the messages alone."""
    return ScriptedChatModel(script=_next_turn, keep_calls=0)


def _next_turn(messages: Sequence[BaseMessage]) -> AIMessage:
    asked = max(index for index, each in enumerate(messages) if isinstance(each, HumanMessage))
    answers = sum(isinstance(each, AIMessage) for each in messages[asked:])
    batches = _SCRIPT[str(messages[asked].content)]
    calls = batches[answers] if answers < len(batches) else ()
    # As with real models, the input of a call is the whole history.
    given, made = 120 + 22 * len(messages), 20 + 25 * len(calls)
    return AIMessage(
        "" if calls else "That is all that I found.",
        # A thread in a file outlives this model: ids must be unique among several models.
        tool_calls=[
            ToolCall(name=name, args=args, id=f"call_{uuid4().hex}", type="tool_call")
            for name, args in calls
        ],
        response_metadata={"model_name": "scripted"},
        usage_metadata=UsageMetadata(
            input_tokens=given, output_tokens=made, total_tokens=given + made
        ),
    )


def limiter(threads: int, telemetry: Telemetry) -> QuotaMiddleware:
    """The limits of the table, and two that threads do not use up.

    Args:
        threads: How many threads there are: the more, the more searches run at the same time.
        telemetry: Makes the decisions visible.
    """
    at_once = ToolCallLimit("search", name="search at once", at_once=max(1, threads // 3))
    # Only a store gives grants. It begins with the counts of the checkpointer.
    store = MemoryStore()
    return QuotaMiddleware([*LIMITS, at_once, RepeatLimit(3)], store=store, telemetry=telemetry)


def build_agent(
    model: BaseChatModel,
    checkpointer: BaseCheckpointSaver[Any],
    quota: QuotaMiddleware,
    *,
    tool_seconds: float,
) -> Any:
    """An agent that is held to the limits.

    Args:
        model: The chat model.
        checkpointer: Keeps the threads, and with them their counts.
        quota: Holds it to them.
        tool_seconds: How long a tool takes.
    """
    return create_agent(
        model,
        tools=_tools(tool_seconds),
        name=AGENT,
        checkpointer=checkpointer,
        system_prompt="You help the customers of a timber yard. Use the tools. Be brief.",
        middleware=[quota],
    )


def _tools(seconds: float) -> list[BaseTool | Callable[..., Any]]:
    @tool
    async def search(query: str) -> str:
        """Search the catalogue of the timber yard."""
        await asyncio.sleep(seconds)
        return f"12 boards of {query}, from 40 EUR"

    @tool
    async def weather(city: str) -> str:
        """The weather in a city."""
        await asyncio.sleep(seconds / 2)
        return f"sunny in {city}"

    @tool
    async def convert(amount: float) -> str:
        """Convert an amount of EUR to NOK."""
        await asyncio.sleep(seconds / 2)
        return f"{amount * 11.5:.2f} NOK"

    return [search, weather, convert]
