"""Which model runs are collected: all that a block starts, each once, by its id."""

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from http.client import IncompleteRead
from typing import Any

import pytest
from langchain.agents import create_agent
from langchain.agents.middleware import (
    AgentMiddleware,
)
from langchain_core.caches import InMemoryCache
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.language_models import FakeListLLM
from langchain_core.messages import AIMessage
from langchain_core.tools import BaseTool, tool

from langchain_quota.model_runs import ModelRun, collect_model_runs
from langchain_quota.model_usage import ModelUsage, charged_tokens
from langchain_quota.testing import ScriptedChatModel
from tests.scene import Form, both_forms

ASKED: Any = {"messages": [("user", "Hi!")]}


class Budget(AgentMiddleware):
    """Keeps the runs of every model call and every tool call, as a budget would."""

    def __init__(self) -> None:
        super().__init__()
        self.collected: list[list[ModelRun]] = []

    def wrap_model_call(self, request: Any, handler: Callable[[Any], Any]) -> Any:
        with collect_model_runs() as collector:
            try:
                return handler(request)
            finally:
                self.collected.append(collector.runs())

    async def awrap_model_call(self, request: Any, handler: Callable[[Any], Awaitable[Any]]) -> Any:
        with collect_model_runs() as collector:
            try:
                return await handler(request)
            finally:
                self.collected.append(collector.runs())

    wrap_tool_call = wrap_model_call
    awrap_tool_call = awrap_model_call

    def tokens(self) -> list[list[int]]:
        return [[run.usage.total_tokens for run in runs] for runs in self.collected]


def answer(tokens: int, *calls: str) -> AIMessage:
    usage: Any = {"input_tokens": tokens - 1, "output_tokens": 1, "total_tokens": tokens}
    called = [{"name": name, "args": {}, "id": f"{name}-{tokens}"} for name in calls]
    return AIMessage("Hello.", usage_metadata=usage, tool_calls=called)


def scripted(*script: Any, **options: Any) -> ScriptedChatModel:
    return ScriptedChatModel(script=[*script], **options)


def run(
    form: Form,
    model: ScriptedChatModel,
    *middleware: AgentMiddleware,
    tools: Sequence[BaseTool] = (),
    **options: Any,
) -> None:
    agent: Any = create_agent(model, [*tools], middleware=middleware, **options)
    if form == "sync":
        agent.invoke(ASKED)
    else:
        asyncio.run(agent.ainvoke(ASKED))


@both_forms
def test_a_sub_agent_is_collected_at_every_level(form: Form) -> None:
    """A sub-agent's run is its own budget's and that of the tool call, by one id."""
    outer, inner = Budget(), Budget()

    @tool
    def ask() -> str:
        """Ask."""
        create_agent(scripted(answer(7)), middleware=[inner]).invoke(ASKED)
        return "asked"

    run(form, scripted(answer(10, "ask"), answer(20)), outer, tools=[ask])
    assert outer.tokens() == [[10], [7], [20]]
    assert inner.collected == [outer.collected[1]]


def test_what_the_response_cache_answers_is_free() -> None:
    """LangChain's response cache repeats the tokens: they are seen, and not charged."""
    model = scripted(answer(10), cache=InMemoryCache())
    with collect_model_runs() as collector:
        model.invoke("Hi!")
        model.invoke("Hi!")
    first, again = (each.usage for each in collector.runs())
    assert (first.cached, again.cached) == (False, True)
    assert again.total_tokens == 10
    assert [charged_tokens(each, "total") for each in (first, again)] == [10, 0]


def named(name: str, *kinds: type[BaseException], **attributes: Any) -> BaseException:
    """An error as a client's package has it, with the names of its classes."""
    kind: type[BaseException] = type(name, kinds or (Exception,), attributes)
    return kind("It failed.")


HTTP_ERROR: Any = type("HTTPError", (OSError,), {})
GOOGLE: Any = type("GoogleAPICallError", (Exception,), {})


