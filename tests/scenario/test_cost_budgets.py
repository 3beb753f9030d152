"""Budgets of money: model calls are charged what they cost, at prices that may be missing.

Tools may cost money, too: a call is charged its price if it ran, and refused if it does not fit.
"""

from collections.abc import Mapping
from decimal import Decimal, localcontext
from typing import Any

import pytest
from langchain.agents.middleware import (
    HumanInTheLoopMiddleware,
    ModelFallbackMiddleware,
    ToolRetryMiddleware,
)
from langchain_core.language_models import FakeListLLM
from langchain_core.language_models.base import LangSmithParams
from langchain_core.tools import BaseTool, StructuredTool

from langchain_quota import CostLimit, MemoryStore, Price, Quota, QuotaMiddleware, ToolCallLimit
from langchain_quota.errors import UnknownPriceError
from langchain_quota.limits.call import ModelUsage
from langchain_quota.testing import ScriptedChatModel
from tests.scene import ANN, Form, Kind, Scene, both_forms, tool_limiter
from tests.stores import counts
from tests.telemetry import Signals
from tests.tokens import MONEY, During, ProviderError, answer, spent

DOLLAR = 10**9
"""In the unit of the counts."""


def a_dollar_a_token(used: ModelUsage) -> Decimal:
    return Decimal(used.total_tokens)


def known_models(used: ModelUsage) -> Decimal | None:
    """A dollar a token for one model."""
    return a_dollar_a_token(used) if used.request_model == "known" else None


WRITTEN = {"ephemeral_5m_input_tokens": 100, "ephemeral_1h_input_tokens": 200}
DETAILS = {
    "input_token_details": {"cache_read": 100, "audio": 50, **WRITTEN},
    "output_token_details": {"audio": 50, "reasoning": 100},
}
NONSENSE = {"input_token_details": {"cache_read": -5, "audio": "100", "cache_creation": 1.5}}


@pytest.mark.parametrize(
    ("price", "details", "dollars"),
    [
        ({}, DETAILS, 0.002),
        ({"cache_read": 0.1}, DETAILS, 0.00191),
        ({"cache_creation": "2"}, DETAILS, 0.0023),
        ({"cache_creation_1h": "4"}, DETAILS, 0.0026),
        ({"output_audio": Decimal(21)}, DETAILS, 0.003),
        ({"reasoning": "0"}, DETAILS, 0.0019),
        ({"input_audio": 11}, {"input_token_details": {"priority_audio": 50}}, 0.0025),
        ({"cache_read": "9", "input_audio": "9"}, NONSENSE, 0.002),
        ({"input": "1.0000000001"}, {}, 0.002000001),
        ({"input": "0.0000375", "output": 0}, {}, 0.000000038),
        ({"cache_creation": "2"}, {"input_token_details": {"cache_creation": 300}}, 0.0023),
    ],
)
async def test_parts_have_prices_of_their_own(
    signals: Signals, price: Mapping[str, Any], details: Mapping[str, Any], dollars: float
) -> None:
    """A part without a price has that of the whole; one with a price is paid once, exactly."""
    report = answer(2_000, input_tokens=1_000, output_tokens=1_000, **details)
    script = [report, "never"]
    prices: Any = {"mine": Price(**{"input": "1", "output": "1", **price})}
    model = ScriptedChatModel(model="mine", script=script)
    scene = Scene(signals, model, [CostLimit(run_limit=1)], prices=prices, checkpointer=None)
    # An application may compute with few digits.
    with localcontext(prec=3):
        await scene.play()
    total = signals.value(
        "langchain_quota_spent_dollars_total", agent="unnamed", limit="cost", model="mine"
    )
    assert total == dollars


class OwnModel(ScriptedChatModel):
    """A chat model of the user's own, for a model that the price list has."""

    model: str = "gpt-4o"
    # LangChain names the class where a class names no provider.
    provider: str = "ownmodel"

    def _get_ls_params(self, stop: list[str] | None = None, **settings: Any) -> LangSmithParams:
        params = super()._get_ls_params(stop=stop, **settings)
        return LangSmithParams({**params, "ls_provider": self.provider})


