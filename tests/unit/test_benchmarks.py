"""The benchmarks measure what they say: exact counts, and no times."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from langchain.agents import create_agent
from langgraph.checkpoint.memory import InMemorySaver

from langchain_quota import QuotaMiddleware, ToolCallLimit
from langchain_quota.testing import captured_decisions
from tests.benchmarks import (
    budgets,
    concurrency,
    costs,
    decisions,
    footprint,
    importing,
    per_step,
    runs,
    scenes,
    scrape,
    workers,
)
from tests.benchmarks.__main__ import page
from tests.benchmarks.optional import required
from tests.benchmarks.report import Ratio, Result, Table, targets
from tests.benchmarks.runs import OVERVIEW, WHERE, stored_of
from tests.benchmarks.runs import per_step as stored_per_step
from tests.benchmarks.savers import Stored, memory
from tests.benchmarks.sizes import QUICK
from tests.benchmarks.workloads import (
    Counting,
    Emitting,
    Judging,
    Step,
    Tracing,
    Work,
    attributes,
    decision,
    prepare,
)
from tests.conftest import needs_inline
from tests.servers.programs import required_program

SETUPS = [
    pytest.param(setup, marks=needs_inline) if setup.startswith("Inline") else setup
    for setup in scenes.SETUPS | scenes.BUDGETS | scenes.HOOKS
]

ADDED = {
    scenes.IDLE_HOOKS: 2,
    "LangChain, model": 2,
    "LangChain, tool": 1,
    "LangChain, 2": 3,
    "LangChain, 8": 9,
    "drop-in, model": 2,
    "drop-in, tool": 1,
    "drop-in, 2": 3,
    "drop-in, 8": 9,
    "QuotaMiddleware, tool": 1,
    "QuotaMiddleware, model": 2,
    "QuotaMiddleware, 2": 2,
    "QuotaMiddleware, 8": 2,
    "Inline, 1": 0,
    "Inline, 2": 0,
    "Inline, 8": 0,
    scenes.TWO_HOOKS: 2,
    scenes.WRAP_HOOK: 0,
    "QuotaMiddleware, 8 and tokens": 2,
    "QuotaMiddleware, 8, tokens, cost": 2,
    "Inline, 8 and tokens": 0,
}
"""The nodes that limits add to a step."""

TINY = replace(
    QUICK,
    rounds=1,
    steps=(1, 2),
    decisions=(1, 2),
    concurrent=(2, 1),
    tracked=(2, 3),
    scrapes=1,
    worker_threads=2,
    remembered=2,
)


async def stored(setup: str) -> Stored:
    async with memory() as (saver, look):
        return await stored_per_step(setup, saver, look)


@pytest.mark.parametrize("setup", SETUPS)
@pytest.mark.parametrize("has_memory", [False, True])
async def test_nothing_is_over_its_limit(setup: str, *, has_memory: bool) -> None:
    """In every set-up all calls run, and ours allow each of them; without warnings."""
    saver = InMemorySaver() if has_memory else None
    with captured_decisions() as found:
        state = await scenes.run(scenes.agent(setup, saver), 7, "thread")
    answers = [message for message in state["messages"] if message.type == "tool"]
    assert [answer.name for answer in answers] == [*scenes.TOOLS, scenes.TOOLS[0]]
    assert {answer.content for answer in answers} == {"done"}
    assert {decision.outcome.value for decision in found} <= {"allowed"}


@pytest.mark.parametrize("setup", ["LangChain", "drop-in", "QuotaMiddleware", "Inline"])
def test_the_same_limits(setup: str) -> None:
    """Eight limits are eight, on the same calls, whoever holds them."""
    made = scenes.middlewares(f"{setup}, 8", has_threads=True)
    if len(made) == 1:
        limits = list(getattr(made[0], "_limits", ()))
        tools = [next(iter(each.tools), None) for each in limits if each.kind == "tool"]
    else:
        limits = made
        tools = [each.tool_name for each in made if hasattr(each, "tool_name")]
    assert len(limits) == 8
    assert tools == [None, *scenes.TOOLS]
    assert {(each.thread_limit, each.run_limit) for each in limits} == {
        (scenes.UNREACHED, scenes.UNREACHED)
    }


@pytest.mark.parametrize("setup", SETUPS)
async def test_supersteps_of_a_step(setup: str) -> None:
    """A step takes one superstep and one checkpoint for each node; Inline adds none.

    The hooks alone add as many as the middleware that they are the floor of.
    """
    found = await stored(setup)
    expected = 2 + ADDED.get(setup.removeprefix("hooks of "), 0)
    assert (found.supersteps, found.checkpoints) == (expected, expected)


@pytest.mark.parametrize("has_memory", [False, True])
async def test_budgets_are_charged(*, has_memory: bool) -> None:
    """What the model reports of each call is charged to both budgets."""
    saver = InMemorySaver() if has_memory else None
    agent = scenes.agent("QuotaMiddleware, 8, tokens, cost", saver, reports=True)
    with captured_decisions() as found:
        state = await scenes.run(agent, 3, "thread")
    answers = [message for message in state["messages"] if message.type == "ai"]
    assert [answer.usage_metadata for answer in answers] == [scenes.REPORTED] * 4
    models = [each for each in found if each.call.kind == "model"]
    used = {each.limit: each.run_before for each in models[-1].limits}
    assert (used["tokens"], used["cost"]) == (330, 3 * 350)


@needs_inline
async def test_inline_adds_one_superstep_to_a_run() -> None:
    """Beside its steps a run of Inline has one superstep more, where it begins."""
    async with memory() as (saver, look):
        none = await stored_of(scenes.NONE, 1, saver, look)
        inline = await stored_of("Inline, 8", 1, saver, look)
    assert (inline - none).supersteps == 1
    assert (inline - none).checkpoints == 1


async def test_what_is_stored_is_counted() -> None:
    """Limits write rows and bytes of their own."""
    none, ours = await stored(scenes.NONE), await stored("QuotaMiddleware, 8")
    assert ours.rows > none.rows > none.checkpoints
    assert ours.size > none.size > 0


async def test_another_run_is_an_error() -> None:
    """A run that does not make all of its steps is not measured."""
    limiter = QuotaMiddleware([ToolCallLimit(run_limit=1, exit_behavior="end")])
    agent = create_agent(scenes.InstantModel(), tools=list(scenes.tools()), middleware=[limiter])
    with pytest.raises(RuntimeError, match="not a run of 3 steps"):
        await scenes.run(agent, 3, "thread")


def test_the_decision_that_is_told() -> None:
    """The decision whose telemetry is measured is charged to each limit, and crosses none."""
    found = decision(8)
    assert found.outcome == "allowed"
    assert [status.charged for status in found.limits] == [True] * 8
    crossed = {each.crossed(scope, 0.8) for each in found.limits for scope in each.scopes}
    assert crossed == {None}


def test_the_bare_span_has_as_many_attributes() -> None:
    """The span that a decision's is compared with has the same attributes."""
    assert attributes()["langchain_quota.limit"] == "limit-0"
    assert attributes()["gen_ai.conversation.id"] == "thread-1"


