"""What the dashboards draw of a service with two replicas is what happened in it.

One replica is restarted and threads are reset meanwhile. Three Prometheus servers watch it, each at
an interval of its own. Their answers are compared with the decisions that the replicas wrote down.
"""

import math
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest

from langchain_quota import Level, RedisStore
from langchain_quota.decision import THREAD, Unit
from langchain_quota.money import MICRODOLLARS
from langchain_quota.stores.keys import CountKey
from tests.grafana import ALL, Board, Values, boards, interpolate
from tests.servers.alertmanager import alerting_prometheus
from tests.servers.prometheus import Prometheus, eventually
from tests.traffic.agents import MAIN_TOOLS, Question
from tests.traffic.running import running_traffic
from tests.traffic.truth import COUNTERS, SubjectKey, Truth, Use

SPEED = 20
SECONDS = 400
SCRAPES = (5, 15, 60)
"""Seconds between scrapes, in the time of the traffic."""
STEPS = (1, 4)
"""How long a bar is, in real seconds."""
JOB, REPLICAS = "agents", 2
OVERVIEW, BUDGETS = "langchain-quota-overview", "langchain-quota-budgets"
PANELS: Mapping[Unit, tuple[int, int]] = {"microdollars": (1, 5), "tokens": (2, 12)}
"""Of each unit the panel with the total, and the first one of its row."""
BASE_UNIT: Mapping[Unit, int] = {"microdollars": MICRODOLLARS, "tokens": 1}
SPENDERS = ("support", "writer")

Key = tuple[str, ...]


