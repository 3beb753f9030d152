"""The command that checks the calls of a decision log again, under other limits."""

import json
import runpy
from argparse import Namespace
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from heapq import merge
from itertools import chain
from math import inf
from operator import itemgetter
from pathlib import Path
from typing import Any

from langchain_quota.cli import CommandError, complain, one_line, printable, say, table
from langchain_quota.core.admission import AcquireResult, Demand, admit
from langchain_quota.core.checks import CallChecks, ResolvedLimit, ResolvedLimits, demands_of
from langchain_quota.core.decide import decide
from langchain_quota.core.decision import Outcome
from langchain_quota.limits import Limit, check_together
from langchain_quota.limits.call import RUN, Call
from langchain_quota.limits.options import BUDGETS, NANODOLLARS, UNITS, counts_calls, whole_amount
from langchain_quota.middleware.context import fixed, quota_check
from langchain_quota.middleware.log_lines import RAN
from langchain_quota.runtime.units import in_base_unit
from langchain_quota.stores.grants import in_utc
from langchain_quota.stores.keys import CountKey, window_end

Line = Mapping[str, Any]
Report = dict[str, Any]
Verdict = tuple[Outcome | None, Mapping[str, str | None]]
"""The decision about a call, with the limits that refuse it; `None` if it would not be made."""


class LogContents:
    """What a log has, which decides which limits can be replayed."""

    def __init__(self, lines: Iterable[Line]) -> None:
        self.subjects = defaultdict[str, dict[str, str]](lambda: {"global": ""})
        """The subjects of each run, by what a quota counts by."""
        self._runs = defaultdict[str, set[str]](set)
        """The runs with calls of each kind."""
        self._has = set[str]()
        for line in lines:
            self._has |= line.get("charged", {}).keys()
            self._has |= {name.rpartition("/")[0] for name in line.get("counts", ())}
            self._has |= {
                f"{name} with reserve {n}" for name, n in line.get("reserved", {}).items()
            }
            if "calls" in line:
                self._runs[_calls(line)[0].kind].add(line["run"])
                self.subjects[line["run"]] |= line["subjects"]

    def lacks(self, limit: Limit) -> str:
        """Return why a limit cannot be replayed; empty if it can."""
        numbers = (limit.thread_limit, limit.run_limit, *(quota.limit for quota in limit.quotas))
        if not (limit.counted and counts_calls(limit)):
            return "it depends on more than counts"
        if any(map(callable, (*numbers, _reserve_of(limit), *limit.tool_prices.values()))):
            return "a function gives an amount"
        if getattr(limit, "wait", None) is not None or limit.exit_behavior == "ask":
            return "its calls wait"
        if any(quota.smooth for quota in limit.quotas):
            return "it has a smooth quota"
        if any(quota.rollover is not None for quota in limit.quotas):
            return "what rolls over is not in the log"
        needs = {limit.counter} & {*BUDGETS}
        needs |= {f"{limit.name} with reserve {_reserve(limit)}"} if _reserve_of(limit) else set()
        missing = needs - self._has | {f"{kind} calls" for kind in limit.kinds - self._runs.keys()}
        for run in chain(*(self._runs[kind] for kind in limit.kinds)):
            missing |= {quota.dimension for quota in limit.quotas} - self.subjects[run].keys()
        return " and ".join(f"the log has no {what}" for what in sorted(missing))


@dataclass(slots=True)
class _Run:
    """What a replay knows of a run."""

    refusals: Counter[str] = field(default_factory=Counter)
    ended: bool = False
    is_final: bool = False
    """Whether the newest model call is the last one of a budget."""
    runs: bool = True
    """Whether one of the newest calls runs."""
    budgets: Mapping[str, str] = field(default_factory=dict)
    """The counters of budgets, by the names of the counts to which the run is charged."""


