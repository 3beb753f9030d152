"""`langchain-quota top`: from answers to figures, rows, screens and lines; the keys."""

import io
from dataclasses import replace
from typing import Any

import pytest
from rich.cells import cell_len
from rich.console import Console

from langchain_quota import Level
from langchain_quota.cli import main
from langchain_quota.cli.top_figures import WINDOW, Figures, Growth, Limit, Use, figures
from langchain_quota.cli.top_options import ORDERS
from langchain_quota.cli.top_sources import Scrape, Series
from langchain_quota.cli.top_table import (
    View,
    compact,
    lasting,
    lines,
    percent,
    press,
    rows,
    screen,
)
from langchain_quota.decision import Unit
from langchain_quota.telemetry import names
from langchain_quota.telemetry.names import MetricSpec

ANN = {"agent": "support", "limit": "tool:search", "thread_id": "ann"}
DECIDED = names.LIMIT_DECISIONS
NOW = 1_800_000_000.0

Sample = tuple[Series, float]


def sample(spec: MetricSpec, value: float, **labels: str) -> Sample:
    return (spec.name, *(labels[each] for each in spec.labels)), value


def process(*samples: Sample) -> Scrape:
    return dict(samples)


def use_of(used: float, limit: float, unit: Unit = "calls", **labels: str) -> list[Sample]:
    ann = ANN | labels
    return [
        sample(names.THREAD_USED[unit], used, **ann),
        sample(names.THREAD_LIMIT[unit], limit, **ann),
        sample(names.LIMIT_NEAR, 0.8, **ann),
    ]


def refusals(value: float) -> Sample:
    of = {"agent": "support", "limit": "tool:search", "scope": "run", "decision": "blocked"}
    return sample(DECIDED, value, **of)


REFUSED = refusals(0)[0]


class TestGrowth:
    """How fast counters grow."""

    @pytest.mark.parametrize(
        ("values", "gain"),
        [([10, 16], 6), ([10, 4], 4), ([10, None, 4], 4), ([None, 4], 4)],
        ids=["grows", "restarts", "vanishes and begins again", "begins"],
    )
    def test_rate(self, values: list[float | None], gain: float) -> None:
        """Gains by the time; what begins again or begins while it is watched began at 0."""
        growth = Growth()
        for at, value in enumerate(values):
            assert growth.rates(at) is None or at > 1
            growth.take("one", process(*([] if value is None else [refusals(value)])), at)
        rates = growth.rates(len(values) - 1)
        assert rates is not None
        assert rates[REFUSED] * (len(values) - 1) == gain

    def test_several_processes(self) -> None:
        """Gains are added; what a process had before it was first seen is none."""
        growth = Growth()
        growth.take("a", process(refusals(5)), 0)
        growth.take("b", process(refusals(100)), 0)
        growth.take("later", process(refusals(900)), 10)
        growth.take("a", process(refusals(8)), 10)
        growth.take("b", process(refusals(107)), 10)
        assert growth.rates(10) == {REFUSED: 1.0}

    def test_window(self) -> None:
        """What was gained before the window counts no more, and takes no room."""
        growth = Growth()
        for second in range(2_000):
            growth.take("one", process(refusals(1_000_000 if second else 0)), second)
            rates = growth.rates(second + 0.5)
        assert rates is not None
        assert sum(rates.values()) == 0
        assert len(growth._gains) <= WINDOW + 1


