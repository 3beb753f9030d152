"""The simulated service counts the truth, and its metrics agree with it."""

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import Any

import httpx
import pytest

from langchain_quota import Level
from langchain_quota.decision import Unit
from langchain_quota.money import MICRODOLLARS
from tests.forked import Program, as_module, start_python
from tests.servers.programs import required_program
from tests.servers.prometheus import DEADLINE, parse_openmetrics, series_of
from tests.traffic.agents import DRAFTS, MEANT_TO_BE_HIT, NOTES, PRICES, Question
from tests.traffic.running import running_traffic
from tests.traffic.truth import SubjectKey, Truth

CALLS = ("agent", "kind", "tool", "decision")
REFUSALS = ("agent", "limit", "scope")
SPENT: Mapping[str, tuple[Unit, int]] = {
    "langchain_quota_spent_tokens_total": ("tokens", 1),
    "langchain_quota_spent_dollars_total": ("microdollars", MICRODOLLARS),
}
"""The counters of what was spent, and how many of the unit's parts they count as one."""

SERVERS = (
    ("redis-server", "redis-server"),
    ("prometheus", "prometheus"),
    ("prometheus-alertmanager", "prometheus-alertmanager"),
)
"""What the command starts, and the packages that have it."""

Counts = Counter[tuple[str, ...]]


@dataclass
class Counted:
    """What processes say that they have counted, summed over them."""

    calls: Counts = field(default_factory=Counter)
    refusals: Counts = field(default_factory=Counter)
    spent: Counter[tuple[Unit, str, str]] = field(default_factory=Counter)
    estimated: int = 0

    def add(self, target: str) -> None:
        """Add what a process says."""
        accept = {"accept": "application/openmetrics-text; version=1.0.0"}
        text = httpx.get(f"http://{target}/metrics", headers=accept, trust_env=False).text
        for (name, labels), value in series_of(parse_openmetrics(text)).items():
            found = dict(labels)
            if name == "langchain_quota_calls_total":
                self.calls[tuple(found[label] for label in CALLS)] += int(value)
            elif name == "langchain_quota_limit_decisions_total" and (
                found["decision"] == "blocked"
            ):
                self.refusals[tuple(found[label] for label in REFUSALS)] += int(value)
            elif name in SPENT and found["limit"] in ("tokens", "cost"):
                unit, parts = SPENT[name]
                self.spent[unit, found["agent"], found["model"]] += round(value * parts)
            elif name == "langchain_quota_model_runs_total" and found["usage"] == "estimated":
                self.estimated += int(value)

    def check(self, truth: Truth) -> None:
        """Assert that this is what happened."""
        assert self.calls
        assert +self.calls == truth.calls(*CALLS)
        assert +self.refusals == truth.refusals(*REFUSALS)
        for unit, _ in SPENT.values():
            by_agent: Counts = Counter()
            for (what, agent, _), amount in self.spent.items():
                by_agent[agent,] += amount if what == unit else 0
            assert +by_agent == truth.spent(unit, "agent")


@dataclass(frozen=True)
class Seen:
    """A service whose users have asked all, and what its processes say."""

    truth: Truth
    counted: Counted


@pytest.fixture(scope="module")
def busy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seen]:
    """A busy service after five minutes, without a restart."""
    counted = Counted()
    with running_traffic(
        "busy",
        seconds=300,
        speed=200,
        threads=21,
        events=False,
        directory=tmp_path_factory.mktemp("busy"),
    ) as traffic:
        traffic.begin()
        traffic.wait()
        for target in traffic.targets:
            counted.add(target)
        yield Seen(traffic.truth(), counted)


@dataclass(frozen=True)
class Command:
    """The command, and where it writes."""

    program: Program
    output: Path
    errors: Path