class Replay:
    """Checks the calls of a log again, line by line.

    Where the log has a count, that of the replay differs from it only by the calls that one of the
    two has charged, and the other has not. So it follows resets, refunds and calls of others. It
    also follows a refund of a call that it has not charged itself, which lets one call more run.
    """

    def __init__(self, limits: Sequence[Limit], contents: LogContents) -> None:
        self._limits, self._subjects = limits, contents.subjects
        self._reserves = any(_reserve_of(limit) is not None for limit in limits)
        self._counts, self._logged = Counter[tuple[str, str]](), dict[tuple[str, str], int]()
        self._runs, self._ended_roots = defaultdict[str, _Run](_Run), set[str]()
        self._since = self._until = inf

    def charge(self, line: Line) -> bool:
        """Charge what calls have used, and return whether they run in the replay."""
        run = self._runs[line["run"]]
        for name, counter in run.budgets.items():
            key, amount = self._key(name, line), line["charged"].get(counter, 0)
            self._counts[key] += amount * run.runs
            if key in self._logged:
                self._logged[key] += amount
        return run.runs

    def check(self, line: Line) -> list[Verdict]:
        """Check calls that were checked together, and return the decisions."""
        run, root, ended = self._runs[line["run"]], line.get("root"), False
        self._resolve(line)
        for name, (before, after) in line.get("counts", {}).items():
            key = self._key(name, line)
            self._counts[key] += before - self._logged.get(key, self._counts[key])
            self._logged[key] = after
        if run.ended or root in self._ended_roots:
            verdicts: list[Verdict] = [(None, {}) for _ in line["calls"]]
        elif line.get("outage"):
            # Whatever the limits, the store would not have answered.
            verdicts = [*map(logged, line["calls"])]
            self._add(line, {name: after - n for name, (n, after) in line["counts"].items()})
        else:
            verdicts, ended = self._check(line, run, _calls(line))
        run.runs = any(outcome in RAN for outcome, _ in verdicts)
        # If a run goes on that a limit ended in the log, too, somebody has resumed it.
        if ended and not line.get("ended"):
            run.ended = True
            self._ended_roots |= {root} if root and not line.get("nested") else set()
        return verdicts

    def _check(self, line: Line, run: _Run, calls: Sequence[Call]) -> tuple[list[Verdict], bool]:
        is_model = calls[0].kind == "model"
        if run.is_final and not is_model:
            return [(Outcome.SKIPPED, {}) for _ in calls], True
        checks = [self._checks(call) for call in calls]
        demands, index_of = demands_of(calls, checks)
        stops = {
            name: max(1, after - run.refusals[name])
            for name, after in self._resolved.stops.items()
            if is_model
            or (self._resolved.by_name[name].unit == "calls" and "structured" not in line)
        }
        result = self._admit(line, demands, stops)
        run.refusals.update(chain(*result.refused))
        if is_model and self._reserves and result.admitted[0]:
            # What a call reserves is checked when its request is known.
            reserving = CallChecks.of(
                limit.with_checks(amount=_reserve(limit.limit), lease=1)
                for limit in checks[0].limits
                if limit.is_budget
            )
            second = self._admit(line, [reserving.demand], stops)
            if second.admitted[0]:
                result = replace(result, refused=({**result.refused[0], **second.refused[0]},))
            else:
                checks, demands, result = [reserving], [reserving.demand], second
        self._add(line, result.charged(demands))
        if is_model:
            limits = checks[0].limits
            budgets = {c.counter: one.limit.counter for one in limits for c in one.checks}
            run.budgets = {name: of for name, of in budgets.items() if of in BUDGETS}
            following = CallChecks.of(limit.with_checks(keep=limit.keep) for limit in limits)
            refused = self._admit(line, [following.demand], {}).refused[0]
            run.is_final = not self._resolved.finalizing.isdisjoint(refused)
        verdicts: list[Verdict] = [
            (decision.outcome, {limit.limit: limit.refusal_scope for limit in decision.refused_by})
            for decision in decide(calls, checks, index_of, result)
        ]
        return verdicts, result.stopped

    def _checks(self, call: Call) -> CallChecks:
        """Return the checks of a call, with the price of a paid tool call."""
        key = call.kind, call.tool
        if key not in self._by_tool:
            self._by_tool[key] = CallChecks.of(
                limit.with_checks(amount=price, keep=limit.keep) if price else limit
                for limit in self._resolved.checks_for(call).limits
                if (price := _price(limit.limit, call)) or limit.limit.kind == call.kind
            )
        return self._by_tool[key]

    def _admit(
        self, line: Line, demands: Sequence[Demand], stops: Mapping[str, int]
    ) -> AcquireResult:
        names = {name for demand in demands for name in demand.amounts}
        used = {name: max(0, self._counts[self._key(name, line)]) for name in names}
        return admit(demands, used, stops, line.get("granted"), line.get("frozen", ()))

    def _add(self, line: Line, amounts: Mapping[str, int]) -> None:
        for name, amount in amounts.items():
            self._counts[self._key(name, line)] += amount

    def _key(self, name: str, line: Line) -> tuple[str, str]:
        """Return the key of a count: its name and its subject."""
        per = _dimension(name)
        return name, line["run"] if per == RUN else self._subjects[line["run"]].get(per, "")

    def _resolve(self, line: Line) -> None:
        """Resolve the limits at the time of a line; the names of counts have no subjects."""
        # The calls were checked a moment before, which may be in an earlier window.
        ends = [window_end(name) for name in line.get("counts", ())]
        time = min([line["time"], *(end - 0.001 for end in ends if end is not None)])
        if not self._since <= time < self._until:
            limits = [_resolved(limit, time) for limit in self._limits]
            times = [check.resets_at for limit in limits for check in limit.checks]
            self._resolved, self._by_tool = ResolvedLimits(limits), dict[object, CallChecks]()
            self._since = time
            self._until = min((end.timestamp() for end in times if end is not None), default=inf)


