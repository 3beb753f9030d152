"""Draw the page for the docs, in a real browser: what the demo shows when its traffic is over.

`make picture` writes docs/images/page-light.png and page-dark.png. It needs Playwright, and
Chromium of the system (`apt-get install chromium`).
"""

import argparse
import asyncio
import logging
import shutil
import sys
from pathlib import Path
from threading import Thread
from typing import Literal

from playwright.sync_api import sync_playwright

from langchain_quota import start_metrics_server
from langchain_quota.cli.demo import Traffic

IMAGES = Path(__file__).parents[1] / "docs" / "images"
THREADS = 6
WIDTH, HEIGHT = 1200, 780
SCHEMES: tuple[Literal["light", "dark"], ...] = ("light", "dark")


def draw(url: str, directory: Path, chromium: str) -> None:
    """Draw the page in both color schemes."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        for scheme in SCHEMES:
            page = browser.new_page(
                viewport={"width": WIDTH, "height": HEIGHT},
                color_scheme=scheme,
                device_scale_factor=1.5,
            )
            page.goto(url)
            page.locator("#threads tr.row").first.wait_for()
            page.screenshot(path=directory / f"page-{scheme}.png")
        browser.close()


def main() -> None:
    """Write the pictures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--to", type=Path, default=IMAGES)
    parser.add_argument("--seconds", type=int, default=10, help="how long the traffic lasts")
    arguments = parser.parse_args()
    arguments.to.mkdir(parents=True, exist_ok=True)
    chromium = shutil.which("chromium")
    if chromium is None:
        sys.exit("chromium not found: apt-get install chromium")
    logging.getLogger("langchain_quota").setLevel(logging.ERROR)
    traffic = Traffic(THREADS, arguments.seconds, on_refusal=print)
    # A browser's events take the event loop of this thread.
    running = Thread(target=asyncio.run, args=(traffic.run(),))
    running.start()
    running.join()
    with start_metrics_server(0, registry=traffic.registry) as server:
        draw(str(server.page_url), arguments.to, chromium)


if __name__ == "__main__":
    main()
