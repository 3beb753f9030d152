"""What is charged is what the provider has reported, through the real clients, to the token."""

import asyncio
from collections.abc import Iterator, Mapping
from itertools import product
from typing import Any

import pytest
from langchain.agents.middleware import ModelFallbackMiddleware, wrap_model_call
from langchain_core.messages import SystemMessage

from langchain_quota import CostLimit, MemoryStore, Quota, QuotaWarning, TokenLimit, max_usage
from langchain_quota.errors import UnknownPriceError
from langchain_quota.limits import Limit
from langchain_quota.limits.call import ModelUsage
from tests.clients import (
    KEY,
    PRICES,
    REPORTS,
    Make,
    apis,
    chat,
    messages,
    of_openai,
    openai,
    reporting,
    responses,
)
from tests.provider import Answer, Provider, running_provider
from tests.scene import Form, Scene
from tests.stores import counts
from tests.telemetry import Signals
from tests.tokens import MONEY, RETRY, Twice, spent, spent_by_agent

DOLLARS: dict[Make, tuple[float, float]]
DOLLARS = {chat: (2.5, 10), responses: (2.5, 10), messages: (5, 25)}
"""What a million tokens of input and of output cost."""
GIVEN, MADE = (100, 50), (60, 20)
"""The tokens of input and output of a first and of a second answer."""
ASKED: Any = {"messages": [("user", "Hello!")]}
FORMS: list[Form] = ["sync", "async"]
NAMES: tuple[Any, ...] = ("input", "output")
LIMITS: list[Limit] = [
    TokenLimit(thread_limit=10**9),
    TokenLimit(thread_limit=10**9, tokens="input"),
    TokenLimit(thread_limit=10**9, tokens="output"),
    CostLimit(thread_limit=1_000),
]


@pytest.fixture(scope="module")
def server() -> Iterator[Provider]:
    with running_provider() as provider:
        yield provider


def scene_of(signals: Signals, model: Any, *beside: Any, **options: Any) -> Scene:
    """An agent with a budget of each kind."""
    given = {"prices": PRICES, "tools": (), **options}
    return Scene(signals, model, [*LIMITS, *beside], **given)


def due(api: Make, *several: tuple[int, int]) -> Mapping[str, int]:
    """What so many tokens are charged."""
    given, made = (sum(each) for each in zip(*several, strict=True))
    a_given, a_made = DOLLARS[api]
    return charges(given, made, int((given * a_given + made * a_made) * 1000))


def charges(given: int, made: int, nanodollars: int) -> Mapping[str, int]:
    tokens = {"total": given + made, "input": given, "output": made}
    return {f"model.{name}_tokens": each for name, each in tokens.items()} | {MONEY: nanodollars}


@pytest.mark.parametrize("name", REPORTS)
async def test_what_is_charged_is_what_was_reported(
    server: Provider, signals: Signals, name: str
) -> None:
    """A thread is charged what the provider reports, by its tier and its cache, to the billionth.

    Where a stream does not say how long Anthropic keeps what it caches, the cheaper time counts.
    """
    report = REPORTS[name]
    server.play(*[report.answer] * 4)
    for form, streamed in product(FORMS, (False, True)):
        model = report.api(server.url, streaming=streamed, **report.options)
        scene = scene_of(signals, model, form=form)
        await scene.play()
        nanodollars = (report.streamed if streamed else None) or report.nanodollars
        assert scene.usage().spent == charges(report.input, report.made, nanodollars)
    assert [bool(each.get("stream")) for each in server.requests] == [False, True] * 2


