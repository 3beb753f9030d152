"""The page in a real browser, beside running agents."""

import asyncio
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
from starlette.applications import Starlette

from benchmarks.scrape import tracked
from langchain_quota import (
    MemoryStore,
    ModelCallLimit,
    Quota,
    ToolCallLimit,
    quota_app,
    start_metrics_server,
)
from langchain_quota.limits import Limit
from tests.scene import Scene, searching
from tests.server.browser import Tab, opened, serving
from tests.server.prometheus import eventually
from tests.telemetry import Signals, telling

HOSTILE = (
    *("<script>alert(1)</script>", "<img src=x onerror=alert(1)>", "'\"><svg/onload=alert(1)>"),
    *("safe\u202egnp.exe", "x" * 10_000, "a\x00b\ncd", "__proto__", "javascript:alert(1)", "&lt;"),
    *("שלום", "{{7*7}}", "#find=x&open=%00"),
)


class Service:
    """An agent with limits of threads and tenants, and the server of its page."""

    def __init__(self, *limits: Limit, **options: Any) -> None:
        self.signals: Signals = telling(**{"subject_label": {"tenant": str}, **options})
        quotas = [Quota(12, per="tenant"), Quota(100, per="global")]
        limits = limits or (ToolCallLimit("search", thread_limit=10, quotas=quotas),)
        given: Any = {"store": MemoryStore(), "name": "support", "checkpointer": None}
        self._scene = Scene(self.signals, searching, limits, **given)

    def search(self, **counts: int) -> None:
        """Let threads search so often; the part of a name before `_` is the tenant."""

        async def play() -> None:
            for thread, count in counts.items():
                context = {"tenant": thread.partition("_")[0] or "nobody"}
                await self._scene.play(str(count), thread_id=thread or None, context=context)

        # A browser's events take the event loop of the test's own thread.
        with ThreadPoolExecutor(1) as pool:
            pool.submit(asyncio.run, play()).result()

    def serve(self, port: int = 0) -> Any:
        return start_metrics_server(port, registry=self.signals.registry)


@pytest.fixture
def service() -> Service:
    """A service in which each state is to be seen."""
    made = Service()
    made.search(acme_1=11, acme_2=3, umbrella_1=8, hooli_1=1)
    return made


@contextmanager
def page(service: Service, **options: Any) -> Iterator[Tab]:
    """The page of a service, in a browser."""
    with service.serve() as server, opened(str(server.page_url), **options) as tab:
        yield tab


def test_its_numbers_are_true(service: Service) -> None:
    """Rows and tiles say what the agents did, the nearest first, and go on doing so.

    A click or Enter shows all limits of a row.
    """
    with page(service) as tab:
        shown = [(*row[:2], row[2].removeprefix("tool:search"), row[3]) for row in tab.rows()]
        assert shown == [
            ("acme_1 support", "■ blocked", " · thread10 of 10 calls · 100 %", "0"),
            ("acme_2 support", "■ blocked", " · tenant acme12 of 12 calls · 100 %", "0"),
            ("umbrella_1 support", "▲ near", "8 of 10 calls · 80 %", "2"),
            ("hooli_1 support", "fine", "1 of 10 calls · 10 %", "9"),
        ]
        assert [row[5] for row in tab.rows()] == ["1", "1", "0", "0"]
        used = [(row[0].split()[0], row[2]) for row in tab.rows("subjects")]
        assert used == [
            ("acme", "tool:search · tenant12 of 12 calls · 100 %"),
            ("umbrella", "tool:search8 of 12 calls · 66 %"),
            ("everybody", "tool:search21 of 100 calls · 21 %"),
            ("hooli", "tool:search1 of 12 calls · 8 %"),
        ]
        tiles = [" ".join(each.split()) for each in tab.page.locator(".tile").all_inner_texts()]
        assert tiles[:2] == [
            "Blocked, last 5 min 2 conversations, 1 shared",
            "At their limits 1 conversation, 1 shared; 1 near",
        ]
        for key in ("Enter", None):
            who = tab.page.locator("#threads .who").nth(1)
            who.press(key) if key else who.click()
            tab.wait_for(f"document.querySelectorAll('tr.more').length === {1 if key else 0}")
        service.search(hooli_1=2)
        tab.wait_for("document.querySelector('#threads').innerText.includes('3 of 10 calls')")


CLIPBOARD = {"permissions": ["clipboard-read", "clipboard-write"]}
READ = "navigator.clipboard.readText()"


