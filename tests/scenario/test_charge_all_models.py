"""With `charge_all_models`, and in trees of agents, all that models report is charged, once."""

import asyncio
from typing import Any

import pytest
from langchain.agents import middleware as theirs
from langgraph.types import interrupt

from langchain_quota import MemoryStore, Quota, TokenLimit
from langchain_quota.testing import ScriptedChatModel
from tests.scene import Form, Scene, both_forms, delegate, either
from tests.telemetry import Signals
from tests.tokens import TOTAL, During, ProviderError, answer, asking, spent, spent_by_agent, tool

MANY = 10**6
OF_THREAD = TokenLimit(run_limit=MANY, thread_limit=MANY)


def says(*tokens: int, **options: Any) -> ScriptedChatModel:
    """A model whose answers cost so many tokens, one after the other."""
    return ScriptedChatModel(script=[*map(answer, tokens)], **options)


def always(tokens: int, **options: Any) -> ScriptedChatModel:
    """A model whose answers cost so many tokens each."""
    return ScriptedChatModel(script=lambda _: answer(tokens), **options)


def charged(
    signals: Signals, script: Any, *tools: Any, limit: Any = OF_THREAD, **more: Any
) -> Scene:
    """An agent whose budget is charged all models."""
    return Scene(signals, script, [limit], tools=tools, **{"charge_all_models": True, **more})


def kept(store: Any) -> dict[str, int]:
    """What a store counts, by dimension."""
    return {each.key.split(":")[1]: each.used for each in store.usages() if each.used}


@either
@both_forms
async def test_models_of_tools(signals: Signals, kind: Any, form: Form) -> None:
    """What parallel tools' models use is charged before the next check, and refuses a call."""
    tools = asking("small", says(30)), asking("large", says(70))
    script = [answer(5, "small", "large"), answer(9)]
    limit = TokenLimit(run_limit=100)
    scene = await charged(signals, script, *tools, limit=limit, kind=kind, form=form).played()
    assert scene.last_text() == "Token limits exceeded: run limit (105/100 tokens)"
    assert spent(scene) == (105, 105)


async def test_a_shared_key_is_charged_once(signals: Signals) -> None:
    """What two agents' budgets see is charged to their shared keys once, to their own by each."""
    quotas = [Quota(MANY, per="global"), Quota(MANY, per="root_run")]
    given: Any = {"limit": TokenLimit(run_limit=MANY, quotas=quotas, reserve=50)}
    given["store"] = store = MemoryStore()
    leaf = charged(signals, [answer(7)], **given).agent
    script = [answer(20, "leaf"), answer(3)]
    child = charged(signals, script, delegate(leaf, "leaf"), charge_all_models=False, **given).agent
    script = [answer(5, "child"), answer(9)]
    await charged(signals, script, delegate(child, "child"), **given).play()
    assert sorted(each.used for each in store.usages(f"{TOTAL}:run:*")) == [7, 23, 44]
    found = kept(store)
    assert (found["global"], found["root_run"]) == (44, 44)


class Judge(theirs.AgentMiddleware):
    """Calls a model in every hook."""

    def __init__(self, model: ScriptedChatModel) -> None:
        super().__init__()
        self.model = model

    async def abefore_agent(self, state: Any, runtime: Any) -> None:
        await self.model.ainvoke("Hi!")

    abefore_model = aafter_model = aafter_agent = abefore_agent

    async def awrap_model_call(self, request: Any, handler: Any) -> Any:
        await self.model.ainvoke("Hi!")
        return await handler(request)

    awrap_tool_call = awrap_model_call


async def test_middlewares_of_all_kinds(signals: Signals) -> None:
    """What middlewares call is charged: in nodes of their own, around calls, before and behind."""
    judge, store = always(1), MemoryStore()
    # LangChain tells two middlewares apart by their classes.
    other = type("OtherJudge", (Judge,), {})
    items: list[Any] = [Judge(judge), OF_THREAD, other(judge)]
    tools = [asking("ask", says(50))]
    script = [answer(100, "ask"), answer(100), answer(100)]
    options: Any = {"store": store, "charge_all_models": True}
    scene = await Scene(signals, script, items, tools=tools, **options).played()
    calls = 2 * (1 + 2 * 3 + 1 + 1)
    assert len(judge.calls) == calls
    assert spent_by_agent(signals) == {"unnamed": 250 + calls}
    assert scene.metric("tokens", "allowed") == 2
    # The state has what ended before the last model call did; the rest goes with the next run.
    assert spent(scene)[0] == 250 + calls - 4
    assert kept(store)["thread"] == 250 + calls
    await scene.play()
    calls += 2 * (1 + 3 + 1)
    assert spent(scene)[0] == 350 + calls - 4
    assert kept(store)["thread"] == 350 + calls


