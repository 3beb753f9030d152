"""The reference says what the code has: metrics, spans, logs, the command line, public names."""

import ast
import asyncio
import doctest
import inspect
import logging
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import redirect_stdout, suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from fnmatch import fnmatchcase
from functools import partial
from importlib import import_module
from io import StringIO
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest
from langchain_core.messages import AIMessage
from prometheus_client import CollectorRegistry, Metric

import langchain_quota
from langchain_quota import (
    ConcurrencyLimit,
    CostLimit,
    MemoryStore,
    ModelCallLimit,
    ModelPaceMiddleware,
    Quota,
    RepeatLimit,
    Telemetry,
    TimeLimit,
    TokenLimit,
    ToolCallLimit,
    ToolCallLimitExceededError,
    hmac_label,
    testing,
)
from langchain_quota.cli import main
from langchain_quota.cli.arguments import parser
from langchain_quota.errors import QuotaStoreError, UnknownPriceError
from langchain_quota.testing import ScriptedChatModel
from tests.scene import Scene, asking, delegate, recording, tool_limiter, until, waiting_tool
from tests.telemetry import Signals, telling
from tests.trees import in_a_thread
from tools import reference

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PUBLIC: Sequence[str] = vars(langchain_quota)["__all__"]
MADE = reference.pages()
KEPT = [page.read_text() for page in sorted((DOCS / "reference").glob("*.md"))]
REFERENCE = "".join([*KEPT, *MADE.values()])
DESCRIBED = re.findall(r"(?m)^::: (\S+)\.(\w+)$", REFERENCE)
"""The names that the reference describes, each with its home."""
METRICS, SPANS = MADE["reference/metrics.md"], MADE["reference/telemetry.md"]
LOGS = (DOCS / "observability.md").read_text()

AGENT, THREAD, USER, PER, TOOL, MODEL = "boss", "anna", "ada", "user_id", "search", "gpt-5"
LIMITED = "bert"
"""A thread with a thread limit, and no other."""
OF_TOKENS, OF_MONEY = "of tokens", "of money"
GIVEN = {
    *("", AGENT, THREAD, LIMITED, USER, PER, TOOL, OF_TOKENS, OF_MONEY, MODEL),
    *(MODEL, "Broken", "KeyError", "QuotaStoreError", langchain_quota.__version__),
    *(f"{MODEL}-{number}" for number in range(100)),
}
"""What the scenes bring along; every other value is the code's own."""

pytestmark = pytest.mark.filterwarnings("ignore:model .* no usage", "ignore:subject_label has")


def section(heading: str, page: str) -> str:
    """The text below a heading, up to the next one."""
    found = re.search(rf"^#+ {heading}\n(.*?)(?=^#|\Z)", page, re.DOTALL | re.MULTILINE)
    assert found is not None, heading
    return found[1]


def rows(heading: str, page: str) -> list[dict[str, str]]:
    """The rows of the table below a heading, by the headings of their columns."""
    block = re.findall(r"(?:^\|.*\n)+", section(heading, page), re.MULTILINE)[0]
    head, _, *lines = (
        [cell.strip() for cell in line.strip("|").split("|")] for line in block.splitlines()
    )
    return [dict(zip(head, line, strict=True)) for line in lines]


def quoted(cell: str) -> list[str]:
    """The texts in backticks."""
    return re.findall(r"`([^`]+)`", cell)


def same(said: Iterable[str], real: Iterable[str]) -> None:
    """Fail unless a page has each name once, and no other."""
    assert sorted(said) == sorted(set(real))


class Broken(MemoryStore):
    """A store that cannot be asked, and gives no answer about grants."""

    async def aacquire(self, request: Any) -> Any:
        raise QuotaStoreError("down")

    def _grant(self, *_: object) -> Any:
        raise QuotaStoreError("no answer")

    def _revoke(self, *_: object) -> Any:
        raise QuotaStoreError("no answer")


def complain(_: object) -> None:
    """An observer that fails."""
    raise KeyError("observer")


def a_dollar_a_token(used: Any) -> Decimal:
    return Decimal(used.total_tokens)


def answer(tokens: int | None, model: str = "", tool: str = TOOL) -> AIMessage:
    """An answer that has used so many tokens; `None` if the model does not say."""
    used: Any = tokens and {"input_tokens": tokens, "output_tokens": 0, "total_tokens": tokens}
    calls: Any = [{"name": tool, "args": {}, "id": f"{model}-{tokens}"}] if tool else []
    named = {"model_name": model} if model else {}
    return AIMessage("", tool_calls=calls, usage_metadata=used, response_metadata=named)


