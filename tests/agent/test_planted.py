"""Promises that only tests of internals guarded: each is named beside a fault in faults.yaml."""

import asyncio
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from langchain.agents import create_agent
from langchain.agents.middleware import AgentMiddleware
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, ToolCall, ToolMessage
from langchain_core.tools import ToolException, tool
from langgraph.checkpoint.memory import InMemorySaver
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from langchain_quota import (
    CostLimit,
    Decision,
    InlineQuotaMiddleware,
    Limit,
    MemoryStore,
    ModelCallLimit,
    Price,
    Quota,
    QuotaMiddleware,
    RepeatLimit,
    Telemetry,
    TokenLimit,
    ToolCallLimit,
    ToolCallLimitExceededError,
    metrics_app,
    start_metrics_server,
    usage,
)
from langchain_quota.testing import ScriptedChatModel, assert_valid_history
from tests.forked import run_python
from tests.signals import Signals, needs_inline
from tests.stores import FickleStore

DAY = timedelta(days=1)


@tool
def search() -> str:
    """Search."""
    return "found"


@tool
def calc() -> str:
    """Calculate."""
    return "4"


@tool("model")
def model_tool() -> str:
    """Build a model."""
    return "built"


class Agent:
    """An agent on a thread, and the model that plays its script."""

    def __init__(self, script: Any, quota: QuotaMiddleware[Any, Any], **options: Any) -> None:
        self.model = ScriptedChatModel(script=script, model=options.pop("model", ""))
        self._agent: Any = create_agent(
            self.model,
            options.pop("tools", [search, calc, model_tool]),
            middleware=[quota, *options.pop("beside", ())],
            checkpointer=InMemorySaver(),
            **options,
        )

    async def play(self, thread: object = "7", **context: Any) -> list[BaseMessage]:
        """The messages behind a turn."""
        result = await self._agent.ainvoke(
            {"messages": [("user", "hi")]}, self._config(thread), context=context
        )
        return list(result["messages"])

    async def go_on(self) -> list[BaseMessage]:
        """The messages behind a run that goes on where it failed."""
        return list((await self._agent.ainvoke(None, self._config("7")))["messages"])

    def usage(self) -> Any:
        return usage(self._agent.get_state(self._config("7")))

    def _config(self, thread: object) -> Any:
        return {"configurable": {"thread_id": thread}}


def ran(messages: Sequence[BaseMessage]) -> list[str | None]:
    """The tools that ran."""
    tools = [each for each in messages if isinstance(each, ToolMessage)]
    return [each.name for each in tools if each.status == "success"]


def calling(*tools: Any) -> Callable[[Sequence[BaseMessage]], Any]:
    """A script that calls these tools in one message of each turn."""
    return lambda messages: list(tools) if messages[-1].type == "human" else "done"


def reporting(*tools: str, **tokens: Any) -> AIMessage:
    """An answer with its usage, which may call tools."""
    known = {"input_tokens": 0, "output_tokens": 0, **tokens}
    known["total_tokens"] = known["input_tokens"] + known["output_tokens"]
    calls = [ToolCall(name=each, args={}, id=each) for each in tools]
    return AIMessage("" if tools else "done", tool_calls=calls, usage_metadata=known)


def labels(registry: CollectorRegistry, name: str) -> set[str]:
    """All values of a label in a scrape, each of which is a safe label."""
    families = text_string_to_metric_families(generate_latest(registry).decode())
    samples = [each for family in families for each in family.samples]
    values = {value for each in samples for value in each.labels.values()}
    assert all(value.isprintable() and 0 < len(value) <= 64 for value in values)
    return {each.labels[name] for each in samples if name in each.labels}


async def test_a_call_that_a_limit_refuses_leaves_the_room_of_others(signals: Signals) -> None:
    """Of one message, what one limit refuses leaves the next call its place in another limit."""
    limits = [ToolCallLimit("calc", run_limit=0), ToolCallLimit(run_limit=1)]
    agent = Agent(calling("calc", "search"), QuotaMiddleware(limits, telemetry=signals.telemetry))
    assert ran(await agent.play()) == ["search"]


