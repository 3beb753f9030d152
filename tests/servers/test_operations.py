"""The pages on operations and security do what they say: on real servers, with real agents."""

import asyncio
import re
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import yaml
from langchain.agents import create_agent
from langchain_core.runnables import RunnableConfig
from langchain_core.tools import BaseTool, tool
from langgraph.checkpoint.memory import InMemorySaver
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ALWAYS_ON, ParentBased, Sampler
from prometheus_client import CollectorRegistry

from langchain_quota import (
    MemoryStore,
    ModelCallLimit,
    Outcome,
    Quota,
    QuotaMiddleware,
    QuotaStoreError,
    RedisStore,
    Telemetry,
    ToolCallLimit,
    start_metrics_server,
)
from langchain_quota.admission import Compensation
from langchain_quota.cli import main
from langchain_quota.limits import Limit
from langchain_quota.monitoring import exports
from langchain_quota.stores.redis_clients import URL_VARIABLE
from langchain_quota.telemetry import tracing
from langchain_quota.testing import ScriptedChatModel
from tests.servers.programs import required_program
from tests.servers.prometheus import DEADLINE, Prometheus, eventually
from tests.servers.redis import RedisServer
from tests.servers.stack import Program
from tests.servers.stores import batch, calls, compensating

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "operations.md").read_text()
SECURITY = (DOCS / "security.md").read_text()

LISTENING = re.compile(r'msg="?Listening on"? address=(127\.0\.0\.1:\d+)')
OURS = '{__name__=~"(.+:)?langchain_quota_.+"}'
JOB, AGENT, LIMIT = "agents", "support", "tool:search"
MOST = 5
"""Searches that a thread may make."""

Labels = frozenset[tuple[str, str]]


def blocks(page: str, language: str) -> list[str]:
    """The code of a page in a language."""
    return re.findall(rf"```{language}\n(.*?)```", page, re.DOTALL)


@tool
async def search(query: str = "") -> str:
    """Search."""
    return "found"


def formula() -> tuple[Callable[..., int], Mapping[str, Sequence[str]]]:
    """The page's function, and the limits of its example."""
    namespace: dict[str, Any] = {}
    exec(blocks(PAGE, "python")[0], namespace)  # noqa: S102 - our own page
    return namespace["series"], namespace["limits"]


def limit_of(name: str, thresholds: Sequence[str]) -> ModelCallLimit | ToolCallLimit:
    """A limit of the page's example: none is reached."""
    options: dict[str, Any] = {
        "run_limit": 90 if "run" in thresholds else None,
        "thread_limit": 90 if "thread" in thresholds else None,
        "quotas": [Quota(90, per=each) for each in thresholds if each not in {"run", "thread"}],
    }
    if name == "model":
        return ModelCallLimit(**options)
    tool_name = name.removeprefix("tool:")
    return ToolCallLimit(None if tool_name == "*" else tool_name, **options)


def tools_named(names: Sequence[str]) -> list[BaseTool]:
    return [search.model_copy(update={"name": name}) for name in names]


async def samples_of(
    limits: Sequence[ModelCallLimit | ToolCallLimit],
    tools: Sequence[str],
    threads: int,
    **options: Any,
) -> int:
    """How many series there are after each thread has called each tool once."""
    registry = CollectorRegistry()
    telemetry = Telemetry(
        registry=registry, max_exported_threads=options.pop("max_exported_threads", 500)
    )
    quota: Any = QuotaMiddleware(limits, telemetry=telemetry, **options)
    for number in range(threads):
        agent: Any = create_agent(
            ScriptedChatModel(script=[tools, "done"]),
            tools_named(tools),
            middleware=[quota],
            checkpointer=InMemorySaver(),
        )
        config: RunnableConfig = {"configurable": {"thread_id": f"thread-{number}"}}
        asked = {"messages": [("user", "go on")]}
        await agent.ainvoke(asked, config, context={"user_id": f"user-{number}"})
    return sum(
        not sample.name.endswith("_created")
        for family in registry.collect()
        for sample in family.samples
    )


@pytest.mark.parametrize(
    ("threads", "exported", "tell_model"), [(1, 500, False), (3, 500, True), (6, 2, False)]
)
async def test_the_formula_counts_series(threads: int, exported: int, *, tell_model: bool) -> None:
    """The example's limits make as many series as the function says; threads are bounded."""
    series, limits = formula()
    tools = ["search", "email", *(f"tool_{number}" for number in range(6))]
    found = await samples_of(
        [limit_of(*each) for each in limits.items()],
        tools,
        threads,
        max_exported_threads=exported,
        store=MemoryStore(),
        tell_model=tell_model,
    )
    assert found == series(
        limits,
        tools=len(tools),
        threads=min(threads, exported),
        store_operations=2 if tell_model else 1,
    )


