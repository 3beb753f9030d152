"""Budgets of tokens and money: model calls are charged what they have used, and refused at 0."""

from decimal import Decimal
from typing import Any

import pytest
from langchain.agents import create_agent
from langchain.agents.middleware import (
    ModelFallbackMiddleware,
    ModelRetryMiddleware,
)
from langchain_core.caches import InMemoryCache
from langchain_core.language_models.base import LangSmithParams
from langchain_core.messages import AIMessage
from langchain_core.tools import tool
from langgraph.checkpoint.memory import InMemorySaver

from langchain_quota import (
    CostLimit,
    QuotaMiddleware,
    QuotaWarning,
    TokenLimit,
    usage,
)
from langchain_quota.errors import UnknownPriceError
from langchain_quota.limits import Limit
from langchain_quota.model_usage import ModelUsage, TokenKind
from langchain_quota.testing import ScriptedChatModel
from tests.scene import CONFIG, Form, Middleware, Scene, both_forms
from tests.signals import Signals

TOTAL = "model.total_tokens"


class ProviderError(Exception):
    """The model's provider fails."""


def answer(tokens: int, *calls: str, text: str = "Hello.") -> AIMessage:
    """An answer that has cost so many tokens, one of them of output."""
    used: Any = {"input_tokens": tokens - 1, "output_tokens": 1, "total_tokens": tokens}
    called = [{"name": name, "args": {}, "id": f"{name}-{tokens}"} for name in calls]
    return AIMessage(text, usage_metadata=used, tool_calls=called)


def scene_of(
    signals: Signals,
    script: Any,
    *limits: Limit,
    kind: type[QuotaMiddleware[Any, Any]] = QuotaMiddleware,
    beside: list[Middleware] | None = None,
    form: Form = "async",
    prices: Any = None,
    **options: Any,
) -> Scene:
    quota = kind(limits, telemetry=signals.telemetry, prices=prices)
    return Scene(signals, script, [quota, *(beside or [])], form=form, **options)


def spent(scene: Scene, counter: str = TOTAL) -> tuple[int, int]:
    """What the thread and its newest run have used."""
    used = usage(scene.agent.get_state(CONFIG))
    return used.spent.get(counter, 0), used.run_spent.get(counter, 0)


def last(scene: Scene) -> str:
    return str(scene.state()["messages"][-1].text)


async def test_money_is_counted_in_millionths(signals: Signals) -> None:
    """What a call costs is charged by the prices given, rounded up once, and shown in dollars."""
    prices = {60: Decimal("0.0000001"), 40: Decimal("0.5")}
    scene = scene_of(
        signals,
        [answer(60, "search"), answer(40, "search")],
        CostLimit(run_limit="0.50"),
        prices=lambda used: prices.get(used.total_tokens, Decimal(0)),
    )

    await scene.play()

    assert spent(scene, "model.microdollars") == (500_001, 500_001)
    assert last(scene) == "Cost limits exceeded: run limit ($0.500001/$0.50)"


async def test_an_answer_from_the_response_cache_costs_nothing(signals: Signals) -> None:
    """LangChain's response cache repeats the usage of an answer, which is not paid again."""
    model = ScriptedChatModel(script=[answer(60)], cache=InMemoryCache())
    quota = QuotaMiddleware([TokenLimit(run_limit=100)], telemetry=signals.telemetry)
    agent = create_agent(model, middleware=[quota], checkpointer=InMemorySaver())
    asked: Any = {"messages": [("user", "Hi!")]}

    for thread, tokens in (("1", 60), ("2", 0)):
        config: Any = {"configurable": {"thread_id": thread}}
        await agent.ainvoke(asked, config)
        assert usage(await agent.aget_state(config)).spent.get(TOTAL, 0) == tokens
    assert len(model.calls) == 1


IMAGE = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{'A' * 10_000}"}}


@pytest.mark.parametrize(
    ("asked", "said", "tokens"),
    [
        pytest.param("", "x" * 3000, (0, 1000), id="letters"),
        pytest.param("x" * 300_000, "7" * 100_000, (100_000, 33_334), id="long"),
        pytest.param("", "你好世界", (0, 4), id="Chinese"),
        pytest.param("", "😀" * 3, (0, 4), id="emoji"),
        pytest.param([IMAGE], "Yes.", (1000, 2), id="image"),
        pytest.param(
            [IMAGE, {"type": "text", "text": "What?"}], "", (1002, 0), id="image and text"
        ),
    ],
)
async def test_unreported_tokens_are_a_third_of_the_bytes(
    signals: Signals, asked: Any, said: str, tokens: tuple[int, int]
) -> None:
    """A model that reports nothing is charged a token for three bytes, marked as estimated."""
    kinds: list[TokenKind] = ["input", "output"]
    limits = [TokenLimit(run_limit=10**6, tokens=each) for each in kinds]
    quota = QuotaMiddleware(limits, telemetry=signals.telemetry)
    model = ScriptedChatModel(script=[said])
    agent: Any = create_agent(model, middleware=[quota], checkpointer=InMemorySaver())

    with pytest.warns(QuotaWarning, match="reports no usage"):
        await agent.ainvoke({"messages": [("user", asked)]}, CONFIG)

    used = usage(agent.get_state(CONFIG)).run_spent
    assert (used["model.input_tokens"], used["model.output_tokens"]) == tokens
    runs, labels = "langchain_quota_model_runs_total", {"agent": "unnamed", "model": "unnamed"}
    assert signals.value(runs, **labels, usage="estimated") == 1
    assert not signals.value(runs, **labels, usage="reported")