async def test_a_refusal_by_two_scopes_is_shown_as_the_threads(signals: Signals) -> None:
    """Where thread and run are used up by the same call, decisions and metrics name the thread."""
    seen: list[Decision] = []
    quota = QuotaMiddleware(
        [ToolCallLimit("search", thread_limit=1, run_limit=1, name="searches")],
        on_decision=seen.append,
        telemetry=signals.telemetry,
    )
    await Agent(calling("search", "search"), quota).play()
    scopes = [status.scope for each in seen for status in each.refused_by]
    metric = "langchain_quota_limit_decisions_total"
    known = {"agent": "unnamed", "limit": "searches", "decision": "blocked"}
    assert scopes == ["thread"]
    assert signals.value(metric, scope="thread", **known) == 1
    assert signals.value(metric, scope="run", **known) == 0


async def test_a_tool_named_model_has_a_count_of_its_own(signals: Signals) -> None:
    """Calls of a tool named `model` are no model calls, with a store and without."""
    limits: list[Limit] = [ToolCallLimit("model", thread_limit=100), ModelCallLimit(thread_limit=4)]
    for store in (None, MemoryStore()):
        quota = QuotaMiddleware(limits, store=store, telemetry=signals.telemetry)
        agent = Agent(calling("model", "model"), quota)
        assert [ran(await agent.play())[-2:] for _ in range(2)] == [["model"] * 2] * 2
        assert len(agent.model.calls) == 4


ARGUMENTS: list[tuple[str, Callable[[], object], str | None]] = [
    ("a run may use its whole thread", lambda: ToolCallLimit(thread_limit=2, run_limit=2), None),
    (
        "two limits of one number",
        lambda: QuotaMiddleware(
            [ToolCallLimit("search", run_limit=2), ToolCallLimit("search", run_limit=2, name="b")]
        ),
        None,
    ),
    (
        "one name for two limits",
        lambda: QuotaMiddleware(
            [ToolCallLimit("search", run_limit=2), ToolCallLimit("search", thread_limit=9)]
        ),
        "2 limits are named 'tool:search'",
    ),
    ("a wait for ever", lambda: ToolCallLimit(at_once=1, wait=math.inf), "wait must be"),
    (
        "a grant of nothing",
        lambda: ModelCallLimit(run_limit=1, exit_behavior="ask", grant=0),
        "grant must be above 0",
    ),
    ("a tenth of a microdollar", lambda: CostLimit(run_limit="0.0000001"), "six decimal places"),
]


@pytest.mark.parametrize(
    ("make", "error"), [row[1:] for row in ARGUMENTS], ids=[row[0] for row in ARGUMENTS]
)
def test_arguments_at_their_bounds(make: Callable[[], object], error: str | None) -> None:
    """What is just allowed is taken; what is just not allowed is refused, with the reason."""
    if error is None:
        make()
        return
    with pytest.raises(ValueError, match=error):
        make()


async def test_model_calls_are_counted_beside_a_budget_alone(signals: Signals) -> None:
    """With nothing but a budget the model calls of a thread and of its run are counted."""
    quota = QuotaMiddleware([TokenLimit(run_limit=10**6)], telemetry=signals.telemetry)
    agent = Agent(calling("search"), quota)
    for turn in (1, 2):
        await agent.play()
        assert (agent.usage().model, agent.usage().run_model) == (2 * turn, 2)


@needs_inline
async def test_each_run_of_an_inline_quota_ends_with_its_last_word(signals: Signals) -> None:
    """A later run that ends at the same limit has the same last message, and is no error."""
    quota = InlineQuotaMiddleware([ModelCallLimit(run_limit=1)], telemetry=signals.telemetry)
    agent = Agent(lambda _: ["search"], quota)
    first, second = await agent.play(), await agent.play()
    assert second[-1].content == first[-1].content == "Model call limits exceeded: run limit (1/1)"


async def test_what_a_call_holds_is_not_told_as_used(signals: Signals) -> None:
    """What a store holds for the very call that reads the note is told as left."""
    quota = QuotaMiddleware(
        [TokenLimit(run_limit=100)],
        tell_model=True,
        store=MemoryStore(),
        telemetry=signals.telemetry,
    )
    agent = Agent([reporting("search", input_tokens=90), reporting(input_tokens=1)], quota)
    await agent.play()
    told = agent.model.calls[1].messages[-1].content
    assert told == "found\n\nBudget: tokens: 10 of 100 left."


class ProviderError(Exception):
    """What a provider raises when it has answered, and been paid."""


class FailsOnce(AgentMiddleware[Any, Any, Any]):
    """Loses the first answer of the model."""

    async def awrap_model_call(self, request: Any, handler: Any) -> Any:
        response = await handler(request)
        if not vars(self).setdefault("failed", False):
            vars(self)["failed"] = True
            raise ProviderError
        return response