@dataclass(frozen=True)
class Seen:
    """All that agents in every situation made visible."""

    signals: Signals
    records: list[logging.LogRecord]

    async def play(self, script: Any, *items: Any, **options: Any) -> Scene:
        """Let an agent run once on a thread; a limit may end the run."""
        given = {"name": AGENT, "thread_id": THREAD, "context": {PER: USER}, **options}
        scene = Scene(self.signals, script, items, **given)
        with suppress(ToolCallLimitExceededError):
            await scene.play()
        return scene

    async def play_limits(self) -> None:
        """Every decision, scope and exit behaviour, and a store that fails."""
        searches = asking(*[TOOL] * 6)
        model = ModelCallLimit(run_limit=9, exit_behavior="finalize")
        # Near, exhausted and refused, by thread and by run; an observer fails.
        most = ToolCallLimit(TOOL, thread_limit=5, alert=False)
        await self.play(searches, most, model, on_decision=complain, thread_id=LIMITED)
        # An invented tool; an agent without a name; tried out only.
        trial = ToolCallLimit(run_limit=1, enforce=False)
        await self.play(asking(TOOL, "no such tool"), trial, name=None)
        # The batch is stopped: by the limit, and by another middleware, which is a refund.
        await self.play(searches, ToolCallLimit(TOOL, run_limit=5, exit_behavior="end"))
        await self.play(
            asking(TOOL),
            tool_limiter(self.signals, TOOL, run_limit=5),
            tool_limiter(self.signals, run_limit=0, exit_behavior="error"),
        )
        # Each kind of quota is used up; what is left is looked up; windows end.
        for per in ("thread", "agent", "global", "root_run", PER):
            window = None if per == "root_run" else timedelta(days=1)
            quota = Quota(5, per=per, window=window)
            shared = ToolCallLimit(TOOL, quotas=[quota], near=(0.5, 0.8))
            options = {"store": MemoryStore(), "tell_model": True}
            thread = LIMITED if per == "thread" else THREAD
            scene = await self.play(searches, shared, thread_id=thread, **options)
        await scene.quota.areset(scene.agent, scene.config)
        for action in ("block", "allow"):
            daily = ToolCallLimit(TOOL, quotas=[Quota(5, per="global")])
            await self.play(searches, daily, store=Broken(), on_store_error=action)
        # Some calls wait, some in vain.
        for wait in (0, 30):
            await self.play(searches, ConcurrencyLimit(TOOL, max_concurrency=1, wait=wait))
        hourly = Quota(1, per=PER, window="1h", smooth=True)
        slow = ToolCallLimit(TOOL, quotas=[hourly], wait=9999)
        run = asyncio.create_task(self.play(asking(TOOL, TOOL), slow, store=MemoryStore()))
        await until(
            lambda: set(self.signals.samples("langchain_quota_waiting_calls").values()) > {0}
        )
        run.cancel()
        await asyncio.wait([run])
        await self.play([[TOOL], [TOOL], "done"], RepeatLimit(1))

    async def play_budgets(self) -> None:
        """Limits of tokens and dollars: some use is estimated, some has no price."""
        shared = [Quota(5, per="global")]
        large = TokenLimit(name=OF_TOKENS, call_limit=1, tokens="input")
        await self.play(["done"], large, thread_id=LIMITED)
        for limit in (
            TokenLimit(name=OF_TOKENS, thread_limit=5, run_limit=5, quotas=shared),
            CostLimit(
                name=OF_MONEY, thread_limit=5, run_limit=5, quotas=shared, tool_prices={TOOL: 0.01}
            ),
        ):
            prices = a_dollar_a_token if isinstance(limit, CostLimit) else None
            options = {"prices": prices, "thread_id": limit.name}
            told, untold = [answer(4), answer(4, MODEL), answer(4)], [answer(None, MODEL, tool="")]
            await self.play(told, limit, store=MemoryStore(), **options)
            await self.play(untold, limit, store=MemoryStore(), **options)
        hour: Any = {"thread_limit": "1h", "quotas": [Quota("1h", per="global")]}
        hangs, *_ = waiting_tool()
        time = TimeLimit(call_limit=0.01, **hour)
        await self.play([[TOOL], "done"], time, store=MemoryStore(), tools=[hangs])
        cheap = ScriptedChatModel(model=MODEL, script=["done"])
        other = CostLimit(name=OF_MONEY, run_limit=5, downgrade_to=cheap)
        await self.play([answer(4)], other, prices=a_dollar_a_token)
        many = [answer(4, f"{MODEL}-{number}") for number in range(101)]
        unpriced: dict[str, Any] = {"prices": lambda _: None, "unknown_price": "allow"}
        await self.play([*many, "done"], CostLimit(name=OF_MONEY, run_limit=1), **unpriced)
        with suppress(UnknownPriceError):
            await self.play(["done"], CostLimit(name=OF_MONEY, run_limit=1), prices=lambda _: None)

    async def play_pace(self) -> None:
        """A provider has nothing left."""
        said = {"limit": "1000000", "remaining": "0", "reset": "1s"}
        headers = {f"x-ratelimit-{part}-requests": text for part, text in said.items()}
        told = AIMessage("done", response_metadata={"headers": headers})
        pace = ModelPaceMiddleware(store=MemoryStore(), telemetry=self.signals.telemetry)
        await self.play(ScriptedChatModel(model=MODEL, script=[told]), pace)

    async def play_questions(self) -> None:
        """A person is asked, and answers in each way; what a store has granted is revoked."""
        day, store = timedelta(days=1), MemoryStore()
        quotas = [Quota(5, per=per, window=day) for per in ("agent", "global", PER)]
        searches = [[TOOL] * 6, "done"]
        asks: Any = {"exit_behavior": "ask"}
        tokens = [answer(4), answer(4, MODEL), "done"]
        of_runs = ToolCallLimit(TOOL, thread_limit=5, run_limit=5, **asks)
        in_store = ToolCallLimit(TOOL, quotas=[*quotas, Quota(5, per="root_run")], **asks)
        of_money = CostLimit(name=OF_MONEY, run_limit=5, **asks)
        approve = {"type": "approve"}
        situations: list[tuple[Any, Any, dict[str, Any], dict[str, Any]]] = [
            *((searches, of_runs, approve, {}), (searches, of_runs, {"type": "reject"}, {})),
            (searches, of_runs, {**approve, "amount": 2}, {}),
            (searches, in_store, approve, {"store": store}),
            (tokens, TokenLimit(name=OF_TOKENS, run_limit=5, **asks), approve, {}),
            (tokens, of_money, approve, {"prices": a_dollar_a_token}),
        ]
        for script, limit, decision, options in situations:
            scene = await self.play(script, limit, **options)
            await scene.resume({"decisions": [decision], "by": USER})
        for grant in store.grants():
            store.revoke(grant.key, grant.id)
            with suppress(QuotaStoreError):
                Broken().grant(grant.key, 1, window=None)
            with suppress(QuotaStoreError):
                Broken().revoke(grant.key, grant.id)

    async def play_freeze(self) -> None:
        """A customer is frozen, thawed and frozen."""
        limit = ToolCallLimit(TOOL, quotas=[Quota(5, per=PER), Quota(9, per="global")])
        scene = await self.play(asking(TOOL), limit, store=MemoryStore())
        scene.quota.freeze(**{PER: USER})
        scene.quota.thaw(**{PER: USER})
        until_tomorrow: Any = {"by": USER, "until": datetime.now(UTC) + timedelta(days=1)}
        for whom, thread in (({PER: USER}, THREAD), ({}, USER)):
            scene.quota.freeze(**until_tomorrow, **whom)
            await scene.play(thread_id=thread)

    async def lose_root_runs(self) -> None:
        """Runs that may belong to another root run: in a bare thread, and inside an unknown run."""
        limit = ToolCallLimit(TOOL, quotas=[Quota(5, per="root_run")])
        child = Scene(self.signals, ["done", "done"], [limit], store=MemoryStore(), name=AGENT)
        asked: Any = {"messages": []}
        elsewhere = partial(in_a_thread, child.agent.invoke, asked, child.config)
        await self.play(asking(TOOL), child.quota, tools=[recording(TOOL, [], elsewhere)])
        inside: Any = {**child.config, "metadata": {"langgraph_node": "tools"}}
        await child.agent.ainvoke(asked, inside)

    def labels(self) -> Iterator[tuple[str, str, str]]:
        """Each metric's labels and their values."""
        for family in self.signals.registry.collect():
            for sample in family.samples:
                for label, value in sample.labels.items():
                    if label != "le":
                        yield exposed(family), label, value


