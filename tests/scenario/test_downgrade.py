"""A cheaper model before the end: from a share of a budget on, calls go to another model."""

from collections.abc import Callable
from decimal import Decimal
from typing import Any

import pytest
from langchain.agents.middleware import ModelFallbackMiddleware, wrap_model_call
from langchain.agents.structured_output import ProviderStrategy, ToolStrategy
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.func import entrypoint

from langchain_quota import CostLimit, GraphQuota, MemoryStore, Quota, TokenLimit, max_usage
from langchain_quota.limits.call import ModelUsage
from langchain_quota.testing import ScriptedChatModel
from tests.scene import ANN, Scene, Weather, either, recording
from tests.stores import Clock
from tests.telemetry import Signals, attributes
from tests.tokens import MONEY, RETRY, ProviderError, answer, spent

METRIC = "langchain_quota_downgraded_calls_total"
DOLLARS_SPENT = "langchain_quota_spent_dollars_total"
OF = {"agent": "unnamed", "limit": "cost"}
DOLLARS = {"dear": Decimal("0.40"), "cheap": Decimal("0.05")}


def prices(used: ModelUsage) -> Decimal | None:
    """What a call of each of the two models costs."""
    return DOLLARS.get(used.request_model)


def model(name: str, *script: Any) -> ScriptedChatModel:
    return ScriptedChatModel(model=name, script=list(script))


@either
@pytest.mark.parametrize("options", [{}, {"reserve": max_usage}, {"quotas": True}])
async def test_from_a_share_on(kind: Any, options: Any, signals: Signals) -> None:
    """The calls from that share on are made, held and charged at the other model's price."""
    store = {"store": MemoryStore(), "context": ANN} if "quotas" in options else {}
    if store:
        options = {"quotas": [Quota(1, per="user_id")]}
    cheap = model("cheap", answer(12, "search"), answer(13))
    dear = model("dear", *[answer(10 + each, "search") for each in range(2)])
    limit = CostLimit(thread_limit=1, downgrade_to=cheap, **options)
    given: Any = {"kind": kind, "prices": prices, "tell_model": True, **store}
    scene = await Scene(signals, dear, [limit], **given).played()
    assert (len(dear.calls), len(cheap.calls)) == (2, 2)
    assert spent(scene, MONEY)[0] == 900_000_000
    # It has the tools, and is told.
    assert cheap.calls[0].tools == ("search", "calc")
    assert "a cheaper model answers" in cheap.calls[0].messages[-1].text
    assert "cheaper" not in dear.calls[-1].messages[-1].text
    assert signals.value(METRIC, agent="unnamed", limit="cost") == 2
    spans = [attributes(each) for each in signals.spans() if "model" in each.name]
    assert [each.get("downgraded_by") for each in spans] == [None, None, "cost", "cost"]


async def test_in_a_graph(signals: Signals) -> None:
    """A graph's model calls go to the other model, too, with the tools and the schema."""
    cheap = model("cheap", answer(12, ("Weather", {"degrees": 20})), answer(12))
    limit = CostLimit(run_limit=1, downgrade_to=cheap, downgrade_at=0.4)
    limits = GraphQuota([limit], prices=prices, telemetry=signals.telemetry)
    limited = limits.model(model("dear", answer(11, ("Weather", {"degrees": 10}))))
    structured, tools = limited.with_structured_output(Weather), [recording("search", [])]

    @entrypoint()
    async def graph(_: Any) -> Any:
        found = [await structured.ainvoke("hi") for _ in range(2)]
        await limited.bind_tools(tools).ainvoke("hi")
        return found

    assert await graph.ainvoke("hi") == [Weather(degrees=10), Weather(degrees=20)]
    assert [each.tools for each in cheap.calls] == [("Weather",), ("search",)]
    assert signals.value(DOLLARS_SPENT, model="cheap", **OF) == 0.10


async def test_when_there_is_room_again(signals: Signals) -> None:
    """One scope that is near is enough; when none is any more, the first model comes back."""
    clock = Clock()
    quotas = [Quota(100, per="user_id", window="1h")]
    cheap = model("cheap", answer(5, "search"))
    dear = model("dear", answer(90, "search"), answer(6))

    def wait() -> None:
        if cheap.calls:
            clock.now += 3600

    limit = TokenLimit(run_limit=10_000, thread_limit=10_000, quotas=quotas, downgrade_to=cheap)
    given: Any = {"store": MemoryStore(clock=clock), "context": ANN}
    tools = [recording("search", [], wait)]
    await Scene(signals, dear, [limit], tools=tools, **given).play()
    assert (len(dear.calls), len(cheap.calls)) == (2, 1)


