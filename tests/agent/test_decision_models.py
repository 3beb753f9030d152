"""Decision models of LangChain 1.5, which answer middlewares: what sees these calls."""

from decimal import Decimal
from typing import Any

import pytest
from langchain.agents import create_agent
from langchain.agents.middleware import AgentMiddleware
from langchain_core.messages import AIMessage
from langgraph.checkpoint.memory import InMemorySaver
from prometheus_client import CollectorRegistry

from langchain_quota import (
    CostLimit,
    InlineQuotaMiddleware,
    MemoryStore,
    ModelCallLimit,
    ModelUsage,
    Price,
    Quota,
    QuotaMiddleware,
    Telemetry,
    TokenLimit,
    ToolCallLimit,
    UnknownPriceError,
    usage,
)
from langchain_quota.testing import ScriptedChatModel
from tests.scene import CONFIG, Form, both_forms, recording

# LangChain 1.5 has them, which needs langchain-core 1.8.
decisions = pytest.importorskip("langchain_core.decisions")
middlewares: Any = pytest.importorskip("langchain.agents.middleware")

pytestmark = [
    pytest.mark.skipif(
        not hasattr(middlewares, "AutoModeMiddleware"), reason="needs langchain 1.5"
    ),
    pytest.mark.filterwarnings("ignore:The middleware `ModelRouterMiddleware` is in beta"),
]

GO: dict[str, Any] = {"messages": [("user", "Go!")]}


class Decider(decisions.BaseDecisionModel):  # type: ignore[misc, name-defined]
    """Chooses the first label, and finds a call as risky as it is told; each answer: 30 tokens."""

    model: str = "decider-1"
    reports: bool = True
    fails: bool = False
    risk: float = 0.1
    asks: Any = None

    @property
    def _provider(self) -> str:
        return "acme"

    def _classify(self, state: Any, questions: Any) -> Any:
        if self.fails:
            raise TimeoutError
        if self.asks is not None:
            self.asks.invoke("Which one?")
        answers: dict[str, Any] = {}
        for name, question in questions.items():
            answers[name] = {"type": "noul", "noul": self.risk}
            if question.type == "choice":
                label = next(iter(question.criteria))
                chosen = {"choice": label, "probabilities": {label: 1.0}, "confidence": 1.0}
                answers[name] = {"type": "choice", **chosen}
        usage = {"input_tokens": 20, "output_tokens": 10} if self.reports else None
        return decisions.ClassifierResponse(model=self.model, answers=answers, usage=usage)


def used(tokens: int, *tools: str) -> AIMessage:
    calls = [{"name": name, "args": {}, "id": str(n)} for n, name in enumerate(tools)]
    usage: Any = {"input_tokens": tokens, "output_tokens": 0, "total_tokens": tokens}
    return AIMessage("" if tools else "done", tool_calls=calls, usage_metadata=usage)


def router(model: Any, decider: Any) -> Any:
    choices = {"small": middlewares.ModelChoice(model=model, criteria="Everything.")}
    return middlewares.ModelRouterMiddleware(
        choices=choices, instructions="Choose.", classifier=decider
    )


class Bench:
    """An agent whose middlewares ask decision models: once for the run, and once for its call."""

    def __init__(self, decider: Any = None) -> None:
        self.ran: list[str] = []
        self.registry = CollectorRegistry()
        self.telemetry = Telemetry(registry=self.registry, count_unjudged_calls=True)
        self.decider = decider or Decider()

    def agent(self, quota: Any) -> Any:
        model = ScriptedChatModel(script=[used(100, "search"), used(100)])
        auto = middlewares.AutoModeMiddleware(tools=["search"], classifier=self.decider)
        return create_agent(
            model,
            [recording("search", self.ran)],
            middleware=[quota, router(model, self.decider), auto],
            checkpointer=InMemorySaver(),
            name="boss",
        )

    def quota(self, *limits: Any, kind: Any = QuotaMiddleware, **options: Any) -> Any:
        return kind(limits, telemetry=self.telemetry, **options)

    def samples(self, name: str, *labels: str) -> dict[tuple[str, ...], float]:
        return {
            tuple(sample.labels[label] for label in labels): sample.value
            for family in self.registry.collect()
            for sample in family.samples
            if sample.name == name and sample.value
        }

    @property
    def unjudged(self) -> dict[tuple[str, ...], float]:
        """How many calls no limit judged, by agent and kind."""
        name = "langchain_quota_unjudged_calls_total"
        return self.samples(name, "agent", "kind")


async def run(agent: Any, form: Form = "async") -> Any:
    return agent.invoke(GO, CONFIG) if form == "sync" else await agent.ainvoke(GO, CONFIG)


async def spent(agent: Any, form: Form = "async") -> int:
    """The tokens that a run is charged."""
    await run(agent, form)
    return usage(agent.get_state(CONFIG)).run_spent["model.total_tokens"]