async def test_an_own_chat_model_gets_the_price_of_the_list(signals: Signals) -> None:
    """Its error says that the class names its provider; with the provider, the list prices it."""
    pytest.importorskip("genai_prices")
    unnamed = OwnModel(script=[answer(70)])
    with pytest.raises(UnknownPriceError, match="_get_ls_params returns ls_provider"):
        await Scene(signals, unnamed, [CostLimit(run_limit=1)]).play()
    assert unnamed.calls == ()
    own = {"gpt-4o": Price(input="1", output="2")}
    for prices, cost in ((None, 2_510_000), (own, 1_002_000)):
        named = OwnModel(provider="openai", script=[answer(1_001)])
        scene = await Scene(signals, named, [CostLimit(run_limit=1)], prices=prices).played()
        assert spent(scene, MONEY) == (cost, cost)


@both_forms
@pytest.mark.parametrize("kind", ["quota", "graph"])
async def test_a_model_without_a_price_is_not_called(
    signals: Signals, kind: Kind, form: Form, caplog: pytest.LogCaptureFixture
) -> None:
    """With a limit of costs, a model that has no price is an error before its first call."""
    for prices in (lambda _: None, lambda used: {}[used.request_model]):
        model = ScriptedChatModel(model="mine", script=[answer(5)])
        options: dict[str, Any] = {"prices": prices, "form": form, "kind": kind}
        scene = Scene(signals, model, [CostLimit(run_limit=1)], **options)

        with pytest.raises(UnknownPriceError) as caught:
            await scene.play()

        assert not scene.model.calls
        # The error says what was looked up, and both remedies; nobody also logs it.
        for part in ("for the model 'mine'", "prices={'mine': Price(", "ls_provider"):
            assert part in str(caught.value)
    assert caplog.messages == []


async def test_another_model_without_a_price_is_not_called(signals: Signals) -> None:
    """A model that a middleware puts in place of the agent's is an error before its first call."""
    known = ScriptedChatModel(model="known", script=[ProviderError()])
    other = ScriptedChatModel(model="other", script=[answer(5)])
    items: Any = [CostLimit(run_limit=1), ModelFallbackMiddleware(other)]
    scene = Scene(signals, known, items, prices=known_models)
    with pytest.raises(UnknownPriceError, match="'other'"):
        await scene.play()
    assert not other.calls
    assert spent(scene, MONEY) == (0, 0)


# LangChain does not await the other handlers where one raises.
@pytest.mark.filterwarnings("ignore:coroutine 'ahandle_event' was never awaited")
@pytest.mark.parametrize("form", ["async", "sync"])
async def test_within_a_call_no_model_without_a_price_is_called(
    signals: Signals, form: Form
) -> None:
    """What a middleware asks within the agent's call is refused before it is called, too."""
    chat = ScriptedChatModel(model="other", script=[answer(5)])
    completes = FakeListLLM(responses=["Hello."])
    calls = {"async": lambda: chat.invoke("Hi!"), "sync": lambda: [*completes.stream("Hi!")]}
    known = ScriptedChatModel(model="known", script=[answer(5)])
    items: list[Any] = [CostLimit(run_limit=1), During(calls[form], before=True)]
    scene = Scene(signals, known, items, prices=known_models, form=form)
    with pytest.raises(UnknownPriceError):
        await scene.play()
    assert not chat.calls
    assert not known.calls


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
    scene = Scene(signals, model, [CostLimit(run_limit=5)], prices=prices)
    for _ in answers:
        await scene.play()
    assert asked == [("mine", "", 0), ("mine", "mine-2026", 5), ("mine", "mine-2026", 7)]