@dataclass(frozen=True)
class Service:
    """What happened, and who has seen it.

    Attributes:
        truth: What happened.
        servers: The servers, by the interval at which they scrape.
        began: When it began.
        warm: When each process had answered for each agent: from then on rates are right.
        ended: When all had seen its end.
        forgotten: Threads that only a process which is gone knows.
        stored: What the store has counted in the end, in each window that it has, by counter, by
            what a quota is per, and by whose it is.
    """

    truth: Truth
    servers: Mapping[int, Prometheus]
    began: float
    warm: float
    ended: float
    forgotten: set[Key]
    stored: Mapping[Key, list[int]]

    @property
    def uses(self) -> Mapping[SubjectKey, Use]:
        """What all subjects had used at the end."""
        return self.truth.uses(now=self.ended)

    def threads(self, state: Level) -> set[Key]:
        """The threads of which a limit was in this state at the end, with their agents."""
        return {
            (key.agent, key.subject)
            for key, use in self.uses.items()
            if key.scope == THREAD and use.level is state
        }

    def guessed(self, scrape: int) -> float:
        """By what share an amount may be wrong: what is spent between scrapes, at both edges.

        There Prometheus guesses. In a longer time the share is smaller.
        """
        return 0.02 + 2.2 * scrape / SPEED / (self.ended - self.warm)

    def ask(
        self,
        where: str,
        scrape: int,
        *,
        step: int = 1,
        since: float | None = None,
        uid: str = OVERVIEW,
    ) -> list[Any]:
        """The series of a query of a dashboard.

        Args:
            where: The panel's id and the query's letter.
            scrape: The interval of the server that is asked.
            step: From one point to the next.
            since: From when on to ask for one point, with rates over all that time.
            uid: The dashboard.
        """
        [board] = [each for each in boards() if each.uid == uid]
        [query] = [each for each in board.queries if each.where == f"{board.uid} {where}"]
        seconds = math.ceil(self.ended - (self.began if since is None else since))
        values: Values = {
            **dict.fromkeys(("job", "instance", "agent", "limit"), ALL),
            "__range": f"{seconds}s",
            "__range_s": str(seconds),
            "__rate_interval": f"{4000 * scrape // SPEED}ms",
            "__interval_ms": str(1000 * step),
        }
        server = self.servers[scrape]
        chosen = {**values, **self._hidden(board, server, values)}
        if since is not None:
            # In milliseconds: no sample from before is in it.
            chosen["__rate_interval"] = f"{math.floor(1000 * (self.ended - since))}ms"
        expr = interpolate(query.expr, chosen)
        if since is not None or not query.over_time:
            return server.result("query", query=expr, time=self.ended)
        start = self.began // step * step
        end = (self.ended // step + 1) * step
        return server.result("query_range", query=expr, start=start, end=end, step=step)

    def _hidden(
        self, board: Board, server: Prometheus, values: Values
    ) -> dict[str, str | list[str]]:
        """The variables that a query finds."""
        return {
            each.name: [
                found["metric"][each.label]
                for found in server.result(
                    "query", query=interpolate(each.expr, values), time=self.ended
                )
            ]
            for each in board.variables
            if each.expr
        }


def by(labels: Key, series: list[Any]) -> dict[Key, float]:
    """The values of an instant query, by labels."""
    return {
        tuple(each["metric"].get(label, "") for label in labels): float(each["value"][1])
        for each in series
    }


def has_scraped(server: Prometheus, query: str) -> bool:
    """Whether a query counts as many targets as there are replicas."""
    return server.value(query) == REPLICAS


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """A busy service, half of whose processes are restarted in the middle."""
    directory = tmp_path_factory.mktemp("figures")
    with (
        running_traffic(
            "busy", seconds=SECONDS, speed=SPEED, threads=21, directory=directory / "traffic"
        ) as traffic,
        ExitStack() as running,
    ):
        servers = {}
        for interval in SCRAPES:
            (directory / str(interval)).mkdir()
            servers[interval] = running.enter_context(
                alerting_prometheus(
                    directory / str(interval),
                    {JOB: traffic.targets},
                    rules="groups: []",
                    alertmanager="127.0.0.1:1",
                    interval=f"{1000 * interval // SPEED}ms",
                )
            )

        def wait_for_scrapes() -> None:
            moment = time.time()
            scraped = f'count(timestamp(up{{job="{JOB}"}}) * up > {moment})'
            for server in servers.values():
                eventually(partial(has_scraped, server, scraped))

        traffic.scrape = wait_for_scrapes
        wait_for_scrapes()
        began = time.time()
        # A rate misses what a counter had when it was scraped for the first time, and guesses what
        # was before: so it knows nothing of the first answers of a process.
        for agent, tool in MAIN_TOOLS.items():
            for _ in range(REPLICAS):
                traffic.ask(Question(0, agent, f"{agent} first", "user-00", "tenant-0", tool))
        warm = time.time()
        wait_for_scrapes()
        traffic.begin()
        traffic.wait()
        wait_for_scrapes()
        ended = time.time()
        truth = traffic.truth()
        last: dict[Key, tuple[int, int]] = {}
        for row in truth.decisions:
            last[row["agent"], row["thread"]] = (row["replica"], row["life"])
        lives: dict[int, int] = dict(sorted(last.values()))
        forgotten = {who for who, (replica, life) in last.items() if life < lives[replica]}
        store = RedisStore(traffic.redis.url)
        stored: dict[Key, list[int]] = {}
        for counter in COUNTERS.values():
            for use in store.usages(f"*{counter}*"):
                key = CountKey.parse(use.key)
                stored.setdefault((counter, key.dimension, key.subject), []).append(use.used)
        store.close()
        yield Service(truth, servers, began, warm, ended, forgotten, stored)


def check_bars_add_up_to_the_refusals(service: Service, scrape: int, step: int) -> None:
    """All refusals are drawn, once each, whatever the zoom and the scrape interval."""
    drawn: Counter[Key] = Counter()
    for each in service.ask("9 A", scrape, step=step):
        if each["metric"]["decision"] == "blocked":
            key = each["metric"]["limit"], each["metric"]["scope"]
            drawn[key] += sum(round(float(value)) for _, value in each["values"])
    assert service.truth.refusals("limit", "scope")
    assert +drawn == service.truth.refusals("limit", "scope")


def check_the_table_has_what_threads_have_used(service: Service, scrape: int) -> None:
    """Of a thread that both replicas served, or that was reset, the newest count is shown."""
    shown = by(("agent", "limit", "thread_id"), service.ask("6 C", scrape))
    true = {
        (key.agent, key.limit, key.subject): use.used
        for key, use in service.uses.items()
        if (key.scope, use.unit) == (THREAD, "calls")
        and (key.agent, key.subject) not in service.forgotten
    }
    assert len(true) > len(service.forgotten)
    assert {key: shown[key] for key in true} == true


def check_threads_are_counted_once(service: Service, scrape: int) -> None:
    """Threads that are near a limit or have used one up are counted, not pairs and not replicas."""
    shown = by(("state",), service.ask("27 A", scrape))
    exhausted = service.threads(Level.EXHAUSTED)
    near = service.threads(Level.NEAR) - exhausted
    assert exhausted
    for state, threads in (("exhausted", exhausted), ("near", near)):
        unsure = len(service.forgotten & threads)
        assert len(threads) - unsure <= shown.get((state,), 0) <= len(threads) + unsure


def check_totals(
    shown: Mapping[Key, float], true: Mapping[Any, float], *, rel: float = 0.02, least: float = 0.5
) -> None:
    """Totals of counters are the true ones, by the labels that stand before replica and life.

    Of a process whose place another one has taken a part may be missing: what it had counted when
    it was first scraped, or all, if the other one was not below it when that was first scraped.

    Args:
        shown: What is drawn.
        true: What each process counted.
        rel: By what share of it a total may be wrong.
        least: By how much it may be wrong, however little it is.
    """
    lives: dict[Key, dict[int, dict[int, float]]] = {}
    for (*key, replica, life), amount in true.items():
        lives.setdefault(tuple(key), {}).setdefault(replica, {})[life] = amount
    assert shown.keys() == lives.keys()
    for key, replicas in lives.items():
        amounts = [sum(of_lives.values()) for of_lives in replicas.values()]
        hidden = sum(of_lives.get(1, 0) for of_lives in replicas.values() if 2 in of_lives)
        most = sum(amounts)
        assert (most - hidden) * (1 - rel) - least <= shown[key] <= most * (1 + rel) + least, key


def check_who_is_refused_now(service: Service, scrape: int) -> None:
    """Each thread that was refused is listed, with its limit, how often and when last."""
    labels = ("agent", "limit", "thread_id")
    times = service.truth.refusal_times("agent", "limit", "thread")
    shown = by(labels, service.ask("23 B", scrape))
    assert times
    assert {key: at / 1000 for key, at in shown.items()} == pytest.approx(
        {key: last for key, (_, last) in times.items()}, abs=1
    )
    counted = by(labels, service.ask("23 A", scrape))
    process = "replica", "life"
    check_totals(counted, service.truth.refusals("agent", "limit", "thread", *process))


def since_when(truth: Truth) -> dict[Key, float]:
    """Since when the process that judged a thread last refuses it, by agent, limit and thread."""
    judges: dict[Key, tuple[int, int]] = {}
    began: dict[tuple[Key, tuple[int, int]], float] = {}
    gone = set()
    for event in truth.events:
        process = event.get("replica", -1), event.get("life", -1)
        if event["event"] == "killed":
            gone.add(process)
        elif event["event"] == "reset":
            for key in judges:
                if (key[0], key[2]) == (event["agent"], event["thread"]):
                    judges[key] = process
                    began.pop((key, process), None)
        elif event["event"] == "decision":
            for limit in event["limits"]:
                key = event["agent"], limit["limit"], event["thread"]
                judges[key] = process
                if limit["refused"] and limit["enforced"]:
                    began.setdefault((key, process), event["at"])
    return {
        key: began[key, process]
        for key, process in judges.items()
        if (key, process) in began and process not in gone
    }


def check_since_when_threads_are_refused(service: Service, scrape: int) -> None:
    """The process that judged a thread last says since when it refuses it; a reset ends that."""
    shown = by(("agent", "limit", "thread_id"), service.ask("23 C", scrape))
    true = since_when(service.truth)
    assert true
    assert {key: at / 1000 for key, at in shown.items()} == pytest.approx(true, abs=1)


def check_shared_quotas(service: Service, scrape: int) -> None:
    """What is used of the quotas of all, of an agent and of tenants is what the store counted."""
    of_all = by(("agent", "limit", "scope"), service.ask("25 C", scrape))
    of_tenants = by(("agent", "limit", "scope", "subject"), service.ask("26 C", scrape))
    shown = {(*key, ""): used for key, used in of_all.items()} | of_tenants
    true = {
        (key.agent, key.limit, key.scope, key.subject if key.scope == "tenant" else ""): use.used
        for key, use in service.uses.items()
        if key.scope in ("global", "agent", "tenant")
    }
    assert {scope for _, _, scope, _ in true} == {"global", "agent", "tenant"}
    assert shown.keys() <= true.keys()
    # A window that has just ended is shown for a moment, or is not any more.
    still = {key: used for key, used in true.items() if used}
    assert {key: shown[key] for key in still} == still


def check_runs_that_a_limit_ended(service: Service, scrape: int) -> None:
    """The limits that ended runs are shown, and no other: a budget that is used up."""
    shown = by(("agent", "limit"), service.ask("28 A", scrape, since=service.warm))
    assert {key for key, share in shown.items() if share} == set(service.truth.runs_ended())
    assert ("writer", "tokens") in shown


def after_refusal(truth: Truth, since: float) -> Counter[Key]:
    """The calls of runs in which a call of an earlier step was refused, by kind and decision."""
    runs: dict[Key, list[tuple[str, bool]]] = {}
    found: Counter[Key] = Counter()
    for row in truth.decisions:
        if row["at"] > since:
            # Calls of the model and of tools take turns: those of one kind are one step.
            steps = runs.setdefault((row["replica"], row["life"], row["run"]), [])
            if not steps or steps[-1][0] != row["kind"]:
                steps.append((row["kind"], False))
            found[row["kind"], row["decision"]] += any(refused for _, refused in steps[:-1])
            steps[-1] = row["kind"], steps[-1][1] or row["decision"] == "blocked"
    return found


def check_calls_after_a_refusal(service: Service, scrape: int, letter: str, of: str) -> None:
    """The share of refusals after a refusal, and that of calls of the model, are the true ones."""
    judged: Counter[Key] = Counter(
        (row["kind"], row["decision"])
        for row in service.truth.decisions
        if row["at"] > service.warm
    )
    after, calls = (
        sum(count for key, count in counted.items() if of in key)
        for counted in (after_refusal(service.truth, service.warm), judged)
    )
    [shown] = service.ask(f"29 {letter}", scrape, since=service.warm)
    # Of the busy model one or none asks again.
    assert after or of == "blocked"
    assert float(shown["value"][1]) == pytest.approx(after / calls, rel=0.1)


def check_what_is_spent(service: Service, scrape: int, unit: Unit) -> None:
    """The total counts each model run once; per hour it is what each agent spends on each model."""
    total, first = PANELS[unit]
    true = {key: amount / BASE_UNIT[unit] for key, amount in service.truth.spent(unit).items()}
    [shown] = service.ask(f"{total} A", scrape, uid=BUDGETS)
    assert float(shown["value"][1]) == pytest.approx(true[()], rel=service.guessed(scrape))

    hourly = service.ask(f"{first + 1} A", scrape, since=service.warm, uid=BUDGETS)
    by_agent: dict[Key, float] = {}
    for (agent, model), amount in by(("agent", "model"), hourly).items():
        assert model in {each["model"] for each in service.truth.answers(agent)}
        spent_here = amount * (service.ended - service.warm) / 3600
        by_agent[agent,] = by_agent.get((agent,), 0) + spent_here
    spent = service.truth.spent(unit, "agent", since=service.warm)
    assert by_agent.keys() == {(agent,) for agent in SPENDERS}
    assert by_agent == pytest.approx(
        {key: amount / BASE_UNIT[unit] for key, amount in spent.items()},
        rel=service.guessed(scrape),
    )


def check_the_dearest_threads(service: Service, scrape: int, unit: Unit) -> None:
    """What each thread has spent is listed once, and what was before its reset is in it."""
    _, first = PANELS[unit]
    shown = by(("agent", "thread_id"), service.ask(f"{first + 3} A", scrape, uid=BUDGETS))
    true = service.truth.spent(unit, "agent", "thread", "replica", "life")
    parts = {key: amount / BASE_UNIT[unit] for key, amount in true.items()}
    check_totals(shown, parts, rel=service.guessed(scrape), least=1 / BASE_UNIT[unit])


def check_what_is_left(service: Service, scrape: int, unit: Unit) -> None:
    """Of threads it is what their states say, and of quotas what the store counted."""
    _, first = PANELS[unit]
    left = service.ask(f"{first + 4} D", scrape, uid=BUDGETS)
    shown = by(("agent", "limit", "thread_id"), left)
    true = {
        (key.agent, key.limit, key.subject): max(0, use.cap - use.used) / BASE_UNIT[unit]
        for key, use in service.uses.items()
        if use.unit == unit and (key.agent, key.subject) not in service.forgotten
    }
    assert true
    assert {key: shown[key] for key in true} == pytest.approx(true)

    used: dict[Key, float] = {}
    labels = "agent", "limit", "scope", "subject"
    for panel in (first + 5, first + 6):
        for key, amount in by(labels, service.ask(f"{panel} C", scrape, uid=BUDGETS)).items():
            used[key] = amount * BASE_UNIT[unit]
    quotas: Mapping[Unit, Mapping[Key, str]] = {
        "microdollars": {
            ("support", "cost", "agent", ""): "support",
            ("writer", "cost", "global", ""): "",
        },
        "tokens": {
            ("support", "tokens", "tenant", f"tenant-{number}"): f"tenant-{number}"
            for number in range(4)
        },
    }
    assert used.keys() <= quotas[unit].keys()
    # A window that has just ended is shown for a moment, or is not any more.
    over = {
        (key.agent, key.limit, key.scope, key.subject if key.scope == "tenant" else "")
        for key, use in service.uses.items()
        if use.unit == unit and not use.used
    }
    assert quotas[unit].keys() - used.keys() <= over
    for key, amount in used.items():
        stored = service.stored[COUNTERS[unit], key[2], quotas[unit][key]]
        assert amount in [pytest.approx(each) for each in stored], key


def check_estimated_runs(service: Service, scrape: int) -> None:
    """The share of answers whose usage no model reported."""
    reported = [each["used"] is not None for each in service.truth.answers(*SPENDERS)]
    assert not all(reported)
    [shown] = service.ask("3 A", scrape, uid=BUDGETS)
    assert float(shown["value"][1]) == pytest.approx(
        1 - sum(reported) / len(reported), rel=service.guessed(scrape)
    )


def test_figures_are_what_happened(service: Service) -> None:
    """At each scrape interval every figure is the truth: each check above says which.

    They are one test, so that the service works once.
    """
    for scrape in SCRAPES:
        for step in STEPS:
            check_bars_add_up_to_the_refusals(service, scrape, step)
        check_the_table_has_what_threads_have_used(service, scrape)
        check_threads_are_counted_once(service, scrape)
        check_who_is_refused_now(service, scrape)
        check_since_when_threads_are_refused(service, scrape)
        check_shared_quotas(service, scrape)
        check_runs_that_a_limit_ended(service, scrape)
        for letter, of in (("A", "blocked"), ("B", "model")):
            check_calls_after_a_refusal(service, scrape, letter, of)
        for unit in PANELS:
            check_what_is_spent(service, scrape, unit)
            check_the_dearest_threads(service, scrape, unit)
            check_what_is_left(service, scrape, unit)
        check_estimated_runs(service, scrape)
