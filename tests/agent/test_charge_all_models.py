"""With `charge_all_models` a budget is charged all model runs of the agent's run, each once."""

import asyncio
import gc
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from langchain.agents import create_agent
from langchain.agents.middleware import (
    AgentMiddleware,
    LLMToolSelectorMiddleware,
    ModelFallbackMiddleware,
    ModelRetryMiddleware,
    SummarizationMiddleware,
)
from langchain_core.messages import AIMessage
from langchain_core.runnables import RunnableLambda
from langchain_core.tools import BaseTool, StructuredTool
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.types import Command, interrupt

from langchain_quota import (
    MemoryStore,
    Quota,
    QuotaMiddleware,
    TokenLimit,
    usage,
)
from langchain_quota.limits import Limit
from langchain_quota.middleware import _other_runs
from langchain_quota.testing import ScriptedChatModel
from tests.scene import CONFIG, Form, both_forms
from tests.signals import Signals
from tests.stores import FickleStore

TOTAL = "model.total_tokens"
ASKED: Any = {"messages": [("user", "Hi!")]}
MANY = 10**6


class ProviderError(Exception):
    """The model's provider fails."""


def answer(tokens: int, *calls: str, text: str = "Hello.") -> AIMessage:
    """An answer that has cost so many tokens."""
    used: Any = {"input_tokens": tokens - 1, "output_tokens": 1, "total_tokens": tokens}
    called = [{"name": name, "args": {}, "id": f"{name}-{tokens}"} for name in calls]
    return AIMessage(text, usage_metadata=used, tool_calls=called)


def says(*tokens: int, **options: Any) -> ScriptedChatModel:
    """A model whose answers cost so many tokens, one after the other."""
    return ScriptedChatModel(script=[*map(answer, tokens)], **options)


def tool(name: str, run: Callable[[], object], arun: Callable[[], Awaitable[object]]) -> BaseTool:
    """A tool of both forms."""

    def do() -> str:
        return str(run())

    async def ado() -> str:
        return str(await arun())

    return StructuredTool.from_function(do, ado, name=name, description=name)


def asking(name: str, model: ScriptedChatModel) -> BaseTool:
    """A tool that calls a model."""

    async def aask() -> str:
        return (await model.ainvoke("Hi!")).text

    return tool(name, lambda: model.invoke("Hi!").text, aask)


def delegating(name: str, agent: Any, config: Any = None) -> BaseTool:
    """A tool that asks an agent."""

    async def aask() -> object:
        return (await agent.ainvoke(ASKED, config))["messages"][-1].text

    return tool(name, lambda: agent.invoke(ASKED, config)["messages"][-1].text, aask)


class Family:
    """Agents under budgets, on one thread, with one store or none.

    Args:
        signals: Where what happens is made visible.
        form: Which hooks run.
        kind: The middleware.
        store: The store.
    """

    def __init__(
        self,
        signals: Signals,
        form: Form = "sync",
        kind: type[QuotaMiddleware[Any, Any]] = QuotaMiddleware,
        store: Any = None,
    ) -> None:
        self.signals = signals
        self.form = form
        self.kind = kind
        self.store = store

    def quota(self, *limits: Limit, **options: Any) -> Any:
        given = limits or (TokenLimit(run_limit=MANY, thread_limit=MANY),)
        return self.kind(
            given,
            **{"charge_all_models": True, "store": self.store, **options},
            telemetry=self.signals.telemetry,
        )

    def agent(self, script: Any, *tools: BaseTool, quota: Any = None, **options: Any) -> Any:
        beside = options.pop("beside", [])
        before = options.pop("before", [])
        return create_agent(
            ScriptedChatModel(script=script),
            tools,
            middleware=[*before, quota or self.quota(), *beside],
            checkpointer=InMemorySaver(),
            **options,
        )

    async def run(self, agent: Any, given: Any = ASKED, config: Any = CONFIG) -> Any:
        if self.form == "sync":
            return agent.invoke(given, config)
        return await agent.ainvoke(given, config)

    def spent(self, agent: Any) -> tuple[int, int]:
        """What the thread and its newest run have used, as their state has it."""
        used = usage(agent.get_state(CONFIG))
        return used.spent.get(TOTAL, 0), used.run_spent.get(TOTAL, 0)

    def kept(self) -> dict[str, int]:
        """What the store counts, by dimension."""
        return {each.key.split(":")[1]: each.used for each in self.store.usages() if each.used}


