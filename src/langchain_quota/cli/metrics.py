"""What services say at /metrics: who has used how much, and what limits refuse."""

import math
import os
import ssl
import sys
import time
from argparse import Namespace
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from threading import Thread
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import httpx
from prometheus_client.parser import text_string_to_metric_families

from langchain_quota.cli.arguments import TOKEN_VARIABLE
from langchain_quota.cli.printing import CommandError, one_line
from langchain_quota.decision import THREAD, Outcome
from langchain_quota.telemetry import names
from langchain_quota.units import PER_BASE_UNIT, UNIT_LABELS, Level, Unit, level

Series = tuple[str, ...]
"""A series: the metric's name, and the values of the metric's own labels, in their order."""
Scrape = Mapping[Series, float]
"""What a process said at one moment."""

SILENCE = 10.0
"""How many seconds an address may stay silent; Prometheus waits as long by default."""

_SHOWN = 200
_WANTED = {
    spec.name: spec.labels for spec in names.METRICS if spec.labels and spec.kind != "histogram"
}
"""The labels of the metrics that are read, by name."""
_PARTS = {
    "used": (*names.THREAD_USED.values(), *names.SUBJECT_USED.values()),
    "most": (*names.THREAD_LIMIT.values(), *names.SUBJECT_LIMIT.values()),
    "refused": (names.THREAD_BLOCKED,),
    "": (names.THREAD_TIMES, names.SUBJECT_TIMES),
}
_TIMES = {"refusal": "refused_at", "decision": "decided", "reset": "resets_at"}
_PART_OF = {spec.name: part for part, metrics in _PARTS.items() for spec in metrics}
"""What a metric of a thread or of a subject says."""
_GRANTED_IN = {label: unit for unit, label in UNIT_LABELS.items()}
_UNITS: dict[str, Unit] = {
    spec.name: unit
    for amounts in (names.THREAD_USED, names.SUBJECT_USED)
    for unit, spec in amounts.items()
}


class Source:
    """An address that is asked again and again: its latest answer, or why it cannot be used."""

    def __init__(self, name: str, client: httpx.Client) -> None:
        self.name = name
        self.scrape: Scrape | None = None
        self.answered_at = 0.0
        self._client = client
        self._failure: str | None = "no answer yet"

    def poll(self, interval: float | None) -> None:
        """Ask it, and keep its answer, or why there is none; with an interval, again and again."""
        while True:
            asked_at = time.monotonic()
            try:
                scrape = self._ask()
            except httpx.TimeoutException:
                self._failure = f"no answer within {SILENCE:g} s"
            except (CommandError, httpx.HTTPError) as error:
                self._failure = one_line(error)[:_SHOWN] or type(error).__name__
            except Exception as error:  # noqa: BLE001 - it is shown; the others go on
                self._failure = f"it answers, but not with metrics: {one_line(error)[:_SHOWN]}"
            else:
                # The scrape is last: who sees that it is new reads its time.
                self.answered_at, self._failure, self.scrape = time.monotonic(), None, scrape
            if interval is None:
                return
            time.sleep(max(0.0, asked_at + interval - time.monotonic()))

    @property
    def fault(self) -> str | None:
        """What is wrong with it, in one line, with the age of figures that are old."""
        age = f" (figures {time.monotonic() - self.answered_at:.0f} s old)" if self.scrape else ""
        return self._failure and f"{self.name}{age}: {self._failure}"

    def _ask(self) -> Scrape:
        response = self._client.get(self.name)
        if response.status_code != httpx.codes.OK:
            answer = f"it answers {response.status_code} {response.reason_phrase}".rstrip()
            if response.status_code in {httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN}:
                has_token = "Authorization" in self._client.headers
                remedy = "it does not take the token in" if has_token else "give a token in"
                answer += f": {remedy} {TOKEN_VARIABLE}"
            elif "Location" in response.headers:
                answer += f": give the address {response.headers['Location']}"
            raise CommandError(answer)
        scrape = of_text(response.content.decode())
        if not scrape:
            raise CommandError("it answers, but has no metrics of langchain-quota")
        return scrape


def of_text(text: str) -> Scrape:
    """The series in a text of metrics that are finite numbers."""
    wanted = (line for line in text.split("\n") if line.partition("{")[0] in _WANTED)
    return {
        # One object for equal texts: a thread is in many series.
        (sample.name, *(sys.intern(sample.labels[each]) for each in _WANTED[sample.name])): float(
            sample.value
        )
        for family in text_string_to_metric_families("\n".join(wanted))
        for sample in family.samples
        if math.isfinite(sample.value)
    }


def sources(arguments: Namespace) -> list[Source]:
    """The addresses that the arguments name, each once."""
    token = os.environ.get(TOKEN_VARIABLE, "")
    if not all("!" <= each <= "~" for each in token):
        must = "it must have visible ASCII characters only"
        raise CommandError(f"{TOKEN_VARIABLE} is no token: {must}")
    headers = {"Accept": "text/plain; version=0.0.4", "Accept-Encoding": "identity"}
    if token:
        headers["Authorization"] = f"Bearer {token}"
    given: Any = {"headers": headers, "verify": ssl.create_default_context(), "timeout": SILENCE}
    found = []
    for url in dict.fromkeys(arguments.addresses):
        # This machine asks itself without a proxy.
        is_here = (urlsplit(url).hostname or "").startswith(("localhost", "127.", "::1"))
        found.append(Source(url, httpx.Client(trust_env=not is_here, **given)))
    return found


def ask(sources: Sequence[Source], interval: float | None) -> list[Thread]:
    """Ask each once, or with an interval again and again, as long as the process lasts."""
    # A slow one holds up neither the others nor, as a daemon thread, the end of the process.
    asking = [Thread(target=each.poll, args=(interval,), daemon=True) for each in sources]
    for thread in asking:
        thread.start()
    return asking


