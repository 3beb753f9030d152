"""The agent, its tools, and the limits that it is held to."""

import asyncio
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

from langchain.agents import create_agent
from langchain.chat_models import init_chat_model
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, ToolCall
from langchain_core.messages.ai import UsageMetadata
from langchain_core.tools import BaseTool, tool
from langgraph.checkpoint.base import BaseCheckpointSaver

from langchain_quota import (
    ConcurrencyLimit,
    CostLimit,
    ModelCallLimit,
    Price,
    Quota,
    QuotaMiddleware,
    RepeatLimit,
    Telemetry,
    TokenLimit,
    ToolCallLimit,
)
from langchain_quota.limits import Limit
from langchain_quota.stores import QuotaStore
from langchain_quota.testing import ScriptedChatModel
from service.settings import SCRIPTED, Settings

PRICES = {SCRIPTED: Price(input="2.50", output="10")}
"""In dollars per million tokens; those of real models are in genai-prices."""


@dataclass(frozen=True, slots=True)
class Caller:
    """The user for whom a run is made, and whose quotas it draws on."""

    user_id: str


def user_limit(calls: int) -> ModelCallLimit:
    """Return the limit of a user's model calls in an hour."""
    quota = Quota(calls, per="user_id", window="1h")
    return ModelCallLimit(name="user", quotas=[quota], exit_behavior="end")


def limits(settings: Settings) -> list[Limit]:
    """Return all limits; if several refuse a call, the answer shows the first of them."""
    return [
        # At these, the run ends. Waiting does not help.
        ModelCallLimit(
            run_limit=settings.run_model_limit,
            thread_limit=settings.thread_model_limit,
            exit_behavior="end",
        ),
        TokenLimit(thread_limit=settings.thread_token_limit, exit_behavior="end"),
        # At these, the run ends, too, and the user can go on in the next hour.
        user_limit(settings.user_model_limit),
        CostLimit(
            name="user cost",
            quotas=[Quota(settings.user_cost_limit, per="user_id", window="1h")],
            exit_behavior="end",
        ),
        # At these, the model gets an error message, and goes on.
        ToolCallLimit("search", thread_limit=settings.thread_search_limit),
        ConcurrencyLimit("search", max_concurrency=settings.searches_at_once),
        RepeatLimit(3),
    ]


def build_quota(settings: Settings, store: QuotaStore) -> QuotaMiddleware:
    """Return the middleware with the limits, which counts in the store."""
    return QuotaMiddleware(
        limits(settings),
        store=store,
        prices=PRICES,
        # A model that is newer than the list is still served; an alert says so.
        unknown_price="allow",
        # Without it, the page and the dashboards only say how many users there are.
        telemetry=Telemetry(subject_label={"user_id": str}),
    )


def build_agent(
    settings: Settings, quota: QuotaMiddleware, checkpointer: BaseCheckpointSaver[Any]
) -> Any:
    """Return the agent, whose threads the checkpointer keeps."""
    # Tests look at kept requests; a service that keeps them grows with every call.
    scripted = ScriptedChatModel(script=_next_turn, keep_calls=0, model=SCRIPTED)
    return create_agent(
        scripted if settings.model == SCRIPTED else init_chat_model(settings.model),
        tools=_tools(settings.tool_seconds),
        name="librarian",
        system_prompt="You look things up for the readers of a library. Be brief.",
        context_schema=Caller,
        checkpointer=checkpointer,
        middleware=[quota],
    )


def _tools(seconds: float) -> list[BaseTool]:
    @tool
    async def search(query: str) -> str:
        """Search the catalogue."""
        await asyncio.sleep(seconds)
        return f"3 books about {query}"

    @tool
    async def loan(number: int) -> str:
        """Find out who has borrowed a book, by its number."""
        await asyncio.sleep(seconds)
        return f"book {number} is on the shelf"

    return [search, loan]


def _next_turn(messages: Sequence[BaseMessage]) -> AIMessage:
    """Look up every word of the question, one after the other: long questions are loops."""
    asked = max(index for index, each in enumerate(messages) if isinstance(each, HumanMessage))
    words = re.findall(r"\w+", messages[asked].text)
    done = sum(isinstance(each, AIMessage) for each in messages[asked:])
    # As with real models, the input of a call is the whole history.
    given, made = 300 + 30 * len(messages), 30
    used = UsageMetadata(input_tokens=given, output_tokens=made, total_tokens=given + made)
    if done >= len(words):
        return AIMessage(f"I looked up {len(words)} words.", usage_metadata=used)
    word = words[done]
    name, args = ("loan", {"number": word}) if word.isdecimal() else ("search", {"query": word})
    # Other and later processes use the same threads: ids must be unique among all of them.
    call = ToolCall(name=name, args=args, id=f"call_{uuid4().hex}", type="tool_call")
    return AIMessage("", tool_calls=[call], usage_metadata=used)
