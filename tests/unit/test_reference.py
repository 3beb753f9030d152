"""docs/observability.md is what the code has: nothing on the page is gone, nothing is missing."""

import ast
import asyncio
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from langchain.agents import create_agent
from langchain_core.messages import AIMessage, ToolCall
from langchain_core.messages.ai import UsageMetadata
from langchain_core.runnables import RunnableConfig
from langchain_core.tools import StructuredTool, tool
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.types import Command
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client import CollectorRegistry, Metric

from langchain_quota import (
    CostLimit,
    Decision,
    Grant,
    MemoryStore,
    ModelCallLimit,
    Quota,
    QuotaMiddleware,
    QuotaStoreError,
    RepeatLimit,
    Telemetry,
    TokenLimit,
    ToolCallLimit,
    ToolCallLimitExceededError,
    ToolCallLimitMiddleware,
    hmac_label,
)
from langchain_quota.model_usage import ModelUsage
from langchain_quota.testing import Script, ScriptedChatModel
from tests.faults import at, differences, no_faults

ROOT = Path(__file__).parents[2]
SRC = ROOT / "src" / "langchain_quota"
DOCS = ROOT / "docs"
PATH = DOCS / "observability.md"
PAGE = PATH.read_text()

MODULES = [ast.parse(path.read_text()) for path in sorted(SRC.rglob("*.py"))]

AGENT, THREAD, USER, PER, TOOL = "boss", "anna", "ada", "user_id", "search"
LIMITED = "bert"
"""A thread with a thread limit, and no other."""
LABELLED = hmac_label("at least sixteen bytes")
APPROVE = {"type": "approve"}
MODEL = "gpt-5"

pytestmark = pytest.mark.filterwarnings("ignore:model .* reports no usage")


def section(heading: str) -> str:
    """The text below a heading, up to the next one."""
    found = re.search(rf"^##+ {heading}\n(.*?)(?=^#|\Z)", PAGE, re.DOTALL | re.MULTILINE)
    assert found is not None, heading
    return found[1]


def tables(text: str) -> list[list[dict[str, str]]]:
    """The tables of a text: rows, by the headings of their columns."""
    found = []
    for block in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
        head, _, *rows = (
            [cell.strip() for cell in line.strip("|").split("|")] for line in block.splitlines()
        )
        found.append([dict(zip(head, row, strict=True)) for row in rows])
    return found


def quoted(cell: str) -> list[str]:
    """The texts in backticks."""
    return re.findall(r"`([^`]+)`", cell)


def name(cell: str) -> str:
    """The only text in backticks."""
    (found,) = quoted(cell)
    return found


def same(said: Iterable[str], real: Iterable[str], *, kind: str) -> None:
    """Fail unless the page has each name once, and no other."""
    found = differences(PATH, said, real, kind=kind)
    no_faults(found, remedy="Let the page's table and the code agree.")


[METRICS] = tables(section("Metrics"))
[LABELS] = tables(section("Labels"))
[SPANS] = tables(section("Spans"))
[MESSAGES, FIELDS_OF_LIMITS] = tables(section("Logs"))
[FIELDS_OF_GRANTS] = tables(section("The audit log of grants"))
[FIELDS_OF_ANSWERS] = tables(section("Questions and answers"))
[VARIABLES] = tables(section("Environment variables"))


class Broken(MemoryStore):
    """A store that cannot be asked."""

    async def aacquire(self, request: Any) -> Any:
        raise QuotaStoreError("down")


def complain(_: Decision) -> None:
    """An observer that fails."""
    raise KeyError("observer")


class Kept(logging.Handler):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)


@tool
async def search(query: str = "") -> str:
    """Search."""
    await asyncio.sleep(0)
    return "found"


@dataclass(frozen=True)
class Scene:
    """All that agents in every situation made visible."""

    families: Sequence[Metric]
    spans: Sequence[ReadableSpan]
    records: Sequence[logging.LogRecord]

    def labels(self) -> Iterator[tuple[str, str, str]]:
        """Each metric's labels and their values."""
        for family in self.families:
            for sample in family.samples:
                for label, value in sample.labels.items():
                    if label != "le" and not sample.name.endswith("_created"):
                        yield exposed(family), label, value

    def attributes(self) -> Iterator[tuple[str, Any]]:
        """Each attribute of each span."""
        for span in self.spans:
            yield from (span.attributes or {}).items()


class Silent(MemoryStore):
    """A store that gives no answer about grants."""

    def _grant(self, asked: Grant) -> tuple[Grant | None, bool]:
        raise QuotaStoreError("no answer")

    def _revoke(self, key: str, name: str) -> Grant | None:
        raise QuotaStoreError("no answer")


