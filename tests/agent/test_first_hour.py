"""Mistakes that are made with real agents in the first hour, and the sentence each leads to."""

import logging
import socket
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, TypedDict

import pytest
from langchain.agents import create_agent
from langchain_core._api import LangChainBetaWarning
from langchain_core.messages import AIMessage
from langchain_core.tools import StructuredTool
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import MessagesState, StateGraph
from langgraph.prebuilt import create_react_agent
from langgraph.warnings import LangGraphDeprecatedSinceV10

from langchain_quota import (
    CostLimit,
    GraphQuota,
    InlineQuotaMiddleware,
    MemoryStore,
    ModelCallLimit,
    ModelCallLimitMiddleware,
    ModelUsage,
    Price,
    Quota,
    QuotaMiddleware,
    QuotaWarning,
    RedisStore,
    TokenLimit,
    ToolCallLimit,
    ToolCallLimitMiddleware,
    UnknownPriceError,
    with_limits,
)
from langchain_quota.graph._react import ReactState
from langchain_quota.middleware import inline
from langchain_quota.testing import ScriptedChatModel
from tests.agent.conftest import Form, both_forms
from tests.agent.rules import recording
from tests.signals import Signals, needs_inline
from tests.troubleshooting import begins, messages, raised

ASKED: Any = {"messages": [("user", "hi")]}
SEARCH = ToolCallLimit("search", run_limit=9)
MODEL = ModelCallLimit(run_limit=9)
MISSPELT = "limits name tools that agent … does not have: …"


@dataclass
class Bench:
    """What a mistake is made with."""

    signals: Signals
    caplog: pytest.LogCaptureFixture
    monkeypatch: pytest.MonkeyPatch

    def quota(self, *limits: Any, **options: Any) -> QuotaMiddleware[Any, Any]:
        return QuotaMiddleware(limits, telemetry=self.signals.telemetry, **options)

    def inline(self, *limits: Any) -> InlineQuotaMiddleware[Any, Any]:
        return InlineQuotaMiddleware(limits, telemetry=self.signals.telemetry)

    def agent(self, *middleware: Any, **options: Any) -> Any:
        """An agent that searches once, and then is done."""
        model = ScriptedChatModel(script=[["search"], "done"])
        tools = options.pop("tools", [recording("search", [])])
        return create_agent(model, tools, middleware=middleware, **options)

    def logged(self) -> list[str]:
        return [record.getMessage() for record in self.caplog.records]


Mistake = Callable[[Bench], str]
MISTAKES: dict[str, Mistake] = {}
"""What a user sees of each mistake, by how the page says that it begins."""


def sees(message: str) -> Callable[[Mistake], Mistake]:
    def register(mistake: Mistake) -> Mistake:
        MISTAKES[message] = mistake
        return mistake

    return register