@needs_inline
async def test_what_a_failed_call_has_used_ends_the_run(signals: Signals) -> None:
    """A run that goes on behind a failed call which used its budget up makes no other call."""
    quota = InlineQuotaMiddleware([TokenLimit(run_limit=50)], telemetry=signals.telemetry)
    agent = Agent(lambda _: reporting(input_tokens=60), quota, beside=[FailsOnce()])
    with pytest.raises(ProviderError):
        await agent.play()
    messages = await agent.go_on()
    assert messages[-1].content == "Token limits exceeded: run limit (60/50 tokens)"
    assert len(agent.model.calls) == 1


PRICES = {"gpt": Price(input="0.5", output="0.5", cache_read="0.1")}


@pytest.mark.parametrize(
    ("tokens", "spent"),
    [
        ({"input_tokens": 1}, 1),
        ({"input_tokens": 3}, 2),
        ({"input_tokens": 4}, 2),
        ({"input_tokens": 100, "input_token_details": {"cache_read": 100}}, 10),
    ],
    ids=["half a microdollar", "one and a half", "two", "from the cache"],
)
async def test_money_is_rounded_up(tokens: dict[str, Any], spent: int, signals: Signals) -> None:
    """A part of a microdollar is charged as a whole one; cached tokens have their own price."""
    limits = [CostLimit(run_limit="2.5")]
    quota = QuotaMiddleware(limits, prices=PRICES, telemetry=signals.telemetry)
    agent = Agent([reporting(**tokens)], quota, model="gpt")
    await agent.play()
    assert agent.usage().spent["model.microdollars"] == spent
    gauge = signals.value(
        "langchain_quota_limit_dollars", agent="unnamed", limit="cost", scope="run"
    )
    assert gauge == 2.5


class Unusable(logging.Handler):
    """A log handler of an application that raises."""

    def emit(self, record: logging.LogRecord) -> None:
        raise RuntimeError(record)


def fail(_: object) -> str:
    raise RuntimeError("no label")


@pytest.fixture
def unusable_log() -> Iterator[None]:
    logger, handler = logging.getLogger("langchain_quota"), Unusable()
    logger.addHandler(handler)
    yield
    logger.removeHandler(handler)


@pytest.mark.usefixtures("unusable_log")
async def test_what_fails_in_telemetry_fails_no_agent() -> None:
    """With a label function and a log handler that raise, calls run, are limited and counted."""
    registry = CollectorRegistry()
    quota = QuotaMiddleware(
        [ToolCallLimit("search", run_limit=1)],
        telemetry=Telemetry(registry=registry, thread_label=fail),
    )
    messages = await Agent(calling("search", "search"), quota).play()
    assert ran(messages) == ["search"]
    assert messages[-1].content == "done"
    assert labels(registry, "component") == {"observer", "thread_label"}


async def test_a_run_that_goes_on_is_not_ended(
    signals: Signals, caplog: pytest.LogCaptureFixture
) -> None:
    """A refusal after which the agent goes on ends no run; near and used up are told apart."""
    caplog.set_level(logging.DEBUG, logger="langchain_quota")
    limits = [
        ToolCallLimit("search", run_limit=2, near=0.5, name="holds"),
        ToolCallLimit("calc", run_limit=0, enforce=False, name="tries"),
        ToolCallLimit(run_limit=9, near=0.3, name="nears"),
    ]
    quota = QuotaMiddleware(limits, telemetry=signals.telemetry)
    messages = await Agent(calling("search", "search", "search", "calc"), quota).play()
    holds, nears = ({"agent": "unnamed", "limit": each} for each in ("holds", "nears"))
    assert ran(messages) == ["search", "search", "calc"]
    assert signals.value("langchain_quota_runs_ended_total", **holds) == 0
    assert signals.value("langchain_quota_near_limit_total", **holds, scope="run") == 1
    assert signals.value("langchain_quota_exhausted_total", **holds, scope="run") == 1
    assert signals.value("langchain_quota_near_limit_total", **nears, scope="run") == 1
    assert signals.value("langchain_quota_exhausted_total", **nears, scope="run") == 0
    told = [(each.levelname, vars(each).get("quota_event")) for each in caplog.records]
    assert [each for each in told if each[1]] == [
        ("INFO", "near"),
        ("WARNING", "exhausted"),
        ("DEBUG", "refused"),
        ("DEBUG", "would refuse"),
        ("INFO", "near"),
    ]