async def test_the_formula_without_a_store() -> None:
    """Without a store there are no series of it, nor of refusals because of it."""
    series, _ = formula()
    limits = {"tool:search": ["thread", "run"], "tool:*": ["run"]}
    found = await samples_of([limit_of(*each) for each in limits.items()], ["search"], 2)
    assert found == series(limits, tools=1, threads=2)


async def test_a_computed_threshold_has_one_series_less() -> None:
    """What differs from call to call is no configured limit."""
    fixed = await samples_of([ToolCallLimit("search", run_limit=9)], ["search"], 1)
    computed = ToolCallLimit("search", run_limit=lambda *_: 9)
    assert await samples_of([computed], ["search"], 1) == fixed - 1


def test_the_example_is_the_texts() -> None:
    """The numbers in the text are those of the function."""
    series, limits = formula()
    example = {"tools": 8, "store_operations": 1}
    all_of_it = series(limits, threads=500, **example)
    threads = all_of_it - series(limits, threads=0, **example)
    text = " ".join(PAGE.split())
    assert f"{all_of_it:,} series. The 500 threads make {threads:,} of them." in text
    assert f"Thirty such replicas make {30 * all_of_it:,} series." in text


class Replica:
    """A process of an agent: metrics of its own; threads are shared.

    Args:
        saver: Keeps the threads of all replicas.
        most: What its agent of another name may search: a rollout is going on.
    """

    def __init__(self, saver: InMemorySaver, most: int) -> None:
        self.registry = CollectorRegistry()
        provider = TracerProvider(sampler=ALWAYS_ON)
        telemetry = Telemetry(registry=self.registry, tracer_provider=provider)
        self._saver = saver
        self._quotas: dict[str, Any] = {
            name: QuotaMiddleware(
                [ToolCallLimit("search", thread_limit=limit)], telemetry=telemetry
            )
            for name, limit in ((AGENT, MOST), ("rollout", most))
        }

    def run(self, thread: str, searches: int, name: str = AGENT) -> None:
        """Search on a thread."""
        agent, config = self._agent(searches, name), self._config(thread)
        asyncio.run(agent.ainvoke({"messages": [("user", "go on")]}, config))

    def reset(self, thread: str) -> None:
        """Set what a thread has used back to 0."""
        asyncio.run(self._quotas[AGENT].areset(self._agent(1, AGENT), self._config(thread)))

    def _agent(self, searches: int, name: str) -> Any:
        return create_agent(
            ScriptedChatModel(script=[["search"] * searches, "done"]),
            [search],
            middleware=[self._quotas[name]],
            name=name,
            checkpointer=self._saver,
        )

    def _config(self, thread: str) -> RunnableConfig:
        return {"configurable": {"thread_id": thread}}


@dataclass(frozen=True)
class Fleet:
    """Two replicas, the Prometheus that scrapes both, and two that it writes to."""

    sender: Prometheus
    receiver: Prometheus
    narrow: Prometheus
    """Receives what the page's further rule keeps."""
    instances: Sequence[str]
    """The first replica, and the second."""


@contextmanager
def prometheus(
    directory: Path, config: Mapping[str, Any], *flags: str
) -> Iterator[tuple[Prometheus, str]]:
    """A Prometheus, and its address."""
    program = required_program("prometheus", "prometheus")
    directory.mkdir()
    file = directory / "prometheus.yml"
    file.write_text(yaml.safe_dump(dict(config)))
    command = [
        program,
        f"--config.file={file}",
        f"--storage.tsdb.path={directory / 'data'}",
        "--web.listen-address=127.0.0.1:0",
        "--enable-feature=exemplar-storage",
        *flags,
    ]
    with Program("prometheus", command, directory) as process:
        url = f"http://{process.says(LISTENING)}"
        with closing(Prometheus(url)) as client:
            eventually(client.ready)
            yield client, url


def remote_write(url: str) -> dict[str, Any]:
    """The page's configuration, to another address."""
    [text] = [each for each in blocks(PAGE, "yaml") if "remote_write" in each]
    [found] = yaml.safe_load(text)["remote_write"]
    return {**found, "url": f"{url}/api/v1/write"}