async def play(
    script: Script, *middleware: Any, agent: str | None = AGENT, thread: str = THREAD
) -> tuple[Any, RunnableConfig]:
    """Let an agent run once on a thread; a limit may end the run. The agent, and the thread."""
    built: Any = create_agent(
        ScriptedChatModel(script=script),
        [search],
        middleware=middleware,
        name=agent,
        checkpointer=InMemorySaver(),
    )
    config: RunnableConfig = {"configurable": {"thread_id": thread}}
    with suppress(ToolCallLimitExceededError):
        await built.ainvoke({"messages": [("user", "go on")]}, config, context={PER: USER})
    return built, config


async def play_all(telemetry: Telemetry, hiding: Telemetry) -> None:
    """Every decision, scope, exit behaviour, operation, action and event."""

    def quota(*limits: Any, **options: Any) -> Any:
        return QuotaMiddleware(limits, telemetry=telemetry, **options)

    searches = [[TOOL] * 6, "done"]
    model = ModelCallLimit(run_limit=9, exit_behavior="finalize")
    # Near, exhausted and refused, by thread and by run; an observer fails.
    limits = ToolCallLimit(TOOL, thread_limit=5), model
    await play(searches, quota(*limits, on_decision=complain), thread=LIMITED)
    # An invented tool; an agent without a name; tried out only.
    trial = ToolCallLimit(run_limit=1, enforce=False)
    await play([[TOOL, "no such tool"], "done"], quota(trial), agent=None)
    # The batch is stopped: by the limit, and by another middleware, which is a refund.
    await play(searches, quota(ToolCallLimit(TOOL, run_limit=5, exit_behavior="end")))
    stacked = [
        ToolCallLimitMiddleware(tool_name=TOOL, run_limit=5, telemetry=telemetry),
        ToolCallLimitMiddleware(run_limit=0, exit_behavior="error", telemetry=telemetry),
    ]
    await play([[TOOL], "done"], *stacked)
    # Each kind of quota is used up; what is left is looked up; windows end.
    for per in ("thread", "agent", "global", PER, "root_run"):
        window = None if per == "root_run" else timedelta(days=1)
        shared = ToolCallLimit(TOOL, quotas=[Quota(5, per=per, window=window)])
        stored = quota(shared, store=MemoryStore(), tell_model=True)
        await stored.areset(*await play(searches, stored))
    for action in ("deny", "allow"):
        daily = ToolCallLimit(TOOL, quotas=[Quota(5, per="global")])
        await play(searches, quota(daily, store=Broken(), on_store_error=action))
    await play([[TOOL], "done"], ToolCallLimitMiddleware(run_limit=5, telemetry=hiding))
    # Some calls wait, some in vain.
    for wait in (0, 30):
        await play(searches, quota(ToolCallLimit(TOOL, at_once=1, wait=wait)))
    await play([[TOOL], [TOOL], "done"], quota(RepeatLimit(1)))
    await spend(quota)
    await answer_all(quota)
    await lose(quota)


async def lose(quota: Callable[..., Any]) -> None:
    """Runs that may belong to another root run: in a bare thread, and inside an unknown run."""
    limited = quota(ToolCallLimit(TOOL, quotas=[Quota(5, per="root_run")]), store=MemoryStore())
    child: Any = create_agent(ScriptedChatModel(script=["done", "done"]), middleware=[limited])
    asked = {"messages": [("user", "go on")]}
    thread = {"configurable": {"thread_id": THREAD}}

    def elsewhere() -> str:
        with ThreadPoolExecutor() as executor:
            return str(executor.submit(child.invoke, asked, thread).result())

    asks = StructuredTool.from_function(elsewhere, name=TOOL, description="Ask.")
    model = ScriptedChatModel(script=[[TOOL], "done"])
    top: Any = create_agent(model, [asks], middleware=[limited])
    await top.ainvoke(asked, thread)
    await child.ainvoke(asked, {**thread, "metadata": {"langgraph_node": "tools"}})


async def answer_all(quota: Callable[..., Any]) -> None:
    """A person is asked, and answers in each way; what a store has granted is revoked."""
    day = timedelta(days=1)
    quotas = [Quota(5, per=per, window=day) for per in ("agent", "global", PER)]
    asks: dict[str, Any] = {"exit_behavior": "ask"}
    searches: Script = [[TOOL] * 6, "done"]
    tokens: Script = [answer(4), answer(4, model=MODEL), "done"]
    another = {**APPROVE, "amount": 2}
    store = MemoryStore()
    for script, limit, decision, options in (
        (searches, ToolCallLimit(TOOL, thread_limit=5, run_limit=5, **asks), APPROVE, {}),
        (searches, ToolCallLimit(TOOL, run_limit=5, **asks), another, {}),
        (searches, ToolCallLimit(TOOL, run_limit=5, **asks), {"type": "reject"}, {}),
        (
            searches,
            ToolCallLimit(TOOL, quotas=[*quotas, Quota(5, per="root_run")], **asks),
            APPROVE,
            {"store": store},
        ),
        (tokens, TokenLimit(name="of tokens", run_limit=5, **asks), APPROVE, {}),
        (
            tokens,
            CostLimit(name="of microdollars", run_limit=5, **asks),
            APPROVE,
            {"prices": a_dollar_a_token},
        ),
    ):
        agent, config = await play(script, quota(limit, **options))
        answered: Command[Any] = Command(resume={"decisions": [decision], "by": USER})
        await agent.ainvoke(answered, config, context={PER: USER})
    for grant in store.grants():
        store.revoke(grant.key, grant.id)
    with suppress(QuotaStoreError):
        Silent().grant(grant.key, 1)
    with suppress(QuotaStoreError):
        Silent().revoke(grant.key, grant.id)