@pytest.fixture
def command(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Command]:
    """The command, and where it writes."""
    for name, package in SERVERS:
        required_program(name, package)
    directory = tmp_path_factory.mktemp("command")
    output, errors = directory / "output", directory / "errors"
    with (
        output.open("wb") as written,
        errors.open("wb") as failed,
        start_python(
            as_module("tests.traffic"),
            *("--profile", "loop", "--seconds", "120", "--speed", "100", "--threads", "14"),
            stdout=written.fileno(),
            stderr=failed.fileno(),
        ) as program,
    ):
        yield Command(program, output, errors)
        program.wait(DEADLINE)  # killed, it would leave its servers behind


def test_processes_count_what_happens(busy: Seen) -> None:
    """Calls and refusals of the truth are the sums of what the processes serve."""
    busy.counted.check(busy.truth)
    assert {decision["replica"] for decision in busy.truth.decisions} == {0, 1}


def test_a_limit_that_is_meant_to_be_hit_refuses_a_fifth(busy: Seen) -> None:
    """Of five calls in a batch it refuses one, in each run that makes them."""
    refused = busy.truth.refusals("limit")[MEANT_TO_BE_HIT,]
    assert refused
    assert refused / busy.truth.calls("tool")["browse",] == 0.2


def test_threads_of_a_busy_service_are_near_and_exhausted(busy: Seen) -> None:
    """Some threads are near a limit, and those that have used one up are refused."""
    assert busy.truth.threads(Level.NEAR)
    exhausted = busy.truth.threads(Level.EXHAUSTED)
    assert exhausted
    refused = busy.truth.refusal_times("agent", "thread", "scope")
    assert {key[:2] for key in refused if key[2] == "thread"} == exhausted
    assert all(first <= last for first, last in refused.values())


def test_budgets_are_charged_what_models_report(busy: Seen) -> None:
    """Of each model it is what it reported, priced by hand; what it did not report is estimated."""
    counted: Counter[tuple[Unit, str, str]] = Counter()
    for each in busy.truth.answers("writer"):
        price, used = PRICES[each["model"]], each["used"]
        dollars_per_million = (
            Decimal(str(price.input)) * used["input_tokens"]
            + Decimal(str(price.output)) * used["output_tokens"]
        )
        counted["tokens", "writer", each["model"]] += used["total_tokens"]
        counted["microdollars", "writer", each["model"]] += math.ceil(dollars_per_million)
    assert {model for _, _, model in counted} == {DRAFTS, NOTES}
    spent = busy.counted.spent
    assert counted == Counter({key: spent[key] for key in spent if key[1] == "writer"})
    reported = [each["used"] is not None for each in busy.truth.answers("writer", "support")]
    assert 0 < reported.count(False) < reported.count(True)
    assert busy.counted.estimated == reported.count(False)


def test_a_budget_of_a_thread_is_used_up(busy: Seen) -> None:
    """A writer's thread that has written all its drafts is refused, and its run ended."""
    refused = busy.truth.refusals("limit", "scope", "agent")
    assert refused["tokens", "thread", "writer"]
    assert busy.truth.runs_ended() == {("writer", "tokens"): refused["tokens", "thread", "writer"]}


def test_nothing_is_lost_by_a_graceful_restart(tmp_path: Path) -> None:
    """A replica that was scraped before its kill comes back on its port, and all is counted.

    So are refusals because the store is lost, and resets.
    """
    counted = Counted()
    with running_traffic(
        "broken", seconds=180, speed=45, threads=14, directory=tmp_path
    ) as traffic:
        targets = traffic.targets
        traffic.scrape = lambda: counted.add(targets[0])
        traffic.redis.blackhole()
        traffic.begin()
        traffic.wait()
        # The replicas take turns. On a busy machine the restart may take as long as the traffic.
        for thread in ("after the restart", "and another"):
            traffic.ask(Question(0, "researcher", thread, "user-00", "tenant-0", "report"))
        for target in targets:
            counted.add(target)
        truth = traffic.truth()
    counted.check(truth)
    assert {(each["replica"], each["life"]) for each in truth.decisions} == {(0, 1), (0, 2), (1, 1)}
    assert truth.unscraped() == []
    assert sum(event["event"] == "reset" for event in truth.events) == 3
    assert truth.refusals("agent", "scope").keys() == {("researcher", "store"), ("writer", "store")}
    assert sum(truth.runs_ended().values()) == truth.refusals("scope")["store",]