@pytest.mark.parametrize(
    ("error", "status", "is_paid"),
    [
        (named("ChunkedEncodingError"), None, True),
        (named("ClientPayloadError"), None, True),
        (named("CloseError"), None, True),
        (IncompleteRead(b""), None, True),
        (asyncio.IncompleteReadError(b"", 5), None, True),
        (json.JSONDecodeError("no answer", "{", 1), None, True),
        (named("ConnectionClosedError", code=1011), None, True),
        (named("DeadlineExceeded", GOOGLE, code=504), None, True),
        (named("Failed", code=1011), None, False),
        (named("Failed", code=503), None, False),
        (named("TooManyRequests", HTTP_ERROR, code=429), 429, False),
        (named("InvalidArgument", GOOGLE, code=400), 400, False),
        (named("APIStatusError", status_code=503), 503, False),
        (named("NewConnectionError", TimeoutError), None, False),
        (named("PoolTimeout", TimeoutError), None, False),
    ],
    ids=repr,
)
def test_an_error_shows_whether_the_call_may_be_paid(
    error: BaseException, status: int | None, *, is_paid: bool
) -> None:
    """What breaks when something was sent may be paid; what was refused or not sent is not."""
    with collect_model_runs() as collector, pytest.raises(type(error)):
        scripted(error).invoke("How do you do?")
    (found,) = collector.runs()
    assert (found.http_status, bool(found.usage.total_tokens)) == (status, is_paid)


def test_completion_models_are_collected() -> None:
    """A completion model that reports nothing is estimated by its prompt and its text."""
    with collect_model_runs() as collector:
        FakeListLLM(responses=["Good day to you."]).invoke("How do you do?")
    (found,) = collector.runs()
    assert found.status == "success"
    assert found.usage.estimated
    assert (found.usage.input_tokens, found.usage.output_tokens) == (5, 6)


def test_a_run_ends_after_its_block() -> None:
    """What is still running when the block ends is pending, and is itself when it has ended."""
    with collect_model_runs() as collector:
        stream = scripted(answer(10)).stream("Hi!")
        next(stream)
    (pending,) = collector.runs()
    assert (pending.status, pending.usage.estimated) == ("pending", True)
    assert [*stream]
    (ended,) = collector.runs()
    assert (ended.status, ended.id, ended.usage.total_tokens) == ("success", pending.id, 10)


class RefusedError(Exception):
    """The model may not be called."""


class Looks(BaseCallbackHandler):
    """Looks on, as an application's own handler does."""


async def call(model: Any, form: Form, *handlers: BaseCallbackHandler, streamed: bool) -> None:
    config: Any = {"callbacks": [*handlers]}
    if form == "sync":
        [*model.stream("Hi!", config)] if streamed else model.invoke("Hi!", config)
    elif streamed:
        [each async for each in model.astream("Hi!", config)]
    else:
        await model.ainvoke("Hi!", config)


# LangChain does not await the other handlers where one raises.
@pytest.mark.filterwarnings("ignore:coroutine 'ahandle_event' was never awaited")
@both_forms
@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("completes", [False, True], ids=["chat model", "completion model"])
async def test_a_model_run_can_be_refused(form: Form, *, streamed: bool, completes: bool) -> None:
    """It is not made, and no block knows of it. What is asked is only the name of the model."""
    asked: list[ModelUsage] = []

    def admit(usage: ModelUsage) -> None:
        asked.append(usage)
        raise RefusedError

    chat = ScriptedChatModel(model="mine", script=[answer(5)])
    model: Any = FakeListLLM(responses=["Hello."]) if completes else chat
    with collect_model_runs() as around, collect_model_runs(admit) as collector:
        with pytest.raises(RefusedError):
            # Where graphs are nested, handlers are handed down.
            await call(model, form, around, Looks(), streamed=streamed)
        assert (collector.runs(), around.runs(), len(collector.refused)) == ([], [], 1)
    assert not chat.calls
    assert completes or [each.request_model for each in asked] == ["mine"]
    assert not asked[0].total_tokens


def test_what_is_not_understood_ends_no_call(caplog: pytest.LogCaptureFixture) -> None:
    """Where a run may be refused, a report that cannot be read is logged, and then estimated."""
    odd: Any = answer(5).model_copy(update={"usage_metadata": [5]})
    with collect_model_runs(lambda _: None) as collector:
        assert scripted(odd).invoke("Hi!").text
    (found,) = collector.runs()
    assert found.usage.estimated
    assert "a model run was not understood" in caplog.text