def exposed(family: Metric) -> str:
    """A metric's name as it is queried."""
    return f"{family.name}_total" if family.type == "counter" else family.name


@pytest.fixture(scope="module")
def seen() -> Seen:
    """The scenes, played once for all tests; one hides its thread."""
    told: Any = {"subject_label": {PER: str}, "run_histograms": True}
    signals = telling(**told)
    told["tracer_provider"] = signals.provider
    hiding = Telemetry(registry=CollectorRegistry(), thread_label=hmac_label("a" * 16), **told)
    watching = Telemetry(registry=signals.registry, count_unchecked_calls=True, **told)
    found = Seen(signals, [])
    hidden, watched = (Seen(replace(signals, telemetry=each), []) for each in (hiding, watching))

    async def play_all() -> None:
        await found.play_limits()
        await found.play_budgets()
        await found.play_questions()
        await found.play_pace()
        await found.lose_root_runs()
        await hidden.play(asking(TOOL), ToolCallLimit(TOOL, run_limit=5))
        unlimited = Scene(watched.signals, ["done"], tools=(), name=AGENT, checkpointer=None).agent
        ask = delegate(unlimited, TOOL)
        await watched.play(asking(TOOL), ModelCallLimit(run_limit=9), tools=[ask])
        await found.play_freeze()

    logger, handler = logging.getLogger("langchain_quota"), logging.Handler()
    handler.emit = found.records.append  # type: ignore[assignment,method-assign]  # takes the record
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    try:
        asyncio.run(play_all())
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
    return found


