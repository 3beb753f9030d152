"""Half an hour in which things go wrong: what happens when, and how soon somebody is told."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from benchmarks.traffic.agents import Question
from benchmarks.traffic.truth import Truth
from tests.server.alertmanager import Notification

SECONDS = 27 * 60
"""How long users ask, in simulated seconds; then all processes are killed."""

_MINUTE = 60.0
OUTAGES = ((11 * _MINUTE, 14 * _MINUTE), (17 * _MINUTE, 26 * _MINUTE))
"""When the store is lost, and when it is back, in simulated seconds."""

_SOON, _SOON_WITHOUT_STORE = 90, 150
_TWICE = 600
"""Within so many seconds nothing is told twice."""


class Incident(NamedTuple):
    """Something that somebody must be told.

    Attributes:
        name: What happens.
        at: When it has happened, by the clock; `None` if it has not.
        alert: The alert that tells of it.
        labels: What the alert must say.
        within: How soon, in simulated seconds.
    """

    name: str
    at: float | None
    alert: str
    labels: dict[str, str]
    within: int


class Told(NamedTuple):
    """How an incident was told: by which notification, and how many simulated seconds after it."""

    incident: Incident
    by: Notification | None
    after: float | None

    @property
    def in_time(self) -> bool:
        """Whether it was told soon enough."""
        return self.after is not None and self.after <= self.incident.within


def questions() -> Iterator[Question]:
    """What users ask beside the usual: they run into limits, one after the other."""
    # A small limit of the writer first: what comes later must not be hidden behind it.
    for turn in range(48):
        at = 3 * _MINUTE + 30 * turn
        yield Question(at, "writer", "small-0", "user-01", "tenant-1", " ".join(["browse"] * 4))
    # So many drafts use up what all writers may spend in an hour.
    for turn in range(75):
        at, thread = 6 * _MINUTE + turn, f"rush-{turn}"
        yield Question(at, "writer", thread, "user-02", "tenant-2", "|".join(["draft draft"] * 3))
    # A tenant uses up its plan.
    for turn in range(34):
        at = 9 * _MINUTE + (5 * turn if turn < 10 else 30 * turn - 250)
        text = "|".join(["lookup lookup lookup lookup"] * 3)
        yield Question(at, "support", f"plan-{turn % 5}", "user-03", "tenant-3", text)


def incidents(truth: Truth, begun: float, gone: float, speed: float) -> list[Incident]:
    """What has happened.

    Args:
        truth: What was written down.
        begun: When users began to ask, by the clock.
        gone: When all processes were killed.
        speed: How many simulated seconds pass in a real one.
    """
    first = {key: times[0] for key, times in truth.refusal_times("agent", "limit", "scope").items()}

    def refused(agent: str, limit: str, scope: str) -> float | None:
        return first.get((agent, limit, scope))

    def limit(agent: str, name: str) -> dict[str, str]:
        return {"agent": agent, "limit": name}

    hit, used_up = "LangChainQuotaLimitBreached", "LangChainQuotaSharedQuotaExhausted"
    return [
        Incident(
            "a small limit refuses",
            *(refused("writer", "tool:browse", "run"), hit, limit("writer", "tool:browse"), _SOON),
        ),
        Incident(
            "an agent loops",
            *(refused("researcher", "tool:lookup", "run"), "LangChainQuotaThreadKeepsHitting"),
            *(limit("researcher", "tool:lookup"), _SOON),
        ),
        Incident(
            "the money of all writers is used up",
            *(refused("writer", "cost", "global"), used_up, limit("writer", "cost"), _SOON),
        ),
        Incident(
            "the plan of a tenant is used up",
            *(refused("support", "tool:lookup", "tenant"), used_up),
            *(limit("support", "tool:lookup") | {"subject": "tenant-3"}, _SOON),
        ),
        *(
            Incident(
                f"the store is lost for {(ends - begins) / _MINUTE:.0f} minutes",
                *(begun + begins / speed, "LangChainQuotaEnforcementDegraded", {}),
                _SOON_WITHOUT_STORE,
            )
            for begins, ends in OUTAGES
        ),
        Incident("all processes are gone", gone, "LangChainQuotaMetricsMissing", {}, _SOON),
    ]


def told(
    happened: Sequence[Incident], messages: Sequence[Sequence[Notification]], speed: float
) -> list[Told]:
    """How each incident was told."""
    firing = [each for post in messages for each in post if each.status == "firing"]

    def told_of(incident: Incident) -> Told:
        for each in firing:
            if (
                incident.at is not None
                and each.labels["alertname"] == incident.alert
                and incident.labels.items() <= each.labels.items()
                and each.at >= incident.at
            ):
                return Told(incident, each, (each.at - incident.at) * speed)
        return Told(incident, None, None)

    return [told_of(each) for each in happened]


def told_twice(messages: Sequence[Sequence[Notification]], speed: float) -> list[Notification]:
    """The notifications that say nothing but what was said in the ten minutes before."""
    said: dict[tuple[str, frozenset[tuple[str, str]]], tuple[float, str]] = {}
    twice: list[Notification] = []
    for post in messages:
        news = False
        for each in post:
            key = each.path, frozenset(each.labels.items())
            at, status = said.get(key, (0.0, ""))
            news |= status != each.status or (each.at - at) * speed > _TWICE
        for each in post:
            said[each.path, frozenset(each.labels.items())] = each.at, each.status
        if not news:
            twice += post
    return twice


def for_nothing(
    happened: Sequence[Incident], messages: Sequence[Sequence[Notification]]
) -> list[Notification]:
    """The first notifications of alerts that tell of none of the incidents."""
    found: dict[frozenset[tuple[str, str]], Notification] = {}
    for post in messages:
        for each in post:
            tells = any(
                incident.alert == each.labels["alertname"]
                and incident.labels.items() <= each.labels.items()
                for incident in happened
            )
            if each.status == "firing" and not tells:
                found.setdefault(frozenset(each.labels.items()), each)
    return list(found.values())


def clock(at: float | None, begun: float, speed: float) -> str:
    """A moment, in minutes and seconds of simulated time from the beginning."""
    if at is None:
        return "never"
    minutes, seconds = divmod(round((at - begun) * speed), 60)
    return f"{minutes}:{seconds:02}"


def lines(
    happened: Sequence[Incident],
    messages: Sequence[Sequence[Notification]],
    *,
    begun: float,
    speed: float,
) -> Iterator[str]:
    """A table of what happened, when it was told and how; what was told twice, or for nothing."""
    yield f"{'event':<42}{'happened':>9}{'told':>7}{'after':>7}  {'to':<10}text"
    for incident, by, after in told(happened, messages, speed):
        late = "" if after is not None and after <= incident.within else "  LATE"
        yield (
            f"{incident.name:<42}{clock(incident.at, begun, speed):>9}"
            f"{clock(by.at if by else None, begun, speed):>7}"
            f"{'' if after is None else f'{after:.0f} s':>7}  "
            f"{by.path.strip('/') if by else '':<10}"
            f"{by.annotations.get('summary', '') if by else ''}{late}"
        )
    for title, found in (
        ("told twice", told_twice(messages, speed)),
        ("told beside", for_nothing(happened, messages)),
    ):
        for each in found:
            yield (
                f"{title}: {clock(each.at, begun, speed)} {each.path.strip('/')} "
                f"{each.labels['alertname']}: {each.annotations.get('summary', '')}"
            )
