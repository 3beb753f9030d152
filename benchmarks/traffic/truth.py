"""What really happened: each process writes its decisions down, and tests ask about all of them."""

import json
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, Self

from langchain_core.messages import AIMessage

from langchain_quota.core.decision import Decision, LimitStatus
from langchain_quota.limits.call import RUN, STORE, THREAD
from langchain_quota.limits.options import NANODOLLARS, TOTAL_TOKENS
from langchain_quota.middleware.state import ThreadUsage
from langchain_quota.runtime.units import Level, Unit, level
from langchain_quota.telemetry.labels import NONE

Row = Mapping[str, Any]

COUNTERS: Mapping[Unit, str] = {"tokens": TOTAL_TOKENS, "nanodollars": NANODOLLARS}
"""What counts the amounts that budgets of the traffic have."""


class Journal:
    """Where a process writes what happens in it, a line for each event; it survives a kill.

    Args:
        file: The file; no other process writes to it.
        fields: What all of its lines say.
    """

    def __init__(self, file: Path, **fields: object) -> None:
        self._file = file.open("a", encoding="utf-8")
        self._fields = fields

    def write(self, event: str, **fields: object) -> None:
        """Write a line, with the time."""
        line = {"event": event, "at": time.time(), **self._fields, **fields}
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def decided(self, decision: Decision, run: object) -> None:
        """Write a decision of a run."""
        call = decision.call
        self.write(
            "decision",
            run=run,
            agent=call.agent,
            kind=call.kind,
            tool=call.tool or NONE,
            thread=call.thread_id,
            decision=decision.outcome,
            limits=[_limit(status, call.thread_id) for status in decision.limits],
        )

    def answered(self, agent: str, message: AIMessage, run: object) -> None:
        """Write an answer of a model, and what it reports."""
        model, used = message.response_metadata["model_name"], message.usage_metadata
        self.write("answer", run=run, agent=agent, model=model, used=used)

    def spent(self, agent: str, thread: str, used: ThreadUsage, run: object) -> None:
        """Write what a run and its thread have spent by the thread's state."""
        of_run, of_thread = (
            {unit: amounts.get(counter, 0) for unit, counter in COUNTERS.items()}
            for amounts in (used.run_spent, used.spent)
        )
        self.write("spent", run=run, agent=agent, thread=thread, **of_run, all=of_thread)


class SubjectKey(NamedTuple):
    """Whose use of which limit; the scope of a thread's own quota is `thread`, too."""

    agent: str
    limit: str
    scope: str
    subject: str


@dataclass(frozen=True)
class Use:
    """What a subject has used of a limit.

    Attributes:
        used: The count, in the limit's unit.
        cap: The limit, in that unit.
        near: The share from which the limit is near.
        at: When this was known.
        resets: When the window of a quota ends, if it has one.
        unit: What is counted.
    """

    used: int
    cap: int
    near: float
    at: float
    resets: float | None
    unit: Unit = "calls"

    @property
    def level(self) -> Level:
        """How much of the limit is used."""
        return level(self.used, self.cap, self.near)


