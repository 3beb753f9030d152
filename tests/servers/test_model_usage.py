"""What is read of a model run is what the provider has reported, through the real clients."""

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
from langchain.agents import create_agent
from langchain.agents.middleware import AgentMiddleware
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import BaseMessage, HumanMessage, SystemMessage

from langchain_quota.estimates import asked_of, max_tokens_setting, usage_bound
from langchain_quota.model_runs import ModelRun, ModelRunCollector, collect_model_runs
from langchain_quota.model_usage import ModelUsage, charged_tokens
from langchain_quota.prices import cost
from tests.servers.clients import (
    CLAUDE,
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

Call = Callable[[BaseChatModel, list[BaseMessage]], Any]
HELLO: Any = {"messages": [("user", "Hello!")]}
ASKED: list[BaseMessage] = [SystemMessage("Be kind."), HumanMessage("Hello!")]


@pytest.fixture(scope="module")
def server() -> Iterator[PricedProvider]:
    with running_priced_provider() as provider:
        yield provider


def invoked(model: BaseChatModel, prompt: list[BaseMessage]) -> None:
    model.invoke(prompt)


def streamed(model: BaseChatModel, prompt: list[BaseMessage]) -> None:
    assert [*model.stream(prompt)]


def ainvoked(model: BaseChatModel, prompt: list[BaseMessage]) -> None:
    asyncio.run(model.ainvoke(prompt))


def astreamed(model: BaseChatModel, prompt: list[BaseMessage]) -> None:
    async def stream() -> None:
        assert [each async for each in model.astream(prompt)]

    asyncio.run(stream())


def events(model: BaseChatModel, prompt: list[BaseMessage]) -> None:
    assert [*model.stream_events(prompt, version="v3")]


calls = pytest.mark.parametrize("call", [invoked, streamed, ainvoked, astreamed, events])
apis = pytest.mark.parametrize("api", [chat, responses, messages])


def run_of(collector: ModelRunCollector) -> ModelRun:
    (run,) = collector.runs()
    return run


def collected(call: Call, model: BaseChatModel, prompt: list[BaseMessage] = ASKED) -> ModelRun:
    with collect_model_runs() as collector:
        call(model, prompt)
    return run_of(collector)


@calls
@pytest.mark.parametrize("name", REPORTS)
def test_what_is_reported_is_read(server: PricedProvider, name: str, call: Call) -> None:
    """The tokens and the price are those of the report, streamed or not, to the millionth."""
    report = REPORTS[name]
    server.play(Answer(usage=report.usage, model=report.model, service_tier=report.service_tier))
    run = collected(call, report.api(server.url, **report.options))
    read, microdollars = report.read, report.microdollars
    if report.if_streamed and call not in {invoked, ainvoked}:
        read, microdollars = report.if_streamed
    assert (run.status, run.error, run.http_status) == ("success", "", None)
    assert run.usage == read
    assert cost(run.usage, PRICES) == microdollars


@pytest.mark.parametrize("where", ["system prompt", "request"])
def test_what_is_cached_for_an_hour_is_known_from_the_request(
    server: PricedProvider, where: str
) -> None:
    """A stream does not say how long the cache is kept: what the request asks for is dearer."""
    kept = {"type": "ephemeral", "ttl": "1h"}
    server.play(Answer(usage=of_messages(25, 80, for_1h=2_000), model=CLAUDE.response_model))
    model = messages(server.url)
    prompt: list[BaseMessage] = [HumanMessage("Hello!")]
    if where == "request":
        run = collected(streamed, model.bind(cache_control=kept), prompt)
    else:
        block: Any = {"type": "text", "text": "Be kind.", "cache_control": kept}
        run = collected(streamed, model, [SystemMessage([block]), *prompt])
    assert run.usage.cache_creation_tokens == run.usage.cache_creation_1h_tokens == 2_000
    assert cost(run.usage, PRICES) == 22_125  # 25 of $5, 2,000 of $10, 80 of $25


@pytest.mark.filterwarnings("ignore:Unexpected type for token usage")  # langchain-openai's
def test_several_answers_are_paid_once(server: PricedProvider) -> None:
    """A batch has a run for each prompt, with a report for each."""
    reports = [of_chat(10, 1), of_chat(20, 2)]
    server.play(*(Answer(usage=each) for each in reports))
    with collect_model_runs() as collector:
        chat(server.url).generate([ASKED, ASKED])
    assert [run.usage.total_tokens for run in collector.runs()] == [11, 22]


@pytest.mark.parametrize("call", [invoked, streamed])
def test_without_a_report_tokens_are_estimated(server: PricedProvider, call: Call) -> None:
    """A server that reports nothing is charged about what it was sent, and what it has said."""
    server.play(Answer(text="Good day to you. " * 100))
    usage = collected(call, chat(server.url), [HumanMessage("Hello there. " * 200)]).usage
    assert usage.estimated
    assert 500 < usage.input_tokens < 1_000
    assert 400 < usage.output_tokens < 700
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens
    assert usage.models == ("gpt-4o-2024-08-06", "gpt-4o")


def test_a_stream_of_an_own_server_has_no_report(server: PricedProvider) -> None:
    """ChatOpenAI with a `base_url` asks for none while it streams: it is estimated."""
    server.play(Answer(usage=of_chat(1_000, 300)))
    assert collected(streamed, chat(server.url, stream_usage=None)).usage.estimated
    assert "stream_options" not in server.requests[0]


# Runs that fail.


@calls
@apis
@pytest.mark.parametrize("status", [429, 500])
def test_a_refused_request_is_not_charged(
    server: PricedProvider, api: Make, status: int, call: Call
) -> None:
    """A provider that answers with an error has used nothing; the next attempt is another run."""
    usage = of_messages(25, 80) if api is messages else of_chat(25, 80)
    usage = of_responses(25, 80) if api is responses else usage
    server.play(Answer(status=status), Answer(usage=usage))
    model = api(server.url)
    with collect_model_runs() as collector:
        with pytest.raises(Exception, match="not now"):
            call(model, ASKED)
        call(model, ASKED)
    failed, answered = collector.runs()
    assert (failed.status, failed.http_status) == ("error", status)
    assert "Error" in failed.error
    assert failed.usage.total_tokens == 0
    assert (answered.status, answered.usage.total_tokens) == ("success", 105)
    assert failed.id != answered.id


@apis
@pytest.mark.parametrize("call", [invoked, ainvoked])
def test_a_timeout_is_charged_by_an_estimate(server: PricedProvider, api: Make, call: Call) -> None:
    """Whether a provider has served what nobody waited for is not known: the prompt is charged."""
    server.play(Answer(stops_after=0))
    with collect_model_runs() as collector, pytest.raises(Exception, match=r"(?i)timed out"):
        call(api(server.url, timeout=0.2), ASKED)
    run = run_of(collector)
    assert (run.status, run.http_status) == ("error", None)
    assert "Timeout" in run.error
    assert run.usage.estimated
    assert run.usage.input_tokens > 0
    assert run.usage.output_tokens == 0


@apis
def test_a_connection_that_breaks_is_charged_by_an_estimate(
    server: PricedProvider, api: Make
) -> None:
    """So is what a server has been sent that then closes the connection."""
    server.play(Answer(stops_after=0, then="close"))
    with collect_model_runs() as collector, pytest.raises(Exception, match="Connection error"):
        api(server.url).invoke(ASKED)
    assert run_of(collector).usage.estimated


@apis
def test_a_server_that_is_not_there_is_not_charged(api: Make) -> None:
    """Where no connection is made nothing is sent."""
    with running_priced_provider() as gone:
        url = gone.url
    with collect_model_runs() as collector, pytest.raises(Exception, match="Connection error"):
        api(url).invoke(ASKED)
    run = run_of(collector)
    assert (run.status, run.http_status, run.usage.total_tokens) == ("error", None, 0)


# Streams that do not end.


@apis
def test_a_stream_that_is_left_is_charged_what_has_arrived(
    server: PricedProvider, api: Make
) -> None:
    """Who stops reading pays for the prompt, and for the words so far."""
    server.play(Answer(text="word " * 100, stops_after=50, usage=None))
    with collect_model_runs() as collector:
        stream: Any = api(server.url).stream(ASKED)
        said = ""
        for chunk in stream:
            said += chunk.text
            if said.count("word") == 40:
                break
        stream.close()
    run = run_of(collector)
    assert (run.status, run.error) == ("error", "GeneratorExit")
    assert run.usage.estimated
    assert 66 <= run.usage.output_tokens <= 84


@apis
async def test_a_call_that_is_cancelled_stays_pending(server: PricedProvider, api: Make) -> None:
    """Nobody tells how a cancelled call ends: it is charged the prompt, and what has arrived."""
    server.play(Answer(text="word " * 100, stops_after=50))
    with collect_model_runs() as collector:
        model = api(server.url, streaming=True)
        task = asyncio.create_task(model.ainvoke(ASKED))
        async with asyncio.timeout(30):
            while sum(run.usage.output_tokens for run in collector.runs()) < 40:  # noqa: ASYNC110 - it has no event
                await asyncio.sleep(0.01)
        task.cancel()
        server.let_go()  # some clients wait for the rest
        with pytest.raises(asyncio.CancelledError):
            await task
    run = run_of(collector)
    assert run.status == "pending"
    assert run.usage.estimated
    assert run.usage.request_model == model._get_ls_params()["ls_model_name"]
    assert charged_tokens(run.usage, "input") > 0
    assert 40 <= charged_tokens(run.usage, "output") <= 84


@apis
@pytest.mark.parametrize("then", ["close", "fail"])
def test_a_stream_that_fails_is_charged_what_has_arrived(
    server: PricedProvider, api: Make, then: Any
) -> None:
    """An error in mid-answer does not make the words before it free."""
    server.play(Answer(text="word " * 100, stops_after=50, then=then))
    with collect_model_runs() as collector, contextlib.suppress(Exception):
        [*api(server.url).stream(ASKED)]
    run = run_of(collector)
    assert then == "close" or run.status == "error"
    assert run.usage.estimated
    assert 66 <= run.usage.output_tokens <= 84


# The bound before a call.


class Bounds(AgentMiddleware):
    """Keeps the bound of every model call, with the settings of a request that is capped."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        super().__init__()
        self.settings = settings
        self.bounds: list[ModelUsage] = []

    def wrap_model_call(self, request: Any, handler: Callable[[Any], Any]) -> Any:
        request = request.override(model_settings={**request.model_settings, **self.settings})
        self.bounds.append(usage_bound(request))
        return handler(request)


@apis
@pytest.mark.parametrize("most", [100, 7])
@pytest.mark.parametrize("own", [100, None])
def test_the_bound_of_an_answer_is_what_is_asked_for(
    server: PricedProvider, api: Make, own: int | None, most: int
) -> None:
    """What the bound takes for the limit of an answer is what the provider is sent."""
    usage = of_messages(25, 5) if api is messages else of_chat(25, 5)
    server.play(Answer(usage=of_responses(25, 5) if api is responses else usage))
    model = api(server.url, max_tokens=own)
    middleware = Bounds({} if own == most else {max_tokens_setting(model): most})
    create_agent(model, [], middleware=[middleware]).invoke(HELLO)
    ((bound,), (sent,)) = middleware.bounds, server.requests
    assert bound.output_tokens == most
    assert {value for name, value in sent.items() if name.startswith("max_")} == {most}
    assert bound.models == (sent["model"],)
    assert bound.provider == ("anthropic" if api is messages else "openai")
    assert bound.input_tokens >= 25


@apis
def test_a_setting_that_may_not_count_does_not_lower_the_bound(
    server: PricedProvider, api: Make
) -> None:
    """Over the Responses API a model's own limit beats `max_tokens` of a request."""
    usage = of_messages(25, 5) if api is messages else of_chat(25, 5)
    server.play(Answer(usage=of_responses(25, 5) if api is responses else usage))
    middleware = Bounds({"max_tokens": 7})
    model = api(server.url, max_tokens=100)
    create_agent(model, [], middleware=[middleware]).invoke(HELLO)
    (sent,) = server.requests
    (most,) = {value for name, value in sent.items() if name.startswith("max_")}
    assert middleware.bounds[0].output_tokens >= most


def test_azure_is_a_provider_of_its_own(server: PricedProvider) -> None:
    """The answer names the model, where the request may only name a deployment."""
    server.play(Answer(usage=of_chat(1_000, 0)))
    model = openai.AzureChatOpenAI(
        azure_endpoint=server.url, azure_deployment="mine", api_version="2026-01-01", api_key=KEY
    )
    asked = asked_of(model, {})
    assert (asked.provider, asked.models) == ("azure", ("mine",))
    usage = collected(invoked, model).usage
    assert (usage.provider, usage.models) == ("azure", ("gpt-4o-2024-08-06", "mine"))
    assert cost(usage, PRICES) == 2_500
