"""The pictures of the dashboards, from the traffic of a simulated service.

`make dashboard-pictures RENDER=program` writes docs/images/dashboard*.png. It takes half an hour:
a service is busy, and then a prompt loops. The program draws a dashboard. It is called as

    program DASHBOARD.json PROMETHEUS_URL OUT.png --theme dark --width 1280 --from now-30m

with `--scrape 15`, for the part that a screen shows with `--height 900`, and for a thread with
`--var thread=ID`. `pngquant` makes the pictures small.
"""

import argparse
import subprocess
from pathlib import Path
from shutil import which
from tempfile import TemporaryDirectory

from langchain_quota.decision import THREAD
from tests.traffic.running import Traffic, running_traffic
from tests.traffic.watched import watching
from tools.screenshot import make_small

ROOT = Path(__file__).parents[1]
IMAGES = ROOT / "docs" / "images"
BOARDS = ROOT / "dashboards" / "grafana"
THEMES = ("dark", "light")
WIDTH, SCREEN = 1280, 900
SCRAPE = 15
"""Seconds between scrapes."""


def draw(render: str, prometheus: str, thread: str, minutes: int) -> None:
    """Draw the dashboards in both themes, and the first screen of the overview."""
    common = ["--width", str(WIDTH), "--from", f"now-{minutes}m", "--scrape", str(SCRAPE)]
    wanted = [
        (
            f"dashboard-{name}-{theme}.png",
            f"langchain-quota-{name}.json",
            [*extra, "--theme", theme],
        )
        for name, extra in (
            ("overview", []),
            ("thread", ["--var", f"thread={thread}"]),
            ("budgets", []),
        )
        for theme in THEMES
    ]
    screen = ["--theme", "dark", "--height", str(SCREEN)]
    wanted.append(("dashboard.png", "langchain-quota-overview.json", screen))
    for picture, board, options in wanted:
        path = IMAGES / picture
        subprocess.run([render, BOARDS / board, prometheus, path, *common, *options], check=True)
        make_small(path)


def most_refused(traffic: Traffic) -> str:
    """The thread whose limit of tokens refused most calls."""
    refused = traffic.truth().refusals("limit", "scope", "thread")
    out_of_tokens = [each for each in refused if each[:2] == ("tokens", THREAD)]
    return str(max(out_of_tokens, key=refused.__getitem__)[2])


def main() -> None:
    """Let the service work, and draw."""
    parser = argparse.ArgumentParser(description="Draws the dashboards for the documentation.")
    parser.add_argument("render", help="the program that draws a dashboard")
    parser.add_argument("--minutes", type=int, default=30, help="of traffic (default: 30)")
    options = parser.parse_args()
    if which("pngquant") is None:
        parser.error("pngquant is missing: install it")
    seconds = options.minutes * 60
    with (
        TemporaryDirectory() as directory,
        running_traffic("busy", seconds=seconds, directory=Path(directory, "traffic")) as traffic,
        watching(
            traffic, Path(directory, "servers"), speed=1, scrape_interval=f"{SCRAPE}s"
        ) as watch,
    ):
        # In the last part a prompt loops, and an alert fires.
        traffic.events[seconds * 0.7] = lambda: traffic.loop(seconds * 0.25)
        traffic.begin()
        traffic.wait()
        draw(options.render, watch.prometheus.url, most_refused(traffic), options.minutes)


if __name__ == "__main__":
    main()