class TestFigures:
    """What several processes say together."""

    def test_a_thread_in_two_processes(self) -> None:
        """Refusals are added; what is used is what the one says that judged last."""
        scrapes = [
            process(
                *use_of(used, 10),
                sample(names.THREAD_DECIDED, at, **ANN),
                sample(names.THREAD_BLOCKED, used, **ANN),
                sample(names.THREAD_REFUSED, at, **ANN),
                refusals(used),
            )
            for used, at in ((9, NOW - 5), (1, NOW))
        ]
        for order in (scrapes, scrapes[::-1]):
            found = figures(order)
            (thread,) = found.threads
            assert (thread.used, thread.refused, thread.refused_at) == (1, 10, NOW)
            assert [limit.refused for limit in found.limits] == [10]
            assert found.processes == 2

    def test_a_subject_in_two_processes(self) -> None:
        """Who is near is counted once, though two processes have served them."""
        ann = [*use_of(9, 10), sample(names.SUBJECTS, 1, **ANN, scope="thread", state="near")]
        tenants = sample(names.SUBJECTS, 3, **ANN, scope="tenant", state="near")
        scrapes = [process(*ann, tenants)] * 2
        assert [each.near for each in figures(scrapes).limits] == [1 + 3]
        bob = process(*use_of(9, 10, thread_id="bob"))
        assert [each.near for each in figures([*scrapes, bob]).limits] == [2 + 3]

    def test_level(self) -> None:
        """How near a thread is, by the limit's own share; nobody is near what is on trial."""
        scrape = process(*use_of(0.3, 0.375, "microdollars"), *use_of(7, 10, thread_id="bob"))
        assert {each.level for each in figures([scrape]).threads} == {Level.NEAR, Level.OK}
        (thread,) = figures([process(*use_of(20, 10)[:2])]).threads
        assert (thread.level, thread.share) == (None, 2)

    def test_budgets(self) -> None:
        """A thread's use of a budget is in dollars; of one without thread limit, what it spent."""
        tokens = sample(names.THREAD_SPENT["tokens"], 1200, **ANN | {"limit": "per run"})
        dollars = use_of(0.45, 0.5, "microdollars")
        scrapes = [process(*dollars, tokens)] * 2
        found = {(each.unit, each.used, each.most) for each in figures(scrapes).threads}
        assert found == {("microdollars", 0.45, 0.5), ("tokens", 2400, None)}

    def test_a_thread_without_limit(self) -> None:
        """A thread that was only judged has no row; one that was refused has."""
        judged = sample(names.THREAD_DECIDED, NOW, **ANN)
        assert figures([process(judged)]).threads == ()
        (thread,) = figures([process(judged, sample(names.THREAD_BLOCKED, 1, **ANN))]).threads
        assert (thread.used, thread.share, thread.refused) == (None, None, 1)

    def test_limits(self) -> None:
        """A limit's row: charges without refunds, refusals of all scopes, grants, ended runs."""
        of = {"agent": "support", "limit": "tool:search", "scope": "thread"}
        decided = {"allowed": 9, "refunded": 2, "blocked": 3, "would_block": 4}
        scrape = process(
            *(sample(DECIDED, count, **of, decision=each) for each, count in decided.items()),
            refusals(10),
            sample(names.SUBJECTS, 7, **of, state="exhausted"),
            sample(names.RUNS_ENDED, 8, **of),
            sample(names.GRANTED["microdollars"], 1.5, **of),
        )
        (found,) = figures([scrape], {REFUSED: 0.5}).limits
        assert found == Limit(
            *("support", "tool:search", 7, 13, 4, 30.0),
            exhausted=7,
            ended=8,
            granted=1.5,
            unit="microdollars",
        )

    def test_calls(self) -> None:
        """Calls that ran and calls that were refused; a call that would be refused ran."""
        of = {"agent": "support", "kind": "tool", "tool": "search"}
        decided = {"allowed": 5, "would_block": 1, "blocked": 2, "skipped": 4}
        calls = [sample(names.CALLS, n, **of, decision=each) for each, n in decided.items()]
        found = figures([process(*calls)], {calls[2][0]: 0.1})
        assert (found.ran, found.refused) == (6, 2)
        assert found.refused_a_minute == pytest.approx(6)


def use(subject: str, used: float = 1, most: float = 10, **values: Any) -> Use:
    of = {"agent": "support", "limit": "tool:search", "scope": "thread", "level": Level.OK}
    return Use(subject=subject, used=used, most=most, **of | values)


