"""A real browser, Chromium of the system, in which a test opens the page; and an app's server."""

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Thread
from typing import Any

import uvicorn

from tests.server.programs import missing, required_program
from tests.server.prometheus import eventually

try:
    from axe_playwright_python.sync_playwright import Axe  # type: ignore[import-untyped]
    from playwright.sync_api import Page, sync_playwright

    HAS_PLAYWRIGHT = True
except ImportError:
    HAS_PLAYWRIGHT = False


class Tab:
    """A tab of the browser with the page in it, and all that went wrong there."""

    def __init__(self, page: "Page", url: str) -> None:
        self.page = page
        self.faults: list[str] = []
        self.requests: list[str] = []
        page.on("pageerror", lambda error: self.faults.append(str(error)))
        page.on("console", lambda message: self.faults.append(message.text))
        page.on("request", lambda request: self.requests.append(request.url))
        page.goto(url)
        page.locator("#threads h2").wait_for()

    def rows(self, kind: str = "threads") -> list[list[str]]:
        """The texts of the rows, cell by cell, each on one line."""
        return [
            [" ".join(cell.split()) for cell in row.locator("> td").all_inner_texts()]
            for row in self.page.locator(f"#{kind} > table > tbody > tr.row").all()
        ]

    def names(self) -> list[str]:
        """The names of the conversations, from the top."""
        return self.page.locator("#threads .who").all_inner_texts()

    def wait_for(self, script: str) -> None:
        """Wait until an expression of JavaScript is true."""
        # Playwright's own wait evaluates text in the page, which the page's policy forbids.
        eventually(lambda: self.page.evaluate(script))

    def violations(self) -> list[str]:
        """What axe finds wrong for people who see little or use a screen reader."""
        found = Axe().run(self.page).response["violations"]
        return [f"{each['id']}: {each['nodes'][0]['html']}" for each in found]


@contextmanager
def opened(url: str, **options: Any) -> Iterator[Tab]:
    """Open the page in a new browser; no script of it may fail."""
    chromium = required_program("chromium", "chromium")
    if not HAS_PLAYWRIGHT:
        missing("playwright not found: pip install playwright axe-playwright-python")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        tab = Tab(browser.new_page(**options), url)
        yield tab
        faults = [each for each in tab.faults if "net::ERR" not in each]
        assert faults == [], faults
        browser.close()


@contextmanager
def serving(app: Any) -> Iterator[str]:
    """The address at which uvicorn serves an app."""
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error"))
    thread = Thread(target=server.run)
    thread.start()
    try:
        eventually(lambda: server.started)
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()