def spent_by_agent(signals: Signals) -> dict[str, float]:
    """What the metrics say was spent, by agent, of the limit `tokens`."""
    found: dict[str, float] = {}
    for family in signals.registry.collect():
        for sample in family.samples:
            if sample.name == "langchain_quota_spent_tokens_total":
                agent = sample.labels["agent"]
                found[agent] = found.get(agent, 0) + sample.value
    return found


async def test_agents_at_once_in_one_root_run(signals: Signals) -> None:
    """Agents that a plain runnable starts at once are each charged what is below themselves."""
    family = Family(signals, "async")
    agents = [family.agent([answer(5, "ask"), answer(9)], asking("ask", says(n))) for n in (30, 70)]

    async def both(_: Any) -> None:
        await asyncio.gather(*map(family.run, agents))

    await RunnableLambda(both).ainvoke(None)

    assert [family.spent(each)[1] for each in agents] == [44, 84]


class Behind(AgentMiddleware):
    """Calls a model behind the last hook of the run."""

    def __init__(self, tokens: int) -> None:
        super().__init__()
        self.model = ScriptedChatModel(script=lambda _: answer(tokens))

    def after_agent(self, state: Any, runtime: Any) -> None:
        self.model.invoke("Hi!")

    async def aafter_agent(self, state: Any, runtime: Any) -> None:
        await self.model.ainvoke("Hi!")


@both_forms
async def test_what_follows_the_last_hook(signals: Signals, form: Form) -> None:
    """It is made visible at once, and charged to the thread with its next run."""
    family = Family(signals, form, store=MemoryStore())
    limit = TokenLimit(thread_limit=100, quotas=[Quota(MANY, per="global")])
    agent = family.agent([answer(9), answer(3)], quota=family.quota(limit), beside=[Behind(91)])

    await family.run(agent)
    assert spent_by_agent(signals) == {"unnamed": 100}
    assert family.spent(agent) == (9, 9)
    result = await family.run(agent)

    assert result["messages"][-1].text == "Token limits exceeded: thread limit (100/100 tokens)"
    assert family.spent(agent) == (100, 0)
    assert family.kept() == {"thread": 100 + 91, "global": 100 + 91}


@both_forms
@pytest.mark.parametrize("in_memory", [True, False])
async def test_what_a_store_has_when_a_run_ends(
    *, in_memory: bool, signals: Signals, form: Form
) -> None:
    """The store has all use; if it is asked over a network, with the next request at the latest."""
    store = MemoryStore()
    family = Family(signals, form, store=store if in_memory else FickleStore(store))
    quota = family.quota(TokenLimit(thread_limit=MANY))
    agent = family.agent([answer(9), answer(3)], quota=quota, beside=[Behind(91)])

    for before, used in ((0, 9), (100, 3)):
        if form == "sync":
            await asyncio.to_thread(agent.invoke, ASKED, CONFIG)
        else:
            await family.run(agent)
        waits = family.kept()["thread"] == before + used
        assert waits or family.kept() == {"thread": before + used + 91}
        assert not (waits and in_memory)


