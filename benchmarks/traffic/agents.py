"""The agents of the service, their limits, and what its users ask."""

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from random import Random
from typing import Any, Literal, NamedTuple
from uuid import uuid4

from langchain.agents import create_agent
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, ToolCall, ToolMessage
from langchain_core.messages.ai import UsageMetadata
from langgraph.checkpoint.base import BaseCheckpointSaver

from langchain_quota import (
    CostLimit,
    Decision,
    ModelCallLimit,
    PostgresStore,
    Price,
    Quota,
    QuotaMiddleware,
    RedisStore,
    Telemetry,
    TokenLimit,
    ToolCallLimit,
    ToolCallLimitMiddleware,
)
from langchain_quota.testing import ScriptedChatModel

Profile = Literal["healthy", "busy", "loop", "broken", "incidents"]
PROFILES: tuple[Profile, ...] = ("healthy", "busy", "loop", "broken", "incidents")

THREAD_LIMIT = 20
"""How often a thread may call the tool that its agent is for."""

_AGENTS = ("support", "researcher", "support", "writer", "clerk", "researcher", "support")
MAIN_TOOLS = {"support": "search", "researcher": "report", "writer": "draft", "clerk": "file"}
_TOOLS = (*MAIN_TOOLS.values(), "fetch", "browse", "lookup", "embed", "tally", "translate", "plan")
_LOOP = "|".join(["lookup"] * 12)


ANSWERS, DRAFTS, NOTES = "gpt-5", "claude-sonnet-4-5", "claude-haiku-4-5"
"""The models that answer, that write drafts, and that say that these are done."""

PRICES = {
    ANSWERS: Price(input="1.25", output="10"),
    DRAFTS: Price(input="3", output="15"),
    NOTES: Price(input="1", output="5"),
}

WINDOW = 360
"""How long the window of the desk's quota is, in simulated seconds."""

_PER_DRAFT = (2_400, 600)
"""The tokens that a draft takes in and gives out."""


class Question(NamedTuple):
    """What a user asks on a thread, or its reset.

    Attributes:
        at: When, in simulated seconds from the beginning.
        agent: Whom.
        thread: The thread's id.
        user: The user's id.
        tenant: The user's tenant.
        text: The tools that the model is to call: a batch after the other, separated by `|`.
            A reset has none.
    """

    at: float
    agent: str
    thread: str
    user: str = ""
    tenant: str = ""
    text: str | None = None