@pytest.fixture
def bench(
    signals: Signals, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> Bench:
    """A bench of the test's own."""
    return Bench(signals, caplog, monkeypatch)


@sees("Please remove duplicate middleware instances.")
def two_of_a_kind(bench: Bench) -> str:
    return raised(AssertionError, lambda: bench.agent(bench.quota(SEARCH), bench.quota(MODEL)))


@sees("… and another middleware of this agent both count its model calls")
def two_that_count_model_calls(bench: Bench) -> str:
    drop_in: Any = ModelCallLimitMiddleware(run_limit=9, telemetry=bench.signals.telemetry)
    agent = bench.agent(bench.quota(MODEL), drop_in)
    return raised(RuntimeError, lambda: agent.invoke(ASKED))


class OwnInline(InlineQuotaMiddleware[Any, Any]):
    """A second one, which LangChain tells apart by its class."""


@sees("… and another middleware of this agent both judge around the model call")
def two_inline(bench: Bench) -> str:
    agent = bench.agent(
        bench.inline(SEARCH), OwnInline([SEARCH], telemetry=bench.signals.telemetry)
    )
    return raised(RuntimeError, lambda: agent.invoke(ASKED))


@sees("limit … has exit_behavior='ask', and a run that waits for a person needs a checkpointer: …")
def nothing_keeps_a_run_that_waits(bench: Bench) -> str:
    limit = ToolCallLimit("search", run_limit=9, exit_behavior="ask")
    agent = bench.agent(bench.quota(limit))
    return raised(RuntimeError, lambda: agent.invoke(ASKED))


@sees("limit … has exit_behavior='ask', which needs QuotaMiddleware: …")
def inline_asks(bench: Bench) -> str:
    limit = ToolCallLimit("search", run_limit=9, exit_behavior="ask")
    return raised(ValueError, lambda: bench.inline(limit))


@sees("… needs langchain 1.4 or newer: use QuotaMiddleware")
def inline_on_an_older_langchain(bench: Bench) -> str:
    bench.monkeypatch.setattr(inline, "OLDEST_LANGCHAIN", (99, 0))
    agent = bench.agent(bench.inline(SEARCH))
    return raised(RuntimeError, lambda: agent.invoke(ASKED))


@sees("'QuotaMiddleware' object is not iterable")
def a_middleware_without_a_list(bench: Bench) -> str:
    given: Any = bench.quota(SEARCH)
    model = ScriptedChatModel(script=["done"])
    return raised(TypeError, lambda: create_agent(model, middleware=given))


@sees("type object 'ToolCallLimit' has no attribute 'wrap_tool_call'")
def a_limit_as_middleware(bench: Bench) -> str:
    return raised(AttributeError, lambda: bench.agent(SEARCH))


@sees("type object 'type' has no attribute 'wrap_tool_call'")
def a_class_as_middleware(bench: Bench) -> str:
    return raised(AttributeError, lambda: bench.agent(QuotaMiddleware))


@sees("create_react_agent() got unexpected keyword arguments: {'middleware': …")
def the_older_agent(bench: Bench) -> str:
    make: Any = create_react_agent
    model = ScriptedChatModel(script=["done"])
    with pytest.warns(LangGraphDeprecatedSinceV10):
        return raised(TypeError, lambda: make(model, [], middleware=[bench.quota(SEARCH)]))


@sees("Expected a Runnable, callable or dict")
def a_middleware_as_a_node(bench: Bench) -> str:
    node: Any = bench.quota(SEARCH)
    return raised(TypeError, lambda: StateGraph(MessagesState).add_node("quota", node))


@sees("graph … compiled …: call add_to before compile()")
def limits_for_a_compiled_graph(bench: Bench) -> str:
    graph: Any = inside(lambda _state: None)
    quota = GraphQuota([SEARCH], telemetry=bench.signals.telemetry)
    return raised(
        TypeError, lambda: quota.add_to(graph, model=ScriptedChatModel(script=["done"]), tools=[])
    )


@sees("… refused a call, and … ran.")
def a_hook_that_the_graph_does_not_follow(bench: Bench) -> str:
    quota: Any = bench.quota(ModelCallLimit(run_limit=1))
    with pytest.warns(LangGraphDeprecatedSinceV10):
        agent = create_react_agent(
            ScriptedChatModel(script=lambda _messages: ["search"]),
            [recording("search", [])],
            pre_model_hook=quota.before_model,
            state_schema=ReactState,
        )
    return raised(RuntimeError, lambda: agent.invoke(ASKED))


def deep_agents() -> Any:
    """The package, which the oldest versions do not have."""
    return pytest.importorskip("deepagents")


@sees("sub-agent … is compiled without limits")
def a_compiled_sub_agent(bench: Bench) -> str:
    make = deep_agents().create_deep_agent
    compiled = {"name": "helper", "description": "Helps.", "runnable": bench.agent()}
    quota = bench.quota(SEARCH, store=MemoryStore())
    model = ScriptedChatModel(script=["done"])
    return raised(ValueError, lambda: with_limits(make, quota)(model, subagents=[compiled]))


@sees("limit … does not see what code calls: CodeInterpreterMiddleware calls …")
def code_that_calls_a_limited_tool(bench: Bench) -> str:
    quickjs = pytest.importorskip("langchain_quickjs")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", LangChainBetaWarning)
        code = quickjs.CodeInterpreterMiddleware(ptc=["search"], timeout=120)
    agent = bench.agent(bench.quota(SEARCH), code)
    return raised(RuntimeError, lambda: agent.invoke(ASKED))


@sees("the sub-agents that the tool 'task' of agent … starts have no limits of langchain-quota: …")
def deep_agents_with_a_middleware(bench: Bench) -> str:
    model = ScriptedChatModel(script=["done"])
    return warned(deep_agents().create_deep_agent(model, middleware=[bench.quota(SEARCH)]))


def warned(agent: Any) -> str:
    with pytest.warns(QuotaWarning) as caught:
        agent.invoke(ASKED)
    [warning] = caught
    return str(warning.message)


@sees(
    "… has a thread limit, but this agent's state does not outlive the run: the limit holds "
    "within one run only. Give create_agent a checkpointer"
)
def no_checkpointer(bench: Bench) -> str:
    return warned(bench.agent(bench.quota(ToolCallLimit("search", thread_limit=9))))


@sees(
    "… has a thread limit, but this agent's state does not outlive the run: the limit holds "
    'within one run only. Call the agent with {"configurable": {"thread_id": …}}'
)
def no_thread_id_with_a_store(bench: Bench) -> str:
    limit = ToolCallLimit("search", thread_limit=9)
    return warned(bench.agent(bench.quota(limit, store=MemoryStore())))


def inside(agent: Any) -> Any:
    """A graph with the agent as its only node."""
    return StateGraph(MessagesState).add_node("agent", agent).set_entry_point("agent").compile()


@sees(
    "… has a thread limit, but this agent's state does not outlive the run: the limit holds "
    "within one run only. To count all agents of a thread together"
)
def no_store_in_a_sub_agent(bench: Bench) -> str:
    return warned(inside(bench.agent(bench.quota(ToolCallLimit("search", thread_limit=9)))))


@sees(
    "… has a thread limit, but this agent's state does not outlive the run: the limit holds "
    'within one run only. Call the outermost graph with {"configurable": {"thread_id": …}}'
)
def no_thread_id_around_a_sub_agent(bench: Bench) -> str:
    limit = ToolCallLimit("search", thread_limit=9)
    return warned(inside(bench.agent(bench.quota(limit, store=MemoryStore()))))


@sees("Checkpointer requires one or more of the following 'configurable' keys: …")
def no_thread_id_with_a_checkpointer(bench: Bench) -> str:
    limit = ToolCallLimit("search", thread_limit=9)
    agent = bench.agent(bench.quota(limit), checkpointer=InMemorySaver())
    return raised(ValueError, lambda: agent.invoke(ASKED))


def per(bench: Bench, subject: str, **options: Any) -> Any:
    """An agent with a quota."""
    limit = ToolCallLimit("search", quotas=[Quota(9, per=subject)])
    return bench.agent(bench.quota(limit, store=MemoryStore()), **options)


@sees("quota … is per thread, and this run has none")
def no_thread_id_with_a_quota(bench: Bench) -> str:
    return raised(ValueError, lambda: per(bench, "thread").invoke(ASKED))


@sees("quota … needs … in runtime.context: call the agent with context=…")
def no_context(bench: Bench) -> str:
    agent = per(bench, "user_id")
    return raised(ValueError, lambda: agent.invoke(ASKED, {"configurable": {"user_id": "ada"}}))


@sees("the subject of quota … must be a string, a whole number or a UUID, not …")
def a_subject_that_is_none(bench: Bench) -> str:
    agent = per(bench, "user_id")
    return raised(TypeError, lambda: agent.invoke(ASKED, context={"user_id": ["ada"]}))


@sees("the subject of quota … must not be empty")
def an_empty_subject(bench: Bench) -> str:
    agent = per(bench, "user_id")
    return raised(ValueError, lambda: agent.invoke(ASKED, context={"user_id": ""}))


@sees("quota … is per agent, and this one has no name")
def an_agent_without_a_name(bench: Bench) -> str:
    return raised(ValueError, lambda: per(bench, "agent").invoke(ASKED))


async def nine(_state: object, _runtime: object) -> int:
    """A limit that is looked up."""
    return 9


@sees("… of limit … is async: call the agent with ainvoke or astream")
def an_async_limit_in_a_sync_run(bench: Bench) -> str:
    agent = bench.agent(bench.quota(ToolCallLimit("search", run_limit=nine)))
    return raised(RuntimeError, lambda: agent.invoke(ASKED))


async def observe(_decision: object) -> None:
    """Looks on."""


@sees("on_decision=… is async: call the agent with ainvoke or astream")
def an_async_observer_in_a_sync_run(bench: Bench) -> str:
    agent = bench.agent(bench.quota(SEARCH, on_decision=observe))
    return raised(RuntimeError, lambda: agent.invoke(ASKED))


@sees("a client of redis.asyncio serves no sync calls")
def an_async_client_in_a_sync_run(bench: Bench) -> str:
    import redis.asyncio  # noqa: PLC0415 - an extra, which this mistake alone needs

    limit = ToolCallLimit("search", quotas=[Quota(9, per="global")])
    store = RedisStore(redis.asyncio.Redis(host="127.0.0.1", port=1))
    agent = bench.agent(bench.quota(limit, store=store))
    return raised(TypeError, lambda: agent.invoke(ASKED))


@sees(MISSPELT)
def a_misspelt_tool(bench: Bench) -> str:
    bench.agent(bench.quota(ToolCallLimit("serach", run_limit=9))).invoke(ASKED)
    [seen] = bench.logged()
    return seen


def while_nobody_listens(bench: Bench) -> tuple[logging.LogRecord, Any]:
    """The record and the result of a run that cannot ask Redis."""
    limit = ToolCallLimit("search", quotas=[Quota(9, per="global")])
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        store = RedisStore(f"redis://127.0.0.1:{taken.getsockname()[1]}/0")
        result = bench.agent(bench.quota(limit, store=store)).invoke(ASKED)
    [record] = bench.caplog.records
    return record, result


@sees("store of langchain-quota failed with QuotaStoreError")
def redis_is_not_there(bench: Bench) -> str:
    record, _ = while_nobody_listens(bench)
    return record.getMessage()


@sees("RedisStore(…): …: check that Redis runs there and that the URL is right")
def the_last_line_of_its_stack(bench: Bench) -> str:
    record, _ = while_nobody_listens(bench)
    shown = logging.Formatter().format(record).splitlines()[-1]
    assert shown.startswith("langchain_quota.errors.QuotaStoreError: ")
    return shown.removeprefix("langchain_quota.errors.QuotaStoreError: ")


@sees("Tool call limit could not be checked, so the call of … was not run. Try again later.")
def what_the_model_reads_without_redis(bench: Bench) -> str:
    _, result = while_nobody_listens(bench)
    return str(result["messages"][-2].content)


@sees("no price is known for the model …: give it, …")
def a_model_without_a_price(bench: Bench) -> str:
    quota = bench.quota(CostLimit(run_limit=1), prices={"gpt-4o": Price(input="2.50", output=10)})
    model = ScriptedChatModel(script=["Never said."], model="prod-chat")
    agent = create_agent(model, middleware=[quota])
    return raised(UnknownPriceError, lambda: agent.invoke(ASKED))


@sees("the price of the model … is not known: …")
def a_prices_function_that_fails(bench: Bench) -> str:
    def prices(used: ModelUsage) -> Decimal:
        return Decimal(1) / (1 - min(used.total_tokens, 1))

    used: Any = {"input_tokens": 3, "output_tokens": 1, "total_tokens": 4}
    quota = bench.quota(CostLimit(run_limit=1), prices=prices)
    model = ScriptedChatModel(script=[AIMessage("Hello.", usage_metadata=used)] * 2, model="ours")
    agent = create_agent(model, middleware=[quota])
    agent.invoke(ASKED)
    return raised(UnknownPriceError, lambda: agent.invoke(ASKED))


@sees("model … reports no usage: its tokens are estimated. …")
def a_model_that_reports_no_usage(bench: Bench) -> str:
    return warned(bench.agent(bench.quota(TokenLimit(run_limit=10_000))))


NEEDS_INLINE = {
    "limit … has exit_behavior='ask', which needs QuotaMiddleware: …",
    "… and another middleware of this agent both judge around the model call",
}


@pytest.mark.parametrize(
    "message",
    [
        pytest.param(message, marks=needs_inline if message in NEEDS_INLINE else ())
        for message in MISTAKES
    ],
)
def test_a_mistake_leads_to_a_sentence(message: str, bench: Bench) -> None:
    """The mistake, made with a real agent, shows a message that the page explains."""
    assert message in messages()
    assert begins(MISTAKES[message](bench), message)


@dataclass
class Caller:
    """A context without the name that the quota wants."""

    user: str = "ada"


class CallerDict(TypedDict):
    """The same, as a dict."""

    user: str


@pytest.mark.parametrize("schema", [Caller, CallerDict, None])
@pytest.mark.parametrize("context", [None, {"user": "ada"}], ids=["no context", "another name"])
def test_a_context_without_the_name(schema: Any, context: Any, bench: Bench) -> None:
    """Whatever the context is declared as, the sentence has the name that it lacks."""
    agent = per(bench, "user_id", context_schema=schema)
    seen = raised(ValueError, lambda: agent.invoke(ASKED, context=context))
    assert seen.endswith('call the agent with context={"user_id": …}, or an object that has it')


OFFERED = ("search", "send_mail", "calc")


async def run_of(
    bench: Bench,
    *limits: Any,
    times: int = 1,
    inside: bool = False,
    form: Form = "async",
    **options: Any,
) -> list[str]:
    """What is logged of misspelt tools in runs of an agent."""
    middleware = (bench.inline if inside else bench.quota)(*limits)
    tools = options.pop("tools", [recording(name, []) for name in OFFERED])
    for _ in range(times):
        agent = bench.agent(middleware, tools=tools, **options)
        if form == "sync":
            agent.invoke(ASKED)
        else:
            await agent.ainvoke(ASKED)
    return [seen for seen in bench.logged() if begins(seen, MISSPELT)]


@both_forms
@pytest.mark.parametrize("inside", [False, pytest.param(True, marks=needs_inline)])
async def test_misspelt_tools_are_told_once(form: Form, *, inside: bool, bench: Bench) -> None:
    """Names in limits that are spelt like tools are logged in one line, at the first request."""
    limits = [ToolCallLimit(["serach", "calc", "sendmail"], run_limit=9, name="odd"), MODEL]
    [told] = await run_of(bench, *limits, inside=inside, name="support", form=form, times=3)
    assert told == (
        "limits name tools that agent 'support' does not have: 'sendmail' (did you mean "
        "'send_mail'?), 'serach' (did you mean 'search'?)"
    )


@pytest.mark.parametrize(
    ("limited", "offered"),
    [("browse", "search"), ("ask_agent1", "search_web"), ("search", "send_mail")],
)
async def test_other_words_are_no_misspelling(limited: str, offered: str, bench: Bench) -> None:
    """A name that is like no tool may be another agent's: nothing is logged."""
    limit = ToolCallLimit(limited, run_limit=9)
    assert await run_of(bench, limit, tools=[recording(offered, [])], times=2) == []


async def test_a_misspelt_exclusion(bench: Bench) -> None:
    """An excluded name that is spelt like a tool is told, too."""
    [told] = await run_of(bench, ToolCallLimit(run_limit=9, exclude=["serach", "write_todos"]))
    assert told.endswith(": 'serach' (did you mean 'search'?)")


async def test_no_tools_yet(bench: Bench) -> None:
    """A request without tools is not the one that is looked at."""
    middleware = bench.quota(ToolCallLimit("serach", run_limit=9))
    for tools in ([], [recording("search", [])]):
        model = ScriptedChatModel(script=["done"])
        await create_agent(model, tools, middleware=[middleware]).ainvoke(ASKED)
    assert len([seen for seen in bench.logged() if begins(seen, MISSPELT)]) == 1


async def test_tools_of_the_provider_are_known(bench: Bench) -> None:
    """A provider's own tools have their names in dicts of several shapes."""
    tools = [
        {"type": "web_search_20250305", "name": "web_search"},
        {"type": "function", "function": {"name": "lookup", "parameters": {}}},
        {"type": "code_interpreter"},
    ]
    names = ["web_search", "lookup", "code_interpreter"]
    assert await run_of(bench, ToolCallLimit(names, run_limit=9), tools=tools, times=2) == []


async def test_a_log_handler_that_raises(bench: Bench) -> None:
    """Whoever reads the log cannot break the agent by the advice, either."""

    def refuse(_record: logging.LogRecord) -> bool:
        raise ZeroDivisionError

    logger = logging.getLogger("langchain_quota")
    logger.addFilter(refuse)
    try:
        assert await run_of(bench, ToolCallLimit("serach", run_limit=9)) == []
    finally:
        logger.removeFilter(refuse)
    name, labels = "langchain_quota_errors_total", {"error_type": "ZeroDivisionError"}
    assert bench.signals.value(name, component="observer", **labels)


async def test_the_drop_in_cannot_tell(bench: Bench) -> None:
    """The drop-in for tools sees no tools, as the page says: it adds no hook of its own."""
    drop_in = ToolCallLimitMiddleware(
        tool_name="serach", run_limit=9, telemetry=bench.signals.telemetry
    )
    tool = StructuredTool.from_function(lambda: "found", name="search", description="search")
    await bench.agent(drop_in, tools=[tool]).ainvoke(ASKED)
    assert bench.logged() == []
    labels = {"agent": "unnamed", "limit": "tool:serach", "scope": "none", "decision": "allowed"}
    assert bench.signals.value("langchain_quota_limit_decisions_total", **labels) is None
