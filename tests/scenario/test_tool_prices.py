"""Tools that cost money: a call is charged its price if it ran, and refused if it does not fit."""

from decimal import Decimal
from typing import Any

import pytest
from langchain.agents.middleware import HumanInTheLoopMiddleware, ToolRetryMiddleware
from langchain_core.language_models.base import LangSmithParams
from langchain_core.tools import BaseTool, StructuredTool

from langchain_quota import CostLimit, MemoryStore, Quota, ToolCallLimit
from langchain_quota.testing import ScriptedChatModel
from tests.scene import ANN, Scene, tool_limiter
from tests.stores import counts
from tests.telemetry import Signals
from tests.tokens import MONEY, answer, spent

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


class Listed(ScriptedChatModel):
    """A model that is in the list of prices."""

    provider: str = "openai"

    def _get_ls_params(self, stop: Any = None, **kwargs: Any) -> LangSmithParams:
        return {**super()._get_ls_params(stop=stop, **kwargs), "ls_provider": self.provider}


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
    listed = Listed(model=model, provider=provider, script=[said] * 2)
    scene = Scene(signals, listed, [CostLimit(thread_limit=1)])
    for _ in range(2):
        await scene.play()
    assert spent(scene, MONEY) == (2 * price, price)
    assert caplog.text.count("not charged") == len(named)
    assert all(f"{each!r}" in caplog.text for each in named)


@pytest.mark.parametrize(
    ("prices", "error", "said"),
    [
        ({"search": -1}, ValueError, r"tool_prices\['search'\] must be from 0"),
        ({"search": "0.0000000001"}, ValueError, "at most nine decimal places"),
        ({"": 1}, ValueError, "tool_prices must be the name of a tool, not ''"),
        (["search"], TypeError, "tool_prices must be a table of prices by tool"),
        ({"search": lambda: 1}, TypeError, r"tool_prices\['search'\]"),
    ],
)
def test_bad_prices(prices: Any, error: type[Exception], said: str) -> None:
    """A price that cannot be used fails where it is given."""
    with pytest.raises(error, match=said):
        CostLimit(run_limit=1, tool_prices=prices)


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