@both_forms
@pytest.mark.parametrize("nested", [False, True])
async def test_a_run_that_is_resumed(*, nested: bool, signals: Signals, form: Form) -> None:
    """What a tool's models use before and after an interrupt is charged, also behind a failure."""
    family = Family(signals, form)
    asks = asking("ask", ScriptedChatModel(script=lambda _: answer(10)))

    def human() -> str:
        asks.invoke({})
        found = interrupt("May I?")
        asks.invoke({})
        return str(found)

    async def ahuman() -> str:
        await asks.ainvoke({})
        found = interrupt("May I?")
        await asks.ainvoke({})
        return str(found)

    steps = [answer(5, "human"), answer(3)]
    if nested:
        of_run = family.quota(TokenLimit(run_limit=MANY))
        child = family.agent(steps, tool("human", human, ahuman), quota=of_run)
        agent = family.agent([answer(1, "child"), answer(1)], delegating("child", child))
    else:
        agent = family.agent(steps, tool("human", human, ahuman))

    await family.run(agent)
    await family.run(agent, Command(resume="Yes."))

    # The tool runs from its beginning again.
    total = 8 + 3 * 10 + 2 * nested
    assert family.spent(agent) == (total, total)


async def test_a_run_that_another_worker_goes_on_with(signals: Signals) -> None:
    """It is charged what its first node uses, before any hook of it runs there."""
    family, fails, saver = Family(signals, "async"), [True], InMemorySaver()
    model = ScriptedChatModel(script=lambda _: answer(10))

    async def fail() -> str:
        await model.ainvoke("Hi!")
        if fails.pop() if fails else False:
            raise ProviderError
        return "done"

    def worker(*script: AIMessage) -> Any:
        agent = family.agent([*script], tool("fail", str, fail))
        agent.checkpointer = saver
        return agent

    with pytest.raises(ProviderError):
        await family.run(worker(answer(5, "fail")))
    second = worker(answer(3))
    await family.run(second, None)

    # Without a store it does not know what the first one has used last.
    assert family.spent(second) == (18, 18)


class Gated(ScriptedChatModel):
    """A model that answers when the test lets it."""

    started: Any = None
    goes_on: Any = None

    async def _agenerate(self, *given: Any, **more: Any) -> Any:
        self.started.set()
        await self.goes_on.wait()
        return self._generate(*given, **more)


def gated(tokens: int) -> Gated:
    return Gated(script=[answer(tokens)], started=asyncio.Event(), goes_on=asyncio.Event())


async def test_background_tasks(signals: Signals) -> None:
    """What a tool leaves running is charged if it ends before the run does, or not at all."""
    family = Family(signals, "async", store=MemoryStore())
    model, later, tasks = gated(30), gated(500), list[asyncio.Task[Any]]()

    async def start() -> str:
        tasks.extend(asyncio.create_task(each.ainvoke("Hi!")) for each in (model, later))
        return "started"

    async def wait() -> str:
        model.goes_on.set()
        return str((await tasks[0]).text)

    script = [answer(5, "start"), answer(4, "wait"), answer(3), answer(2)]
    agent = family.agent(script, tool("start", str, start), tool("wait", str, wait))
    await family.run(agent)
    assert family.spent(agent) == (42, 42)
    later.goes_on.set()
    await tasks[1]
    assert spent_by_agent(signals) == {"unnamed": 42}
    await family.run(agent)

    assert family.spent(agent) == (44, 2)
    assert family.kept()["thread"] == 44


@pytest.mark.parametrize("whole", [True, False])
async def test_what_is_cancelled(*, whole: bool, signals: Signals) -> None:
    """A cancelled call of a tool's model is charged an estimate, to the run or to the next one."""
    family, model = Family(signals, "async", store=MemoryStore()), gated(30)

    async def impatient() -> str:
        running = asyncio.create_task(model.ainvoke("Hi!"))
        if whole:
            await running
        await asyncio.wait_for(model.started.wait(), 60)
        running.cancel()
        await asyncio.wait([running])
        return "gave up"

    agent = family.agent([answer(5, "impatient"), answer(3)], tool("impatient", str, impatient))
    if whole:
        running = asyncio.create_task(family.run(agent))
        await asyncio.wait_for(model.started.wait(), 60)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert spent_by_agent(signals)["unnamed"] > 5
        await family.run(agent)
    else:
        await family.run(agent)

    estimate = family.spent(agent)[0] - 8
    assert 0 < estimate < 30
    assert family.kept()["thread"] == 8 + estimate
    assert (
        signals.value(
            "langchain_quota_model_runs_total", agent="unnamed", model="unnamed", usage="estimated"
        )
        == 1
    )