def test_what_was_refused(service: Service) -> None:
    """An opened row has its last refusals, with traces to copy; a chart has the calls by minute."""
    with page(service, **CLIPBOARD) as tab:
        chart = tab.page.locator("#calls .chart")
        label = "Calls by minute: 21 allowed and 2 blocked in the last hour, most of them at "
        assert (chart.get_attribute("aria-label") or "").startswith(label)
        titles = [each.get_attribute("title") or "" for each in chart.locator("span").all()]
        counts = [int(each) for title in titles for each in re.findall(r" (\d+) [ab]", title)]
        assert (len(titles), sum(counts[::2]), sum(counts[1::2])) == (60, 21, 2)
        heights = "[...document.querySelectorAll('.chart i')].map(bar => bar.offsetHeight)"
        assert max(tab.page.evaluate(heights)) > 20
        tab.page.locator("#threads .who").nth(1).click()
        [row] = tab.page.locator("table.last tbody tr").all()
        when, *refusal, trace = row.locator("td").all_inner_texts()
        assert re.search(r"\d:\d\d:\d\d.* · \d+ s ago$", when)
        assert refusal == ["search", "tool:search · tenant acme", "12 of 12 calls"]
        blocked = [
            each for each in service.signals.decision_spans() if "acme" in str(each.to_json())
        ]
        assert trace in {f"{each.context.trace_id:032x}" for each in blocked if each.context}
        row.get_by_role("button").click()
        tab.wait_for(f"{READ}.then(text => text === '{trace}')")
        assert tab.page.locator("tr.more").count() == 1


@pytest.mark.parametrize("way", ["copied", "selected"])
def test_how_customers_get_names(way: str) -> None:
    """Where customers have none, the page has the argument that names them, to be copied."""
    service = Service(subject_label={})
    service.search(acme_1=1)
    with page(service, **(CLIPBOARD if way == "copied" else {})) as tab:
        code = tab.page.locator("#unnamed code").inner_text()
        if way == "selected":  # as in a page that is not served from this machine by https
            tab.page.evaluate("Object.defineProperty(navigator, 'clipboard', {value: undefined})")
        tab.page.get_by_role("button", name="Copy").click()
        tab.wait_for(
            f"{READ if way == 'copied' else 'Promise.resolve(`${getSelection()}`)'}"
            f".then(text => text === {code!r})"
        )
    assert code == 'telemetry=Telemetry(subject_label={"tenant": str})'


def test_a_run_that_is_over() -> None:
    """A run that its limit has ended blocks nothing more: its row has its state, and names it."""
    service = Service(ModelCallLimit(run_limit=1), ToolCallLimit("search", thread_limit=10))
    service.search(hooli_1=9)
    with page(service) as tab:
        [row] = tab.rows()
        assert row[1:3] == ["▲ near was blocked by model · run", "tool:search9 of 10 calls · 90 %"]
        assert tab.page.locator("#tile-blocked b").inner_text() == "1"
        assert tab.page.locator("#threads .exhausted").count() == 0


def test_sort_and_filter(service: Service) -> None:
    """A click sorts, a second one the other way; words and tiles filter; a reload keeps it all."""
    with page(service) as tab:
        for clicks, first in ((1, "acme_1"), (2, "umbrella_1")):
            tab.page.locator("#sort-threads-name").click()
            tab.wait_for(f"document.querySelector('#threads .who').innerText === '{first}'")
            order = ("ascending", "descending")[clicks - 1]
            assert tab.page.locator("#threads th[aria-sort]").get_attribute("aria-sort") == order
        tab.page.keyboard.press("/")
        tab.page.keyboard.type("ACME")
        tab.wait_for("document.querySelectorAll('#threads tr.row').length === 2")
        tab.page.locator("#tile-exhausted").click()
        tab.wait_for("document.querySelectorAll('#threads tr.row').length === 1")
        tab.page.reload()
        tab.wait_for("document.querySelectorAll('#threads tr.row').length === 1")
        assert tab.page.locator("#find").input_value() == "ACME"
        assert tab.page.locator("#h-threads").inner_text() == "Conversations 1 of 4"


def test_selected_text_and_the_focus_stay(service: Service) -> None:
    """An update changes numbers in place: neither the focus nor a text selection is lost."""
    with page(service) as tab:
        tab.page.locator("#threads .who").nth(3).focus()
        tab.page.evaluate(
            "getSelection().selectAllChildren(document.querySelectorAll('#threads .who bdi')[3])"
        )
        service.search(hooli_1=9)
        tab.wait_for("document.querySelector('#threads').innerText.includes('10 of 10 calls')")
        tab.wait_for("document.querySelectorAll('#threads .exhausted.number').length === 2")
        assert tab.page.evaluate("getSelection().toString()") == "hooli_1"
        assert "hooli_1" in str(tab.page.evaluate("document.activeElement.id"))


