"""From series to figures: who has used how much, and what limits refuse."""

from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from langchain_quota.cli.top_sources import Scrape, Series
from langchain_quota.decision import THREAD, Outcome, Unit
from langchain_quota.levels import Level, level
from langchain_quota.money import MICRODOLLARS
from langchain_quota.telemetry import names

WINDOW = 300.0
"""The longest time that a rate covers, in seconds."""

_PER_THREAD = names.THREAD_BLOCKED.labels
_MINUTE = 60
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
_GRANTED: dict[str, Unit] = {spec.name: unit for unit, spec in names.GRANTED.items()}
_GROWING = {names.CALLS.name, names.LIMIT_DECISIONS.name}


class Use(NamedTuple):
    """What a thread, or a subject of the quota `scope`, has used of a limit, in its base unit."""

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
    """What happened to the calls that a limit matches, and how many subjects are near the limit."""

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


class Figures(NamedTuple):
    """All that is known at one moment; `hidden` threads have no series of their own."""

    threads: tuple[Use, ...] = ()
    quotas: tuple[Use, ...] = ()
    limits: tuple[Limit, ...] = ()
    ran: float = 0
    refused: float = 0
    refused_a_minute: float | None = None
    hidden: float = 0
    processes: int = 0


Rates = Mapping[Series, float]
"""What counters gain in a second, over all processes."""


class Growth:
    """How much counters have grown since the first answer, or at most since the window began."""

    def __init__(self) -> None:
        self._last: dict[str, Scrape] = {}
        self._gains: deque[tuple[float, Scrape]] = deque()
        self._began: float | None = None

    def take(self, name: str, scrape: Scrape, at: float) -> None:
        """Take in an address's answer: what a process had before it was first seen is no gain."""
        now = {key: value for key, value in scrape.items() if key[0] in _GROWING}
        before = self._last.get(name)
        self._last[name] = now
        if self._began is None:
            self._began = at
        if before is not None:
            # A counter that is lower than before began again at 0, with its process.
            known = {key: last for key, last in before.items() if now.get(key, 0.0) >= last}
            self._gains.append((at, {key: now[key] - known.get(key, 0.0) for key in now}))

    def rates(self, at: float) -> Rates | None:
        """The gains in a second; `None` before anything was seen twice."""
        if self._began is None or not self._gains or at <= self._began:
            return None
        while self._gains[0][0] < at - WINDOW and len(self._gains) > 1:
            self._gains.popleft()
        seconds = min(WINDOW, at - self._began)
        found: defaultdict[Series, float] = defaultdict(float)
        for _, gains in self._gains:
            for key, gain in gains.items():
                found[key] += gain / seconds
        return found


_Part = dict[str, Any]


def figures(scrapes: Iterable[Scrape], rates: Rates | None = None) -> Figures:
    """What processes say: the sums, and what a thread or subject has used by who judged it last."""
    scrapes = [*scrapes]
    uses: defaultdict[Series, list[_Part]] = defaultdict(list)
    sums: defaultdict[Series, float] = defaultdict(float)
    near: dict[Series, float] = {}
    subjects: defaultdict[Series, float] = defaultdict(float)
    for scrape in scrapes:
        own: defaultdict[Series, _Part] = defaultdict(dict)
        for key, value in scrape.items():
            name, *labels = key
            if name in _OF_USES:
                is_thread = len(labels) == len(_PER_THREAD)
                part = own[*labels[:2], *((THREAD, labels[2]) if is_thread else labels[2:])]
                told, unit = _OF_USES[name]
                part[told], part["unit"] = value, unit or part.get("unit", "calls")
            elif name == names.LIMIT_NEAR.name:
                near[key[1:]] = value
            elif name == names.SUBJECTS.name:
                # Each process counts whom it has served: a sum would count some of them twice.
                subjects[key[1:]] = max(subjects[key[1:]], value)
            else:
                sums[key] += value
        for key, part in own.items():
            uses[key].append(part)
    made = (_use(key, parts, near.get(key[:2])) for key, parts in uses.items())
    known = [each for each in made if each.used is not None or each.refused]
    for key, count in Counter((*each[:3], each.level) for each in known if each.level).items():
        subjects[key] = max(subjects[key], count)
    return Figures(
        threads=tuple(each for each in known if each.scope == THREAD),
        quotas=tuple(each for each in known if each.scope != THREAD),
        limits=_limits(sums, rates, subjects),
        ran=_total(sums, names.CALLS.name, *_RAN),
        refused=_total(sums, names.CALLS.name, Outcome.BLOCKED),
        refused_a_minute=None
        if rates is None
        else _MINUTE * _total(rates, names.CALLS.name, Outcome.BLOCKED),
        hidden=_total(sums, names.THREADS_HIDDEN.name),
        processes=len(scrapes),
    )


def _total(amounts: Rates, name: str, *decisions: str) -> float:
    found = ((key[-1], amount) for key, amount in amounts.items() if key[0] == name)
    return sum(amount for decision, amount in found if not decisions or decision in decisions)


def _use(key: Series, parts: list[_Part], near: float | None) -> Use:
    agent, limit, scope, subject = key
    latest = max(parts, key=lambda part: part.get("decided", 0))
    refused_at = (part["refused_at"] for part in parts if "refused_at" in part)
    used, most, unit = latest.get("used"), latest.get("most"), latest["unit"]
    if used is None and any("spent" in part for part in parts):
        # No limit per thread: what it has spent, in all processes.
        used = sum(part.get("spent", 0) for part in parts)
    is_at = None
    if used is not None and most is not None and near is not None:
        scale = MICRODOLLARS if unit == "microdollars" else 1
        is_at = level(round(used * scale), round(most * scale), near)
    return Use(
        *(agent, limit, scope, subject, unit, used, most, is_at),
        refused=sum(part.get("refused", 0) for part in parts),
        refused_at=max(refused_at, default=None),
        resets_at=latest.get("resets_at"),
    )


def _limits(sums: Rates, rates: Rates | None, subjects: Rates) -> tuple[Limit, ...]:
    found: defaultdict[Series, defaultdict[str, float]] = defaultdict(lambda: defaultdict(float))
    units: dict[Series, Unit] = {}
    for key, value in sums.items():
        if key[0] == names.LIMIT_DECISIONS.name:
            found[key[1:3]][key[-1]] += value
        elif key[0] == names.RUNS_ENDED.name:
            found[key[1:3]]["ended"] += value
        elif key[0] in _GRANTED:
            found[key[1:3]]["granted"] += value
            units[key[1:3]] = _GRANTED[key[0]]
    for key, count in subjects.items():
        found[key[:2]][key[-1]] += count
    for key, gain in (rates or {}).items():
        if key[0] == names.LIMIT_DECISIONS.name and key[-1] == Outcome.BLOCKED:
            found[key[1:3]]["lately"] += gain
    return tuple(
        Limit(
            *(key[0], key[1]),
            allowed=of[Outcome.ALLOWED] - of["refunded"],
            refused=of[Outcome.BLOCKED],
            on_trial=of[Outcome.WOULD_BLOCK],
            refused_a_minute=None if rates is None else _MINUTE * of["lately"],
            near=of[Level.NEAR],
            exhausted=of[Level.EXHAUSTED],
            ended=of["ended"],
            granted=of["granted"],
            unit=units.get(key, "calls"),
        )
        for key, of in found.items()
    )