def test_the_command_compares_and_ends(command: Command) -> None:
    """It runs to its end, and its table shows the same numbers for the truth and Prometheus."""
    assert command.program.wait(DEADLINE) == 0, command.errors.read_text()
    first, *_, last = lines = command.output.read_text().splitlines()
    assert first.startswith("Prometheus: http://127.0.0.1:")
    for begin in ("calls: researcher, blocked", "refusals: researcher, tool:lookup, run"):
        [line] = [each for each in lines if each.startswith(begin)]
        true, told = line.removeprefix(begin).split()
        assert int(true) == int(told) > 0
    assert last.startswith("notifications: {")


def decided(at: float, used: int, **fields: Any) -> dict[str, Any]:
    """A line about a search on a thread."""
    use = {"scope": "thread", "subject": "ann", "used": used, "cap": 5, "resets": None}
    limit: dict[str, Any] = {
        "limit": "search",
        "refused": None,
        "enforced": True,
        "near": None,
        "exit": "end",
    }
    limit |= {"uses": [use], **fields.pop("limit", {})}
    line = {"event": "decision", "at": at, "agent": "support", "thread": "ann", "limits": [limit]}
    return {**line, "replica": 0, "life": 1, **fields}


def truth_of(directory: Path, **files: list[dict[str, Any]]) -> Truth:
    """The truth that files tell."""
    for name, lines in files.items():
        text = "".join(f"{json.dumps(line)}\n" for line in lines)
        (directory / f"{name}.jsonl").write_text(text)
    return Truth.read(directory)


def test_the_newest_of_all_processes_is_true(tmp_path: Path) -> None:
    """What a thread has used is what the last process said, or nothing after a reset."""
    key = SubjectKey("support", "search", "thread", "ann")
    reset = {"event": "reset", "at": 4.0, "agent": "support", "thread": "ann"}
    first, second = [decided(1, 1), decided(3, 5)], [decided(2, 4, replica=1)]
    truth = truth_of(tmp_path, a=first, b=second)
    assert truth.uses()[key].used == 5
    assert truth.threads(Level.EXHAUSTED) == {("support", "ann")}
    truth = truth_of(tmp_path, c=[reset])
    assert (truth.uses()[key].used, truth.uses()[key].at) == (0, 4.0)
    assert truth.threads(Level.EXHAUSTED) == set()


def test_without_an_answer_of_the_store_nothing_is_known(tmp_path: Path) -> None:
    """A refusal because the store is lost tells nothing about what is used."""
    lost = decided(2, 0, limit={"refused": "store"})
    [use] = truth_of(tmp_path, a=[decided(1, 4), lost]).uses().values()
    assert (use.used, use.level) == (4, Level.NEAR)


def test_a_window_that_has_ended_counts_nothing(tmp_path: Path) -> None:
    """From the end of its window on, nothing of a quota is used."""
    use = {"scope": "tenant", "subject": "acme", "used": 3, "cap": 4, "resets": 10.0}
    truth = truth_of(tmp_path, a=[decided(1, 0, limit={"uses": [use]})])
    assert [each.used for each in truth.uses(now=9.9).values()] == [3]
    assert [each.used for each in truth.uses(now=10.0).values()] == [0]


def test_what_a_kill_cut_off_is_told_apart(tmp_path: Path) -> None:
    """Decisions after the last scrape before a kill are named, and half a line is not read."""
    killed = {"event": "killed", "at": 4.0, "replica": 0, "life": 1, "scraped": 2.5}
    lines = [decided(2, 1), decided(3, 2), decided(5, 3, life=2)]
    truth_of(tmp_path, a=lines, driver=[killed])
    with (tmp_path / "a.jsonl").open("a") as file:
        file.write('{"event": "decis')
    assert [row["at"] for row in Truth.read(tmp_path).unscraped()] == [3]
