"""A reader of /metrics for `top`: who has used how much, and what limits refuse."""

import math
import os
import ssl
import sys
import time
from argparse import Namespace
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from threading import Thread
from typing import Any, NamedTuple, TypeAlias
from urllib.parse import urlsplit

import httpx
from prometheus_client.parser import text_string_to_metric_families

from langchain_quota.cli.arguments import TOKEN_VARIABLE
from langchain_quota.cli.printing import CommandError, one_line
from langchain_quota.core.decision import Outcome
from langchain_quota.limits.call import THREAD
from langchain_quota.runtime.units import PER_BASE_UNIT, Level, Unit, level
from langchain_quota.telemetry import names

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
_SAYS: dict[str, tuple[str, Unit | None]] = {
    **{
        spec.name: (part, unit)
        for part, metrics in (
            ("used", (names.THREAD_USED, names.SUBJECT_USED)),
            ("most", (names.THREAD_LIMIT, names.SUBJECT_LIMIT)),
        )
        for by_unit in metrics
        for unit, spec in by_unit.items()
    },
    names.THREAD_BLOCKED.name: ("refused", None),
    names.THREAD_TIMES.name: ("", None),
    names.SUBJECT_TIMES.name: ("", None),
}
"""What a metric says of a thread or of a subject, and in which unit."""
_TIMES = {"refusal": "refused_at", "decision": "decided", "reset": "resets_at"}
_OF_LIMITS = {names.LIMIT_DECISIONS.name, names.SUBJECTS.name, names.RUNS_ENDED.name}


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
            wants_token = response.status_code in {httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN}
            remedy = f": it needs its token in {TOKEN_VARIABLE}" if wants_token else ""
            raise CommandError(
                f"it answers {response.status_code} {response.reason_phrase}{remedy}"
            )
        scrape = of_text(response.text)
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
    """Return the sources that the arguments name, without duplicates."""
    token = os.environ.get(TOKEN_VARIABLE, "")
    if not all("!" <= character <= "~" for character in token):
        must = "it must have visible ASCII characters only"
        raise CommandError(f"{TOKEN_VARIABLE} is no token: {must}")
    headers = {"Accept": "text/plain; version=0.0.4", "Accept-Encoding": "identity"}
    if token:
        headers["Authorization"] = f"Bearer {token}"
    context, found = ssl.create_default_context(), []
    for url in dict.fromkeys(arguments.addresses):
        # This machine asks itself without a proxy.
        is_here = (urlsplit(url).hostname or "").startswith(("localhost", "127.", "::1"))
        client = httpx.Client(
            headers=headers, verify=context, timeout=SILENCE, trust_env=not is_here
        )
        found.append(Source(url, client))
    return found


def ask(sources: Sequence[Source], interval: float | None) -> list[Thread]:
    """Request all sources once, or with an interval as long as the process lasts."""
    # A slow one holds up neither the others nor, as a daemon thread, the end of the process.
    asking = [Thread(target=source.poll, args=(interval,), daemon=True) for source in sources]
    for thread in asking:
        thread.start()
    return asking


_Says: TypeAlias = dict[str, Any]
"""What a process says of a thread or a subject, by the names in `_SAYS` and `_TIMES`."""


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
        """The used share of the limit; `None` if it is unknown."""
        if self.used is None or self.most is None:
            return None
        return self.used / self.most if self.most > 0 else 1.0


class Limit(NamedTuple):
    """What happened to the calls that a limit matches, and how many subjects are near the limit."""

    agent: str
    limit: str
    counts: Counter[str]
    """Calls by decision, subjects by level, and the runs `ended`."""


class Figures(NamedTuple):
    """All that is known at one moment."""

    threads: tuple[Use, ...] = ()
    quotas: tuple[Use, ...] = ()
    limits: tuple[Limit, ...] = ()
    ran: int = 0
    refused: int = 0
    processes: int = 0


def figures(scrapes: Sequence[Scrape]) -> Figures:
    """Return the sums of all processes, and the use of subjects by the newest check."""
    # What each process says of a thread or of a subject.
    uses: defaultdict[Series, defaultdict[int, _Says]]
    uses = defaultdict(lambda: defaultdict(dict))
    limits: defaultdict[Series, Counter[str]] = defaultdict(Counter)
    calls, near = Counter[str](), dict[Series, float]()
    for process, scrape in enumerate(scrapes):
        for (name, *labels), value in scrape.items():
            if name in _SAYS:
                says, unit = _SAYS[name]
                says = says or _TIMES.get(labels.pop(), "")
                scoped = labels[:2] + [THREAD] * ("thread_id" in _WANTED[name]) + labels[2:]
                uses[*scoped,][process] |= {says: value} | ({"unit": unit} if unit else {})
            elif name in _OF_LIMITS:
                # A decision or a level is the label after the scope.
                event = labels[3] if labels[2:] else "ended"
                limits[*labels[:2],][event] += int(value)
            elif name == names.LIMIT_NEAR.name:
                near[*labels[:2],] = value
            elif name == names.CALLS.name:
                calls[labels[-1]] += int(value)
    all_uses = (_use(key, [*parts.values()], near.get(key[:2])) for key, parts in uses.items())
    known = [use for use in all_uses if use.used is not None or use.refused]
    return Figures(
        threads=tuple(use for use in known if use.scope == THREAD),
        quotas=tuple(use for use in known if use.scope != THREAD),
        limits=tuple(Limit(agent, limit, counts) for (agent, limit), counts in limits.items()),
        ran=calls[Outcome.ALLOWED] + calls[Outcome.WOULD_BLOCK],
        refused=calls[Outcome.BLOCKED],
        processes=len(scrapes),
    )


def _use(key: Series, parts: list[_Says], near: float | None) -> Use:
    latest = max(parts, key=lambda part: part.get("decided", 0))
    used, most, unit = latest.get("used"), latest.get("most"), latest.get("unit", "calls")
    is_at = None
    if used is not None and most is not None and near is not None:
        scale = PER_BASE_UNIT.get(unit, 1)
        is_at = level(round(used * scale), round(most * scale), near)
    agent, limit, scope, subject = key
    return Use(
        *(subject, agent, limit, scope, unit, used, most, is_at),
        refused=sum(part.get("refused", 0) for part in parts),
        refused_at=max(
            (part["refused_at"] for part in parts if "refused_at" in part), default=None
        ),
        resets_at=latest.get("resets_at"),
    )
