"""Each branch of a thread is charged what was used on its way, in any process.

A branch begins where a run is repeated from one of its older checkpoints.
"""

from typing import Any

import pytest
from langchain.agents import create_agent
from langchain.agents.middleware import AgentMiddleware
from langchain_core.messages import AIMessage
from langchain_core.tools import StructuredTool
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.types import StateSnapshot

from langchain_quota import InlineQuotaMiddleware, QuotaMiddleware, TokenLimit, usage
from langchain_quota.testing import ScriptedChatModel
from tests.agent.conftest import Form, both_forms
from tests.agent.rules import CONFIG
from tests.signals import Signals, needs_inline

TOTAL = "model.total_tokens"
ASKED: Any = {"messages": [("user", "Hi!")]}
EITHER = pytest.mark.parametrize(
    "kind", [QuotaMiddleware, pytest.param(InlineQuotaMiddleware, marks=needs_inline)]
)


class ProviderError(Exception):
    """The model's provider fails."""


class Fails(AgentMiddleware):
    """Fails after paid answers, for the requests in a list."""

    def __init__(self, *fails: bool) -> None:
        super().__init__()
        self.fails = [*fails]

    async def awrap_model_call(self, request: Any, handler: Any) -> Any:
        response = await handler(request)
        if self.fails and self.fails.pop(0):
            raise ProviderError
        return response


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


@both_forms
@EITHER
async def test_a_branch_has_what_came_before_it(signals: Signals, kind: Any, form: Form) -> None:
    """A branch behind the first of three calls is charged that one and its own."""
    script = [answer(10, "search"), answer(20, "search"), answer(400), answer(3)]
    agent = agent_of(quota_of(signals, kind), *script)
    await (agent.ainvoke(ASKED, CONFIG) if form == "async" else _sync(agent, ASKED, CONFIG))
    assert spent(agent) == 430

    older = before_call(agent, 1).config
    await (agent.ainvoke(None, older) if form == "async" else _sync(agent, None, older))

    assert spent(agent) == 13


async def _sync(agent: Any, given: Any, config: Any) -> None:
    agent.invoke(given, config)


@both_forms
async def test_an_answer_that_is_repeated(signals: Signals, form: Form) -> None:
    """An answer that is made again is not refused for the one that it replaces."""
    agent = agent_of(quota_of(signals), answer(1000), answer(3))
    await (agent.ainvoke(ASKED, CONFIG) if form == "async" else _sync(agent, ASKED, CONFIG))
    assert spent(agent) == 1000

    older = before_call(agent, 0).config
    await (agent.ainvoke(None, older) if form == "async" else _sync(agent, None, older))

    assert spent(agent) == 3


async def test_a_failed_call_belongs_to_its_branch(signals: Signals) -> None:
    """A call that has failed is charged where the run goes on behind it, and nowhere else."""
    fails = Fails(False, False, True)
    script = [answer(10, "search"), answer(20, "search"), answer(400), answer(3), answer(5)]
    agent = agent_of(quota_of(signals), *script, beside=[fails])
    with pytest.raises(ProviderError):
        await agent.ainvoke(ASKED, CONFIG)
    failed = agent.get_state(CONFIG).config

    await agent.ainvoke(None, before_call(agent, 1).config)
    assert spent(agent) == 13
    await agent.ainvoke(None, failed)

    assert spent(agent) == 435


@EITHER
async def test_calls_that_fail_one_after_the_other(signals: Signals, kind: Any) -> None:
    """A run that goes on behind two failed calls is charged both."""
    script = [answer(10), answer(20), answer(3)]
    agent = agent_of(quota_of(signals, kind), *script, beside=[Fails(True, True)])
    for given in (ASKED, None):
        with pytest.raises(ProviderError):
            await agent.ainvoke(given, CONFIG)

    await agent.ainvoke(None, CONFIG)

    assert spent(agent) == 33


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