def build_agents(
    store: RedisStore,
    second: PostgresStore | None,
    saver: BaseCheckpointSaver[Any],
    telemetry: Telemetry,
    *,
    on_decision: Callable[[Decision], None],
    speed: float,
) -> tuple[Mapping[str, Any], Mapping[str, QuotaMiddleware]]:
    """The agents by their names, and by the same what resets their threads.

    The clerk has a drop-in instead, which neither resets nor tells an observer what it decides.
    Support and the writer have budgets: a thread of the writer has tokens for `THREAD_LIMIT`
    drafts.

    Args:
        store: Keeps the shared counts.
        second: Keeps those of the planner, if there is one.
        saver: Keeps the threads.
        telemetry: Makes visible what limits do.
        on_decision: Sees every decision.
        speed: How many simulated seconds pass in a real one.
    """

    def window(**duration: float) -> timedelta:
        return timedelta(seconds=max(1, round(timedelta(**duration).total_seconds() / speed)))

    hour, minutes = window(hours=1), window(minutes=10)
    support = QuotaMiddleware(
        [
            ModelCallLimit(run_limit=15, quotas=[Quota(400, per="user_id", window=hour)]),
            ToolCallLimit(
                "search",
                thread_limit=THREAD_LIMIT,
                run_limit=6,
                quotas=[Quota(1000, per="tenant", window=hour)],
                alert=False,
            ),
            ToolCallLimit("fetch", quotas=[Quota(400, per="global", window=minutes)]),
            ToolCallLimit("fetch", run_limit=1, enforce=False, name="fetch dry run"),
            ToolCallLimit("lookup", quotas=[Quota(100, per="tenant", window=hour)]),
            TokenLimit(quotas=[Quota(2_000_000, per="tenant", window=hour)]),
            CostLimit(thread_limit=2, quotas=[Quota(20, per="agent", window=hour)]),
        ],
        prices=PRICES,
        store=store,
        on_store_error="allow",
        on_decision=on_decision,
        telemetry=telemetry,
    )
    researcher = QuotaMiddleware(
        [
            ModelCallLimit(run_limit=15, quotas=[Quota(3000, per="agent", window=minutes)]),
            ToolCallLimit(
                "report",
                near=0.95,
                quotas=[Quota(THREAD_LIMIT, per="thread", window=hour)],
                alert=False,
            ),
            # It refuses a fifth of its calls when the service is busy, as it is meant to do.
            ToolCallLimit("browse", run_limit=4, name="browse at most 4", alert=False),
            ToolCallLimit("lookup", run_limit=3),
        ],
        store=store,
        on_store_error="block",
        on_decision=on_decision,
        telemetry=telemetry,
    )
    writer = QuotaMiddleware(
        [
            TokenLimit(thread_limit=THREAD_LIMIT * sum(_PER_DRAFT), alert=False),
            CostLimit(thread_limit="0.40", name="thread cost", alert=False),
            CostLimit(quotas=[Quota(6, per="global", window=hour)]),
            ToolCallLimit("browse", run_limit=2),
        ],
        prices=PRICES,
        store=store,
        on_decision=on_decision,
        telemetry=telemetry,
    )
    embedding = Quota(30, per="global", window=window(minutes=1), smooth=True)
    desk = QuotaMiddleware(
        [
            ToolCallLimit("embed", quotas=[embedding], wait=40 / speed),
            ToolCallLimit("tally", quotas=[Quota(5, per="agent", window=window(seconds=WINDOW))]),
            ToolCallLimit("translate", quotas=[Quota(20, per="tenant", window=hour)]),
        ],
        store=store,
        on_decision=on_decision,
        telemetry=telemetry,
    )
    planner = QuotaMiddleware(
        [ToolCallLimit("plan", quotas=[Quota(1000, per="global", window=hour)])],
        store=second or store,
        on_store_error="block",
        on_decision=on_decision,
        telemetry=telemetry,
    )
    clerk = ToolCallLimitMiddleware(
        tool_name="file",
        thread_limit=THREAD_LIMIT,
        run_limit=6,
        alert=False,
        telemetry=telemetry,
    )

    quotas = {
        "support": support,
        "researcher": researcher,
        "writer": writer,
        "desk": desk,
        "planner": planner,
    }
    agents = {
        name: create_agent(
            ScriptedChatModel(script=partial(_answer, name), keep_calls=0, model=ANSWERS),
            tools=[_tool(tool, 0.2 / speed) for tool in _TOOLS],
            middleware=[middleware],
            name=name,
            checkpointer=saver,
        )
        for name, middleware in {**quotas, "clerk": clerk}.items()
    }
    return agents, quotas