async def spend(quota: Callable[..., Any]) -> None:
    """Model calls under limits of tokens and dollars; some are estimated, some have no price."""
    shared = [Quota(5, per="global")]
    for limit in (
        TokenLimit(name="of tokens", thread_limit=5, run_limit=5, quotas=shared),
        CostLimit(name="of microdollars", thread_limit=5, run_limit=5, quotas=shared),
    ):
        script = [answer(4), answer(4, model=MODEL), answer(4)]
        prices = a_dollar_a_token if isinstance(limit, CostLimit) else None
        limited = quota(limit, prices=prices, store=MemoryStore())
        await play(script, limited, thread=f"{THREAD} in {limit.unit}")
        await play(
            [answer(None, model=MODEL, calls=())],
            quota(limit, prices=prices, store=MemoryStore()),
        )
    unpriced = quota(
        CostLimit(name="of microdollars", run_limit=1), prices=lambda _: None, unknown_price="allow"
    )
    await play([answer(4, model=f"{MODEL}-{number}") for number in range(101)] + ["done"], unpriced)


def answer(tokens: int | None, *, model: str = "", calls: Sequence[str] = (TOOL,)) -> AIMessage:
    """An answer that has cost so many tokens; `None` if the model does not say."""
    used = tokens and UsageMetadata(input_tokens=tokens - 1, output_tokens=1, total_tokens=tokens)
    named = {"model_name": model} if model else {}
    calls_made = [ToolCall(name=name, args={}, id=f"{name}-{model}-{tokens}") for name in calls]
    return AIMessage("", tool_calls=calls_made, usage_metadata=used, response_metadata=named)


def a_dollar_a_token(used: ModelUsage) -> Decimal:
    """What a model run costs."""
    return Decimal(used.total_tokens)


@pytest.fixture(scope="module")
def scene() -> Scene:
    """The scene, played once for all tests."""
    registry, exporter = CollectorRegistry(), InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    telemetry = Telemetry(registry=registry, tracer_provider=provider, subject_label={PER: str})
    hiding = Telemetry(
        registry=CollectorRegistry(), tracer_provider=provider, thread_label=LABELLED
    )
    kept = Kept()
    logger = logging.getLogger("langchain_quota")
    level = logger.level
    logger.addHandler(kept)
    logger.setLevel(logging.DEBUG)
    try:
        asyncio.run(play_all(telemetry, hiding))
    finally:
        logger.removeHandler(kept)
        logger.setLevel(level)
    return Scene(list(registry.collect()), exporter.get_finished_spans(), kept.records)


def exposed(family: Metric) -> str:
    """A metric's name as it is queried."""
    return f"{family.name}_total" if family.type == "counter" else family.name


def test_units(scene: Scene) -> None:
    """What the page says is counted, the metric's name or help says, too; seconds are named so."""
    units = {name(row["name"]): row["unit"] for row in METRICS}
    wrong = []
    for family in scene.families:
        unit = units[exposed(family)]
        words = re.findall(r"[a-z0-9]+", f"{family.name} {family.documentation}".lower())
        if unit not in words or (unit == "seconds") != family.name.endswith("_seconds"):
            wrong.append(f"{at(PATH, exposed(family))}: {exposed(family)} counts {unit!r}")
    no_faults(wrong, remedy="Let the metric's name or help, and the page, name the same unit.")


def variables() -> set[str]:
    """The environment variables that the code names."""
    pattern = r"[A-Z]+(_[A-Z]+)+|prometheus_multiproc_dir"
    named: set[str] = set()
    for module in MODULES:
        nodes = [*ast.walk(module)]
        found = {
            node.value
            for node in nodes
            if isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and re.fullmatch(pattern, node.value)
        }
        reads = any(isinstance(node, ast.Attribute) and node.attr == "environ" for node in nodes)
        assert bool(found) == reads, "a module reads variables that it does not name, or inversely"
        named |= found
    return named