@pytest.mark.parametrize(
    "work",
    [Counting(), Tracing(), Judging(1), Emitting(1, "sampled"), Step("none", has_memory=True)],
    ids=lambda work: type(work).__name__,
)
def test_works_are_told_apart(work: Work) -> None:
    """Each work can be repeated, and has a key of its own among all others."""
    prepare(work)(2)
    others = [Counting(), Tracing(), Judging(2), Emitting(1, "off"), Step("none", has_memory=False)]
    assert work not in [each for each in others if type(each) is not type(work)]


def test_instructions_are_read(tmp_path: Path) -> None:
    """The count is what callgrind writes as the total; without one there is no count."""
    path = tmp_path / "7.callgrind"
    path.write_text("events: Ir\nsummary: 12\n\n\ntotals: 1234\n")
    assert costs._counted(path) == 1234
    path.write_text("events: Ir\n")
    with pytest.raises(RuntimeError, match="no total"):
        costs._counted(path)


@pytest.mark.parametrize("threads", [600, 1_200])
def test_scrapes_export_the_same(threads: int) -> None:
    """However many threads are tracked, as many are exported."""
    registry = scrape.tracked(threads)
    exported = hidden = 0.0
    for family in registry.collect():
        for sample in family.samples:
            exported += (
                sample.name == "langchain_quota_thread_last_decision_timestamp_seconds"
                and sample.labels["limit"] == "tool:search"
            )
            if sample.name == "langchain_quota_threads_hidden":
                hidden += sample.value
    assert (exported, hidden) == (500, threads - 500)