@pytest.mark.parametrize(
    ("gives", "held", "text"),
    [
        (lambda: 1 // 0, None, "ZeroDivisionError"),
        (lambda: Decimal(-1), "0.25", "must be from 0 to"),
        (lambda: "0.5", lambda _: "0.25", "must give a number of dollars"),
        (lambda: None, None, "what answered has no price"),
    ],
    ids=["raises", "negative", "text", "unknown"],
)
async def test_a_model_whose_price_fails_is_called_once(
    signals: Signals, gives: Any, held: Any, text: str
) -> None:
    """Its call is charged what was held; the next one is an error, until the price is known."""
    works: list[bool] = []

    def prices(used: ModelUsage) -> Any:
        return used.total_tokens if works or not used.total_tokens else gives()

    limit = CostLimit(thread_limit=100, reserve=held)
    scene = await Scene(signals, [answer(5), answer(2)], [limit], prices=prices).played()
    with pytest.raises(UnknownPriceError, match=text):
        await scene.play()
    assert len(scene.model.calls) == 1
    assert spent(scene, MONEY)[0] == (1 if held is None else DOLLAR // 4)
    works.append(True)
    await scene.play()
    assert spent(scene, MONEY)[1] == 2 * DOLLAR


async def test_models_whose_price_failed_are_forgotten(signals: Signals, monkeypatch: Any) -> None:
    """The newest few are remembered: callers may invent names of models without end."""
    monkeypatch.setattr("langchain_quota.features.budgets.prices.MOST_KNOWN", 3)

    def prices(used: ModelUsage) -> Decimal:
        return Decimal("NaN" if used.total_tokens else 0)

    held = QuotaMiddleware([CostLimit(run_limit=100)], prices=prices, telemetry=signals.telemetry)
    names = [f"model-{each}" for each in range(5)]
    models = [ScriptedChatModel(script=lambda _: answer(5), model=each) for each in names]
    scenes = [Scene(signals, model, [held]) for model in models]
    for scene in [*scenes, scenes[0]]:
        await scene.play()
    with pytest.raises(UnknownPriceError):
        await scenes[4].play()


@pytest.mark.parametrize("price", [None, Decimal("NaN")])
async def test_unknown_prices_are_allowed(signals: Signals, price: Decimal | None) -> None:
    """With `unknown_price="allow"` a model without a price, or whose price fails, costs nothing."""
    limit = CostLimit(thread_limit=1, reserve=lambda _: ModelUsage(input_tokens=9))
    options: Any = {"prices": lambda _: price, "unknown_price": "allow"}
    scene = await Scene(signals, [answer(5), answer(2)], [limit], **options).played()
    await scene.play()
    assert spent(scene, MONEY) == (0, 0)
    assert scene.last_text() == "Hello."


@pytest.mark.parametrize(
    ("report", "charged"),
    [
        ({"cost": 0.25}, DOLLAR // 4),
        ({"cost": {"total_cost": 0.25}}, DOLLAR // 4),
        ({"token_usage": {"cost": 0.25}}, DOLLAR // 4),
        ({"token_usage": {"cost_in_usd_ticks": 2_500_000_000}}, DOLLAR // 4),
        ({"headers": {"x-litellm-response-cost": "0.25"}}, DOLLAR // 4),
        ({"model_name": "known", "cost": 0.25}, 8 * DOLLAR),
        ({}, None),
        ({"cost": 0}, None),
        ({"cost": float("nan")}, None),
        ({"cost": "0.25"}, None),
        ({"cost": {}}, None),
        ({"token_usage": {"cost_in_usd_ticks": None}}, None),
    ],
)
async def test_costs_that_providers_report(
    signals: Signals, report: Mapping[str, Any], charged: int | None
) -> None:
    """They are charged without a price; a report of nothing costs the reserve, then it is an error.

    A gateway that chooses the model, such as OpenRouter's `openrouter/auto`, has no price before.
    """
    said = answer(8)
    said.response_metadata = dict(report)
    prices = lambda used: a_dollar_a_token(used) if "known" in used.models else None  # noqa: E731
    model = ScriptedChatModel(model="openrouter/auto", script=lambda _: said)
    limit = CostLimit(thread_limit=99, reserve=7)
    scene = Scene(signals, model, [limit], prices=prices, unknown_price="reported")
    with scene.quota.receipt() as bill:
        await scene.play()
    assert spent(scene, MONEY)[0] == (7 * DOLLAR if charged is None else charged)
    line = bill.total("model")
    assert line.nanodollars == charged
    assert line.reported_nanodollars == (charged if charged == DOLLAR // 4 else 0)
    said_so = "8 tokens, $0.25 ($0.25 reported by the provider)"
    assert (said_so in str(bill)) is (charged == DOLLAR // 4)
    if charged is None:
        with pytest.raises(UnknownPriceError, match="an earlier call is paid"):
            await scene.play()
    else:
        await scene.play()
        assert spent(scene, MONEY)[0] == 2 * charged


@pytest.mark.parametrize("reserve", [None, 7])
async def test_a_reporting_call_that_is_cut_off(signals: Signals, reserve: Any) -> None:
    """It costs its reserve, and stops nobody; without one, the model's next call is an error."""
    said = answer(8)
    said.response_metadata = {"cost": 0.25}
    limit = CostLimit(thread_limit=99, reserve=reserve)
    options: Any = {"prices": lambda _: None, "unknown_price": "reported"}
    scene = Scene(signals, [TimeoutError(), said], [limit], **options)
    with pytest.raises(TimeoutError):
        await scene.play()
    if reserve is None:
        with pytest.raises(UnknownPriceError, match="an earlier call is paid"):
            await scene.play()
    else:
        await scene.play()
        assert spent(scene, MONEY)[0] == 7 * DOLLAR + DOLLAR // 4


async def test_computed_dollars_are_rounded(signals: Signals) -> None:
    """Floats that functions compute are rounded to nine places, half to even; no run fails."""
    limit = CostLimit(
        run_limit=lambda state, runtime: 19.99 * 0.7,
        reserve=lambda request: 0.1 + 0.2,
        tool_prices={"search": lambda call: 0.1 + 0.2},
    )
    script = [["search"], answer(5)]
    scene = await Scene(signals, script, [limit], prices=lambda used: 0.1 + 0.7).played()
    assert (scene.ran, spent(scene, MONEY)[0]) == (["search"], 2 * 800_000_000 + 300_000_000)


SPENT = "langchain_quota_tool_spent_dollars_total"
CENT = 10**7
RETRY = ToolRetryMiddleware(max_retries=2, initial_delay=0, jitter=False, on_failure="continue")


def of_pages(call: Any) -> float:
    pages: int = call["args"].get("pages", 1)
    return 0.05 * pages


PRICES: Any = {"search": "0.30", "calc": of_pages, "fail": Decimal("0.10")}


def by_model(_: Any) -> Decimal:
    """Each model call costs a cent."""
    return Decimal("0.01")


Due = dict[str, int]
"""What was to be paid when a tool began, by call."""


def scene_of(signals: Signals, due: Due, script: Any, *items: Any, **options: Any) -> Scene:
    """An agent with paid tools; each model call costs a cent."""

    def tool(name: str) -> BaseTool:
        async def run(call: str = "", pages: int = 1) -> str:
            price = PRICES[name]
            dollars = price({"args": {"pages": pages}}) if callable(price) else price
            due[f"{name}{call}"] = round(float(dollars) * 100) * CENT
            if name == "fail":
                raise RuntimeError("It failed.")
            return "It ran."

        return StructuredTool.from_function(coroutine=run, name=name, description=name)

    options = {"tools": [tool(name) for name in PRICES], "prices": by_model, **options}
    return Scene(signals, script, items, **options)


def made(name: str, *calls: int, **args: Any) -> list[tuple[str, dict[str, Any]]]:
    return [(name, {"call": str(each), **args}) for each in calls]


def charged(signals: Signals) -> float:
    """What the metric says tools have spent."""
    found = signals.samples(SPENT, limit="cost")
    dollars = [-each if "refunded" in labels else each for labels, each in found.items()]
    return round(sum(dollars) * 100) * CENT


stores = pytest.mark.parametrize("stored", [False, True], ids=["state", "store"])


@stores
async def test_charged_is_what_ran(signals: Signals, *, stored: bool) -> None:
    """Calls that fail or are retried are charged once; refused, stopped and free ones nothing."""
    due, store = Due(), MemoryStore() if stored else None
    quotas = [Quota(9, per="user_id")] if stored else []
    limit = CostLimit(run_limit="1.40", thread_limit=9, tool_prices=PRICES, quotas=quotas)
    script = [
        answer(11, *made("search", 1, 2), *made("calc", 1, pages=2), *made("fail", 1)),
        # One call fits, the second does not. What costs nothing runs.
        answer(12, *made("search", 3, 4), *made("calc", 2, pages=0)),
        # The other limit refuses the second one.
        answer(13, *made("calc", 3), *made("fail", 2, 3)),
        answer(14),
    ]
    items = [limit, ToolCallLimit("fail", run_limit=2), RETRY]
    scene = await scene_of(signals, due, script, *items, context=ANN, store=store).played()
    ran = "search1", "search2", "search3", "calc1", "calc2", "calc3", "fail1", "fail2"
    assert {*due} == {*ran}
    assert charged(signals) == sum(due.values())
    assert spent(scene, MONEY) == (charged(signals) + 4 * CENT,) * 2
    assert scene.usage().tools == {"fail": 2}
    if store:
        assert {*counts(store).values()} == {charged(signals) + 4 * CENT}
    assert "'search' costs $0.30, more than what is left" in str(scene.state()["messages"])
    shown = {"agent": "unnamed", "limit": "cost", "scope": "run", "unit": "dollars"}
    assert signals.value("langchain_quota_limit", **shown) == 1.4


@pytest.mark.parametrize("exit_behavior", ["end", "error", "finalize"])
async def test_a_tool_that_is_too_dear(signals: Signals, exit_behavior: Any) -> None:
    """It leaves what is kept for the last answer, and the run goes on without it."""
    due, last = Due(), exit_behavior == "finalize"
    limit = CostLimit(
        run_limit="0.62" if last else "0.45",
        tool_prices=PRICES,
        exit_behavior=exit_behavior,
        keep="0.20" if last else None,
    )
    script = [answer(11, *made("search", 1, 2)), answer(12, *made("fail", 1)), answer(13)]
    scene = await scene_of(signals, due, script, limit, RETRY).played()
    assert {*due} == {"search1", "fail1"}
    assert len(scene.model.calls) == 3


@stores
@pytest.mark.parametrize("why", ["a person", "a drop-in"])
async def test_what_does_not_run_is_free(signals: Signals, why: str, *, stored: bool) -> None:
    """What a person rejects, and what another limiter refuses, is given back."""
    due, store = Due(), MemoryStore() if stored else None
    limits: list[Any] = [CostLimit(thread_limit=1, tool_prices=PRICES)]
    if why == "a person":
        limits.append(HumanInTheLoopMiddleware[Any, Any]({"search": True}))
    else:
        # It checks behind the limit, which has charged the call.
        limits.insert(0, tool_limiter(signals, "search", run_limit=0))
    script = [
        *(answer(11, *made("search", 1), *made("calc", 1)), answer(12)),
        *(answer(13, *made("calc", 2)), answer(14)),
    ]
    scene = await scene_of(signals, due, script, *limits, store=store).played()
    if why == "a person":
        await scene.resume({"decisions": [{"type": "reject"}]})
    assert due == {"calc1": 5 * CENT}
    await scene.play()
    assert spent(scene, MONEY)[0] == 10 * CENT + 4 * CENT
    assert charged(signals) == 10 * CENT
    if store:
        assert counts(store) == {f"{MONEY}:thread:thread-1": 14 * CENT}


OF_OPENAI: list[Any] = [
    {"type": "text", "text": "Good day."},
    {"type": "server_tool_use", "id": "1", "name": "web_search", "input": {}},
    {"type": "web_search_call", "id": "2", "action": {"type": "search"}},
    {"type": "web_search_call", "id": "3", "action": {"type": "open_page"}},
    {"type": "code_interpreter_call", "id": "4"},
    # The same in LangChain's own form.
    {"type": "server_tool_call", "id": "5", "name": "web_search", "args": {"type": "open_page"}},
    {"type": "server_tool_call", "id": "6", "name": "web_search", "args": {"type": "search"}},
]
OF_GEMINI: list[Any] = [{"type": "executable_code", "executable_code": "1", "language": "PYTHON"}]
# When Gemini streams, its queries may come twice, and empty ones are free.
SOURCES = {
    "web_search_queries": ["weather", "", "rain", "weather"],
    "grounding_chunks": [{"web": {}, "maps": None}, {"web": None, "maps": {"title": "Oslo"}}],
}


@pytest.mark.parametrize(
    ("of", "price", "named"),
    [
        # A million tokens cost $2.50, and a thousand searches $10.
        (("openai", "gpt-4o", OF_OPENAI), 2_500_000 + 3 * CENT, ["code_interpreter"]),
        # $0.30, and $35 for a thousand calls that search; then $0.50, and $14 for the searches.
        *(
            (("google_genai", model, OF_GEMINI, SOURCES), price, ["code_execution", "google_maps"])
            for model, price in (
                ("gemini-2.5-flash", 300_000 + 35_000_000),
                ("gemini-3-flash-preview", 500_000 + 2 * 14_000_000),
            )
        ),
    ],
)
async def test_a_providers_own_tools(
    of: Any, price: int, named: list[str], signals: Signals, caplog: pytest.LogCaptureFixture
) -> None:
    """A web search is charged at the price of the list; what no price includes is named once."""
    pytest.importorskip("genai_prices")
    provider, model, parts, *sources = of
    metadata = {"model_name": model, "grounding_metadata": sources[0] if sources else None}
    said = answer(1_000, input_tokens=1_000, output_tokens=0)
    said = said.model_copy(update={"content": parts, "response_metadata": metadata})
    listed = OwnModel(model=model, provider=provider, script=[said] * 2)
    scene = Scene(signals, listed, [CostLimit(thread_limit=1)])
    for _ in range(2):
        await scene.play()
    assert spent(scene, MONEY) == (2 * price, price)
    assert caplog.text.count("not charged") == len(named)
    assert all(f"{each!r}" in caplog.text for each in named)


async def test_a_price_that_fails(signals: Signals) -> None:
    """Without its price a call does not run: the error reaches the caller, and names the limit."""
    due, limit = Due(), CostLimit(run_limit=1, tool_prices={"search": lambda _: "cheap"})
    scene = scene_of(signals, due, [answer(11, *made("search", 1))], limit)
    with pytest.raises(ValueError, match="what tool_prices\\['search'\\] of limit 'cost' gives"):
        await scene.play()
    assert due == {}


async def test_a_tool_named_like_money(signals: Signals) -> None:
    """The calls of a tool are not added to what paid tools cost, whatever it is named."""
    named = ToolCallLimit(MONEY, thread_limit=2)
    script = [answer(11, MONEY, "search"), answer(12, *[MONEY] * 2), answer(13)]
    given: Any = {"tools": [MONEY, "search"], "prices": by_model}
    scene = Scene(signals, script, [CostLimit(thread_limit=9, tool_prices=PRICES), named], **given)
    await scene.play()
    assert scene.ran == [MONEY, "search", MONEY]
    assert spent(scene, MONEY)[0] == 33 * CENT
    assert scene.usage().tools == {MONEY: 2}


async def test_calls_that_share_an_id(signals: Signals) -> None:
    """Each call of a message costs the price of its own tool, though a model gave both one id."""
    calls: Any = [{"name": name, "args": {}, "id": "same"} for name in ("search", "calc")]
    limit = CostLimit(run_limit=5, tool_prices={"search": 3})
    scene = await Scene(signals, [calls, "done"], [limit], prices=by_model).played()
    assert spent(scene, MONEY) == (302 * CENT, 302 * CENT)