async def test_labels_of_tools_and_threads_are_safe_and_bounded() -> None:
    """What a model invents, and ids that cannot be printed, make few and printable labels."""
    registry = CollectorRegistry()
    telemetry = Telemetry(registry=registry, max_tools=4)
    quota = QuotaMiddleware([ToolCallLimit(thread_limit=100)], telemetry=telemetry)
    invented = [f"invented-{index}" for index in range(9)]
    for thread in ("two\nlines", "\x1b[31m", "x" * 200):
        await Agent(calling("search", "odd name", *invented), quota).play(thread)
    # The agent's own three tools have a place each, so one is left.
    assert labels(registry, "tool") == {"search", "invented-0", "_other", "none"}
    assert len(labels(registry, "thread_id")) == 3


async def test_failures_that_the_model_has_not_read_count_once(signals: Signals) -> None:
    """Of one message, calls that fail alike are one failure: the model has not read the first."""

    @tool("search")
    def failing(text: str) -> str:
        """Search for a text."""
        ran_with.append(text)
        raise ToolException("the index is broken")

    ran_with: list[str] = []
    failing.handle_tool_error = True
    made = [["a"], ["b", "c"], ["d"], ["e"]]
    script = [*([("search", {"text": each}) for each in texts] for texts in made), "done"]
    quota = QuotaMiddleware([RepeatLimit(3)], telemetry=signals.telemetry)
    await Agent(script, quota, tools=[failing]).play()
    assert sorted(ran_with) == ["a", "b", "c", "d"]


async def test_a_store_that_forgot_all_hears_of_an_outage_in_order(signals: Signals) -> None:
    """What ran in an outage is counted once, on top of what the oldest of its runs began with."""
    store = FickleStore(MemoryStore())
    quota = QuotaMiddleware(
        [ToolCallLimit("search", thread_limit=9)],
        store=store,
        on_store_error="allow",
        telemetry=signals.telemetry,
    )
    agent = Agent(calling("search"), quota)
    store.down = True
    await agent.play()
    await agent.play()
    store.down = False
    await agent.play()
    assert [each.used for each in store.usages("search:thread:*")] == [3]


@pytest.mark.parametrize("caps", [(1, 3), (3, 1)])
async def test_the_lowest_of_two_caps_holds(caps: tuple[int, int], signals: Signals) -> None:
    """Of one tool no more calls run at once than the lower cap allows, and they run in order."""
    running, most, order = 0, 0, ""

    @tool("search")
    async def slow(text: str) -> str:
        """Search for a text for a while."""
        nonlocal running, most, order
        running, order = running + 1, order + text
        most = max(most, running)
        for _ in range(20):
            await asyncio.sleep(0)
        running -= 1
        return "found"

    limits = [ToolCallLimit("search", at_once=each, name=f"cap-{each}") for each in caps]
    quota = QuotaMiddleware(limits, telemetry=signals.telemetry)
    agent = Agent(calling(*(("search", {"text": each}) for each in "abcd")), quota, tools=[slow])
    assert ran(await agent.play()) == ["search"] * 4
    assert (most, order) == (1, "abcd")


async def test_spans_of_what_was_refused(signals: Signals) -> None:
    """Only refused calls have spans if so chosen; one that raised is an error; no id is shown."""
    telemetry = Telemetry(
        registry=CollectorRegistry(),
        tracer_provider=signals.provider,
        spans="refused",
        thread_label=lambda _: "hidden",
    )
    limits = [ToolCallLimit("search", run_limit=1, exit_behavior="error")]
    quota = QuotaMiddleware(limits, telemetry=telemetry)
    with pytest.raises(ToolCallLimitExceededError):
        await Agent(calling("calc", "search", "search"), quota).play("secret")
    spans = signals.spans()
    shown = [(each.attributes or {}).get("langchain_quota.decision") for each in spans]
    assert shown == ["skipped", "skipped", "blocked"]
    assert [each.status.is_ok for each in spans] == [True, True, False]
    assert all((each.attributes or {})["langchain_quota.thread.id"] == "hidden" for each in spans)
    assert "secret" not in "".join(each.to_json() for each in spans)