def further_rule() -> Any:
    """The rule that the page offers to add."""
    [text] = re.findall(r"`(\{source_labels: .*?\})`", PAGE)
    return yaml.safe_load(text)


def quick_rules(directory: Path) -> str:
    """The package's rules, evaluated more often."""
    [text] = exports.rules(per_thread=True).values()
    rendered = yaml.safe_load(text)
    for group in rendered["groups"]:
        group["interval"] = "500ms"
    file = directory / "rules.yaml"
    file.write_text(yaml.safe_dump(rendered))
    return str(file)


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Threads that move between replicas, are reset, and are refused; all of it scraped."""
    directory = tmp_path_factory.mktemp("fleet")
    saver = InMemorySaver()
    first, second = Replica(saver, MOST), Replica(saver, MOST + 1)
    first.run("moved", 3)
    second.run("moved", 2)
    second.reset("moved")
    second.run("moved", 1)
    first.run("stayed", 2)
    for replica in (first, second):
        replica.run("stubborn", MOST + 1)
        replica.run("somebody", 1, name="rollout")
    flag = "--web.enable-remote-write-receiver"
    with ExitStack() as running:
        servers = [
            running.enter_context(start_metrics_server(0, registry=each.registry))
            for each in (first, second)
        ]
        instances = [f"{each.addr}:{each.port}" for each in servers]
        receiver, url = running.enter_context(prometheus(directory / "receiver", {}, flag))
        narrow, narrow_url = running.enter_context(prometheus(directory / "narrow", {}, flag))
        narrowed = remote_write(narrow_url)
        narrowed["write_relabel_configs"].append(further_rule())
        config = {
            "global": {
                "scrape_interval": "500ms",
                "scrape_timeout": "500ms",
                "evaluation_interval": "500ms",
            },
            "rule_files": [quick_rules(directory)],
            "remote_write": [remote_write(url), narrowed],
            "scrape_configs": [{"job_name": JOB, "static_configs": [{"targets": instances}]}],
        }
        sender, _ = running.enter_context(prometheus(directory / "sender", config))
        scrapes = "min(count_over_time(up[1h]))"
        eventually(lambda: (sender.value(scrapes) or 0) >= 2 and sender.value("sum(up)") == 2)
        first.run("stubborn", 2)
        second.run("stubborn", 3)
        seen = sender.value(scrapes) or 0
        eventually(lambda: (sender.value(scrapes) or 0) >= seen + 3)
        recorded = "job_agent_limit_thread_id:langchain_quota_thread_used:ratio"
        eventually(lambda: bool(sender.query(recorded)))
        yield Fleet(sender, receiver, narrow, instances)


QUERIES = blocks(PAGE, "promql")


def query(having: str) -> str:
    """The page's query that has this in it."""
    [found] = [each for each in QUERIES if having in each]
    return found


def test_how_many_series_there_are(fleet: Fleet) -> None:
    """The query counts the series of each metric."""
    asked = fleet.sender._get("/api/v1/query", query=query("__name__=~"))["result"]
    counted = {each["metric"]["__name__"]: float(each["value"][1]) for each in asked}
    assert counted["langchain_quota_limit"] == 4
    assert counted["langchain_quota_thread_used"] == len(
        fleet.sender.query("langchain_quota_thread_used")
    )
    assert [*counted.values()] == sorted(counted.values(), reverse=True)


def test_refusals_are_added(fleet: Fleet) -> None:
    """The refusals of both replicas are one series, as large as both together."""
    text = query("rate(langchain_quota_limit_decisions_total")
    [inner] = re.findall(r"(rate\(.*\))\s*\)", text)
    at = {"time": time.time()}
    found = fleet.sender._get("/api/v1/query", query=text, **at)["result"]
    parts = fleet.sender._get("/api/v1/query", query=inner, **at)["result"]
    by_scope = {(each["metric"]["agent"], each["metric"]["scope"]): each for each in found}
    assert len(by_scope) == len(found)
    refused = by_scope[AGENT, "thread"]
    both = [
        float(each["value"][1])
        for each in parts
        if (each["metric"]["agent"], each["metric"]["scope"]) == (AGENT, "thread")
    ]
    assert len(both) == 2
    assert all(each > 0 for each in both)
    assert float(refused["value"][1]) == pytest.approx(sum(both))