@dataclass(frozen=True)
class Truth:
    """The events of all processes, in order of time.

    A row of an event has the fields that `Journal` writes, and a row of a refusal those of its
    decision with `limit`, `scope` and `enforced`. Fields are named as labels are where metrics have
    them (`agent`, `kind`, `tool`, `decision`, `limit`, `scope`); others are `at`, `thread`, `run`,
    `replica` (a number from 0) and `life` (how many processes the replica has had, from 1).
    """

    events: tuple[Row, ...] = field(repr=False)

    @classmethod
    def read(cls, directory: Path) -> Self:
        """Read what the processes of a directory have written so far."""
        lines: list[Row] = []
        for file in sorted(directory.glob("*.jsonl")):
            # What a process wrote when it was killed may have no end.
            whole = file.read_text(encoding="utf-8").rpartition("\n")[0]
            lines += [json.loads(line) for line in whole.splitlines()]
        return cls(tuple(sorted(lines, key=lambda line: line["at"])))

    @property
    def decisions(self) -> list[Row]:
        """The rows of the decisions."""
        return [event for event in self.events if event["event"] == "decision"]

    def calls(self, *fields: str) -> Counter[tuple[Any, ...]]:
        """How many calls were checked, by some fields."""
        return _counted(self.decisions, fields)

    def refused(self, *, enforced: bool = True) -> list[Row]:
        """A row for each limit that refused a call; those in a dry run refuse nothing for real."""
        return [
            {**decision, "limit": limit["limit"], "scope": limit["refused"], "exit": limit["exit"]}
            for decision in self.decisions
            for limit in decision["limits"]
            if limit["refused"] is not None and limit["enforced"] is enforced
        ]

    def refusals(self, *fields: str, enforced: bool = True) -> Counter[tuple[Any, ...]]:
        """How many calls each limit refused, by some fields."""
        return _counted(self.refused(enforced=enforced), fields)

    def refusal_times(self, *fields: str) -> dict[tuple[Any, ...], tuple[float, float]]:
        """When the first and the last refusal were, by some fields."""
        times: dict[tuple[Any, ...], tuple[float, float]] = {}
        for row in self.refused():
            key = tuple(row[name] for name in fields)
            times[key] = (times.get(key, (row["at"], 0))[0], row["at"])
        return times

    def uses(self, *, near: float = 0.8, now: float | None = None) -> dict[SubjectKey, Use]:
        """What each subject has used of each limit that is enforced: the newest that is known.

        Of limits of tokens and money only threads are known, when a run is over.

        Args:
            near: The share from which a limit without one of its own is near.
            now: The time; windows that ended before it count nothing any more.
        """
        now = time.time() if now is None else now
        found: dict[SubjectKey, Use] = {}
        for event in self.events:
            if event["event"] == "decision":
                for key, use in _uses(event, near):
                    found[key] = _newer(key, found.get(key), use)
            elif event["event"] in ("reset", "spent"):
                amounts = event.get("all", {})
                for key, use in found.items():
                    if key[0::2] == (event["agent"], THREAD) and key.subject == event["thread"]:
                        if event["event"] == "reset":
                            found[key] = replace(use, used=0, at=event["at"], resets=None)
                        elif use.unit in amounts:
                            found[key] = replace(use, used=amounts[use.unit], at=event["at"])
        ended = [key for key, use in found.items() if use.resets is not None and use.resets <= now]
        return found | {key: replace(found[key], used=0, resets=None) for key in ended}

    def threads(self, state: Level) -> set[tuple[str, str]]:
        """The threads, with their agents, of which a limit is in this state, each once.

        A thread that is exhausted by one limit and near another is in both.
        """
        return {
            (key.agent, key.subject)
            for key, use in self.uses().items()
            if key.scope == THREAD and use.level is state
        }

    def runs(self) -> Counter[str]:
        """How many runs have begun, by agent."""
        return Counter(event["agent"] for event in self.events if event["event"] == "run")

    def runs_ended(self) -> Counter[tuple[str, str]]:
        """How many runs a limit has ended, by agent and limit."""
        ended = {
            (row["replica"], row["life"], row["run"], row["agent"], row["limit"])
            for row in self.refused()
            if row["exit"] == "end"
        }
        return Counter((agent, limit) for *_, agent, limit in ended)

    def spent(self, unit: Unit, *fields: str, since: float = 0) -> Counter[tuple[Any, ...]]:
        """How much runs have spent, by some fields, as the threads' states say.

        Args:
            unit: What is counted.
            fields: `agent`, `thread` or `run`.
            since: Only runs that have ended after this time.
        """
        amounts: Counter[tuple[Any, ...]] = Counter()
        for event in self.events:
            if event["event"] == "spent" and event["at"] > since:
                amounts[tuple(event[name] for name in fields)] += event[unit]
        return +amounts

    def answers(self, *agents: str, since: float = 0) -> list[Row]:
        """What the models of agents have answered after a time; `used` is what they report."""
        return [
            event
            for event in self.events
            if event["event"] == "answer" and event["agent"] in agents and event["at"] > since
        ]

    def unscraped(self) -> list[Row]:
        """The decisions of killed processes that are not known to have been scraped before."""
        ends = {
            (event["replica"], event["life"]): event["scraped"] or 0.0
            for event in self.events
            if event["event"] == "killed"
        }
        return [
            row
            for row in self.decisions
            if row["at"] > ends.get((row["replica"], row["life"]), row["at"])
        ]


def _limit(status: LimitStatus, thread: object) -> Row:
    uses = [
        {
            "scope": THREAD if quota.per == THREAD else quota.scope,
            "subject": thread if quota.per == THREAD else quota.subject,
            "used": quota.used,
            "cap": quota.limit,
            "resets": quota.resets_at and quota.resets_at.timestamp(),
        }
        for quota in status.quotas
    ]
    uses += [
        {
            "scope": count.scope,
            "subject": thread if count.scope == THREAD else None,
            "used": count.before if status.deferred and count.scope == THREAD else count.used,
            "cap": count.limit,
            "resets": None,
        }
        for count in status.counts
        if count.limit is not None and not count.per
    ]
    return {
        "limit": status.limit,
        "unit": status.unit,
        "refused": status.refusal_scope,
        "charged": status.charged,
        "enforced": status.enforced,
        "near": status.near,
        "exit": status.exit_behavior,
        "uses": uses,
    }


def _uses(decision: Row, near: float) -> Iterable[tuple[SubjectKey, Use]]:
    """What a decision tells about subjects; without an answer of the store that is nothing."""
    for limit in decision["limits"]:
        if limit["enforced"] and limit["refused"] != STORE:
            unit = limit.get("unit", "calls")
            for use in limit["uses"]:
                # What a call has used is charged after the decision.
                if use["scope"] == THREAD or (unit == "calls" and use["scope"] != RUN):
                    key = (decision["agent"], limit["limit"], use["scope"], use["subject"])
                    share = near if limit["near"] is None else limit["near"]
                    yield (
                        SubjectKey(*key),
                        Use(use["used"], use["cap"], share, decision["at"], use["resets"], unit),
                    )


def _newer(key: SubjectKey, old: Use | None, new: Use) -> Use:
    """What is known after a decision.

    Calls of a thread follow each other. Those of users and all others overlap, and the one that the
    store counted later may be written down first: in a window, their count only grows.
    """
    if old is None or key.scope == THREAD or old.resets != new.resets:
        return new
    return max(old, new, key=lambda use: use.used)


def _counted(rows: Iterable[Row], fields: Iterable[str]) -> Counter[tuple[Any, ...]]:
    return Counter(tuple(row[name] for name in fields) for row in rows)