def test_metrics(seen: Seen) -> None:
    """The page has each metric as agents make it."""
    table = rows("Metrics", METRICS)
    families = {exposed(family): family for family in seen.signals.registry.collect()}
    same((name for row in table for name in quoted(row["name"])), families)
    labels: dict[str, set[str]] = {name: set() for name in families}
    for name, label, _ in seen.labels():
        labels[name].add(label)
    described = {name: row for row in table for name in quoted(row["name"])}
    for name, row in described.items():
        assert ({*quoted(row["labels"])}, row["type"]) == (labels[name], families[name].type), name
        text = families[name].documentation
        timed = "in seconds" in text or "How long" in text
        assert timed == name.removesuffix("_total").endswith("_seconds"), name


def test_labels(seen: Seen) -> None:
    """Each label of each metric is explained once, with the values that are the code's own."""
    explained = []
    for row in rows("Labels", METRICS):
        [label], patterns = quoted(row["label"]), quoted(row["on"]) or ["*"]
        on = {
            metric
            for metric, each, _ in seen.labels()
            if each == label and any(fnmatchcase(metric, pattern) for pattern in patterns)
        }
        explained += [f"{label} of {metric}" for metric in on]
        found = {value for metric, each, value in seen.labels() if each == label and metric in on}
        values = {*quoted(row["values"])}
        # Most components cannot be made to fail from outside.
        expected = values if label == "component" else found - GIVEN
        assert values == expected, row
        assert found - GIVEN <= values, row
    same(explained, (f"{label} of {metric}" for metric, label, _ in seen.labels()))


def test_spans(seen: Seen) -> None:
    """Each attribute of spans is on the page, with the values of the code's own; so are names."""
    found: dict[str, set[Any]] = {}
    names = set()
    for span in seen.signals.spans():
        assert span.kind.name == "INTERNAL"
        told = dict(span.attributes or {})
        assert len(told.keys() & {"gen_ai.conversation.id", "langchain_quota.thread.id"}) == 1
        names.add(re.sub("(check_quota tool) .*", r"\1 <tool>", span.name))
        for attribute, value in told.items():
            quota = re.sub(r"\.\w+\.(used|limit)$", r".<scope>.\1", attribute)
            found.setdefault(quota, set()).add(value)
    table = {quoted(row["attribute"])[0]: {*quoted(row["values"])} for row in rows("Spans", SPANS)}
    same(table, found)
    for attribute, values in table.items():
        assert not values or values == found[attribute] - GIVEN, attribute
    assert {
        each for each in quoted(section("Spans", SPANS)) if each.startswith("check_quota")
    } == names


def test_messages(seen: Seen) -> None:
    """Each message of the one logger is on the page with its level."""
    page = {
        (row["level"], *quoted(row["message"]))
        for row in rows("Log lines", MADE["reference/logs.md"])
    }
    of_limits = {
        "near": "INFO",
        "exhausted": "WARNING",
        "refused": "DEBUG",
        "would refuse": "DEBUG",
    }
    for record in seen.records:
        if hasattr(record, "quota_limit"):
            assert of_limits[vars(record)["quota_event"]] == record.levelname
        else:
            assert (record.levelname, re.sub(r"(%[rsd])+", "…", str(record.msg))) in page
    assert {each.name for each in seen.records} == {"langchain_quota"}
    assert len(page) > 20


