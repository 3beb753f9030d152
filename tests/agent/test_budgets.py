"""Budgets of tokens and money: model calls are charged what they have used, and refused at 0."""

import asyncio
import warnings
from collections.abc import Awaitable, Callable
from decimal import Decimal
from functools import partial
from typing import Any

import pytest
from langchain.agents import create_agent
from langchain.agents.middleware import (
    AgentMiddleware,
    ModelFallbackMiddleware,
    ModelRetryMiddleware,
)
from langchain.agents.middleware.types import ModelResponse
from langchain.agents.structured_output import ProviderStrategy, StructuredOutputValidationError
from langchain_core.caches import InMemoryCache
from langchain_core.language_models.base import LangSmithParams
from langchain_core.messages import AIMessage
from langchain_core.tools import tool
from langgraph.checkpoint.memory import InMemorySaver
from pydantic import BaseModel

from langchain_quota import (
    CostLimit,
    InlineQuotaMiddleware,
    MemoryStore,
    ModelCallLimit,
    ModelCallLimitExceededError,
    Outcome,
    QuotaMiddleware,
    QuotaWarning,
    TokenLimit,
    usage,
)
from langchain_quota.errors import UnknownPriceError
from langchain_quota.limits import Limit
from langchain_quota.model_usage import ModelUsage, TokenKind
from langchain_quota.testing import ScriptedChatModel, captured_decisions
from tests.agent.conftest import Form, both_forms
from tests.agent.rules import CONFIG, Middleware, Scene
from tests.signals import Signals, needs_inline

TOTAL = "model.total_tokens"
EITHER = pytest.mark.parametrize(
    "kind", [QuotaMiddleware, pytest.param(InlineQuotaMiddleware, marks=needs_inline)]
)
"""Where the model call is judged before its own step, and where it is judged in it."""


class ProviderError(Exception):
    """The model's provider fails."""


class Weather(BaseModel):
    """The weather."""

    degrees: int


class Twice(AgentMiddleware):
    """Calls the model twice, and takes the second answer."""

    async def awrap_model_call(self, request: Any, handler: Callable[[Any], Awaitable[Any]]) -> Any:
        await handler(request)
        return await handler(request)


def answer(tokens: int, *calls: str, text: str = "Hello.") -> AIMessage:
    """An answer that has cost so many tokens, one of them of output."""
    used: Any = {"input_tokens": tokens - 1, "output_tokens": 1, "total_tokens": tokens}
    called = [{"name": name, "args": {}, "id": f"{name}-{tokens}"} for name in calls]
    return AIMessage(text, usage_metadata=used, tool_calls=called)


def a_dollar_a_token(used: ModelUsage) -> Decimal:
    return Decimal(used.total_tokens)


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


@EITHER
@both_forms
async def test_a_run_ends_when_its_tokens_are_used(
    signals: Signals, kind: type[QuotaMiddleware[Any, Any]], form: Form
) -> None:
    """Calls are charged what they used; the call after the last token is refused, none earlier."""
    script = [answer(60, "search"), answer(45, "search"), answer(7)]
    scene = scene_of(signals, script, TokenLimit(run_limit=100), kind=kind, form=form)

    await scene.turn()

    assert len(scene.model.calls) == 2
    assert spent(scene) == (105, 105)
    assert last(scene) == "Token limits exceeded: run limit (105/100 tokens)"

    await scene.turn()

    assert spent(scene) == (112, 7)
    scene.check_requests()


async def test_a_thread_ends_when_its_tokens_are_used(signals: Signals) -> None:
    """A thread's tokens are one count over its runs; at exactly the limit nothing is left."""
    scene = scene_of(signals, [answer(60), answer(40)], TokenLimit(thread_limit=100))

    for _ in range(3):
        await scene.turn()

    assert spent(scene) == (100, 0)
    assert last(scene) == "Token limits exceeded: thread limit (100/100 tokens)"


async def test_input_output_and_total_are_counts_of_their_own(signals: Signals) -> None:
    """Limits on input, output and all tokens each have their own count."""
    kinds: list[TokenKind] = ["input", "output", "total"]
    limits = [TokenLimit(run_limit=10**6, tokens=each) for each in kinds]
    scene = scene_of(signals, [answer(60, "search"), answer(40)], *limits)

    await scene.turn()

    counters = ("model.input_tokens", "model.output_tokens", TOTAL)
    assert [spent(scene, each) for each in counters] == [(98, 98), (2, 2), (100, 100)]