async def test_the_last_answer_has_what_is_kept_for_it(signals: Signals) -> None:
    """When only what is kept is left, the next request says that it is the last one."""
    limit = TokenLimit(run_limit=100, exit_behavior="finalize", keep=30)
    scene = scene_of(signals, [answer(69, "search"), answer(1, "search"), answer(20)], limit)

    await scene.play()

    told = ["last model call" in each.messages[-1].text for each in scene.model.calls]
    assert told == [False, False, True]
    assert (last(scene), spent(scene)) == ("Hello.", (90, 90))


async def test_a_last_answer_that_says_nothing_is_replaced(signals: Signals) -> None:
    """A last call that asks for tools ends the run with a text that says what is used up."""
    limit = TokenLimit(run_limit=100, exit_behavior="finalize", keep=30)
    scene = scene_of(signals, [answer(80, "search"), answer(10, "search", text="")], limit)

    await scene.play()

    assert last(scene).endswith(
        "Token limits exceeded: run limit (80/100 tokens, the rest was kept for the last answer)"
    )
    assert len(scene.model.calls) == 2


class OwnModel(ScriptedChatModel):
    """A chat model of the user's own, for a model that the price list has."""

    model: str = "gpt-4o"


class OwnModelOfOpenAI(OwnModel):
    """The same, as the error says that it should be."""

    def _get_ls_params(self, stop: list[str] | None = None, **settings: Any) -> LangSmithParams:
        params = super()._get_ls_params(stop=stop, **settings)
        return LangSmithParams({**params, "ls_provider": "openai"})


async def test_an_own_chat_model_gets_the_price_of_the_list(signals: Signals) -> None:
    """Its error says that the class names its provider; with the provider, the list prices it."""
    pytest.importorskip("genai_prices")
    limit = CostLimit(run_limit=1)
    limiter = QuotaMiddleware[Any, Any]([limit], telemetry=signals.telemetry)
    script = [answer(70, text="Hello.")]
    unnamed, named = OwnModel(script=script), OwnModelOfOpenAI(script=script)
    asked: Any = {"messages": [("user", "hi")]}
    with pytest.raises(UnknownPriceError, match="_get_ls_params returns ls_provider"):
        await create_agent(unnamed, middleware=[limiter]).ainvoke(asked)
    assert unnamed.calls == ()

    config: Any = CONFIG
    agent: Any = create_agent(named, middleware=[limiter], checkpointer=InMemorySaver())
    await agent.ainvoke(asked, config)

    assert usage(agent.get_state(config)).spent["model.microdollars"] > 0


@both_forms
async def test_a_model_without_a_price_is_not_called(signals: Signals, form: Form) -> None:
    """With a limit of costs, a model that has no price is an error before its first call."""
    model_limit = CostLimit(run_limit=1)
    scene = scene_of(signals, [answer(5)], model_limit, prices=lambda _: None, form=form)

    with pytest.raises(UnknownPriceError, match="prices="):
        await scene.play()

    assert not scene.model.calls


def known_models(used: ModelUsage) -> Decimal | None:
    """A dollar a token for one model."""
    return Decimal(used.total_tokens) if used.request_model == "known" else None


async def test_a_model_that_is_not_called_is_charged_nothing(signals: Signals) -> None:
    """Where all models are charged, one that was refused is not; a tool's is never refused."""
    own = ScriptedChatModel(model="other", script=[answer(3), answer(4)])

    @tool
    async def ask() -> str:
        """Ask another model."""
        return str((await own.ainvoke("Hi!")).text)

    model = ScriptedChatModel(
        model="known", script=[answer(5, "ask"), ProviderError(), answer(2, "ask"), answer(1)]
    )
    other = ScriptedChatModel(model="other", script=[])
    quota = QuotaMiddleware(
        [CostLimit(run_limit=9)],
        prices=known_models,
        charge_all_models=True,
        telemetry=signals.telemetry,
    )
    retry = ModelRetryMiddleware(max_retries=1, initial_delay=0, jitter=False)
    agent: Any = create_agent(
        model,
        [ask],
        middleware=[quota, retry, ModelFallbackMiddleware(other)],
        checkpointer=InMemorySaver(),
    )

    await agent.ainvoke({"messages": [("user", "Hi!")]}, CONFIG)

    assert len(own.calls) == 2
    # The tool's model is charged the least, as it has no price.
    assert usage(agent.get_state(CONFIG)).spent["model.microdollars"] == 8_000_002