HIDE = """value => {
    Object.defineProperty(document, "hidden", {value, configurable: true});
    document.dispatchEvent(new Event("visibilitychange"));
}"""
"""What the browser does where another tab is shown, or this one again."""


@pytest.mark.parametrize("how", ["hidden", "paused"])
def test_a_hidden_tab_is_silent(how: str, service: Service) -> None:
    """Hidden or paused, it asks nothing; shown again, it asks at once."""
    with page(service) as tab:

        def switch(*, off: bool) -> None:
            if how == "hidden":
                tab.page.evaluate(HIDE, off)
            else:
                tab.page.locator("#pause").click()

        tab.page.clock.install()
        switch(off=True)
        before = len(tab.requests)
        tab.page.clock.run_for(60_000)
        assert len(tab.requests) == before
        switch(off=False)
        eventually(lambda: tab.page.title() and len(tab.requests) > before)


def test_a_server_that_is_gone(service: Service) -> None:
    """A banner says so, with the age of the figures, until it answers again."""
    with service.serve() as server, opened(str(server.page_url)) as tab:
        assert not tab.page.locator("#banner").is_visible()
        server.close()
        banner = tab.page.locator("#banner")
        banner.wait_for()
        tab.wait_for("document.querySelector('#banner').innerText.match(/are [1-9] s old/)")
        assert banner.inner_text().startswith("The server does not answer. These figures are ")
        with service.serve(server.port):
            banner.wait_for(state="hidden")


def test_hostile_names() -> None:
    """Names of attackers are text: no script runs, none is wider than the page, all are found."""
    service = Service()
    service.search(**dict.fromkeys(HOSTILE, 1))
    with page(service) as tab:
        names = tab.names()
        assert len(names) == len(HOSTILE)
        assert {"<script>alert(1)</script>", "__proto__", "javascript:alert(1)", "&lt;"} <= {*names}
        assert max(map(len, names)) <= 64
        assert not any("\u202e" in name for name in names)
        for index in range(len(HOSTILE)):
            tab.page.locator("#threads .who").nth(index).click()
        assert tab.page.locator("tr.more").count() == len(HOSTILE)
        assert tab.page.locator("main script, main img, main svg").count() == 0
        assert tab.page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        assert tab.faults == []
        attempt = "try { document.body.innerHTML = '<b>'; 0 } catch (error) { error.name }"
        assert tab.page.evaluate(attempt) == "TypeError"
        tab.faults.clear()  # the browser reports the attempt


def test_five_thousand_threads() -> None:
    """The page has 50 rows of what is exported, and more at a click; it says what it leaves out."""
    with (
        start_metrics_server(0, registry=tracked(5_000)) as server,
        opened(str(server.page_url)) as tab,
    ):
        assert len(tab.names()) == 50
        notes = tab.page.locator("#threads .note").all_inner_texts()
        assert [note.split(":")[0] for note in notes] == [
            "450 more",
            "4,500 more are counted but not listed",
        ]
        tab.page.locator("#more-threads").click()
        tab.wait_for("document.querySelectorAll('#threads .who').length === 100")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
def test_everybody_can_use_it(scheme: Any, width: int, service: Service) -> None:
    """On a phone nothing is cut off; contrast, roles and names are right by axe."""
    size: Any = {"width": width, "height": 844}
    with page(service, viewport=size, color_scheme=scheme, bypass_csp=True) as tab:
        tab.page.locator("#threads .who").first.click()
        assert tab.page.evaluate("document.documentElement.scrollWidth") == width
        assert tab.violations() == []


def test_in_an_application(service: Service) -> None:
    """Mounted in an application under uvicorn, it is the same page."""
    app = Starlette()
    app.mount("/quota", quota_app(service.signals.registry, dashboards_url="https://g.example/d"))
    with serving(app) as url, opened(f"{url}/quota") as tab:
        assert tab.names()[0] == "acme_1"
        assert tab.page.locator("footer a").get_attribute("href") == "https://g.example/d"


def test_no_data_yet() -> None:
    """Without conversations the page says why: no call was made, or none with a thread_id."""
    service = Service(ToolCallLimit("search", run_limit=3))
    with service.serve() as server, opened(str(server.page_url)) as tab:
        assert "No data yet" in tab.page.locator("#threads").inner_text()
        service.search(**{"": 1})
        tab.wait_for("document.querySelector('#threads').innerText.includes('no thread_id')")