async def test_money_is_counted_in_millionths(signals: Signals) -> None:
    """What a call costs is charged by the prices given, rounded up once, and shown in dollars."""
    prices = {60: Decimal("0.0000001"), 40: Decimal("0.5")}
    scene = scene_of(
        signals,
        [answer(60, "search"), answer(40, "search")],
        CostLimit(run_limit="0.50"),
        prices=lambda used: prices.get(used.total_tokens, Decimal(0)),
    )

    await scene.turn()

    assert spent(scene, "model.microdollars") == (500_001, 500_001)
    assert last(scene) == "Cost limits exceeded: run limit ($0.500001/$0.50)"


async def test_a_budget_is_judged_with_the_other_limits(signals: Signals) -> None:
    """Whichever limit is reached first ends the run, and both have counted."""
    limits: list[Limit] = [ModelCallLimit(run_limit=2), TokenLimit(run_limit=1000)]
    scene = scene_of(signals, [answer(60, "search"), answer(40, "search")], *limits)

    await scene.turn()

    assert last(scene) == "Model call limits exceeded: run limit (2/2)"
    assert (spent(scene), scene.state()["thread_model_call_count"]) == ((100, 100), 2)


async def test_an_exception_says_tokens(signals: Signals) -> None:
    """With `"error"` the exception has the counts and the decision in the limit's unit."""
    scene = scene_of(
        signals, [answer(60, "search")], TokenLimit(run_limit=50, exit_behavior="error")
    )

    with pytest.raises(ModelCallLimitExceededError, match="60/50 tokens") as caught:
        await scene.turn()

    assert (caught.value.run_count, caught.value.run_limit) == (60, 50)
    assert caught.value.decision is not None
    assert caught.value.decision.limits[0].unit == "tokens"


async def test_a_budget_on_trial_refuses_nothing(signals: Signals) -> None:
    """With `enforce=False` calls run, are counted, and the decision says what would be refused."""
    scene = scene_of(
        signals, [answer(60, "search"), answer(40)], TokenLimit(run_limit=50, enforce=False)
    )

    with captured_decisions() as decisions:
        await scene.turn()

    models = [each.outcome for each in decisions if each.call.kind == "model"]
    assert models == [Outcome.ALLOWED, Outcome.WOULD_BLOCK]
    assert spent(scene) == (100, 100)


RETRY = ModelRetryMiddleware(max_retries=1, initial_delay=0, jitter=False)


@EITHER
@pytest.mark.parametrize(
    ("script", "beside", "reserve", "allowed", "over"),
    [
        pytest.param([30, 30, 10, 10], [], None, 2, 2, id="no reserve"),
        pytest.param([15, 20, 10, 10], [], 20, 2, 2, id="reserve"),
        pytest.param([15, 20, 10, 10], [], lambda _: 20, 2, 2, id="function"),
        pytest.param([60, 10, ProviderError(), 10], [RETRY], None, 1, 2, id="retry"),
        pytest.param([ProviderError(), 60, 10], [RETRY], lambda _: 20, 1, 1, id="first retry"),
        pytest.param([10, 10, 10], [], None, 3, 0, id="under it"),
    ],
)
async def test_a_budget_on_trial_counts_a_call_once(
    signals: Signals,
    *,
    kind: type[QuotaMiddleware[Any, Any]],
    script: list[Any],
    beside: list[Middleware],
    reserve: Any,
    allowed: int,
    over: int,
) -> None:
    """A call that a budget on trial would refuse counts as `would_block`, and not as allowed."""
    calls = [answer(each, "search") if isinstance(each, int) else each for each in script[:-1]]
    limit = TokenLimit(run_limit=50, reserve=reserve, enforce=False)
    scene = scene_of(signals, [*calls, answer(script[-1])], limit, kind=kind, beside=beside)

    await scene.turn()

    assert len(scene.model.calls) == len(script)
    assert scene.metric("tokens", "allowed") == allowed
    assert scene.metric("tokens", "would_block", "run") == over
    assert scene.metric("tokens", "blocked", "run") == 0