class Use(NamedTuple):
    """What a thread, or a subject of the quota `scope`, has used of a limit, in its base unit."""

    subject: str
    agent: str
    limit: str
    scope: str
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
    counts: defaultdict[str, float]
    """Calls by decision, subjects by level, and the runs `ended` and the amount `granted`."""
    refused_at: float | None = None
    unit: Unit = "calls"


class Figures(NamedTuple):
    """All that is known at one moment; `hidden` threads have no series of their own."""

    threads: tuple[Use, ...] = ()
    quotas: tuple[Use, ...] = ()
    limits: tuple[Limit, ...] = ()
    ran: float = 0
    refused: float = 0
    hidden: float = 0
    processes: int = 0


_Parts = defaultdict[int, dict[str, Any]]
"""What each process says of a thread or of a subject."""
_Values = list[tuple[Series, float]]
"""The labels and values of a metric in all processes."""


def figures(scrapes: Sequence[Scrape]) -> Figures:
    """What processes say: the sums, and what a thread or subject has used by who judged it last."""
    uses: defaultdict[Series, _Parts] = defaultdict(lambda: defaultdict(dict))
    values: defaultdict[str, _Values] = defaultdict(list)
    for process, scrape in enumerate(scrapes):
        for (name, *labels), value in scrape.items():
            if name not in _PART_OF:
                values[name].append(((*labels,), value))
                continue
            says = _PART_OF[name] or _TIMES.get(labels.pop(), "")
            scoped = labels[:2] + [THREAD] * ("thread_id" in _WANTED[name]) + labels[2:]
            part = uses[*scoped,][process]
            part[says] = value
            part["unit"] = _UNITS.get(name) or part.get("unit", "calls")
    near = {of[:2]: value for of, value in values[names.LIMIT_NEAR.name]}
    made = (_use(key, [*parts.values()], near.get(key[:2])) for key, parts in uses.items())
    known = [each for each in made if each.used is not None or each.refused]
    calls = values[names.CALLS.name]
    return Figures(
        threads=tuple(each for each in known if each.scope == THREAD),
        quotas=tuple(each for each in known if each.scope != THREAD),
        limits=_limits(values, known, scrapes),
        ran=sum(value for of, value in calls if of[-1] in {Outcome.ALLOWED, Outcome.WOULD_BLOCK}),
        refused=sum(value for of, value in calls if of[-1] == Outcome.BLOCKED),
        hidden=_hidden(values[names.SUBJECTS.name]),
        processes=len(scrapes),
    )


def _hidden(subjects: _Values) -> float:
    """How many threads have no series; a thread with several limits counts once."""
    by_limit: Counter[Series] = Counter()
    for (agent, limit, scope, _, shown), value in subjects:
        if scope == THREAD and shown == "false":
            by_limit[agent, limit] += int(value)
    by_agent: Counter[str] = Counter()
    for (agent, _), count in by_limit.items():
        by_agent[agent] = max(by_agent[agent], count)
    return by_agent.total()


def _use(key: Series, parts: list[dict[str, Any]], near: float | None) -> Use:
    latest = max(parts, key=lambda part: part.get("decided", 0))
    used, most, unit = latest.get("used"), latest.get("most"), latest["unit"]
    is_at = None
    if used is not None and most is not None and near is not None:
        scale = PER_BASE_UNIT.get(unit, 1)
        is_at = level(round(used * scale), round(most * scale), near)
    refused_at = [part["refused_at"] for part in parts if "refused_at" in part]
    agent, limit, scope, subject = key
    return Use(
        *(subject, agent, limit, scope, unit, used, most, is_at),
        refused=sum(part.get("refused", 0) for part in parts),
        refused_at=max(refused_at, default=None),
        resets_at=latest.get("resets_at"),
    )


def _tracked(scrapes: Sequence[Scrape]) -> Iterator[tuple[Series, float]]:
    """How many subjects each process tracks, those without series included."""
    for scrape in scrapes:
        found: defaultdict[Series, float] = defaultdict(float)
        for (name, *labels), value in scrape.items():
            if name == names.SUBJECTS.name:
                found[*labels[:-1],] += value
        yield from found.items()


def _limits(
    values: Mapping[str, _Values], known: Sequence[Use], scrapes: Sequence[Scrape]
) -> tuple[Limit, ...]:
    counts: defaultdict[Series, defaultdict[str, float]] = defaultdict(lambda: defaultdict(float))
    units: dict[Series, Unit] = {}
    for labels, value in values[names.LIMIT_DECISIONS.name]:
        counts[labels[:2]][labels[-1]] += value
    for labels, value in values[names.RUNS_ENDED.name]:
        counts[labels]["ended"] += value
    for labels, value in values[names.GRANTED.name]:
        counts[labels[:2]]["granted"] += value
        units[labels[:2]] = _GRANTED_IN[labels[-1]]
    # Each process counts whom it has served: a sum would count some of them twice.
    subjects: defaultdict[Series, float] = defaultdict(float)
    shown = Counter((*each[1:4], str(each.level)) for each in known if each.level)
    for labels, value in (*_tracked(scrapes), *shown.items()):
        subjects[labels] = max(subjects[labels], value)
    for labels, value in subjects.items():
        counts[labels[:2]][labels[-1]] += value
    refused_at: defaultdict[Series, float] = defaultdict(float)
    for each in known:
        refused_at[each[1:3]] = max(refused_at[each[1:3]], each.refused_at or 0)
    return tuple(
        Limit(
            agent, limit, of, refused_at[agent, limit] or None, units.get((agent, limit), "calls")
        )
        for (agent, limit), of in counts.items()
    )