def logged(call: Mapping[str, Any]) -> Verdict:
    """Return the decision of the log about a call."""
    return Outcome(call["decision"]), call.get("refused_by", {})


def _calls(line: Line) -> list[Call]:
    return [
        Call("tool" if "tool" in call else "model", call.get("tool"), call.get("id"))
        for call in line["calls"]
    ]


@lru_cache(maxsize=4096)
def _dimension(name: str) -> str:
    return name.rpartition("/")[2] if "/" in name else CountKey.parse(name).dimension


def _resolved(limit: Limit, time: float) -> ResolvedLimit:
    checks = [
        quota_check(limit, quota, quota.limit, "", prefix="", now=time) for quota in limit.quotas
    ]
    return fixed(limit).stored(None, None, checks, remembers=False)


def _reserve_of(limit: Limit) -> object:
    return getattr(limit, "reserve", None)


def _reserve(limit: Limit) -> int:
    return whole_amount(limit.unit, "reserve", _reserve_of(limit) or 0)


def _price(limit: Limit, call: Call) -> int:
    return whole_amount("nanodollars", "price", limit.tool_prices.get(str(call.tool), 0))


def run(arguments: Namespace) -> int:
    """Print what other limits would have refused, and return the exit code."""
    limits, unreadable = _read_limits(arguments.limits), list[str]()
    contents = LogContents(_read(arguments.log, unreadable))
    if not contents.subjects:
        raise CommandError(f"no decisions in {', '.join(map(str, arguments.log))}")
    if unreadable:
        complain("replay", f"{len(unreadable)} lines are cut off or no decisions, and are skipped")
    lacking = {limit.name: reason for limit in limits if (reason := contents.lacks(limit))}
    limits = [limit for limit in limits if limit.name not in lacking]
    report = {**_report(limits, contents, _read(arguments.log, [])), "not_replayable": lacking}
    for text in [json.dumps(report)] if arguments.json else _texts(report):
        say(text)
    return 0


def _read_limits(path: Path) -> list[Limit]:
    """Run the user's file, and return its limits."""
    try:
        limits = runpy.run_path(str(path)).get("limits", ())
        limits = getattr(limits, "limits", limits)
        check_together(limits)
    except Exception as error:
        raise CommandError(f"--limits {str(path)!r}: {one_line(error)}") from error
    return [*limits]