@EITHER
@pytest.mark.parametrize(
    ("script", "beside", "tokens"),
    [
        ([answer(60), answer(40)], [Twice()], 100),
        (
            [ProviderError(), answer(40)],
            [ModelRetryMiddleware(max_retries=1, initial_delay=0, jitter=False)],
            40,
        ),
        (
            [ProviderError()],
            [ModelFallbackMiddleware(ScriptedChatModel(script=lambda _: answer(30)))],
            30,
        ),
    ],
    ids=["twice", "retry", "fallback"],
)
async def test_every_model_run_is_charged(
    signals: Signals,
    kind: type[QuotaMiddleware[Any, Any]],
    script: Any,
    beside: list[Middleware],
    tokens: int,
) -> None:
    """What other middlewares make of one call is charged in full, and what is refused costs 0."""
    scene = scene_of(signals, script, TokenLimit(run_limit=10**6), kind=kind, beside=beside)

    await scene.turn()

    assert spent(scene) == (tokens, tokens)


async def test_a_middleware_around_it_that_calls_twice_loses_nothing(signals: Signals) -> None:
    """Where a middleware listed before makes two calls of one step, both are charged."""
    quota = QuotaMiddleware([TokenLimit(run_limit=10**6)], telemetry=signals.telemetry)
    scene = Scene(signals, [answer(60), answer(40)], [Twice(), quota])

    await scene.turn()

    assert spent(scene) == (100, 100)


async def test_a_subclass_that_makes_its_own_answer_loses_nothing(signals: Signals) -> None:
    """What a subclass drops of the update is charged with the next hook that writes."""

    class Own(QuotaMiddleware[Any, Any]):
        async def awrap_model_call(self, request: Any, handler: Any) -> Any:
            return ModelResponse(result=(await super().awrap_model_call(request, handler)).result)

    quota = Own([TokenLimit(run_limit=50)], telemetry=signals.telemetry)
    scene = Scene(signals, [answer(60, "search")], [quota])

    await scene.turn()

    assert spent(scene) == (60, 60)
    assert last(scene) == "Token limits exceeded: run limit (60/50 tokens)"


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


@EITHER
@both_forms
async def test_what_a_failed_call_has_used_is_charged_later(
    signals: Signals, kind: type[QuotaMiddleware[Any, Any]], form: Form
) -> None:
    """A structured answer that cannot be read is paid: the thread is charged at its next run."""
    scene = scene_of(
        signals,
        [answer(60, text="no json"), answer(7, text='{"degrees": 3}')],
        TokenLimit(thread_limit=1000),
        kind=kind,
        form=form,
        response_format=ProviderStrategy(Weather),
    )

    with pytest.raises(StructuredOutputValidationError):
        await scene.turn()
    await scene.turn()

    assert spent(scene) == (67, 7)


async def test_what_a_failed_call_has_used_counts_when_the_run_goes_on(signals: Signals) -> None:
    """A run that is resumed behind a failed call has that call's tokens in its own count."""
    fails = [True]

    class Fails(AgentMiddleware):
        async def awrap_model_call(self, request: Any, handler: Any) -> Any:
            response = await handler(request)
            if fails.pop() if fails else False:
                raise ProviderError
            return response

    script = [answer(60), answer(30, "search"), answer(9)]
    scene = scene_of(signals, script, TokenLimit(run_limit=95), beside=[Fails()])

    with pytest.raises(ProviderError):
        await scene.turn()
    await scene.go_on()

    assert spent(scene) == (99, 99)


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


async def test_a_cancelled_call_is_charged_an_estimate(signals: Signals) -> None:
    """A call that its caller does not wait for may have been paid: it is charged an estimate."""
    began = asyncio.Event()

    class Slow(ScriptedChatModel):
        async def _agenerate(self, *_: Any, **__: Any) -> Any:
            began.set()
            await asyncio.sleep(3600)

    quota = QuotaMiddleware([TokenLimit(thread_limit=1000)], telemetry=signals.telemetry)
    saver = InMemorySaver()
    slow: Any = create_agent(Slow(script=[]), middleware=[quota], checkpointer=saver)
    asked: Any = {"messages": [("user", "Hi!")]}
    running = asyncio.create_task(slow.ainvoke(asked, CONFIG))
    await asyncio.wait_for(began.wait(), 60)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running

    quick: Any = create_agent(
        ScriptedChatModel(script=[answer(5)]), middleware=[quota], checkpointer=saver
    )
    await quick.ainvoke(asked, CONFIG)

    used = usage(await quick.aget_state(CONFIG))
    assert used.run_spent == {TOTAL: 5}
    assert used.spent[TOTAL] > 5