class TestView:
    """What is looked at, and what keys do to it."""

    KNOWN = Figures(
        threads=(
            use("ann", 5, refused=1),
            use("bob", 9, agent="Writer"),
            use("cid", 7, refused=8),
            use("dan", 99, level=None, limit="trial"),
        ),
        limits=(Limit("a", "one", refused=9, near=1), Limit("a", "two", refused_a_minute=1)),
    )

    @pytest.mark.parametrize(
        ("view", "expected"),
        [
            (View(), ["bob", "cid", "ann", "dan"]),
            (View(order="refused"), ["cid", "ann", "bob", "dan"]),
            (View(order="name"), ["ann", "bob", "cid", "dan"]),
            (View(text="WRIT"), ["bob"]),
            (View(text="trial"), ["dan"]),
            (View(text="["), []),
            (View("limits"), ["two", "one"]),
            (View("limits", "share"), ["one", "two"]),
        ],
    )
    def test_rows(self, view: View, expected: list[str]) -> None:
        """Orders, and texts that a name must have; what is on trial is near to nothing."""
        name = {"threads": "subject", "limits": "limit"}[view.name]
        assert [getattr(row, name) for row in rows(self.KNOWN, view)] == expected

    @pytest.mark.parametrize(
        ("keys", "expected"),
        [
            (["3"], {"name": "limits"}),
            (["4", "0", "²", "x", "é", "\r"], {}),
            (["s"], {"order": "refused"}),
            (["s", "s", "s"], {"order": "share"}),
            (["2", "s"], {"name": "quotas", "order": "name"}),
            ([" "], {"paused": True}),
            ([" ", " "], {}),
            (["q"], {"ended": True}),
            (["\x1b[B", "\x1b[B", "\x1b[A"], {"first": 1}),
            (["\x1b[A"], {}),
            (["\x1b[6~", "\x1b[6~", "\x1b[5~"], {"first": 20}),
            (["\x1b[B", "1"], {}),
            (["/", "w", "q", "\x7f", "\r"], {"text": "w"}),
            (["/", "é", "\x1b"], {}),
            (["/", "x"], {"text": "x", "is_typing": True}),
            (["/", "x", "\r", "/", "y", "\x1b[A", "\r"], {"text": "xy"}),
            (["/", "x", "\r", "\x1b"], {}),
        ],
    )
    def test_keys(self, keys: list[str], expected: dict[str, Any]) -> None:
        """What each key does; while a filter is typed, letters are letters."""
        view = View()
        for key in keys:
            view = press(view, key, page=20)
        assert view == replace(View(), **expected)


@pytest.mark.parametrize(
    ("value", "unit", "expected"),
    [
        (None, "calls", "-"),
        (8, "calls", "8"),
        (0.25, "calls", "0.2"),
        (99_999, "calls", "99,999"),
        (100_000, "calls", "100k"),
        (999_999, "tokens", "1M tok"),
        (1e20, "tokens", "1e+08T tok"),
        (0.5, "microdollars", "$0.50"),
        (0.0042, "microdollars", "$0.0042"),
        (0.000042, "microdollars", "$0.000042"),
        (1234.5, "microdollars", "$1,234.50"),
        (0, "microdollars", "$0.00"),
        (2_500_000, "microdollars", "$2.5M"),
    ],
)
def test_compact(value: float | None, unit: Unit, expected: str) -> None:
    """Amounts are short, and say their unit where it is not calls."""
    assert compact(value, unit) == expected


def test_shares_do_not_round_up() -> None:
    """All is used only at 100 %, and something is used if it is not 0 %."""
    assert [percent(each) for each in (None, 0, 0.001, 0.999, 1, 1.5, 1e9)] == [
        *("-", "0%", "1%", "99%", "100%", "150%", "999%")
    ]
    assert [lasting(each) for each in (None, -5, 0.4, 59, 60, 7_300, 1e9)] == [
        *("", "0s", "0s", "59s", "1m", "2h", "999d")
    ]


HOSTILE = ("a\x1b[2Jb", "line\nbreak", "\u202etxt", "名前" * 40, "x" * 3000, "[bold]m[/]", "\ud800")


def drawn(known: Figures | None, view: View | None = None, **options: Any) -> list[str]:
    """The lines of the screen, as they are written to a terminal."""
    raw = io.BytesIO()
    settings = {"color_system": None, "width": 80, "height": 24} | options
    faults, encoding = settings.pop("faults", ()), settings.pop("encoding", "utf-8")
    file = io.TextIOWrapper(raw, encoding=encoding, errors="backslashreplace")
    console = Console(file=file, **settings)
    shown = screen(known, view or View(), console=console, addresses=1, faults=faults, now=NOW)
    console.print(shown)
    file.flush()
    return raw.getvalue().decode(encoding).removesuffix("\n").split("\n")


