"""With `charge_all_models` in trees that other packages build: who is charged what."""

from typing import Any

import pytest
from langchain.agents import create_agent
from langchain_core.messages import AIMessage
from langgraph.checkpoint.memory import InMemorySaver

from langchain_quota import MemoryStore, Quota, QuotaMiddleware, TokenLimit, usage, with_limits
from langchain_quota.testing import ScriptedChatModel
from tests.agent.conftest import Form, both_forms
from tests.agent.rules import CONFIG
from tests.signals import Signals

# Among the oldest versions there are none.
deepagents = pytest.importorskip("deepagents")
langgraph_supervisor = pytest.importorskip("langgraph_supervisor")

TOTAL = "model.total_tokens"
MANY = 10**6
ASKED: Any = {"messages": [("user", "Go!")]}


def answer(tokens: int, *calls: tuple[str, dict[str, Any]]) -> AIMessage:
    """An answer that has cost so many tokens."""
    used: Any = {"input_tokens": tokens - 1, "output_tokens": 1, "total_tokens": tokens}
    called = [
        {"name": name, "args": args, "id": f"{name}-{tokens}-{n}"}
        for n, (name, args) in enumerate(calls)
    ]
    return AIMessage("Hello.", usage_metadata=used, tool_calls=called)


def task(name: str) -> tuple[str, dict[str, Any]]:
    return "task", {"description": "Find it!", "subagent_type": name}


async def run(form: Form, agent: Any) -> None:
    if form == "sync":
        agent.invoke(ASKED, CONFIG)
    else:
        await agent.ainvoke(ASKED, CONFIG)


def sub_agent(name: str, tokens: int, *middleware: Any) -> dict[str, Any]:
    return {
        "name": name,
        "description": "Finds.",
        "system_prompt": "Find it.",
        "model": ScriptedChatModel(script=lambda _: answer(tokens)),
        "middleware": [*middleware],
    }


@both_forms
@pytest.mark.filterwarnings("ignore:the sub-agents that the tool 'task'")
async def test_a_deep_agent(signals: Signals, form: Form) -> None:
    """Sub-agents at once, with and without budgets, are charged; a shared key is charged once."""
    store = MemoryStore()
    limit = TokenLimit(run_limit=MANY, quotas=[Quota(MANY, per="global")])

    def quota(**options: Any) -> Any:
        return QuotaMiddleware([limit], store=store, telemetry=signals.telemetry, **options)

    agent = deepagents.create_deep_agent(
        ScriptedChatModel(script=[answer(5, task("free"), task("held")), answer(3)]),
        middleware=[quota(charge_all_models=True)],
        subagents=[sub_agent("free", 100), sub_agent("held", 1000, quota())],
        checkpointer=InMemorySaver(),
    )

    await run(form, agent)

    assert usage(agent.get_state(CONFIG)).run_spent == {TOTAL: 1108}
    assert sorted(each.used for each in store.usages()) == [1000, 1108, 1108]


@both_forms
async def test_a_deep_agent_whose_sub_agents_have_the_same_limits(
    signals: Signals, form: Form
) -> None:
    """With `with_limits` all agents have the switch: each run has its own sum, the tree one."""
    store = MemoryStore()
    limit = TokenLimit(run_limit=MANY, quotas=[Quota(MANY, per="root_run")])
    quota: Any = QuotaMiddleware(
        [limit], store=store, charge_all_models=True, telemetry=signals.telemetry
    )
    agent = with_limits(deepagents.create_deep_agent, quota)(
        ScriptedChatModel(script=[answer(5, task("one"), task("two")), answer(3)]),
        subagents=[sub_agent("one", 100), sub_agent("two", 1000)],
        checkpointer=InMemorySaver(),
    )

    await run(form, agent)

    assert usage(agent.get_state(CONFIG)).run_spent == {TOTAL: 1108}
    runs = sorted(each.used for each in store.usages(f"{TOTAL}:run:*"))
    assert runs == [100, 1000, 1108]
    assert [each.used for each in store.usages(f"{TOTAL}:root_run:*")] == [1108]


@pytest.mark.filterwarnings("ignore:create_react_agent has been moved")
@both_forms
async def test_a_supervisor(signals: Signals, form: Form) -> None:
    """An agent under a supervisor is charged what is below it, and not what is beside it."""
    store = MemoryStore()
    limit = TokenLimit(run_limit=MANY, quotas=[Quota(MANY, per="root_run")])

    def ask() -> str:
        """Ask."""
        return ScriptedChatModel(script=[answer(10)]).invoke("Hi!").text

    def member(name: str, tokens: int) -> Any:
        quota: Any = QuotaMiddleware(
            [limit], store=store, charge_all_models=True, telemetry=signals.telemetry
        )
        script = [answer(tokens, ("ask", {})), answer(tokens)]
        model = ScriptedChatModel(script=script)
        return create_agent(model, [ask], middleware=[quota], name=name)

    graph = langgraph_supervisor.create_supervisor(
        [member("one", 100), member("two", 1000)],
        model=ScriptedChatModel(
            script=[answer(5, ("transfer_to_one", {})), answer(5, ("transfer_to_two", {})), "Bye."]
        ),
    ).compile(checkpointer=InMemorySaver())

    await run(form, graph)

    runs = sorted(each.used for each in store.usages(f"{TOTAL}:run:*"))
    assert runs == [210, 2010]
    assert [each.used for each in store.usages(f"{TOTAL}:root_run:*")] == [2220]
