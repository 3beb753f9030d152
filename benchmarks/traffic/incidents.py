"""Twenty minutes in which things go wrong: what happens when, and how soon somebody is told."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

from benchmarks.traffic.agents import WINDOW, Question
from benchmarks.traffic.truth import Truth
from langchain_quota import cli
from tests.server.alertmanager import Notification

SECONDS = 20 * 60
"""How long users ask, in simulated seconds; then all processes are killed."""

_MINUTE = 60.0
OUTAGES = {
    "redis": (8 * _MINUTE, 11 * _MINUTE),
    "postgresql": (15.5 * _MINUTE, 18.5 * _MINUTE),
}
"""When each store is lost, and when it is back, in simulated seconds."""

RESTART, DEPLOY = 4.5 * _MINUTE, 12.25 * _MINUTE
"""When a replica restarts, and when all are replaced; a smooth quota refuses calls at both."""

_GRANT, _FREEZE, _THAW = 11.5 * _MINUTE, 11.75 * _MINUTE, 16 * _MINUTE
"""When a tenant gets more of its plan; when another one is frozen, and may call again."""

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
        over: When it is over, by the clock; `None` if it lasts.
    """

    name: str
    at: float | None
    alert: str
    labels: dict[str, str]
    within: int
    over: float | None = None


class Told(NamedTuple):
    """How an incident was told: by which notification, and how many simulated seconds after it."""

    incident: Incident
    by: Notification | None
    after: float | None
    ended: float | None = None
    """How many simulated seconds after its end the alert was resolved."""


def questions() -> Iterator[Question]:
    """What users ask beside the usual: they run into limits, one after the other."""
    # A small limit of the writer first: what comes later must not be hidden behind it.
    for turn in range(32):
        at = 2 * _MINUTE + 30 * turn
        yield Question(at, "writer", "small-0", "user-01", "tenant-1", " ".join(["browse"] * 4))
        # A silent limit refuses until its process dies.
        yield Question(at, "researcher", "silent-0", "user-01", "tenant-1", "browse " * 5)
    # So many drafts use up what all writers may spend in an hour.
    for turn in range(75):
        at, thread = 4 * _MINUTE + turn, f"rush-{turn}"
        yield Question(at, "writer", thread, "user-02", "tenant-2", "|".join(["draft draft"] * 3))
    # Twice the rate of a smooth quota. Who waits holds up no question: each has its own thread.
    for turn in range(220):
        at, thread = 3 * _MINUTE + 3 * turn, f"embed-{turn}"
        yield Question(at, "desk", thread, "user-04", "tenant-0", "embed embed embed")
    # A quota is used up, and nobody asks until its window ends.
    for turn in range(6):
        yield Question(
            5 * _MINUTE + 10 * turn, "desk", "tally-0", "user-04", "tenant-0", "tally tally"
        )
    # A tenant uses up its plan.
    for turn in range(34):
        at = 6 * _MINUTE + (5 * turn if turn < 10 else 22 * turn - 170)
        text = "|".join(["lookup lookup lookup lookup"] * 3)
        yield Question(at, "support", f"plan-{turn % 5}", "user-03", "tenant-3", text)
    # A customer comes near her budget: 17 of 20.
    for turn in range(17):
        yield Question(7 * _MINUTE + turn, "desk", "near-0", "user-01", "tenant-1", "translate")
    # Each of three processes asks every 15 seconds: so often a store must be asked to be seen back.
    for at in range(30, SECONDS, 5):
        yield Question(at, "planner", f"plans-{at}", "user-05", "tenant-0", "plan")


def operations(store: str) -> dict[float, Callable[[], object]]:
    """What operators do with the command, by the simulated second; a freeze is told to nobody."""

    def quotas(action: str, tenant: str, *more: str) -> Callable[[], object]:
        subject = ("--per", "tenant", "--subject", tenant, "--store", store)
        return partial(cli.main, ["quotas", action, *more, *subject])

    return {
        _GRANT: quotas("grant", "tenant-3", "400", "--limit", "tool:lookup"),
        _FREEZE: quotas("freeze", "tenant-2", "--reason", "key leaked"),
        _THAW: quotas("thaw", "tenant-2"),
    }