async def test_what_a_gateway_says_it_costs(server: Provider, signals: Signals) -> None:
    """`ChatOpenAI` passes it on, but not in a stream: then the next call is an error."""
    usage = of_openai("prompt", "completion", 100, 50)
    told = (usage | {"cost": 0.0125}, usage | {"cost_in_usd_ticks": 125_000_000})
    server.play(*[Answer(usage=each, model="z/unlisted") for each in (*told, told[0])])
    options = {"unknown_price": "reported", "thread_id": "1"}
    model = chat(server.url, model="openrouter/auto")
    scene = scene_of(signals, model, **options)
    await scene.play()
    assert spent(scene, MONEY)[0] == 12_500_000
    await scene.play()
    assert spent(scene, MONEY)[0] == 25_000_000
    streaming = scene_of(signals, chat(server.url, model="z/streams", streaming=True), **options)
    await streaming.play()
    with pytest.raises(UnknownPriceError, match="an earlier call is paid"):
        await streaming.play()


@pytest.mark.parametrize("where", ["system prompt", "request"])
async def test_what_is_cached_for_an_hour_is_known_from_the_request(
    server: Provider, signals: Signals, where: str
) -> None:
    """A stream does not say how long the cache is kept: what the request asks for is dearer."""
    kept: Any = {"type": "ephemeral", "ttl": "1h"}
    server.play(reporting(messages, 25, 80, for_1h=2_000))
    block: Any = {"type": "text", "text": "Be kind.", "cache_control": kept}

    @wrap_model_call
    async def keeps(request: Any, handler: Any) -> Any:
        if where == "request":
            return await handler(request.override(model_settings={"cache_control": kept}))
        return await handler(request.override(system_message=SystemMessage([block])))

    scene = scene_of(signals, messages(server.url, streaming=True), keeps)
    await scene.play()

    assert spent(scene, MONEY)[0] == 22_125_000  # 25 of $5, 2,000 of $10, 80 of $25


async def test_a_model_that_reports_nothing_is_warned_of_once(
    server: Provider, signals: Signals
) -> None:
    """ChatOpenAI with a `base_url` streams no usage: one warning says what to do, and it helps."""
    server.play(*[reporting(chat, 1_001, 50)] * 3)
    silent = scene_of(signals, chat(server.url, streaming=True, stream_usage=None))
    with pytest.warns(QuotaWarning, match="'gpt-4o.*stream_usage=True"):
        await silent.play()
    # Warnings are errors here.
    await silent.play()
    assert 0 < spent(silent)[0] < 100

    told = scene_of(signals, chat(server.url, streaming=True, stream_usage=True), thread_id="2")
    await told.play()
    assert spent(told) == (1_051, 1_051)


@apis
async def test_what_is_asked_again(server: Provider, signals: Signals, api: Make) -> None:
    """What was refused costs nothing; all answers are charged, but what a client hides is not.

    A client that asks again after a broken connection says nothing of it. The provider may have
    served both requests. That is a known gap: `max_retries=0` closes it.
    """
    given, made = reporting(api, *GIVEN), reporting(api, *MADE)
    broken = reporting(api, *GIVEN, stops_after=0, then="close")
    other = chat if api is messages else messages
    fallback = ModelFallbackMiddleware(other(server.url))
    tries: list[tuple[Answer, Answer, Any, Mapping[str, int]]] = [
        (Answer(status=429), made, RETRY, due(api, MADE)),
        (Answer(status=500), made, None, due(api, MADE)),
        (broken, made, None, due(api, MADE)),
        (given, made, Twice(), due(api, GIVEN, MADE)),
        (Answer(status=500), reporting(other, *GIVEN), fallback, due(other, GIVEN)),
    ]
    for first, second, beside, charged in tries:
        server.play(first, second)
        model = api(server.url, max_retries=0 if beside else 1)
        scene = scene_of(signals, model, *([beside] if beside else []))

        await scene.play()

        assert len(server.requests) == 2
        assert scene.usage().spent == charged


async def test_a_deployment_needs_the_name_of_its_model(server: Provider, signals: Signals) -> None:
    """On Azure a deployment has no price: nothing is sent until `model=` names the model."""
    options: Any = {"azure_endpoint": server.url, "azure_deployment": "mine", "api_key": KEY}
    options["api_version"] = "2026-01-01"
    server.play(reporting(chat, *GIVEN))
    nameless = scene_of(signals, openai.AzureChatOpenAI(**options))
    with pytest.raises(UnknownPriceError, match="the model 'mine' of 'azure'"):
        await nameless.play()
    assert not server.requests

    scene = scene_of(signals, openai.AzureChatOpenAI(**options, model="gpt-4o"))
    await scene.play()

    assert scene.usage().spent == due(chat, GIVEN)


