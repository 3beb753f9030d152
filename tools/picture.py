"""Draw the pictures of the docs, in a real browser: of the page, and of dashboards in a Grafana.

`make picture` writes docs/images/page-light.png and page-dark.png: what the demo shows when its
traffic is over. `make picture ARGS="--grafana http://localhost:3000"` writes dashboard-*.png: what
this Grafana shows, without its menus, such as that of the stack while `service.load` plays threads
(docker/README.md). Both need Playwright, and Chromium of the system (`apt-get install chromium`).
"""

import argparse
import asyncio
import logging
import shutil
import sys
from collections.abc import Mapping
from itertools import product
from pathlib import Path
from threading import Thread
from typing import Literal

from playwright.sync_api import sync_playwright

from dashboards.settings import BUDGETS_UID, OVERVIEW_UID, THREAD_UID
from langchain_quota import start_metrics_server
from langchain_quota.cli.demo import Traffic

IMAGES = Path(__file__).parents[1] / "docs" / "images"
THREADS = 6
WIDTH = 1200
SCHEMES: tuple[Literal["light", "dark"], ...] = ("light", "dark")


def draw(
    addresses: Mapping[str, str], selector: str, height: int, directory: Path, chromium: str
) -> None:
    """Draw what is at addresses in both color schemes, by the names of the pictures."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        for (name, url), scheme in product(addresses.items(), SCHEMES):
            page = browser.new_page(
                viewport={"width": WIDTH, "height": height},
                color_scheme=scheme,
                device_scale_factor=1.5,
            )
            page.goto(url.format(scheme=scheme), wait_until="networkidle")
            page.locator(selector).first.wait_for()
            page.screenshot(path=directory / f"{name}-{scheme}.png")
        browser.close()


def main() -> None:
    """Write the pictures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--to", type=Path, default=IMAGES)
    parser.add_argument("--seconds", type=int, default=10, help="how long the traffic lasts")
    parser.add_argument("--grafana", help="draw the dashboards of this Grafana, not the page")
    arguments = parser.parse_args()
    arguments.to.mkdir(parents=True, exist_ok=True)
    chromium = shutil.which("chromium")
    if chromium is None:
        sys.exit("chromium not found: apt-get install chromium")
    if arguments.grafana:
        boards = {
            uid.replace("langchain-quota", "dashboard"): f"{arguments.grafana}/d/{uid}?kiosk"
            "&_dash.hideVariables&_dash.hideTimePicker&_dash.hideLinks&theme={scheme}"
            for uid in (OVERVIEW_UID, THREAD_UID, BUDGETS_UID)
        }
        draw(boards, "[data-viz-panel-key]", 1500, arguments.to, chromium)
        return
    logging.getLogger("langchain_quota").setLevel(logging.ERROR)
    traffic = Traffic(THREADS, arguments.seconds, on_refusal=print)
    # A browser's events take the event loop of this thread.
    running = Thread(target=asyncio.run, args=(traffic.run(),))
    running.start()
    running.join()
    with start_metrics_server(0, registry=traffic.registry) as server:
        draw({"page": str(server.page_url)}, "#threads tr.row", 940, arguments.to, chromium)


if __name__ == "__main__":
    main()
