"""From series to figures: who has used how much, what limits refuse, what is spent."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from langchain_quota.cli.top_sources import Process, Scrape, Series
from langchain_quota.decision import THREAD, Outcome, Unit
from langchain_quota.levels import Level, level
from langchain_quota.money import MICRODOLLARS
from langchain_quota.telemetry import names

WINDOW = 300.0
"""The longest time that a rate covers, in seconds; Prometheus may scrape only once a minute."""

_PER_THREAD = names.THREAD_BLOCKED.labels
_MINUTE, _HOUR = 60, 3600
_RAN = (Outcome.ALLOWED, Outcome.WOULD_BLOCK)

_BY_UNIT = {
    "used": (names.THREAD_USED, names.SUBJECT_USED),
    "most": (names.THREAD_LIMIT, names.SUBJECT_LIMIT),
    "spent": (names.THREAD_SPENT,),
}
_OF_USES: dict[str, tuple[str, Unit | None]] = {
    names.THREAD_BLOCKED.name: ("refused", None),
    names.THREAD_REFUSED.name: ("refused_at", None),
    **{spec.name: ("decided", None) for spec in (names.THREAD_DECIDED, names.SUBJECT_DECIDED)},
    **{spec.name: ("resets_at", None) for spec in (names.THREAD_RESETS, names.SUBJECT_RESETS)},
    **{
        spec.name: (part, unit)
        for part, metrics in _BY_UNIT.items()
        for metric in metrics
        for unit, spec in metric.items()
    },
}
"""What a metric of a thread or of a subject says, and in which unit."""
_SPENT: dict[str, Unit] = {spec.name: unit for unit, spec in names.SPENT.items()}
_GRANTED: dict[str, Unit] = {spec.name: unit for unit, spec in names.GRANTED.items()}
_GROWING = {names.CALLS.name, names.LIMIT_DECISIONS.name, *_SPENT}


class Use(NamedTuple):
    """What a thread, or a subject of a shared quota, has used of a limit, in its base unit.

    `scope` is `"thread"`, or the quota's name. `used` and `most` are `None` where that is not
    known, and `level` where the limit is on trial or has no `most`.
    """

    agent: str
    limit: str
    scope: str
    subject: str
    unit: Unit = "calls"
    used: float | None = None
    most: float | None = None
    level: Level | None = None
    refused: float = 0
    refused_at: float | None = None
    resets_at: float | None = None

    @property
    def share(self) -> float | None:
        """What part of the limit is used; `None` where that is not known."""
        if self.used is None or self.most is None:
            return None
        return self.used / self.most if self.most > 0 else 1.0


class Limit(NamedTuple):
    """What happened to the calls that a limit matches, and how many are near the limit.

    `allowed` is without refunds. `near` and `exhausted` count threads and subjects of quotas: those
    that one process knows, or that have series, whichever are more.
    """

    agent: str
    limit: str
    allowed: float = 0
    refused: float = 0
    on_trial: float = 0
    refused_a_minute: float | None = None
    near: float = 0
    exhausted: float = 0
    ended: float = 0
    granted: float = 0
    unit: Unit = "calls"


class Spending(NamedTuple):
    """What the runs of a model have spent of a limit; `an_hour` is `None` until it is known."""

    agent: str
    limit: str
    model: str
    unit: Unit
    spent: float
    an_hour: float | None = None


class Figures(NamedTuple):
    """All that is known at one moment; `hidden` threads have no series of their own."""

    threads: tuple[Use, ...] = ()
    quotas: tuple[Use, ...] = ()
    limits: tuple[Limit, ...] = ()
    spending: tuple[Spending, ...] = ()
    ran: float = 0
    refused: float = 0
    refused_a_minute: float | None = None
    hidden: float = 0
    processes: int = 0

    def an_hour(self, unit: Unit) -> float | None:
        """What is spent in an hour; `None` if not known yet, or nothing counts this unit.

        Two limits of an agent are both charged for a model run, so the largest one counts.
        """
        most: dict[tuple[str, str], float] = {}
        for each in self.spending:
            if each.unit == unit and each.an_hour is not None:
                key = (each.agent, each.model)
                most[key] = max(most.get(key, 0.0), each.an_hour)
        return sum(most.values()) if most else None


Rates = Mapping[tuple[str, Series], float]
"""What counters gain in a second, over all processes of a service."""


class Growth:
    """How much counters have grown since the first answer, or at most since the window began.

    The window has two halves. When the second is full the first is forgotten, so that what is kept
    does not grow with time.
    """

    def __init__(self) -> None:
        self._last: dict[str, Scrape] = {}
        self._halves: list[tuple[float, defaultdict[tuple[str, Series], float]]] = []
        self._seen_twice = False

    def take(self, name: str, scrape: Scrape, at: float) -> None:
        """Take in an address's answer.

        A counter that is lower than before began again at 0, with its process. A series that was
        not there before began at 0. What a process had before it was first seen is no gain.
        """
        now = {
            process: {key: value for key, value in found.items() if key[0] in _GROWING}
            for process, found in scrape.items()
        }
        before = self._last.get(name, {})
        self._last[name] = now
        self._seen_twice |= bool(before)
        if not self._halves or at - self._halves[-1][0] >= WINDOW / 2:
            self._halves = [*self._halves[-1:], (at, defaultdict(float))]
        gains = self._halves[-1][1]
        for process in now.keys() & before.keys():
            for key, value in now[process].items():
                last = before[process].get(key, 0.0)
                gains[process[0], key] += value - last if value >= last else value

    def rates(self, at: float) -> Rates | None:
        """The gains in a second; `None` before anything was seen twice."""
        if not self._seen_twice or at <= self._halves[0][0]:
            return None
        seconds = at - self._halves[0][0]
        found: defaultdict[tuple[str, Series], float] = defaultdict(float)
        for _, gains in self._halves:
            for key, gain in gains.items():
                found[key] += gain / seconds
        return found


_Key = tuple[str, ...]
_Part = dict[str, Any]


def figures(scrapes: Iterable[Scrape], rates: Rates | None = None) -> Figures:
    """What several processes say, together.

    Counters are added. What a thread or a subject has used is what the process says that judged it
    last. Processes of different services are kept apart.
    """
    found = [(process, series) for scrape in scrapes for process, series in scrape.items()]
    several = len({service for (service, _), _ in found}) > 1
    uses: dict[_Key, dict[Process, _Part]] = {}
    sums: defaultdict[_Key, float] = defaultdict(float)
    near: dict[_Key, float] = {}
    subjects: defaultdict[_Key, float] = defaultdict(float)
    for process, series in found:
        for (name, *labels), value in series.items():
            agent = f"{process[0]}/{labels[0]}" if several and process[0] else labels[0]
            if name in _OF_USES:
                scope_and_subject = (
                    labels[2:] if len(labels) > len(_PER_THREAD) else (THREAD, labels[2])
                )
                parts = uses.setdefault((agent, labels[1], *scope_and_subject), {})
                part = parts.setdefault(process, {})
                told, unit = _OF_USES[name]
                part[told], part["unit"] = value, unit or part.get("unit", "calls")
            elif name == names.LIMIT_NEAR.name:
                near[agent, labels[1]] = value
            elif name == names.SUBJECTS.name:
                # Each process counts whom it has served: a sum would count some of them twice.
                key = (agent, *labels[1:])
                subjects[key] = max(subjects[key], value)
            else:
                sums[name, agent, *labels[1:]] += value
    gains: dict[_Key, float] | None = None
    if rates is not None:
        gains = {}
        for (service, (name, agent, *labels)), gain in rates.items():
            whose = f"{service}/{agent}" if several and service else agent
            gains[name, whose, *labels] = gain
    known = [_use(key, [*parts.values()], near.get(key[:2])) for key, parts in uses.items()]
    known = [each for each in known if each.used is not None or each.refused]
    levels = Counter((*each[:3], each.level) for each in known if each.level)
    for key, count in levels.items():
        subjects[key] = max(subjects[key], count)
    return Figures(
        threads=tuple(each for each in known if each.scope == THREAD),
        quotas=tuple(each for each in known if each.scope != THREAD),
        limits=_limits(sums, gains, subjects),
        spending=tuple(
            Spending(
                *(key[1], key[2], key[3], _SPENT[key[0]], spent),
                None if gains is None else _HOUR * gains.get(key, 0.0),
            )
            for key, spent in sums.items()
            if key[0] in _SPENT
        ),
        ran=_total(sums, names.CALLS.name, *_RAN),
        refused=_total(sums, names.CALLS.name, Outcome.BLOCKED),
        refused_a_minute=None
        if gains is None
        else _MINUTE * _total(gains, names.CALLS.name, Outcome.BLOCKED),
        hidden=_total(sums, names.THREADS_HIDDEN.name),
        processes=len({process for process, _ in found}),
    )


def _total(amounts: Mapping[_Key, float], name: str, *decisions: str) -> float:
    return sum(
        amount
        for key, amount in amounts.items()
        if key[0] == name and (not decisions or key[-1] in decisions)
    )


def _use(key: _Key, parts: list[_Part], near: float | None) -> Use:
    agent, limit, scope, subject = key
    latest = max(parts, key=lambda part: part.get("decided", 0))
    used, most, unit = latest.get("used"), latest.get("most"), latest["unit"]
    if used is None and any("spent" in part for part in parts):
        # No limit per thread: what it has spent, in all processes.
        used = sum(part.get("spent", 0) for part in parts)
    return Use(
        *(agent, limit, scope, subject, unit, used, most),
        level=_level(used, most, near, unit),
        refused=sum(part.get("refused", 0) for part in parts),
        refused_at=max(
            (part["refused_at"] for part in parts if "refused_at" in part), default=None
        ),
        resets_at=latest.get("resets_at"),
    )


def _level(used: float | None, most: float | None, near: float | None, unit: Unit) -> Level | None:
    if used is None or most is None or near is None:
        return None
    scale = MICRODOLLARS if unit == "microdollars" else 1
    return level(round(used * scale), round(most * scale), near)


def _limits(
    sums: Mapping[_Key, float],
    gains: Mapping[_Key, float] | None,
    subjects: Mapping[_Key, float],
) -> tuple[Limit, ...]:
    found: dict[tuple[str, str], defaultdict[str, float]] = {}
    units: dict[tuple[str, str], Unit] = {}

    def add(key: _Key, what: str, value: float) -> None:
        found.setdefault((key[1], key[2]), defaultdict(float))[what] += value

    for key, value in sums.items():
        if key[0] == names.LIMIT_DECISIONS.name:
            add(key, key[-1], value)
        elif key[0] == names.RUNS_ENDED.name:
            add(key, "ended", value)
        elif key[0] in _GRANTED:
            add(key, "granted", value)
            units[key[1], key[2]] = _GRANTED[key[0]]
    for key, count in subjects.items():
        add(("", *key), key[-1], count)
    for key, gain in (gains or {}).items():
        if key[0] == names.LIMIT_DECISIONS.name and key[-1] == Outcome.BLOCKED:
            add(key, "lately", gain)
    return tuple(
        Limit(
            *key,
            allowed=of[Outcome.ALLOWED] - of["refunded"],
            refused=of[Outcome.BLOCKED],
            on_trial=of[Outcome.WOULD_BLOCK],
            refused_a_minute=None if gains is None else _MINUTE * of["lately"],
            near=of[Level.NEAR],
            exhausted=of[Level.EXHAUSTED],
            ended=of["ended"],
            granted=of["granted"],
            unit=units.get(key, "calls"),
        )
        for key, of in found.items()
    )