async def test_where_metrics_are_served(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only on this machine, or where the environment says; and by HTTP alone."""
    registry = CollectorRegistry()
    with start_metrics_server(0, registry=registry) as server:
        assert server.url == f"http://127.0.0.1:{server.port}/metrics"
    monkeypatch.setenv("LANGCHAIN_QUOTA_METRICS_ADDR", "localhost")
    with start_metrics_server(0, registry=registry) as server:
        assert server.addr == "localhost"

    async def unused(*_: object) -> Any:
        raise AssertionError

    with pytest.raises(ValueError, match="websocket"):
        await metrics_app(registry)({"type": "websocket"}, unused, unused)


async def test_labels_of_agents_are_bounded() -> None:
    """Agents that are named anew for each request make no more labels than the bound."""
    registry = CollectorRegistry()
    telemetry = Telemetry(registry=registry, max_agents=2, max_exported_threads=0)
    quota = QuotaMiddleware([ModelCallLimit(run_limit=9)], telemetry=telemetry)
    for index in range(5):
        await Agent(["done"], quota, name=f"agent-{index}").play()
    assert labels(registry, "agent") == {"agent-0", "agent-1", "_other"}


async def test_labels_of_models_are_bounded() -> None:
    """Models that are named anew for each request make no more labels than a hundred."""
    registry = CollectorRegistry()
    telemetry = Telemetry(registry=registry, max_exported_threads=0)
    quota = QuotaMiddleware([TokenLimit(run_limit=10**6)], telemetry=telemetry)
    agent = Agent(lambda _: reporting(input_tokens=1), quota)
    for index in range(103):
        agent.model.model = f"model-{index}"
        await agent.play(index)
    found = labels(registry, "model")
    assert "_other" in found
    assert len(found) == 101


EMPTY_FILE = """
import sys
from pathlib import Path
from urllib.request import urlopen
from langchain_quota import Telemetry, start_metrics_server
Telemetry()
Path(sys.argv[1], "counter_1.db").touch()
with start_metrics_server(0) as server, urlopen(server.url) as answer:
    assert b"langchain_quota_build_info" in answer.read()
"""


def test_a_file_of_a_worker_that_is_just_made(tmp_path: Path) -> None:
    """The file of a worker that has just begun is empty: the scrape has what the others know."""
    env = {"PROMETHEUS_MULTIPROC_DIR": str(tmp_path), "PYTHONPATH": str(Path("src").resolve())}
    done = run_python(EMPTY_FILE, str(tmp_path), env=env)
    assert (done.returncode, done.stderr) == (0, "")


CALL = AIMessage("", tool_calls=[ToolCall(name="search", args={}, id="a")])


@pytest.mark.parametrize(
    ("messages", "error"),
    [
        ([HumanMessage("hi"), CALL, ToolMessage("1", tool_call_id="a")], None),
        ([HumanMessage("hi"), CALL, ToolMessage("1", tool_call_id="b")], "'b'"),
        ([HumanMessage("hi"), CALL, *[ToolMessage("1", tool_call_id="a")] * 2], "again"),
        ([HumanMessage("hi"), CALL, HumanMessage("and?")], "gets no answer"),
    ],
    ids=["valid", "another call", "two answers", "no answer"],
)
def test_histories_that_a_provider_refuses(messages: list[BaseMessage], error: str | None) -> None:
    """Each call has exactly one answer, directly behind it."""
    if error is None:
        assert_valid_history(messages)
        return
    with pytest.raises(AssertionError, match=error):
        assert_valid_history(messages)


@pytest.mark.parametrize("hour", [0, 11, 13, 23.999])
def test_a_window_is_the_same_all_day(hour: float) -> None:
    """A grant to a day's count ends with that day, at whatever hour it is given."""
    store = MemoryStore(clock=lambda: datetime(2026, 1, 1, tzinfo=UTC).timestamp() + hour * 3600)
    assert store.grant("search:user_id:ann", 1, window=DAY).until == datetime(
        2026, 1, 2, tzinfo=UTC
    )


@pytest.mark.parametrize(
    ("ann", "bob"),
    [("a" * 100 + "1", "a" * 100 + "2"), ("a:b", "a%3Ab"), ("é" * 50, "é" * 51), ("a b", "a+b")],
    ids=["long", "colon", "accents", "space"],
)
async def test_users_that_look_alike_share_no_quota(ann: str, bob: str, signals: Signals) -> None:
    """However alike two users' ids are, each has a quota of their own."""
    limits = [ToolCallLimit("search", quotas=[Quota(1, per="user_id", window=DAY)])]
    quota = QuotaMiddleware(limits, store=MemoryStore(), telemetry=signals.telemetry)
    agent = Agent(calling("search"), quota)
    found = [
        ran(await agent.play(thread, user_id=who)) for thread, who in enumerate((ann, bob, ann))
    ]
    assert found == [["search"], ["search"], []]