def incidents(truth: Truth, begun: float, gone: float, speed: float) -> list[Incident]:
    """What has happened.

    Args:
        truth: What was written down.
        begun: When users began to ask, by the clock.
        gone: When all processes were killed.
        speed: How many simulated seconds pass in a real one.
    """
    times = truth.refusal_times("agent", "limit", "scope")
    first = {key: moments[0] for key, moments in times.items()}
    window = WINDOW / speed
    tallied = times.get(("desk", "tool:tally", "agent"))
    ends = tallied and (tallied[1] // window + 1) * window
    near = begun + (7 * _MINUTE + 16) / speed

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
            *(refused("researcher", "tool:lookup", "run"), hit),
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
            over=begun + _GRANT / speed,
        ),
        Incident(
            "a smooth quota is over its rate",
            # Calls wait before the first one is refused.
            *(begun + 3 * _MINUTE / speed, "LangChainQuotaRateExceeded"),
            *(limit("desk", "tool:embed"), _SOON),
        ),
        Incident(
            "a window ends while its alert fires",
            *(refused("desk", "tool:tally", "agent"), used_up, limit("desk", "tool:tally"), _SOON),
            over=ends,
        ),
        Incident(
            "a customer is near her budget",
            *(near, "LangChainQuotaRunsOutSoon", limit("desk", "tool:translate"), _SOON),
        ),
        *(
            Incident(
                f"{kind} is lost for {(ends - begins) / _MINUTE:.0f} minutes",
                *(begun + begins / speed, "LangChainQuotaEnforcementDegraded", {"store": kind}),
                _SOON_WITHOUT_STORE,
                begun + ends / speed,
            )
            for kind, (begins, ends) in OUTAGES.items()
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
                and _is_about(each, incident)
                and each.at >= incident.at
            ):
                return Told(incident, each, (each.at - incident.at) * speed, ended(incident, each))
        return Told(incident, None, None)

    def ended(incident: Incident, by: Notification) -> float | None:
        for post in messages:
            for each in post:
                if each.status == "resolved" and each.labels == by.labels and each.at > by.at:
                    return None if incident.over is None else (each.at - incident.over) * speed
        return None

    return [told_of(each) for each in happened]


def _is_about(notification: Notification, incident: Incident) -> bool:
    """Whether a notification has an incident's labels; a store's begins with its kind."""
    labels = notification.labels
    return all(labels.get(name, "").startswith(value) for name, value in incident.labels.items())


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
                incident.alert == each.labels["alertname"] and _is_about(each, incident)
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
    yield f"{'event':<42}{'happened':>9}{'told':>7}{'after':>7}{'ended after':>13}  {'to':<10}words"
    for incident, by, after, ended in told(happened, messages, speed):
        late = "" if after is not None and after <= incident.within else "  LATE"
        yield (
            f"{incident.name:<42}{clock(incident.at, begun, speed):>9}"
            f"{clock(by.at if by else None, begun, speed):>7}"
            f"{'' if after is None else f'{after:.0f} s':>7}"
            f"{'' if ended is None else f'{ended:.0f} s':>13}  "
            f"{by.path.strip('/') if by else '':<10}"
            f"{by.annotations.get('summary', '') if by else ''}{late}"
        )
        if by:
            yield f"    {by.annotations.get('description', '')}"
    for title, found in (
        ("told twice", told_twice(messages, speed)),
        ("told beside", for_nothing(happened, messages)),
    ):
        for each in found:
            yield (
                f"{title}: {clock(each.at, begun, speed)} {each.path.strip('/')} "
                f"{each.labels['alertname']}: {each.annotations.get('summary', '')}"
            )