async def test_a_prices_function_is_asked_before_and_after(signals: Signals) -> None:
    """Before the first call it gets a name and no tokens; after each, what that has used."""
    asked: list[tuple[str, str, int]] = []

    def prices(used: ModelUsage) -> Decimal:
        asked.append((used.request_model, used.response_model, used.total_tokens))
        return Decimal(1)

    answers = [answer(5), answer(7)]
    for each in answers:
        each.response_metadata = {"model_name": "mine-2026"}
    model = ScriptedChatModel(model="mine", script=answers)
    quota = QuotaMiddleware([CostLimit(run_limit=5)], prices=prices, telemetry=signals.telemetry)
    agent: Any = create_agent(model, middleware=[quota])
    for _ in answers:
        await agent.ainvoke({"messages": [("user", "Hi!")]})

    assert asked == [("mine", "", 0), ("mine", "mine-2026", 5), ("mine", "mine-2026", 7)]


def divided(_: ModelUsage) -> Any:
    return 1 // 0


@pytest.mark.parametrize(
    ("fails", "text"),
    [
        (divided, "ZeroDivisionError"),
        (lambda _: Decimal("NaN"), "must be from 0 to"),
        (lambda _: Decimal("Infinity"), "must be from 0 to"),
        (lambda _: Decimal(-1), "must be from 0 to"),
        (lambda _: 0.5, "must give a Decimal"),
        (lambda _: None, "what answered has no price"),
    ],
    ids=["raises", "NaN", "infinity", "negative", "float", "unknown"],
)
@pytest.mark.parametrize("held", [None, "0.25", lambda _: "0.25"], ids=["", "number", "function"])
async def test_a_model_whose_price_fails_is_called_once(
    signals: Signals, fails: Any, text: str, held: Any
) -> None:
    """Its call is charged what was held; the next one is an error, until the price is known."""
    works: list[bool] = []

    def prices(used: ModelUsage) -> Any:
        return Decimal(used.total_tokens) if works or not used.total_tokens else fails(used)

    script = [answer(5), answer(2)]
    scene = scene_of(signals, script, CostLimit(thread_limit=100, reserve=held), prices=prices)

    await scene.play()
    with pytest.raises(UnknownPriceError, match=text):
        await scene.play()
    assert len(scene.model.calls) == 1
    assert spent(scene, "model.microdollars")[0] == (1 if held is None else 250_000)

    works.append(True)
    await scene.play()
    assert spent(scene, "model.microdollars")[1] == 2_000_000


async def test_a_price_that_fails_is_allowed(signals: Signals) -> None:
    """With `unknown_price="allow"` a model whose price fails costs nothing, and goes on."""
    quota = QuotaMiddleware(
        [CostLimit(thread_limit=1)],
        prices=lambda _: Decimal("NaN"),
        unknown_price="allow",
        telemetry=signals.telemetry,
    )
    scene = Scene(signals, [answer(5), answer(2)], [quota])

    await scene.play()
    await scene.play()

    assert spent(scene, "model.microdollars") == (0, 0)


async def test_a_model_without_a_price_may_be_called(signals: Signals) -> None:
    """With `unknown_price="allow"` it is called, and costs nothing."""
    quota = QuotaMiddleware(
        [CostLimit(run_limit=1)],
        prices=lambda _: None,
        unknown_price="allow",
        telemetry=signals.telemetry,
    )
    scene = Scene(signals, [answer(5)], [quota])

    await scene.play()

    assert spent(scene, "model.microdollars") == (0, 0)
    assert last(scene) == "Hello."


async def test_the_model_is_told_what_is_left(signals: Signals) -> None:
    """Once a budget is near, the model reads how many tokens and dollars are left."""
    limits: list[Limit] = [
        TokenLimit(run_limit=100),
        TokenLimit(run_limit=1000, tokens="output"),
        CostLimit(run_limit="0.50"),
    ]
    quota = QuotaMiddleware(
        limits,
        tell_model=True,
        prices=lambda used: Decimal(used.total_tokens) / 1000,
        telemetry=signals.telemetry,
    )
    scene = Scene(signals, [answer(10, "search"), answer(80, "search"), answer(5)], [quota])

    await scene.play()

    notes = [call.messages[-1].text.partition("Budget: ")[2] for call in scene.model.calls]
    assert notes == [
        "",
        "",
        "tokens: 10 of 100 left; output tokens: 998 of 1000 left; money: $0.41 of $0.50 left.",
    ]
