"""What services say at /metrics: who has used how much, and what limits refuse."""

import math
import os
import ssl
import sys
import time
from argparse import Namespace
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from threading import Thread
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import httpx
from prometheus_client.parser import text_string_to_metric_families

from langchain_quota.cli.arguments import DEFAULT, TOKEN_VARIABLE
from langchain_quota.cli.printing import CommandError, one_line
from langchain_quota.decision import THREAD, Outcome
from langchain_quota.telemetry import names
from langchain_quota.units import MICRODOLLARS, Level, Unit, level

Series = tuple[str, ...]
"""A series: the metric's name, and the values of the metric's own labels, in their order."""
Scrape = dict[Series, float]
"""What a process said at one moment."""
Rates = Mapping[Series, float]
"""What counters gain in a second, over all processes."""

SILENCE = 10.0
"""How many seconds an address may stay silent; Prometheus waits as long by default."""
LONGEST = 60.0
"""The seconds that a whole answer may take."""
MOST_BYTES = 100 << 20
UNASKED = "no answer yet"
WINDOW = 300.0
"""The longest time that a rate covers, in seconds."""

_SHOWN = 200
_WANTED = {
    spec.name: spec.labels for spec in names.METRICS if spec.labels and spec.kind != "histogram"
}
"""The labels of the metrics that are read, by name."""
_PARTS = {
    "used": (*names.THREAD_USED.values(), *names.SUBJECT_USED.values()),
    "most": (*names.THREAD_LIMIT.values(), *names.SUBJECT_LIMIT.values()),
    "spent": (*names.THREAD_SPENT.values(),),
    "refused": (names.THREAD_BLOCKED,),
    "refused_at": (names.THREAD_REFUSED,),
    "decided": (names.THREAD_DECIDED, names.SUBJECT_DECIDED),
    "resets_at": (names.THREAD_RESETS, names.SUBJECT_RESETS),
}
_PART_OF = {spec.name: part for part, metrics in _PARTS.items() for spec in metrics}
"""What a metric of a thread or of a subject says."""
_UNITS: dict[str, Unit] = {
    spec.name: unit
    for amounts in (names.THREAD_USED, names.SUBJECT_USED, names.THREAD_SPENT, names.GRANTED)
    for unit, spec in amounts.items()
}
_GROWING = {names.CALLS.name, names.LIMIT_DECISIONS.name}


class Source:
    """An address that is asked again and again: its latest answer, or why it cannot be used."""

    def __init__(self, name: str, client: httpx.Client) -> None:
        self.name = name
        self.scrape: Scrape | None = None
        self.answered_at = 0.0
        self.failure: str | None = UNASKED
        self._client = client

    def poll(self) -> None:
        """Ask it, and keep its answer, or why there is none."""
        try:
            scrape = self._ask()
        except httpx.TimeoutException:
            self.failure = f"no answer within {SILENCE:g} s"
        except (CommandError, httpx.HTTPError) as error:
            self.failure = one_line(error)[:_SHOWN] or type(error).__name__
        except Exception as error:  # noqa: BLE001 - it is shown; the others go on
            self.failure = f"it answers, but not with metrics: {one_line(error)[:_SHOWN]}"
        else:
            # The scrape is last: who sees that it is new reads its time.
            self.answered_at, self.failure, self.scrape = time.monotonic(), None, scrape

    @property
    def fault(self) -> str | None:
        """What is wrong with it, in one line, with the age of figures that are old."""
        age = f" (figures {time.monotonic() - self.answered_at:.0f} s old)" if self.scrape else ""
        return self.failure and f"{self.name}{age}: {self.failure}"

    def _ask(self) -> Scrape:
        """Its answer, bounded in size and time."""
        with self._client.stream("GET", self.name) as response:
            if response.status_code != httpx.codes.OK:
                answer = f"it answers {response.status_code} {response.reason_phrase}".rstrip()
                if response.status_code in {httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN}:
                    answer += f": give a token in {TOKEN_VARIABLE} or with --token-file"
                    if "Authorization" in self._client.headers:
                        answer = f"{answer.partition(':')[0]}: it does not take the token"
                elif "Location" in response.headers:
                    answer += f": give the address {response.headers['Location']}"
                raise CommandError(answer)
            end, answered = time.monotonic() + LONGEST, bytearray()
            for part in response.iter_bytes():  # as they come: a slow answer must not take longer
                answered += part
                if len(answered) > MOST_BYTES:
                    raise CommandError(f"its answer is longer than {MOST_BYTES >> 20} MiB")
                if time.monotonic() > end:
                    raise CommandError(f"its answer takes longer than {LONGEST:g} s")
        scrape = of_text(answered.decode())
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
    file, token, where = arguments.token_file, os.environ.get(TOKEN_VARIABLE, ""), TOKEN_VARIABLE
    if file is not None:
        where = f"--token-file {str(file)!r}"
        try:
            token = file.read_text().strip()
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "it is no text"
            raise CommandError(f"cannot read {where}: {reason}") from error
        if not token:
            raise CommandError(f"{where} is empty")
    if not all("!" <= each <= "~" for each in token):
        raise CommandError(f"{where} is no token: it must have visible ASCII characters only")
    headers = {"Accept": "text/plain; version=0.0.4", "Accept-Encoding": "identity"}
    if token:
        headers["Authorization"] = f"Bearer {token}"
    found = []
    context = ssl.create_default_context()
    for url in dict.fromkeys(arguments.addresses or (DEFAULT,)):
        client = httpx.Client(
            verify=context,
            headers=headers,
            timeout=SILENCE,
            # This machine asks itself without a proxy.
            trust_env=not (urlsplit(url).hostname or "").startswith(("localhost", "127.", "::1")),
            # Nobody closes a client: threads ask with it until the process ends.
            limits=httpx.Limits(max_keepalive_connections=0),
        )
        found.append(Source(url, client))
    return found


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
    uses: defaultdict[Series, defaultdict[int, _Part]] = defaultdict(lambda: defaultdict(dict))
    sums: defaultdict[Series, float] = defaultdict(float)
    near: dict[Series, float] = {}
    subjects: defaultdict[Series, float] = defaultdict(float)
    for process, scrape in enumerate(scrapes):
        for (name, *labels), value in scrape.items():
            if name in _PART_OF:
                of_thread = "thread_id" in _WANTED[name]
                key = (*labels[:2], *([THREAD, labels[2]] if of_thread else labels[2:]))
                part = uses[key][process]
                part[_PART_OF[name]] = value
                part["unit"] = _UNITS.get(name) or part.get("unit", "calls")
            elif name == names.LIMIT_NEAR.name:
                near[*labels,] = value
            elif name == names.SUBJECTS.name:
                # Each process counts whom it has served: a sum would count some of them twice.
                subjects[*labels,] = max(subjects[*labels,], value)
            else:
                sums[name, *labels] += value
    made = (_use(key, [*parts.values()], near.get(key[:2])) for key, parts in uses.items())
    known = [each for each in made if each.used is not None or each.refused]
    for key, count in Counter((*each[:3], each.level) for each in known if each.level).items():
        subjects[key] = max(subjects[key], count)
    lately = _total(rates or {}, names.CALLS.name, Outcome.BLOCKED)
    return Figures(
        threads=tuple(each for each in known if each.scope == THREAD),
        quotas=tuple(each for each in known if each.scope != THREAD),
        limits=_limits(sums, rates, subjects),
        ran=_total(sums, names.CALLS.name, Outcome.ALLOWED, Outcome.WOULD_BLOCK),
        refused=_total(sums, names.CALLS.name, Outcome.BLOCKED),
        refused_a_minute=None if rates is None else 60 * lately,
        hidden=_total(sums, names.THREADS_HIDDEN.name),
        processes=len(scrapes),
    )