def test_a_long_root_run(signals: Signals, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a root run keeps of agents that have ended is bounded, however many it starts."""
    monkeypatch.setattr(_other_runs, "MAX_ENDED", 100)
    monkeypatch.setattr(_other_runs, "MAX_RECENT", 10)
    family = Family(signals)
    model = ScriptedChatModel(script=lambda _: answer(1), keep_calls=0)
    quota = family.quota(TokenLimit(run_limit=MANY))
    agent = create_agent(model, [asking("ask", model)], middleware=[quota])

    def kept() -> int:
        gc.collect()
        modules = [str(type(each).__module__) for each in gc.get_objects()]
        # If an earlier test has switched the count of unjudged calls on, it has a bound of its own.
        ours = [each for each in modules if each.startswith("langchain_quota.middleware.")]
        return sum(not each.endswith("._unjudged") for each in ours)

    def work(_: Any) -> list[int]:
        found = []
        for _ in range(3):
            for _ in range(30):
                agent.invoke(ASKED)
            found.append(kept())
        return found

    _, second, third = RunnableLambda(work).invoke(None)
    assert third <= second


@both_forms
async def test_streams(signals: Signals, form: Form) -> None:
    """A streamed answer in a tool is charged once, also where the run itself is streamed."""
    family = Family(signals, form)
    model = says(30, 50)

    def read() -> str:
        return "".join(each.text for each in model.stream("Hi!"))

    async def aread() -> str:
        return "".join([each.text async for each in model.astream("Hi!")])

    agent = family.agent([answer(5, "read"), answer(3)], tool("read", read, aread))
    if form == "sync":
        assert [*agent.stream(ASKED, CONFIG, stream_mode="messages")]
    else:
        assert [each async for each in agent.astream(ASKED, CONFIG, stream_mode="messages")]

    assert family.spent(agent) == (38, 38)


@both_forms
async def test_abandoned_streams(signals: Signals, form: Form) -> None:
    """A stream that a tool leaves is charged an estimate of what had arrived."""
    family = Family(signals, form)
    model = says(3000)

    def read() -> str:
        stream = model.stream("Hi!")
        first = next(stream).text
        stream.close()  # type: ignore[attr-defined]
        return first

    async def aread() -> str:
        stream = model.astream("Hi!")
        first = (await anext(stream)).text
        await stream.aclose()  # type: ignore[attr-defined]
        return first

    agent = family.agent([answer(5, "read"), answer(3)], tool("read", read, aread))
    await family.run(agent)

    assert family.spent(agent)[0] > 8


@both_forms
async def test_middlewares_of_langchain(signals: Signals, form: Form) -> None:
    """Summaries, choices of tools, retries and fallbacks are charged, each once."""
    family = Family(signals, form)

    class Selector(ScriptedChatModel):
        def with_structured_output(self, *_: Any, **__: Any) -> Any:
            return self | (lambda _: {"tools": ["a"]})

    selector = Selector(script=lambda _: answer(7))
    summary = ScriptedChatModel(script=lambda _: answer(100))
    fallback = ScriptedChatModel(script=lambda _: answer(1000))
    tools = [tool(name, str, asyncio.Event().wait) for name in "abc"]
    agent = family.agent(
        [answer(10**4), ProviderError(), ProviderError()],
        *tools,
        before=[
            SummarizationMiddleware(summary, trigger=("messages", 3), keep=("messages", 1)),
            LLMToolSelectorMiddleware(model=selector, max_tools=1),
        ],
        beside=[
            ModelFallbackMiddleware(fallback),
            ModelRetryMiddleware(max_retries=1, initial_delay=0, jitter=False, on_failure="error"),
        ],
    )

    await family.run(agent)
    await family.run(agent)

    assert [len(each.calls) for each in (selector, summary, fallback)] == [2, 1, 1]
    assert family.spent(agent) == (11114, 1107)