def _read(paths: Sequence[Path], unreadable: list[str]) -> Iterator[Line]:
    """Yield the lines of several files in the order of their times."""
    return merge(*(_lines(path, unreadable) for path in paths), key=itemgetter("time"))


def _lines(path: Path, unreadable: list[str]) -> Iterator[Line]:
    try:
        file = path.open(encoding="utf-8", errors="replace")
    except OSError as error:
        raise CommandError(f"cannot read {str(path)!r}: {error.strerror}") from error
    with file:
        for text in file:
            try:
                line = json.loads(text)
                yield {**line, "time": float(line["time"]), "run": line["run"]}
            except (ValueError, TypeError, KeyError):
                unreadable.append(text)


def _report(limits: Sequence[Limit], contents: LogContents, lines: Iterable[Line]) -> Report:
    """Replay the lines, and return the report, as `--json` prints it."""
    replay, saved, calls = Replay(limits, contents), Counter[str](), Counter[str]()
    refused: dict[str, list[tuple[str, str]]] = {limit.name: [] for limit in limits}
    blocked, times = list[tuple[str, str]](), list[str]()
    for line in lines:
        if "charged" in line:
            saved.update({} if replay.charge(line) else line["charged"])
            continue
        times.append(in_utc(line["time"]).isoformat(timespec="seconds"))
        place = times[-1], line["run"]
        for call, (outcome, refused_by) in zip(line["calls"], replay.check(line), strict=True):
            change = (outcome in RAN) - (call["decision"] in RAN)
            calls["changed"] += outcome != call["decision"]
            calls["not_made"] += change < 0
            calls["also_made"] += change > 0
            calls["checked"] += 1
            saved[NANODOLLARS] += call.get("nanodollars", 0) * (change < 0)
            blocked += [place] * (outcome == Outcome.BLOCKED)
            for limit in refused_by.keys() & refused.keys():
                refused[limit].append(place)
    return {
        "from": times[0],
        "to": times[-1],
        "runs": len(contents.subjects),
        "calls": calls,
        "saved": {of: in_base_unit(n, UNITS[of]) for of, n in sorted(saved.items())},
        "blocked": _refusals(contents, blocked),
        "limits": {limit: _refusals(contents, places) for limit, places in refused.items()},
    }


def _refusals(contents: LogContents, places: Sequence[tuple[str, str]]) -> Report:
    """Return how many calls, and which runs and subjects are refused, and the first refusal."""
    runs = dict.fromkeys(run for _, run in places)
    subjects = defaultdict[str, dict[str, None]](dict)
    for per, subject in chain(*(contents.subjects[run].items() for run in runs)):
        subjects[per][subject] = None
    first = (
        {"time": places[0][0], "run": places[0][1], **contents.subjects[places[0][1]]}
        if places
        else None
    )
    return {
        "calls": len(places),
        "runs": len(runs),
        "subjects": {per: [*names] for per, names in subjects.items()},
        "first": first,
    }


def _texts(report: Report) -> Iterator[str]:
    """Yield the lines of a report for people."""
    rows = []
    for name, row in {**report["limits"], "all that block": report["blocked"]}.items():
        subjects = ", ".join(f"{len(names):,} {per}" for per, names in row["subjects"].items())
        first = " ".join(f"{value}" for value in (row["first"] or {}).values())
        rows.append((name, f"{row['calls']:,}", f"{row['runs']:,}", subjects, first))
    headings = ("limit", "refused", "runs", "subjects", "first refusal")
    yield from map(printable, table(headings, rows, right={"refused", "runs"}))
    calls = report["calls"]
    amounts = "".join(f", {amount:,} {of}" for of, amount in report["saved"].items())
    span = f"from {report['from']} to {report['to']}"
    yield f"{calls['checked']:,} calls in {report['runs']:,} runs, {span}"
    yield f"not made: {calls['not_made']:,} calls{amounts}"
    yield f"also made: {calls['also_made']:,} calls; what would follow them is not in the log"
    for limit, reason in report["not_replayable"].items():
        yield printable(f"not replayable: {limit}: {reason}")
    yield "It is assumed that the agents make the same calls until a limit ends their run."
