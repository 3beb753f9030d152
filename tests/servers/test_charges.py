"""A thread is charged what the provider reported, with any proxy or adapter in between."""

from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Any

import pytest
from langchain.agents import create_agent
from langchain.agents.middleware import (
    AgentMiddleware,
    ModelFallbackMiddleware,
    ModelRetryMiddleware,
)
from langchain.agents.structured_output import (
    ProviderStrategy,
    StructuredOutputValidationError,
    ToolStrategy,
)
from langchain_core.caches import InMemoryCache
from langgraph.checkpoint.memory import InMemorySaver
from pydantic import BaseModel

from langchain_quota import CostLimit, QuotaMiddleware, TokenLimit, usage
from langchain_quota.errors import UnknownPriceError
from langchain_quota.limits import Limit
from tests.servers.clients import (
    KEY,
    PRICES,
    REPORTS,
    Make,
    chat,
    messages,
    of_chat,
    of_messages,
    of_responses,
    openai,
    responses,
)
from tests.servers.priced import Answer, PricedProvider, running_priced_provider
from tests.signals import Signals

ASKED: Any = {"messages": [("user", "Hello!")]}
CONFIG: Any = {"configurable": {"thread_id": "1"}}

apis = pytest.mark.parametrize("api", [chat, responses, messages])
MODELS: dict[Make, str] = {
    chat: "gpt-4o-2024-08-06",
    responses: "gpt-4o-2024-08-06",
    messages: "claude-opus-4-6",
}
DOLLARS: dict[Make, tuple[float, float]] = {
    chat: (2.5, 10),
    responses: (2.5, 10),
    messages: (5, 25),
}
"""What a million tokens of input and of output cost."""
GIVEN, MADE = (100, 50), (60, 20)
"""The tokens of input and output of a first and of a second answer."""


class Weather(BaseModel):
    """The weather."""

    degrees: int


class Twice(AgentMiddleware):
    """Calls the model twice, and takes the second answer."""

    async def awrap_model_call(self, request: Any, handler: Callable[[Any], Awaitable[Any]]) -> Any:
        await handler(request)
        return await handler(request)


@pytest.fixture(scope="module")
def server() -> Iterator[PricedProvider]:
    with running_priced_provider() as provider:
        yield provider


def answer(api: Make, tokens: tuple[int, int] = GIVEN, **more: Any) -> Answer:
    """An answer that reports so many tokens of input and output."""
    reports: dict[Make, Callable[..., dict[str, Any]]] = {
        chat: of_chat,
        responses: of_responses,
        messages: of_messages,
    }
    return Answer(usage=reports[api](*tokens), model=MODELS[api], **more)


def due(api: Make, *several: tuple[int, int]) -> dict[str, int]:
    """What so many tokens are charged."""
    given, made = (sum(each) for each in zip(*several, strict=True))
    a_given, a_made = DOLLARS[api]
    dollars = given * a_given + made * a_made
    assert dollars == int(dollars), "choose tokens that cost whole millionths"
    return {
        "model.total_tokens": given + made,
        "model.input_tokens": given,
        "model.output_tokens": made,
        "model.microdollars": int(dollars),
    }


def agent_of(
    signals: Signals, model: Any, *, beside: Sequence[AgentMiddleware] = (), **options: Any
) -> Any:
    """An agent with a budget of each kind."""
    limits: list[Limit] = [
        TokenLimit(thread_limit=10**9),
        TokenLimit(thread_limit=10**9, tokens="input"),
        TokenLimit(thread_limit=10**9, tokens="output"),
        CostLimit(thread_limit=1_000),
    ]
    quota: QuotaMiddleware[Any, Any] = QuotaMiddleware(
        limits, prices=PRICES, telemetry=signals.telemetry
    )
    return create_agent(model, middleware=[quota, *beside], checkpointer=InMemorySaver(), **options)


async def spent(agent: Any, config: Any = CONFIG) -> Mapping[str, int]:
    """What the thread has been charged."""
    return usage(await agent.aget_state(config)).spent


@pytest.mark.parametrize("form", ["invoke", "stream", "ainvoke", "astream"])
@pytest.mark.parametrize("name", REPORTS)
async def test_what_is_charged_is_what_was_reported(
    server: PricedProvider, signals: Signals, name: str, form: str
) -> None:
    """A thread is charged what the provider reports, by its tier and its cache, to the millionth.

    Where a stream does not say how long Anthropic keeps what it caches, the cheaper time counts.
    """
    report = REPORTS[name]
    server.play(Answer(usage=report.usage, model=report.model, service_tier=report.service_tier))
    agent = agent_of(signals, report.api(server.url, **report.options))

    match form:
        case "invoke":
            agent.invoke(ASKED, CONFIG)
        case "stream":
            assert [*agent.stream(ASKED, CONFIG, stream_mode="messages")]
        case "ainvoke":
            await agent.ainvoke(ASKED, CONFIG)
        case "astream":
            assert [each async for each in agent.astream(ASKED, CONFIG, stream_mode="messages")]

    (sent,) = server.requests
    assert bool(sent.get("stream")) == form.endswith("stream")
    read, microdollars = report.read, report.microdollars
    if report.if_streamed and form.endswith("stream"):
        read, microdollars = report.if_streamed
    assert await spent(agent) == {
        "model.total_tokens": read.total_tokens,
        "model.input_tokens": read.input_tokens,
        "model.output_tokens": read.output_tokens,
        "model.microdollars": microdollars,
    }