def questions(profile: Profile, *, seconds: float, threads: int, seed: int) -> list[Question]:
    """What is asked, in order of time: on each thread something about every minute.

    Each thread uses the tool that its agent is for evenly, up to a number of calls that it reaches
    after three quarters of the time, but not before five minutes: in a run it makes few. When the
    service is busy, the first thread of the writer reaches the limit. The three support threads
    with the highest numbers are reset.
    """
    random = Random(seed)  # noqa: S311 - traffic, no secret
    asked: list[Question] = []
    goals: list[tuple[int, Question]] = []
    turns = max(1, round(seconds / 60))
    for number in range(threads):
        agent = _AGENTS[number % len(_AGENTS)]
        user, tenant = f"user-{number % 20:02}", f"tenant-{number % 4}"
        thread = Question(seconds * 0.6, agent, f"{agent}-{number:02}", user, tenant)
        goal = _goal(random, profile)
        if profile == "busy" and number == _AGENTS.index("writer"):
            goal = THREAD_LIMIT
        goals.append((goal, thread))
        done = 0
        for turn in range(turns):
            wanted = min(goal, math.ceil(goal * (turn + 1) / math.ceil(turns * 0.75)))
            # Who has used up the limit goes on asking.
            times = min(6, wanted - done) or int(goal == THREAD_LIMIT)
            done = min(goal, done + times)
            at = (turn + random.random()) * seconds / turns
            asked.append(thread._replace(at=at, text=_text(random, profile, agent, times)))
    if profile == "loop":
        asked += loops(seconds * 0.3, seconds * 0.7)
    if profile == "incidents":
        asked += loops(300, seconds)
    if turns > 1:
        own = [each for each in goals if each[1].agent == "support"]
        asked += [thread for _, thread in sorted(own, reverse=True)[:3]]
    return sorted(asked, key=lambda question: question.at)


def loops(begin: float, end: float) -> list[Question]:
    """What is asked on threads on which an agent does not stop to call a tool that is refused."""
    return [
        Question(at, "researcher", f"loop-{number}", "user-00", "tenant-0", _LOOP)
        for number in range(4)
        for at in range(math.ceil(begin + number), math.ceil(end), 30)
    ]


def _goal(random: Random, profile: Profile) -> int:
    """How many calls of the tool that its agent is for a thread makes."""
    share = random.random()
    if share < 0.2:
        return random.randint(16, THREAD_LIMIT - 1)
    if profile == "busy" and share < 0.35:
        return THREAD_LIMIT
    return random.randint(2, 12)


def _text(random: Random, profile: Profile, agent: str, times: int) -> str:
    """A question that lets an agent use its tool so many times, and others beside."""
    tools = [MAIN_TOOLS[agent]] * times
    batches = [tools[:3], tools[3:]]
    if agent == "support" and random.random() < 0.5:
        batches.append(["fetch"] * random.randint(1, 2))
    if agent == "researcher" and random.random() < 0.5:
        batches.append(["browse"] * (5 if profile == "busy" else random.randint(1, 4)))
    return "|".join(" ".join(batch) for batch in batches if batch)


def _answer(agent: str, messages: Sequence[BaseMessage]) -> AIMessage:
    """What the model answers: the calls that the question names, and then a text.

    What it used is not reported after a page was fetched: as if these answers were cut off.
    """
    asked = max(at for at, each in enumerate(messages) if isinstance(each, HumanMessage))
    answers = sum(isinstance(each, AIMessage) for each in messages[asked:])
    batches = [batch for batch in str(messages[asked].content).split("|") if batch]
    names = batches[answers].split() if answers < len(batches) else []
    last = messages[-1]
    fetched = isinstance(last, ToolMessage) and last.name == "fetch"
    drafts = names.count("draft")
    if drafts:
        model, used = DRAFTS, [drafts * each for each in _PER_DRAFT]
    elif agent == "writer":
        model, used = NOTES, [15, 5]
    else:
        model, used = ANSWERS, [800 + 150 * len(messages), 40 + 60 * len(names)]
    return AIMessage(
        "" if names else "That is all.",
        # Processes share the threads: ids must be unique beyond one.
        tool_calls=[
            ToolCall(name=name, args={}, id=f"call_{uuid4().hex}", type="tool_call")
            for name in names
        ],
        response_metadata={"model_name": model},
        usage_metadata=None
        if fetched
        else UsageMetadata(input_tokens=used[0], output_tokens=used[1], total_tokens=sum(used)),
    )


def _tool(name: str, seconds: float) -> Callable[[], Any]:
    async def work() -> str:
        await asyncio.sleep(seconds)
        return "done"

    work.__name__ = name
    work.__doc__ = f"Do a {name}."
    return work