async def test_a_reset_forgets_what_was_used(signals: Signals) -> None:
    """After a reset a thread has its whole budget again."""
    limit = TokenLimit(thread_limit=50)
    quota = QuotaMiddleware([limit], telemetry=signals.telemetry)
    scene = Scene(signals, [answer(60), answer(7)], [quota])
    await scene.turn()
    assert spent(scene) == (60, 60)

    await quota.areset(scene.agent, CONFIG)  # type: ignore[arg-type]

    assert spent(scene) == (0, 0)
    await scene.turn()
    assert last(scene) == "Hello."


async def test_the_last_answer_has_what_is_kept_for_it(signals: Signals) -> None:
    """When only what is kept is left, the next request says that it is the last one."""
    limit = TokenLimit(run_limit=100, exit_behavior="finalize", keep=30)
    scene = scene_of(signals, [answer(69, "search"), answer(1, "search"), answer(20)], limit)

    await scene.turn()

    told = ["last model call" in each.messages[-1].text for each in scene.model.calls]
    assert told == [False, False, True]
    assert (last(scene), spent(scene)) == ("Hello.", (90, 90))


async def test_a_last_answer_that_says_nothing_is_replaced(signals: Signals) -> None:
    """A last call that asks for tools ends the run with a text that says what is used up."""
    limit = TokenLimit(run_limit=100, exit_behavior="finalize", keep=30)
    scene = scene_of(signals, [answer(80, "search"), answer(10, "search", text="")], limit)

    await scene.turn()

    assert last(scene).endswith(
        "Token limits exceeded: run limit (80/100 tokens, the rest was kept for the last answer)"
    )
    assert len(scene.model.calls) == 2


async def test_what_ends_a_run_is_told_with_true_amounts(signals: Signals) -> None:
    """The last call by one limit says nothing of a budget that has enough left, and no untruth."""
    limits: list[Limit] = [
        ModelCallLimit(run_limit=2, exit_behavior="finalize"),
        TokenLimit(run_limit=100, exit_behavior="finalize", keep=15, reserve=10),
        TokenLimit(run_limit=120, reserve=15, thread_limit=500, name="other"),
        CostLimit(run_limit="5", exit_behavior="finalize", keep="2"),
    ]
    script = [answer(70, "search"), answer(10, "search", text="")]
    scene = scene_of(signals, script, *limits, prices=lambda _: Decimal("3.5"))

    await scene.turn()

    assert last(scene).endswith(
        "Model call limits exceeded: run limit (2/2) "
        "Cost limits exceeded: run limit ($3.50/$5.00, the rest was kept for the last answer)"
    )


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
        await scene.turn()

    assert not scene.model.calls


class Swap(AgentMiddleware):
    """Has another model answer."""

    def __init__(self, model: ScriptedChatModel) -> None:
        super().__init__()
        self.model = model

    def wrap_model_call(self, request: Any, handler: Callable[[Any], Any]) -> Any:
        return handler(request.override(model=self.model))

    async def awrap_model_call(self, request: Any, handler: Callable[[Any], Awaitable[Any]]) -> Any:
        return await handler(request.override(model=self.model))


def known_models(used: ModelUsage) -> Decimal | None:
    """A dollar a token for one model."""
    return Decimal(used.total_tokens) if used.request_model == "known" else None


@both_forms
@pytest.mark.parametrize("swap", [Swap, ModelFallbackMiddleware])
async def test_another_model_without_a_price_is_not_called(
    signals: Signals, form: Form, swap: Any
) -> None:
    """A model that a middleware puts in place of the agent's is an error before its first call."""
    model = ScriptedChatModel(model="known", script=[ProviderError()])
    other = ScriptedChatModel(model="other", script=[answer(5)])
    quota = QuotaMiddleware(
        [CostLimit(run_limit=1)], prices=known_models, telemetry=signals.telemetry
    )
    agent: Any = create_agent(model, middleware=[quota, swap(other)], checkpointer=InMemorySaver())
    asked = {"messages": [("user", "Hi!")]}
    run: Any = agent.ainvoke if form == "async" else partial(asyncio.to_thread, agent.invoke)

    with pytest.raises(UnknownPriceError, match="'other'"):
        await run(asked, CONFIG)

    assert not other.calls
    assert not usage(agent.get_state(CONFIG)).spent.get("model.microdollars")