@either
@pytest.mark.parametrize(
    ("strategy", "said"),
    [
        (ToolStrategy, answer(12, ("Weather", {"degrees": 20}))),
        (ProviderStrategy, answer(12, text='{"degrees": 20}')),
    ],
)
async def test_structured_answers(kind: Any, strategy: Any, said: Any, signals: Signals) -> None:
    """The other model delivers the structured response."""
    limit = CostLimit(run_limit=1, downgrade_to=model("cheap", said), downgrade_at=0.4)
    given: Any = {"kind": kind, "prices": prices, "response_format": strategy(Weather)}
    scene = await Scene(signals, model("dear", answer(11, "search")), [limit], **given).played()
    assert scene.state()["structured_response"] == Weather(degrees=20)
    assert spent(scene, MONEY) == (450_000_000, 450_000_000)


@pytest.mark.parametrize("kind", ["quota", "graph"])
@pytest.mark.parametrize("how", ["messages", "events"])
async def test_streams(kind: Any, how: str, signals: Signals) -> None:
    """The other model's answer is streamed word by word, and charged at that model's price."""
    cheap = model("cheap", answer(12, text="It is blue."))
    limit = CostLimit(run_limit=1, downgrade_to=cheap, downgrade_at=0.4)
    dear = model("dear", answer(11, "search", text="So what?"))
    scene = Scene(signals, dear, [limit], kind=kind, prices=prices)
    given: Any = {"messages": [("user", "hi")]}
    if how == "messages":
        stream = scene.agent.astream(given, scene.config, stream_mode="messages")
        found = [each[0].text for each in [each async for each in stream] if each[0].type != "tool"]
    else:
        events = [each async for each in scene.agent.astream_events(given, scene.config)]
        chunks = [each for each in events if each["event"] == "on_chat_model_stream"]
        found = [each["data"]["chunk"].text for each in chunks]
    assert [each for each in found if each] == ["So", " what?", "It", " is", " blue."]
    assert signals.value(DOLLARS_SPENT, model="cheap", **OF) == 0.05


def choosing(choose: Callable[[], ScriptedChatModel]) -> Any:
    """A middleware that chooses a model for each request."""

    @wrap_model_call
    async def chosen(request: Any, handler: Any) -> Any:
        return await handler(request.override(model=choose()))

    return chosen


def early(cheap: ScriptedChatModel) -> TokenLimit:
    return TokenLimit(run_limit=100, downgrade_to=cheap, downgrade_at=0.1)


@pytest.mark.parametrize(("order", "made"), [(1, (2, 0)), (-1, (1, 1))])
async def test_a_choice_per_request(order: int, made: Any, signals: Signals) -> None:
    """What a middleware behind the limits chooses stays; what one before them chooses does not."""
    cheap, chosen = model("cheap", answer(12)), model("chosen", answer(11, "search"), answer(12))
    items: list[Any] = [early(cheap), choosing(lambda: chosen)]
    await Scene(signals, model("dear"), items[::order]).play()
    assert (len(chosen.calls), len(cheap.calls)) == made


async def test_a_model_made_for_each_attempt(signals: Signals) -> None:
    """A retry with a model made anew is no fallback: it goes to the other model, too."""
    dear, cheap = list[ScriptedChatModel](), model("cheap", ProviderError(), answer(12))

    def choose() -> ScriptedChatModel:
        dear.append(model("dear", answer(11, "search")))
        return dear[-1]

    await Scene(signals, model("any"), [RETRY, choosing(choose), early(cheap)]).play()
    assert [len(each.calls) for each in (*dear, cheap)] == [1, 0, 0, 2]


@pytest.mark.parametrize("order", [1, -1])
async def test_a_fallback_stays(order: int, signals: Signals) -> None:
    """If the other model fails, a fallback answers, wherever its middleware is listed."""
    cheap, spare = model("cheap", ProviderError()), model("spare", answer(12))
    items: list[Any] = [early(cheap), ModelFallbackMiddleware(spare)]
    await Scene(signals, model("dear", answer(11, "search")), items[::order]).play()
    assert (len(cheap.calls), len(spare.calls)) == (1, 1)


async def test_resumed_in_another_process(signals: Signals) -> None:
    """A call that one process has checked goes to the other model in the process that makes it."""
    options: dict[str, Any] = {"checkpointer": InMemorySaver(), "interrupt_before": ["model"]}
    dear = [model("dear", answer(90)) for _ in "12"]
    cheap = [model("cheap", answer(5, text="cheap")) for _ in "12"]
    first, second = (
        Scene(signals, one, [TokenLimit(thread_limit=100, downgrade_to=other)], **options)
        for one, other in zip(dear, cheap, strict=True)
    )
    await first.play()
    await first.go_on()
    await first.play()
    await second.go_on()
    assert second.last_text() == "cheap"
    assert [len(each.calls) for each in (*dear, *cheap)] == [1, 0, 0, 1]