def test_fields(seen: Seen) -> None:
    """The fields of records are those on the page; so are the events, and what may be `None`."""
    for about, heading in (
        ("quota_limit", "Read the log"),
        ("quota_key", "Fields about grants and freezes"),
        ("quota_limits", "Fields about questions to people"),
    ):
        records = [vars(each) for each in seen.records if hasattr(each, about)]
        names = {name for each in records for name in each if name.startswith("quota_")}
        page = {name: row["value"] for row in rows(heading, LOGS) for name in quoted(row["field"])}
        same(page, names)
        assert {*quoted(page["quota_event"])} == {each["quota_event"] for each in records}
        for name in names - {"quota_thread"}:  # every run of the scene has a thread
            may_be_none = any(each.get(name, "") is None for each in records)
            assert ("`None`" in page[name]) == may_be_none, name


def test_environment_variables() -> None:
    """Each variable that the code names is on the page, and no other is."""
    text = " ".join(" ".join(row.values()) for row in rows("Environment variables", REFERENCE))
    page = [each for each in quoted(text) if re.fullmatch(r"[A-Z]+(_[A-Z]+)+", each)]
    named = re.compile(r"(LANGCHAIN|PROMETHEUS|OTEL)(_[A-Z]+)+")
    code = (path.read_text() for path in (ROOT / "src").rglob("*.py"))
    nodes = (node for text in code for node in ast.walk(ast.parse(text)))
    values = [str(node.value) for node in nodes if isinstance(node, ast.Constant)]
    same(page, filter(named.fullmatch, values))


def test_bounds() -> None:
    """The numbers that bound series are the defaults of the code."""
    bounds = inspect.signature(Telemetry).parameters
    text = (DOCS / "observability.md").read_text()
    page = dict(re.findall(r"`(max_\w+)` \((\d+)\)", section("Bounds", text)))
    assert page == {name: str(each.default) for name, each in bounds.items() if name in page}
    assert len(page) == 4
    assert bounds["thread_ttl"].default == timedelta(hours=1)


def test_every_public_name_is_in_the_reference_once() -> None:
    """It has all names of the package and of `testing`, and others where they live; none twice."""
    said = [name for _, name in DESCRIBED]
    same(said, [*said, *PUBLIC, *testing.__all__])
    for home, name in DESCRIBED:
        assert hasattr(import_module(home), name), name


def test_every_command_is_in_the_reference() -> None:
    """The page of the command line has a section for each command, with each of its options."""
    parts = re.split(r"^## ", MADE["reference/command-line.md"], flags=re.MULTILINE)[1:]
    assert len(parts) > 10
    for text in parts:
        words = text.partition("\n")[0].split()
        with pytest.raises(SystemExit), redirect_stdout(StringIO()) as shown:
            main([*words, "--help"])
        helped = re.findall(r"(?m)^  (--[a-z-]+)", shown.getvalue())
        same(re.findall(r"(?m)^\| `(--[a-z-]+)", text), helped)


def test_every_help_has_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    """Each command explains itself with an example that it understands, and a group alone does."""
    groups = ("", "export", "quotas")
    for command in (
        *groups,
        *(each.prog.partition(" ")[2] for each in reference.commands(parser())),
    ):
        words = command.split()
        with pytest.raises(SystemExit, match=r"^0$"):
            main([*words, *([] if command in groups else ["--help"])])
        *_, heading, example = capsys.readouterr().out.splitlines()
        program, *options = example.split()
        assert (heading, program, options[: len(words)]) == ("example:", "langchain-quota", words)
        assert parser().parse_args(options).command == options[0]


def test_docstrings_have_examples_that_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each public class and function has examples, which give what they say."""
    for variable in ("LANGCHAIN_QUOTA_METRICS_ADDR", "LANGCHAIN_QUOTA_REDIS_URL"):
        monkeypatch.delenv(variable, raising=False)
    faults: list[str] = []
    for home, name in DESCRIBED:
        value = getattr(import_module(home), name)
        if isinstance(value, type | FunctionType):
            examples = (inspect.getdoc(value) or "").partition("\nExamples:\n")[2]
            test = doctest.DocTestParser().get_doctest(
                examples, {"__name__": "__main__"}, name, filename=None, lineno=None
            )
            runner = doctest.DocTestRunner(verbose=False, optionflags=doctest.ELLIPSIS)
            if not test.examples or runner.run(test, out=faults.append).failed:
                faults.append(name)
    assert faults == []