@both_forms
async def test_the_count_of_unjudged_calls(form: Form) -> None:
    """Each call of a decision model is counted as a model call that no limit judges."""
    bench = Bench()
    quota = bench.quota(ModelCallLimit(run_limit=9), ToolCallLimit(run_limit=9))

    await run(bench.agent(quota), form)

    assert bench.ran == ["search"]
    assert bench.unjudged == {("boss", "model"): 2}


@both_forms
@pytest.mark.parametrize("kind", [QuotaMiddleware, InlineQuotaMiddleware])
async def test_a_budget_of_all_models(kind: Any, form: Form) -> None:
    """A budget of all models is charged what decision models report; others are not."""
    bench = Bench()
    limit = TokenLimit(run_limit=10_000)

    own = await spent(bench.agent(bench.quota(limit, kind=kind)), form)
    whole = await spent(bench.agent(bench.quota(limit, kind=kind, charge_all_models=True)), form)

    assert (own, whole) == (200, 200 + 2 * 30)


async def test_a_budget_is_refused() -> None:
    """What decision models use ends a run at its budget: here before the second model call."""
    bench = Bench()
    quota = bench.quota(TokenLimit(run_limit=150), charge_all_models=True)

    assert await spent(bench.agent(quota)) == 100 + 2 * 30


async def test_no_report() -> None:
    """If a decision model reports no tokens, what it was asked and what it answers is estimated."""
    bench = Bench(Decider(reports=False))
    quota = bench.quota(TokenLimit(run_limit=10_000), charge_all_models=True)

    assert await spent(bench.agent(quota)) > 200


async def test_a_price() -> None:
    """A decision model costs what its price says, by the name of the model that has answered."""
    bench = Bench()
    prices = {"decider-1": Price(input="1000", output="1000")}
    limit = CostLimit(run_limit="10")
    quota = bench.quota(limit, prices=prices, unknown_price="allow", charge_all_models=True)
    agent = bench.agent(quota)

    await run(agent)

    microdollars = usage(agent.get_state(CONFIG)).run_spent["model.microdollars"]
    assert microdollars == 2 * 30 * 1000


async def test_a_failure() -> None:
    """A decision model that is cut off ends the run as without limits, and its use is estimated."""
    bench, store = Bench(), MemoryStore()
    limit = TokenLimit(quotas=[Quota(10_000, per="thread")])
    quota = bench.quota(limit, store=store, charge_all_models=True)
    auto = middlewares.AutoModeMiddleware(tools=["search"], classifier=Decider(fails=True))
    model = ScriptedChatModel(script=[used(100, "search")])
    agent = create_agent(model, [recording("search", bench.ran)], middleware=[quota, auto])

    with pytest.raises(TimeoutError):
        await run(agent)

    (charged,) = store.usages()
    assert charged.used > 100
    assert bench.ran == []


async def test_a_decision_model_on_a_chat_model() -> None:
    """If a decision model asks a chat model, the tokens of that one are charged, and only once."""
    bench = Bench(Decider(asks=ScriptedChatModel(script=lambda messages: used(7))))
    quota = bench.quota(TokenLimit(run_limit=10_000), charge_all_models=True)

    assert await spent(bench.agent(quota)) == 200 + 2 * 7


class Deciding(AgentMiddleware[Any, Any, Any]):
    """Asks a decision model around each model call."""

    def __init__(self, decider: Any) -> None:
        super().__init__()
        self.decider = decider

    async def awrap_model_call(self, request: Any, handler: Any) -> Any:
        question = decisions.Noul(instructions="Is it hard?")
        await self.decider.ainvoke({"state": "It is.", "questions": {"hard": question}})
        return await handler(request)


@pytest.mark.parametrize("options", [{}, {"charge_all_models": True}])
async def test_within_the_agents_call(options: dict[str, Any]) -> None:
    """What a decision model uses within the agent's own model call is charged with that call."""
    bench = Bench()
    quota = bench.quota(TokenLimit(run_limit=10_000), **options)
    model = ScriptedChatModel(script=[used(100)])
    saver = InMemorySaver()
    agent = create_agent(model, middleware=[quota, Deciding(bench.decider)], checkpointer=saver)

    assert await spent(agent) == 100 + 30


async def test_no_price_within_the_agents_call() -> None:
    """Within the agent's own call, a decision model without a price is not asked."""
    bench = Bench()

    def prices(usage: ModelUsage) -> Decimal | None:
        return None if "decider-1" in usage.models else Decimal(1)

    quota = bench.quota(CostLimit(run_limit="10"), prices=prices)
    model = ScriptedChatModel(script=[used(100)])
    agent = create_agent(model, middleware=[quota, Deciding(bench.decider)])

    with pytest.raises(UnknownPriceError, match="decider-1"):
        await run(agent)


async def test_a_call_that_is_found_risky() -> None:
    """A tool call that `AutoModeMiddleware` blocks was let through before, and counts."""
    bench = Bench(Decider(risk=0.9))
    agent = bench.agent(bench.quota(ToolCallLimit("search", run_limit=5)))

    await run(agent)

    assert bench.ran == []
    assert usage(agent.get_state(CONFIG)).run_tools == {"search": 1}