def test_a_limit_is_one(fleet: Fleet) -> None:
    """Both replicas have the same number as their limit."""
    found = fleet.sender.query(query("max by (job, agent, limit, scope)"))
    assert {each.labels["agent"]: each.value for each in found} == {
        AGENT: MOST,
        "rollout": MOST + 1,
    }
    assert len(found) == 2


def test_a_half_done_rollout_is_found(fleet: Fleet) -> None:
    """Where replicas hold different limits, and only there, the query tells how many there are."""
    [found] = fleet.sender.query(query("count_values"))
    assert (found.labels["agent"], found.value) == ("rollout", 2)


def test_the_freshest_replica_is_believed(fleet: Fleet) -> None:
    """A thread that moved and was reset has what its last replica says, and not the most."""
    text = query("topk by")
    used = {each.labels["thread_id"]: each.value for each in fleet.sender.query(text)}
    assert used == {"moved": 1, "stayed": 2, "stubborn": MOST, "somebody": 2}
    most = "max by (thread_id) (langchain_quota_thread_used)"
    assert {each.labels["thread_id"]: each.value for each in fleet.sender.query(most)}["moved"] == 3


def test_the_recorded_share_is_the_freshest(fleet: Fleet) -> None:
    """The package's rule, evaluated by this server, says the same as the page's query."""
    recorded = "job_agent_limit_thread_id:langchain_quota_thread_used:ratio"
    shares = {each.labels["thread_id"]: each.value for each in fleet.sender.query(recorded)}
    assert shares["moved"] == pytest.approx(1 / MOST)


def test_refusals_on_a_thread_are_added(fleet: Fleet) -> None:
    """What both replicas refused on one thread is one number: at least all of it."""
    found = fleet.sender.query(query("increase(langchain_quota_thread_blocked_total"))
    by_thread = {each.labels["thread_id"]: each.value for each in found}
    assert len(by_thread) == len(found)
    # increase() guesses what lies beyond the first and the last scrape.
    assert by_thread["stubborn"] >= 5
    assert "stayed" not in by_thread


def test_the_share_of_exhausted_threads(fleet: Fleet) -> None:
    """Each replica counts the threads that it has served: the shares of the sums are told."""
    found = fleet.sender.query(query('state="exhausted"'))
    shares = {each.labels["agent"]: each.value for each in found}
    # The first has served three threads, the second two; one of them has nothing left, on both.
    assert shares == {AGENT: pytest.approx(2 / 5), "rollout": 0}


def test_all_queries_are_tested() -> None:
    """A further query on the page needs a test."""
    assert len(QUERIES) == 7


def series_of(server: Prometheus, selector: str = OURS) -> set[tuple[str, Labels]]:
    """The names and labels of series, those that Prometheus adds included."""
    found = server._get("/api/v1/query", query=selector)["result"]
    return {(each["metric"]["__name__"], frozenset(each["metric"].items())) for each in found}


def wanted(fleet: Fleet) -> set[tuple[str, Labels]]:
    """What the page says is sent, of what there is."""
    return {
        (name, labels)
        for name, labels in series_of(fleet.sender)
        if "thread_id" not in dict(labels) and not name.endswith("_created")
    }


def test_remote_write_leaves_threads_at_home(fleet: Fleet) -> None:
    """All but single threads and times of creation arrives, and nothing of those."""
    eventually(lambda: series_of(fleet.receiver) == wanted(fleet))
    sent = {name for name, _ in series_of(fleet.receiver)}
    assert {
        "langchain_quota_limit_decisions_total",
        "langchain_quota_subjects",
        "langchain_quota_threads_hidden",
        "langchain_quota_build_info",
        "job_agent_limit:langchain_quota_blocked_per_limit_decisions:ratio_rate5m",
    } <= sent
    kept = {name for name, _ in series_of(fleet.sender)} - sent
    assert {
        "langchain_quota_thread_used",
        "langchain_quota_calls_created",
        "job_agent_limit_thread_id:langchain_quota_thread_used:ratio",
    } <= kept
    assert not fleet.receiver.query('{thread_id!=""}')
    assert fleet.receiver.query("up")


def test_remote_write_of_nothing_else(fleet: Fleet) -> None:
    """With the further rule what is not ours does not arrive."""
    eventually(lambda: series_of(fleet.narrow) == wanted(fleet))
    assert series_of(fleet.narrow, '{__name__!=""}') == series_of(fleet.narrow)