@apis
async def test_a_middleware_that_calls_the_model_twice_pays_twice(
    server: PricedProvider, signals: Signals, api: Make
) -> None:
    """Both answers of one model call are charged, though the agent sees only the second."""
    server.play(answer(api), answer(api, MADE))
    agent = agent_of(signals, api(server.url), beside=[Twice()])

    await agent.ainvoke(ASKED, CONFIG)

    assert await spent(agent) == due(api, GIVEN, MADE)


@apis
@pytest.mark.parametrize("status", [429, 500])
async def test_a_retry_pays_for_the_answer_alone(
    server: PricedProvider, signals: Signals, api: Make, status: int
) -> None:
    """Of a call that the provider refuses and LangChain makes again, the answer is charged."""
    server.play(Answer(status=status), answer(api))
    again = ModelRetryMiddleware(max_retries=1, initial_delay=0, jitter=False)
    agent = agent_of(signals, api(server.url), beside=[again])

    await agent.ainvoke(ASKED, CONFIG)

    assert len(server.requests) == 2
    assert await spent(agent) == due(api, GIVEN)


@apis
async def test_a_fallback_has_its_own_price(
    server: PricedProvider, signals: Signals, api: Make
) -> None:
    """Where another model answers, what it has used is charged by its price."""
    other = chat if api is messages else messages
    server.play(Answer(status=500), answer(other))
    beside = [ModelFallbackMiddleware(other(server.url))]
    agent = agent_of(signals, api(server.url), beside=beside)

    await agent.ainvoke(ASKED, CONFIG)

    assert await spent(agent) == due(other, GIVEN)


@apis
@pytest.mark.parametrize("status", [429, 500])
async def test_the_clients_own_retries_are_free_where_they_are_refused(
    server: PricedProvider, signals: Signals, api: Make, status: int
) -> None:
    """With `max_retries` the client asks again by itself: what was refused costs nothing."""
    server.play(Answer(status=status), answer(api))
    agent = agent_of(signals, api(server.url, max_retries=1))

    await agent.ainvoke(ASKED, CONFIG)

    assert len(server.requests) == 2
    assert await spent(agent) == due(api, GIVEN)


@apis
async def test_the_clients_own_retries_are_hidden(
    server: PricedProvider, signals: Signals, api: Make
) -> None:
    """A client that asks again after a broken connection says nothing of it: one is charged.

    The provider may have served both requests. That is a known gap: `max_retries=0` closes it.
    """
    server.play(answer(api, stops_after=0, then="close"), answer(api, MADE))
    agent = agent_of(signals, api(server.url, max_retries=1))

    await agent.ainvoke(ASKED, CONFIG)

    assert len(server.requests) == 2
    assert await spent(agent) == due(api, MADE)


@apis
async def test_the_response_cache_is_free(
    server: PricedProvider, signals: Signals, api: Make
) -> None:
    """An answer from LangChain's response cache repeats a report, and is not charged."""
    server.play(answer(api))
    agent = agent_of(signals, api(server.url, cache=InMemoryCache()))
    again: Any = {"configurable": {"thread_id": "2"}}

    await agent.ainvoke(ASKED, CONFIG)
    result = await agent.ainvoke(ASKED, again)

    assert result["messages"][-1].usage_metadata["total_tokens"] == sum(GIVEN)
    assert len(server.requests) == 1
    assert await spent(agent) == due(api, GIVEN)
    assert {*(await spent(agent, again)).values()} <= {0}


@apis
async def test_a_structured_answer_that_cannot_be_read_is_paid(
    server: PricedProvider, signals: Signals, api: Make
) -> None:
    """With `ProviderStrategy` a parse error ends the run: the next one finds it charged."""
    server.play(answer(api, text="no json"), answer(api, MADE, text='{"degrees": 3}'))
    agent = agent_of(signals, api(server.url), response_format=ProviderStrategy(Weather))

    with pytest.raises(StructuredOutputValidationError):
        await agent.ainvoke(ASKED, CONFIG)
    result = await agent.ainvoke(ASKED, CONFIG)

    assert result["structured_response"] == Weather(degrees=3)
    assert await spent(agent) == due(api, GIVEN, MADE)


@apis
async def test_a_structured_answer_that_is_asked_for_again_is_paid_twice(
    server: PricedProvider, signals: Signals, api: Make
) -> None:
    """With `ToolStrategy` the model is asked again after wrong arguments: both are charged."""
    wrong, right = ("Weather", {"degrees": "mild"}), ("Weather", {"degrees": 3})
    server.play(answer(api, call=wrong), answer(api, MADE, call=right))
    agent = agent_of(signals, api(server.url), response_format=ToolStrategy(Weather))

    result = await agent.ainvoke(ASKED, CONFIG)

    assert result["structured_response"] == Weather(degrees=3)
    assert await spent(agent) == due(api, GIVEN, MADE)


async def test_a_deployment_needs_the_name_of_its_model(
    server: PricedProvider, signals: Signals
) -> None:
    """On Azure a deployment has no price: nothing is sent until `model=` names the model."""
    options = {
        "azure_endpoint": server.url,
        "azure_deployment": "mine",
        "api_version": "2026-01-01",
        "api_key": KEY,
    }
    server.play(answer(chat))
    nameless = agent_of(signals, openai.AzureChatOpenAI(**options))
    with pytest.raises(UnknownPriceError, match="the model 'mine' of 'azure'"):
        await nameless.ainvoke(ASKED, CONFIG)
    assert not server.requests

    agent = agent_of(signals, openai.AzureChatOpenAI(**options, model="gpt-4o"))
    await agent.ainvoke(ASKED, CONFIG)

    assert await spent(agent) == due(chat, GIVEN)
