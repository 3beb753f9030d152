"""What really happened: each process writes its decisions down, and tests ask about all of them."""

import json
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Self

from langchain_quota.core.decision import Decision, LimitStatus
from langchain_quota.limits.call import STORE, THREAD
from langchain_quota.limits.options import NANODOLLARS, TOTAL_TOKENS
from langchain_quota.middleware.thread_usage import ThreadUsage
from langchain_quota.runtime.units import Unit
from langchain_quota.telemetry.labels import NONE

Row = Mapping[str, Any]

COUNTERS: Mapping[Unit, str] = {"tokens": TOTAL_TOKENS, "nanodollars": NANODOLLARS}
"""What counts the amounts that budgets of the traffic have."""


class Journal:
    """Where a process writes what happens in it, a line for each event; it survives a kill.

    Args:
        file: The file; no other process writes to it.
    """

    def __init__(self, file: Path) -> None:
        self._file = file.open("a", encoding="utf-8")

    def write(self, event: str, **fields: object) -> None:
        """Write a line, with the time."""
        line = {"event": event, "at": time.time(), **fields}
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def decided(self, decision: Decision) -> None:
        """Write a decision."""
        call = decision.call
        self.write(
            "decision",
            agent=call.agent,
            kind=call.kind,
            tool=call.tool or NONE,
            thread=call.thread_id,
            decision=decision.outcome,
            limits=[_limit(status) for status in decision.limits],
        )

    def spent(self, agent: str, thread: str, used: ThreadUsage) -> None:
        """Write what a run and its thread have spent by the thread's state."""
        of_run, of_thread = (
            {unit: amounts.get(counter, 0) for unit, counter in COUNTERS.items()}
            for amounts in (used.run_spent, used.spent)
        )
        self.write("spent", agent=agent, thread=thread, **of_run, all=of_thread)


class Use(NamedTuple):
    """What a thread has used of a limit.

    Attributes:
        used: The count, in the limit's unit.
        cap: The limit, in that unit.
        resets: When the window of a quota ends, if it has one.
        unit: What is counted.
    """

    used: int
    cap: int
    resets: float | None
    unit: Unit


@dataclass(frozen=True)
class Truth:
    """The events of all processes, in order of time.

    A row of an event has the fields that `Journal` writes, and a row of a refusal those of its
    decision with `limit` and `scope`. Fields are named as labels are where metrics have them
    (`agent`, `kind`, `tool`, `decision`, `limit`, `scope`); others are `at` and `thread`.
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

    def refused(self) -> list[Row]:
        """A row for each limit that refused a call; those in a dry run refuse nothing for real."""
        return [
            {**decision, "limit": limit["limit"], "scope": limit["refused"]}
            for decision in self.decisions
            for limit in decision["limits"]
            if limit["refused"] is not None and limit["enforced"]
        ]

    def refusals(self, *fields: str) -> Counter[tuple[Any, ...]]:
        """How many calls each limit refused, by some fields."""
        return _counted(self.refused(), fields)

    def refusal_times(self, *fields: str) -> dict[tuple[Any, ...], tuple[float, float]]:
        """When the first and the last refusal were, by some fields."""
        times: dict[tuple[Any, ...], tuple[float, float]] = {}
        for row in self.refused():
            key = tuple(row[name] for name in fields)
            times[key] = (times.get(key, (row["at"], 0))[0], row["at"])
        return times

    def exhausted(self) -> set[tuple[str, str]]:
        """The agents' threads of which a limit that is enforced is exhausted, each once.

        What calls have used of tokens and money is known when a run is over. Windows that have
        ended count nothing any more.
        """
        uses: dict[tuple[str, str, str], Use] = {}
        for event in self.events:
            if event["event"] == "decision":
                uses |= _uses(event)
            elif event["event"] in ("reset", "spent"):
                amounts = event.get("all", dict.fromkeys(["calls", *COUNTERS], 0))
                for key, use in uses.items():
                    if key[:2] == (event["agent"], event["thread"]):
                        uses[key] = use._replace(used=amounts.get(use.unit, use.used))
        now = time.time()
        return {
            (agent, thread)
            for (agent, thread, _), use in uses.items()
            if use.used >= use.cap and not (use.resets and use.resets <= now)
        }

    def spent(self, unit: Unit) -> Counter[tuple[Any, ...]]:
        """How much of a unit the runs of each agent have spent, as the threads' states say."""
        amounts: Counter[tuple[Any, ...]] = Counter()
        for event in self.events:
            if event["event"] == "spent":
                amounts[event["agent"],] += event[unit]
        return +amounts


def _uses(event: Row) -> dict[tuple[str, str, str], Use]:
    """What a decision tells about a thread; without an answer of the store that is nothing."""
    return {
        (event["agent"], event["thread"], limit["limit"]): Use._make([*limit["use"], limit["unit"]])
        for limit in event["limits"]
        if limit["enforced"] and limit["refused"] != STORE and limit["use"]
    }


def _limit(status: LimitStatus) -> Row:
    use = None
    for count in status.counts:
        if count.limit is not None and THREAD in (count.per, count.scope):
            # What a call has used of a budget is charged after the decision.
            used = count.before if status.deferred else count.used
            use = used, count.limit, count.resets_at and count.resets_at.timestamp()
    return {
        "limit": status.limit,
        "unit": status.unit,
        "refused": status.refusal_scope,
        "enforced": status.enforced,
        "use": use,
    }


def _counted(rows: Iterable[Row], fields: Iterable[str]) -> Counter[tuple[Any, ...]]:
    return Counter(tuple(row[name] for name in fields) for row in rows)