@needs_inline
def test_every_set_up_has_a_row() -> None:
    """The table of steps has all set-ups, and each ratio is measured."""
    found = per_step.measure(TINY)
    assert [row[0] for row in found.tables[0].rows] == list(scenes.SETUPS)
    assert None not in [ratio.measured for ratio in found.ratios]


@needs_inline
@pytest.mark.parametrize(
    "part", [budgets, concurrency, decisions, footprint, importing, scrape, workers]
)
def test_parts_can_be_tried(part: Any) -> None:
    """Each part of the benchmark ends with a table, in small, too."""
    found = part.measure(TINY)
    assert all(len(row) == len(table.columns) for table in found.tables for row in table.rows)
    assert None not in [ratio.measured for ratio in found.ratios]


def test_targets() -> None:
    """A ratio is met up to its target; what was not measured is not met."""
    table = targets([Ratio("a", 1.5, 1.5), Ratio("b", 1.5, 1.51), Ratio("c", 0, None)])
    assert [row[-1] for row in table.rows] == ["met", "**not met**", "not measured"]


def test_why_a_target_is_missed() -> None:
    """A missed target has its floor beside it, and the reason below, once; others have none."""
    ratios = [
        Ratio("a", 1, 3, floor=2, why="Two nodes."),
        Ratio("b", 1, 3, floor=2, why="Two nodes."),
        Ratio("c", 1, 1, why="Not needed."),
    ]
    table = targets(ratios)
    assert [row[3] for row in table.rows] == ["2", "2", "-"]
    assert table.note.endswith("\n\nTwo nodes.")
    assert table.note.count("Two nodes.") == 1


def test_the_page_begins_with_what_users_ask() -> None:
    """The overview comes first, whichever part has measured it, and the targets come last."""
    results = [
        Result([Table("Decisions", ["a"], [["1"]])], [Ratio("r", 1, 1)]),
        Result([Table("Runs", ["a"], [["2"]])], overview=Table("In ten lines", ["a"], [["3"]])),
    ]
    shown = page(results, "## How it is measured\n")
    headings = [line for line in shown.splitlines() if line.startswith("#")]
    assert headings == [
        *("# Benchmarks", "## In ten lines", "## How it is measured"),
        *("## Decisions", "## Runs", "## Targets"),
    ]


@needs_inline
async def test_ten_lines() -> None:
    """They are of a step and of a run, with each checkpointer, and of the bytes; no cell is empty.

    The numbers are those that the tables below have.
    """
    times = {where: {each: 10.0 * index for index, each in enumerate(OVERVIEW)} for where in WHERE}
    found = {setup: await stored(setup) for setup in OVERVIEW}
    overview = runs._overview(times, {runs.SQLITE: found, runs.POSTGRES: found})
    assert len(overview.rows) == 10
    assert list(overview.rows[0][1:]) == ["0.0", "1.0", "2.0", "3.0", "4.0", "5.0"]
    assert list(overview.rows[4][1:]) == ["0.0", "10.0", "20.0", "30.0", "40.0", "50.0"]
    assert list(overview.rows[8][1:]) == [f"{each.size:,}" for each in found.values()]


async def test_nodes_that_do_nothing_are_stored() -> None:
    """Two hooks that do nothing cost checkpoints; those that write the same keys cost more."""
    none, idle, writing, ours = [
        await stored(each)
        for each in (scenes.NONE, scenes.IDLE_HOOKS, scenes.TWO_HOOKS, "QuotaMiddleware, 2")
    ]
    assert none.size < idle.size < writing.size < ours.size
    assert none.checkpoints + 2 == idle.checkpoints == writing.checkpoints == ours.checkpoints


def test_tables_are_markdown() -> None:
    """A table has a heading, a rule below its head, and a note."""
    shown = str(Table("Costs", ("what", "µs"), [("a", "1.0")], "Few."))
    assert shown == "## Costs\n\n| what | µs  |\n| ---- | --- |\n| a    | 1.0 |\n\nFew.\n"


def test_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a server's program is missing, the benchmark goes on without it."""
    monkeypatch.delenv("CI", raising=False)
    with pytest.raises(LookupError, match="no-such-program not found"), required():
        required_program("no-such-program", "a-package")
