"""The agent, its tools, and the limits that it is held to."""

import asyncio
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from uuid import uuid4

from langchain.agents import create_agent
from langchain.chat_models import init_chat_model
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, ToolCall
from langchain_core.messages.ai import UsageMetadata
from langchain_core.tools import BaseTool, tool
from langgraph.checkpoint.base import BaseCheckpointSaver

from langchain_quota import (
    ConcurrencyLimit,
    CostLimit,
    Decision,
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
from service.settings import SCRIPTED, Settings, SettingsError

NAME = "librarian"

PRICES = {SCRIPTED: Price(input="2.50", output="10")}
"""In dollars per million tokens; those of real models are in genai-prices."""


@dataclass(frozen=True, slots=True)
class Caller:
    """For whom a run is made.

    Attributes:
        user_id: The user, whose quota the run draws on.
    """

    user_id: str


def limits(settings: Settings) -> list[Limit]:
    """The limits, one for each way in which a blocked call can be handled."""
    return [
        # Refused: an exception.
        ModelCallLimit(
            name="user",
            quotas=[Quota(settings.user_model_limit, per="user_id", window=timedelta(hours=1))],
            exit_behavior="error",
        ),
        CostLimit(
            name="user cost",
            quotas=[Quota(settings.user_cost_limit, per="user_id", window=timedelta(hours=1))],
            exit_behavior="error",
        ),
        # Refused: the run ends, with a message for the user.
        ModelCallLimit(
            run_limit=settings.run_model_limit,
            thread_limit=settings.thread_model_limit,
            exit_behavior="end",
        ),
        TokenLimit(thread_limit=settings.thread_token_limit, exit_behavior="end"),
        # Refused: the model is told so, and goes on.
        ToolCallLimit(
            "search",
            thread_limit=settings.thread_search_limit,
            exit_behavior="continue",
        ),
        ConcurrencyLimit("search", max_concurrency=settings.searches_at_once),
        RepeatLimit(3),
    ]


def build_agent(
    settings: Settings,
    *,
    checkpointer: BaseCheckpointSaver[Any],
    store: QuotaStore,
    on_decision: Callable[[Decision], None],
) -> Any:
    """The agent.

    Args:
        settings: The settings.
        checkpointer: Keeps the threads.
        store: Keeps the counts that threads and users share.
        on_decision: Sees every decision.
    """
    return create_agent(
        build_model(settings.model),
        tools=_tools(settings.tool_seconds),
        name=NAME,
        system_prompt="You look things up for the readers of a library. Be brief.",
        context_schema=Caller,
        checkpointer=checkpointer,
        middleware=[
            QuotaMiddleware(
                limits(settings),
                prices=PRICES,
                # A model that is newer than the list is still served; an alert says so.
                unknown_price="allow",
                store=store,
                on_decision=on_decision,
                # Without it, the page and the dashboards only say how many users there are.
                telemetry=Telemetry(subject_label={"user_id": str}),
            )
        ],
    )


def build_model(name: str) -> BaseChatModel:
    """The model of a name.

    Raises:
        SettingsError: It cannot be used.
    """
    if name == SCRIPTED:
        # Tests look at kept requests; a service that keeps them grows with every call.
        return ScriptedChatModel(script=_next_turn, keep_calls=0, model=SCRIPTED)
    try:
        return init_chat_model(name)
    except Exception as error:  # a missing package or key: each provider raises its own
        reason = " ".join(str(error).split())[:300]
        raise SettingsError(f"MODEL {name!r} cannot be used: {reason}") from error


def _tools(seconds: float) -> list[BaseTool]:
    @tool
    async def search(query: str) -> str:
        """Search the catalogue."""
        await asyncio.sleep(seconds)
        return f"3 books about {query}"

    @tool
    async def loan(number: int) -> str:
        """Who has borrowed a book, by its number."""
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