async def test_a_model_without_a_price_that_is_never_called_is_no_error(signals: Signals) -> None:
    """Only models that are called need a price."""
    known = ScriptedChatModel(model="known", script=[answer(5)])
    scene = scene_of(signals, [], CostLimit(run_limit=9), beside=[Swap(known)], prices=known_models)

    await scene.turn()

    assert spent(scene, "model.microdollars") == (5_000_000, 5_000_000)


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

    await scene.turn()
    with pytest.raises(UnknownPriceError, match=text):
        await scene.turn()
    assert len(scene.model.calls) == 1
    assert spent(scene, "model.microdollars")[0] == (1 if held is None else 250_000)

    works.append(True)
    await scene.turn()
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

    await scene.turn()
    await scene.turn()

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

    await scene.turn()

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

    await scene.turn()

    notes = [call.messages[-1].text.partition("Budget: ")[2] for call in scene.model.calls]
    assert notes == [
        "",
        "",
        "tokens: 10 of 100 left; output tokens: 998 of 1000 left; money: $0.41 of $0.50 left.",
    ]


async def test_a_limit_may_be_a_function_that_gives_dollars(signals: Signals) -> None:
    """A number that is computed is in the limit's unit, and checked like one that is written."""
    scene = scene_of(
        signals,
        [answer(3, "search")],
        CostLimit(run_limit=lambda *_: "2.50", message="That was all."),
        prices=a_dollar_a_token,
    )
    await scene.turn()
    assert last(scene) == "That was all."

    nearly: Any = lambda *_: 2.5  # noqa: E731
    scene = scene_of(signals, [], CostLimit(run_limit=nearly), prices=a_dollar_a_token)
    with pytest.raises(TypeError, match="run_limit of limit 'cost' must not be a float"):
        await scene.turn()


async def test_a_threshold_that_a_call_crosses_is_counted_and_logged(
    signals: Signals, caplog: pytest.LogCaptureFixture
) -> None:
    """A budget is near, and exhausted, when the call that made it so is done."""
    limit = TokenLimit(run_limit=100, thread_limit=1000)
    scene = scene_of(signals, [answer(85, "search"), answer(15)], limit)

    await scene.turn()

    for name in ("near_limit", "exhausted"):
        found = signals.value(
            f"langchain_quota_{name}_total", agent="unnamed", limit="tokens", scope="run"
        )
        assert found == 1, name
    assert "'tokens' exhausted" in caplog.text


@pytest.mark.parametrize("shared", [False, True])
async def test_a_threshold_is_crossed_once_though_a_call_fails(
    signals: Signals, *, shared: bool
) -> None:
    """What a failed call has used is in the count of the next one: each threshold is told once."""
    fails = [True]

    class Fails(AgentMiddleware):
        async def awrap_model_call(self, request: Any, handler: Any) -> Any:
            response = await handler(request)
            if fails.pop() if fails else False:
                raise ProviderError
            return response

    store = MemoryStore() if shared else None
    quota: QuotaMiddleware[Any, Any] = QuotaMiddleware(
        [TokenLimit(run_limit=100)], store=store, telemetry=signals.telemetry
    )
    script = [answer(81), answer(19, "search"), answer(1)]
    scene = Scene(signals, script, [quota, Fails()])

    def crossed() -> list[float | None]:
        labels = {"agent": "unnamed", "limit": "tokens", "scope": "run"}
        names = ("near_limit", "exhausted")
        return [signals.value(f"langchain_quota_{each}_total", **labels) for each in names]

    with pytest.raises(ProviderError):
        await scene.turn()
    assert crossed() == [1, 0]
    await scene.go_on()

    assert crossed() == [1, 1]
    assert spent(scene) == (100, 100)


async def test_a_warning_that_is_an_error_loses_no_answer(
    signals: Signals, caplog: pytest.LogCaptureFixture
) -> None:
    """Where warnings are errors, one that comes after a paid answer is logged instead."""
    scene = scene_of(signals, ["Hello."], TokenLimit(thread_limit=1000))

    with warnings.catch_warnings():
        warnings.simplefilter("error", QuotaWarning)
        await scene.turn()

    assert last(scene) == "Hello."
    assert 0 < spent(scene)[0] < 100
    assert "model 'unnamed' reports no usage" in caplog.text