def _total(amounts: Rates, name: str, *decisions: str) -> float:
    found = ((key[-1], amount) for key, amount in amounts.items() if key[0] == name)
    return sum(amount for decision, amount in found if not decisions or decision in decisions)


def _use(key: Series, parts: list[_Part], near: float | None) -> Use:
    latest = max(parts, key=lambda part: part.get("decided", 0))
    used, most, unit = latest.get("used"), latest.get("most"), latest["unit"]
    if used is None and any("spent" in part for part in parts):
        # No limit per thread: what it has spent, in all processes.
        used = sum(part.get("spent", 0) for part in parts)
    is_at = None
    if used is not None and most is not None and near is not None:
        scale = MICRODOLLARS if unit == "microdollars" else 1
        is_at = level(round(used * scale), round(most * scale), near)
    agent, limit, scope, subject = key
    return Use(
        *(agent, limit, scope, subject, unit, used, most, is_at),
        refused=sum(part.get("refused", 0) for part in parts),
        refused_at=max(
            (part["refused_at"] for part in parts if "refused_at" in part), default=None
        ),
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
        elif key[0] in _UNITS:
            found[key[1:3]]["granted"] += value
            units[key[1:3]] = _UNITS[key[0]]
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
            refused_a_minute=None if rates is None else 60 * of["lately"],
            near=of[Level.NEAR],
            exhausted=of[Level.EXHAUSTED],
            ended=of["ended"],
            granted=of["granted"],
            unit=units.get(key, "calls"),
        )
        for key, of in found.items()
    )


class Watch:
    """Asks addresses, each in a thread: a slow one holds up neither keys nor the others."""

    def __init__(self, sources: Sequence[Source]) -> None:
        self.sources = sources
        self.figures: Figures | None = None
        self._growth = Growth()
        self._taken: dict[Source, Scrape] = {}

    def ask_all(self) -> None:
        """Ask each once, and wait for the answers."""
        # Nobody waits for a daemon thread at the end of the process.
        asking = [Thread(target=each.poll, daemon=True) for each in self.sources]
        # Who takes too long says so itself.
        end = time.monotonic() + LONGEST + 2 * SILENCE
        for thread in asking:
            thread.start()
        for thread in asking:
            thread.join(max(0.0, end - time.monotonic()))
        self.gather()

    def start(self, interval: float) -> None:
        """Ask each again and again, as long as the process lasts."""
        for each in self.sources:
            Thread(target=_ask_often, args=(each, interval), daemon=True).start()

    def gather(self) -> None:
        """Make figures of their latest answers, if there is a new one."""
        now = {each: each.scrape for each in self.sources if each.scrape is not None}
        news = [each for each, scrape in now.items() if scrape is not self._taken.get(each)]
        for each in news:
            self._growth.take(each.name, now[each], each.answered_at)
        self._taken = now
        if news or (self.figures is None and any(each.failure != UNASKED for each in self.sources)):
            self.figures = figures(now.values(), self._growth.rates(time.monotonic()))


def _ask_often(source: Source, interval: float) -> None:
    while True:
        asked_at = time.monotonic()
        source.poll()
        time.sleep(max(0.0, asked_at + interval - time.monotonic()))
