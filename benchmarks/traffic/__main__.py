"""Simulates a service in production, watches it, and compares what is shown with the truth."""

import argparse
import signal
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.traffic import incidents
from benchmarks.traffic.agents import PROFILES
from benchmarks.traffic.running import running_traffic
from benchmarks.traffic.watched import Watch, watching


def main() -> None:
    """Run traffic as the command's options say, to its end."""
    options = _parser().parse_args()
    if options.profile == "incidents":
        options.seconds, options.replicas = incidents.SECONDS, 3
    # So that it stops what it has started.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    with (
        TemporaryDirectory() as place,
        running_traffic(
            options.profile,
            seconds=options.seconds,
            speed=options.speed,
            directory=Path(place),
            replicas=options.replicas,
            threads=options.threads,
            seed=options.seed,
        ) as traffic,
        watching(
            traffic,
            Path(place, "watch"),
            speed=options.speed,
            scrape_interval=options.scrape_interval,
        ) as watch,
    ):
        _say(f"Prometheus: {watch.prometheus.url}")
        _say(f"Metrics: {', '.join(f'http://{each}/metrics' for each in traffic.targets)}")
        over = threading.Event()
        telling = threading.Thread(target=_tell, args=(watch, over))
        telling.start()
        try:
            traffic.begin()
            traffic.wait()
            watch.wait_for_scrape()
            # The rules about threads are evaluated once a minute.
            time.sleep(60 / options.speed)
            _compare(watch)
            if options.profile == "incidents":
                _tell_of_incidents(watch, options.speed)
            if options.hold:
                _say(f"holding for {options.hold:g} seconds: {watch.prometheus.url}")
                time.sleep(options.hold)
        finally:
            over.set()
            telling.join()
        receivers = Counter(post[0].path.strip("/") for post in watch.webhook.messages if post)
        _say(f"notifications: {dict(receivers) or 'none'}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.traffic", description=__doc__)
    parser.add_argument("--profile", choices=PROFILES, default="healthy")
    parser.add_argument("--seconds", type=float, default=600, help="of simulated time")
    parser.add_argument(
        "--speed", type=float, default=1, help="simulated seconds in a real one; durations shrink"
    )
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--threads", type=int, default=70)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--scrape-interval", default="15s", help="in simulated time")
    parser.add_argument(
        "--hold", type=float, default=0, help="real seconds to go on after the traffic"
    )
    return parser


def _tell(watch: Watch, over: threading.Event) -> None:
    """Say what notifications come, until it is over."""
    told = 0
    ending = False
    while not ending:
        ending = over.wait(0.2)
        for post in watch.webhook.messages[told:]:
            told += 1
            for each in post:
                _say(
                    f"{time.strftime('%H:%M:%S')}  {each.path.strip('/'):<6} {each.status:<9}"
                    f"{each.labels['alertname']}: {each.annotations.get('summary', '')}"
                )


def _compare(watch: Watch) -> None:
    """Print a table of the truth beside what Prometheus knows."""
    _say(f"{'':<70}{'truth':>8}{'Prometheus':>12}")
    for what, labels, true, told in watch.compared():
        mark = "" if true == told else "  differs"
        _say(f"{f'{what}: ' + ', '.join(labels):<70}{true:>8}{told:>12}{mark}")


def _tell_of_incidents(watch: Watch, speed: float) -> None:
    """Kill all replicas, and print what happened and how it was told."""
    traffic, gone = watch.traffic, time.time()
    traffic.kill()
    # What a silent limit of a dead process has counted must not be told, however late.
    time.sleep(400 / speed)
    happened = incidents.incidents(traffic.truth(), traffic.begun, gone, speed)
    messages = watch.webhook.messages
    for line in incidents.lines(happened, messages, begun=traffic.begun, speed=speed):
        _say(line)


def _say(text: str) -> None:
    print(text, flush=True)  # noqa: T201 - a command


if __name__ == "__main__":
    main()