async def test_a_run_that_fails(signals: Signals) -> None:
    """What a tool's model has used is charged, though the tool then ends the run by an error."""
    model, store = says(70), MemoryStore()

    async def fail() -> str:
        await model.ainvoke("Hi!")
        raise ProviderError

    scene = charged(signals, [answer(5, "fail"), answer(3)], tool("fail", str, fail), store=store)
    with pytest.raises(ProviderError):
        await scene.play()
    assert spent_by_agent(signals) == {"unnamed": 75}
    await scene.play()
    assert spent(scene) == (78, 3)
    assert kept(store)["thread"] == 78


@pytest.mark.parametrize("nested", [False, True])
async def test_a_run_that_is_resumed(*, nested: bool, signals: Signals) -> None:
    """What a tool's models use between interrupts is charged, though a run ends in the tool."""
    model = always(10)

    async def human() -> str:
        for question in ("May I?", "Sure?"):
            await model.ainvoke("Hi!")
            interrupt(question)
        return str(await model.ainvoke("Hi!"))

    steps, asks = [answer(5, "human"), answer(3)], tool("human", str, human)
    options: Any = {"limit": TokenLimit(run_limit=MANY), "checkpointer": True} if nested else {}
    scene = charged(signals, steps, asks, **options)
    if nested:
        child = delegate(scene.agent, "child")
        scene = charged(signals, [answer(1, "child"), answer(1)], child)
    await scene.play()
    for _ in range(2):
        await scene.resume("Yes.")
    # The tool runs from its beginning again.
    total = 8 + (1 + 2 + 3) * 10 + 2 * nested
    assert spent(scene) == (total, total)


class Gated(ScriptedChatModel):
    """A model that answers when the test lets it."""

    goes_on: Any = None

    async def _agenerate(self, *given: Any, **more: Any) -> Any:
        await self.goes_on.wait()
        return self._generate(*given, **more)


async def test_background_tasks(signals: Signals) -> None:
    """What a tool leaves running is charged if it ends before the run does, or not at all."""
    model, later = (Gated(script=[answer(each)], goes_on=asyncio.Event()) for each in (30, 500))
    tasks, store = list[asyncio.Task[Any]](), MemoryStore()

    async def start() -> str:
        tasks.extend(asyncio.create_task(each.ainvoke("Hi!")) for each in (model, later))
        return "started"

    async def wait() -> str:
        model.goes_on.set()
        return str((await tasks[0]).text)

    script = [answer(5, "start"), answer(4, "wait"), answer(3), answer(2)]
    tools = tool("start", str, start), tool("wait", str, wait)
    scene = await charged(signals, script, *tools, store=store).played()
    assert spent(scene) == (42, 42)
    later.goes_on.set()
    await tasks[1]
    assert spent_by_agent(signals) == {"unnamed": 42}
    await scene.play()
    assert spent(scene) == (44, 2)
    assert kept(store)["thread"] == 44


@both_forms
async def test_an_agent_within_a_model_call(signals: Signals, form: Form) -> None:
    """What an agent uses within a call of another one is charged once to each budget they have."""
    store = MemoryStore()
    limit = TokenLimit(quotas=[Quota(MANY, per="root_run"), Quota(MANY, per="agent")])
    options: Any = {"store": store, "form": form}
    child = Scene(signals, always(7), [limit], name="child", checkpointer=None, **options).agent
    asks = During(lambda: child.invoke({"messages": [("user", "Go!")]}), before=True)
    script = [answer(100, "search"), answer(101)]
    await Scene(signals, script, [limit, asks], name="parent", **options).play()
    found = {each.key.partition(":")[2]: each.used for each in store.usages()}
    assert (found["agent:child"], found["agent:parent"]) == (14, 215)
    assert kept(store)["root_run"] == 215