@apis
@pytest.mark.parametrize(
    ("answer", "options", "output"),
    [
        ({"status": 500}, {}, None),
        (None, {}, None),
        ({"stops_after": 0}, {"timeout": 0.2}, (0, 1)),
        ({"stops_after": 0, "then": "close"}, {}, (0, 1)),
        ({"stops_after": 50, "then": "fail"}, {"streaming": True}, (66, 84)),
    ],
    ids=["refused", "not there", "timeout", "broken", "a stream that fails"],
)
async def test_what_a_failed_call_is_charged(
    server: Provider, signals: Signals, api: Make, *, answer: Any, options: Any, output: Any
) -> None:
    """What was refused or not sent is free; else the prompt is charged, and what has arrived."""
    url, store = server.url, MemoryStore()
    server.play(Answer(text="word " * 100, **(answer or {})))
    if answer is None:
        with running_provider() as gone:
            url = gone.url
    quotas = [Quota(10**9, per="global")]
    limits = [TokenLimit(quotas=quotas, tokens=each) for each in NAMES]
    scene = Scene(signals, api(url, **options), limits, store=store, tools=())

    with pytest.raises(Exception, match=r"not now|onnection|imed out"):
        await scene.play("Hello there!")

    given, made = (counts(store).get(f"model.{each}_tokens:global:", 0) for each in NAMES)
    assert (given > 0) == (output is not None)
    least, most = output or (0, 0)
    assert least <= made <= most


@apis
async def test_a_stream_that_is_cancelled_is_charged_what_has_arrived(
    server: Provider, signals: Signals, api: Make
) -> None:
    """Who stops waiting pays for the prompt, and for the words so far."""
    server.play(Answer(text="word " * 100, stops_after=50))
    scene = scene_of(signals, api(server.url, streaming=True))
    arrived = asyncio.Event()

    async def read() -> None:
        said = 0
        given, how = scene.config, {"stream_mode": "messages"}
        async for chunk, _ in scene.agent.astream(ASKED, given, **how):
            said += chunk.text.count("word")
            if said == 40:
                arrived.set()

    running = asyncio.create_task(read())
    await asyncio.wait_for(arrived.wait(), 30)
    running.cancel()
    server.let_go()  # some clients wait for the rest
    with pytest.raises(asyncio.CancelledError):
        await running
    await asyncio.sleep(0)

    assert 40 <= spent_by_agent(signals)["unnamed"] <= 2 * 84 + 20


@apis
@pytest.mark.parametrize(("own", "setting"), [(100, None), (None, 7), (100, 7), (7, 100)])
async def test_the_bound_of_an_answer_is_what_is_asked_for(
    server: Provider, signals: Signals, api: Make, own: int | None, setting: int | None
) -> None:
    """What the bound takes for the limit of an answer is at least what the provider is sent."""
    server.play(reporting(api, 25, 5))
    capped = {} if setting is None else {"max_tokens": setting}
    bounds = list[ModelUsage]()

    @wrap_model_call
    async def capping(request: Any, handler: Any) -> Any:
        request = request.override(model_settings={**request.model_settings, **capped})
        bounds.append(max_usage(request))
        return await handler(request)

    await scene_of(signals, api(server.url, max_tokens=own), capping).play()

    ((bound,), (sent,)) = bounds, server.requests
    (most,) = {value for name, value in sent.items() if name.startswith("max_")}
    # Over the Responses API a model's own limit beats `max_tokens` of a request.
    assert bound.output_tokens >= most
    assert bound.output_tokens == most or (own and setting)
    assert bound.models == (sent["model"],)
    assert bound.provider == ("anthropic" if api is messages else "openai")