class TestScreen:
    """What a terminal shows."""

    MANY = Figures(threads=tuple(use(f"customer-{each}", each, 100_000) for each in range(10_000)))

    @pytest.mark.parametrize("size", [(80, 24), (140, 40), (40, 10), (300, 100)])
    @pytest.mark.parametrize("name", ORDERS)
    def test_it_fits(self, size: tuple[int, int], name: str) -> None:
        """Every view of hostile names fills a terminal of any size, and is not larger."""
        width, height = size
        known = Figures(
            threads=tuple(use(each, agent=each, limit=each) for each in HOSTILE) * 30,
            quotas=tuple(use(each, agent=each, scope=each) for each in HOSTILE) * 30,
            limits=tuple(Limit(each, each) for each in HOSTILE) * 30,
        )
        shown = drawn(known, View(name), width=width, height=height)
        assert len(shown) == height
        assert all(cell_len(each) <= width for each in shown)
        assert all(each.isprintable() for each in shown)

    def test_a_row(self) -> None:
        """A row says who, of what, how much, how often and when refused; more where it is wide."""
        row = use("ann", 8, 8, level=Level.EXHAUSTED, refused=3, refused_at=NOW - 61)
        found = drawn(Figures(threads=(row,)))[4].split()
        assert found == ["ann", "support", "tool:search", "8/8", "100%!", "3", "1m", "▇" * 6]
        assert " exhausted " in drawn(Figures(threads=(row,)), width=140)[4]
        tokens = row._replace(unit="tokens", used=1.5e6, most=2e6)
        assert "1.5M/2M tok" in drawn(Figures(threads=(tokens,)))[4]

    def test_faults(self) -> None:
        """Addresses that fail are named, a line each, and not more than three lines."""
        faults = tuple(f"http://h:{each}: no answer" for each in range(5))
        shown = drawn(self.MANY, faults=faults)
        assert [each.strip() for each in shown[2:5]] == [*faults[:2], "and 3 more addresses fail"]
        assert len(shown) == 24

    def test_nothing(self) -> None:
        """Before the first answer, and without rows, the screen says so."""
        assert "asking ..." in drawn(None)[0]
        assert "no thread has used anything yet" in drawn(Figures())[4]
        assert "are seen with subject_label" in drawn(Figures(), View("quotas"))[4]
        assert "nothing matches; Esc clears" in drawn(self.MANY, View(text="zz"))[4]

    def test_filter(self) -> None:
        """What is typed is shown, and what it leaves."""
        shown = drawn(self.MANY, View(text="7", is_typing=True))
        assert "filter: 7_" in shown[23]
        assert "1-19 of 3,439" in shown[2]

    def test_ascii(self) -> None:
        """A terminal without UTF-8 gets what it can show."""
        shown = drawn(Figures(threads=(use("é", 5),)), encoding="ascii")[4]
        assert "\\xe9" in shown
        assert "###" in shown


def test_lines() -> None:
    """As plain text: all rows of each view below their headings; names forge no line."""
    known = Figures(
        threads=(use("ann\nlimit", 3, 4, refused=2, refused_at=NOW - 5), use("bob")),
        quotas=(use("", 0.5, 1, scope="tenant", unit="microdollars", resets_at=NOW + 3600),),
        limits=(Limit("support", "model", 5, 6, near=1),),
        ran=10,
        refused=2,
        refused_a_minute=0.5,
    )
    found = [" ".join(each.split()) for each in lines(known, View(), [*ORDERS], NOW)]
    assert [each for each in found if each] == [
        "calls 10 ran, 2 refused (0.5/min) 1 near, 0 exhausted",
        "threads:",
        "thread agent limit used/of share state refused ago ends in",
        "ann\\nlimit support tool:search 3/4 75% ok 2 5s",
        "bob support tool:search 1/10 10% ok 0",
        "quotas:",
        "subject quota agent limit used/of share state ends in",
        "- tenant support tool:search $0.50/$1.00 50% ok 1h",
        "limits:",
        "agent limit allowed refused /min on trial near exhausted ended runs granted",
        "support model 5 6 - 0 1 0 0 0",
    ]


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["http://user:secret@host"], "ADDRESS"),
        (["host:port"], "ADDRESS"),
        (["--interval", "0"], "--interval"),
        (["--interval", "nan"], "--interval"),
        (["--view", "all"], "--view"),
    ],
)
def test_wrong_arguments(
    arguments: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A wrong value is code 2, and the option is named."""
    with pytest.raises(SystemExit) as ended:
        main(["top", *arguments])
    assert ended.value.code == 2
    assert f"argument {reason}" in capsys.readouterr().err.splitlines()[-1]