def test_remote_write_sends_exemplars(fleet: Fleet) -> None:
    """The way from a count to its trace exists at the receiver, too."""
    found = eventually(lambda: fleet.receiver.exemplars("langchain_quota_calls_total"))
    assert all(each.labels["trace_id"] for each in found)


@pytest.mark.parametrize("page", [PAGE, SECURITY], ids=["operations", "security"])
def test_prometheus_takes_the_configurations(page: str, tmp_path: Path) -> None:
    """Promtool finds nothing wrong with what the page gives for prometheus.yml."""
    found = [
        each
        for each in blocks(page, "yaml")
        if {"remote_write", "scrape_configs"} & {*yaml.safe_load(each)}
    ]
    assert len(found) == 1
    token = tmp_path / "token"
    token.write_text("secret")
    config = tmp_path / "prometheus.yml"
    config.write_text(found[0].replace("/etc/prometheus/metrics_token", str(token)))
    command = [required_program("promtool", "prometheus"), "check", "config", str(config)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


async def spans_of_all_outcomes(sampler: Sampler) -> Sequence[ReadableSpan]:
    """The spans that a sampler keeps of calls of every outcome, below no span of a caller."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider(sampler=sampler)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    telemetry = Telemetry(registry=CollectorRegistry(), tracer_provider=provider)
    for limit in (
        ToolCallLimit("search", run_limit=1),
        ToolCallLimit("search", run_limit=1, exit_behavior="end"),
        ToolCallLimit("search", run_limit=1, enforce=False),
    ):
        quota: Any = QuotaMiddleware([limit], telemetry=telemetry)
        model = ScriptedChatModel(script=[["search"] * 3, "done"])
        agent: Any = create_agent(model, [search], middleware=[quota])
        await agent.ainvoke({"messages": [("user", "go on")]})
    return exporter.get_finished_spans()


def decision(span: ReadableSpan) -> Any:
    return (span.attributes or {})[tracing.DECISION]


def collector() -> Any:
    """The page's configuration of a Collector."""
    [text] = [each for each in blocks(PAGE, "yaml") if "tail_sampling" in each]
    return yaml.safe_load(text)


async def test_the_tail_policy_names_what_spans_say() -> None:
    """The Collector's policy asks for every decision that spans have, but for allowed calls."""
    policies = collector()["processors"]["tail_sampling"]["policies"]
    [policy] = [each for each in policies if each["type"] == "string_attribute"]
    found = {decision(span) for span in await spans_of_all_outcomes(ALWAYS_ON)}
    assert found == {each.value for each in Outcome}
    assert policy["string_attribute"]["key"] == tracing.DECISION
    assert {*policy["string_attribute"]["values"]} == found - {"allowed"}
    assert {type(each) for each in policy["string_attribute"]["values"]} == {str}


def test_the_collectors_configuration_hangs_together() -> None:
    """Each policy has the settings of its type, and the pipeline has all that is configured."""
    config = collector()
    for policy in config["processors"]["tail_sampling"]["policies"]:
        assert policy.keys() == {"name", "type", policy["type"]}
    [pipeline] = config["service"]["pipelines"].values()
    for kind, used in pipeline.items():
        assert {*used} == config[kind].keys()


async def test_the_head_sampler_keeps_refusals_and_no_more() -> None:
    """Every call that was not plainly allowed is kept, each run's in one trace."""
    namespace: dict[str, Any] = {}
    [text] = [each for each in blocks(PAGE, "python") if "class RefusalsAnd" in each]
    exec(text, namespace)  # noqa: S102 - our own page
    everything = await spans_of_all_outcomes(ALWAYS_ON)
    kept = await spans_of_all_outcomes(namespace["RefusalsAnd"](ParentBased(ALWAYS_OFF)))
    refused = [decision(span) for span in everything if decision(span) != "allowed"]
    assert [decision(span) for span in kept] == refused
    assert len({span.context.trace_id for span in kept if span.context}) == 3


# --- Redis -----------------------------------------------------------------------------------

SECRET = "a-secret-of-the-tests"  # noqa: S105 - of a server that lives for a test
OF_CONNECTIONS = {"hello", "auth", "info", "config|resetstat", "client|setinfo"}
"""What clients say that are connected, and what the test asks itself."""


def acl() -> tuple[str, list[str]]:
    """The keys and the commands that the pages allow a user of Redis."""
    text = (DOCS / "shared-quotas.md").read_text()
    [(keys, commands)] = re.findall(r"ACL SETUSER quota on >\S+ (\S+) (\+.*)", text)
    further = re.findall(r"`\+(\w+)` is only for", SECURITY)
    assert further == re.findall(r"need `\+(\w+)`", text) == ["scan"]
    return keys, [each.removeprefix("+") for each in commands.split()]


def use_all_of_it(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a store and the command ask of Redis."""
    with closing(RedisStore(url, timeout=30)) as store:
        lost = calls("search", 1)
        store.acquire(lost)
        store.acquire(compensating(Compensation(lost.attempt_id, attempt_id=lost.attempt_id)))
        store.peek(["search"])
        asyncio.run(store.aacquire(calls("search", 1)))
        # What is only held is given back by the reset.
        store.acquire(batch({"search": 1}, leases={"search": 900}))
    monkeypatch.setenv(URL_VARIABLE, url)
    assert main(["quotas", "show"]) == 0
    assert main(["quotas", "reset", "--yes"]) == 0


def test_the_rights_are_those_that_are_used(
    redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A user with the pages' rights can do all, and there is no right that is not needed."""
    keys, commands = acl()
    with redis_server.client() as client:
        allowed = [f"+{each}" for each in (*commands, "scan")]
        client.execute_command("ACL", "SETUSER", "quota", "on", f">{SECRET}", keys, *allowed)
        client.config_resetstat()
        use_all_of_it(f"redis://quota:{SECRET}@127.0.0.1:{redis_server.port}", monkeypatch)
        statistics: Any = client.info("commandstats")
    used = {each.removeprefix("cmdstat_") for each in statistics} - OF_CONNECTIONS
    assert used == {*commands, "scan"}


def test_keys_take_the_memory_that_the_page_says(redis_server: RedisServer) -> None:
    """The sizes of keys in the arithmetic are those of a run with model calls and tool calls."""
    sizes = r"(\d+) bytes for its\s+answer and (\d+) for what it has\s+charged"
    sizes += r".*?(\d+) bytes for a run, (\d+) for a thread and (\d+) for a quota"
    [said] = re.findall(sizes, PAGE, re.DOTALL)
    with (
        closing(RedisStore(redis_server.url, prefix=redis_server.prefix(), timeout=30)) as store,
        redis_server.client() as client,
    ):
        daily = Quota(200, per="user_id", window=timedelta(days=1))
        limits: list[Limit] = [
            ToolCallLimit("search", thread_limit=50, run_limit=20),
            ModelCallLimit(run_limit=20, quotas=[daily]),
        ]
        quota: Any = QuotaMiddleware(limits, store=store)
        model = ScriptedChatModel(script=[["search"], "done"])
        agent = create_agent(model, [search], middleware=[quota])
        config: Any = {"configurable": {"thread_id": str(uuid4())}}
        asked: Any = {"messages": [("user", "hi")]}
        asyncio.run(agent.ainvoke(asked, config, context={"user_id": "user-00000001"}))
        taken: dict[str, int] = {}
        for name in client.scan_iter(match=f"*{store.prefix!s}*"):
            kind = re.sub(r"^.*?:(count:[^:]*:|)", "", name.decode()).partition(":")[0]
            named = len(str(store.prefix)) - len("langchain_quota")
            taken[kind] = client.memory_usage(name) - named
    kinds = ("result", "attempt", "run", "thread", "user_id")
    assert taken.keys() == {*kinds}
    for kind, number in zip(kinds, said, strict=True):
        assert taken[kind] == pytest.approx(int(number), rel=0.3), kind


def test_another_database_needs_a_further_right(redis_server: RedisServer) -> None:
    """With `+select`, and not without it, a URL may name another database than 0."""
    said = " ".join(SECURITY.split())
    assert "`+select` only for a URL with another database than 0" in said
    keys, commands = acl()
    url = f"redis://other:{SECRET}@127.0.0.1:{redis_server.port}/1"
    with redis_server.client() as client:
        allowed = [f"+{each}" for each in commands]
        client.execute_command("ACL", "SETUSER", "other", "on", f">{SECRET}", keys, *allowed)
        with closing(RedisStore(url, timeout=30)) as store:
            with pytest.raises(QuotaStoreError, match="select"):
                store.acquire(calls("search", 1))
            client.execute_command("ACL", "SETUSER", "other", "+select")
            assert store.acquire(calls("search", 1)).admitted == (True,)
