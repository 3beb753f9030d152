"""A live view of running services: who is near a limit, and who is refused."""

import os
import re
import select
import signal
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from datetime import UTC, datetime
from threading import Thread
from typing import Any

from rich.console import Console
from rich.live import Live

from langchain_quota.cli.command import complain, say
from langchain_quota.cli.top_figures import Figures, Growth, figures
from langchain_quota.cli.top_options import INTERVAL, ORDERS, environment_of_console
from langchain_quota.cli.top_sources import LONGEST, UNASKED, Scrape, Source, sources
from langchain_quota.cli.top_table import KEYS, View, lines, page, press, rows, screen

try:
    import termios
    import tty
except ModuleNotFoundError:  # Windows
    termios = tty = None  # type: ignore[assignment]

SOME_FAILED, ALL_FAILED = 1, 2
"""The exit codes if addresses did not answer, where each is asked once."""

_NO_KEYS = "no keys are read here: use the options; Ctrl-C quits"
_NO_WRAPPING, _WRAPPING = "\x1b[?7l", "\x1b[?7h"
_PAUSE = 0.2
"""The seconds between two looks at new answers."""
_KEY = re.compile(r"\x1b\[[0-9;]*[A-Za-z~]|.", re.DOTALL)


class Watch:
    """Asks addresses, each in a thread: a slow one holds up neither keys nor the others."""

    def __init__(self, sources: Sequence[Source]) -> None:
        self.sources = sources
        self.figures: Figures | None = None
        self._growth = Growth()
        self._taken: dict[Source, Scrape] = {}

    def ask_all(self) -> None:
        """Ask each once, and wait for the answers."""
        end = time.monotonic() + LONGEST
        for thread in [_in_background(each.poll) for each in self.sources]:
            thread.join(max(0.0, end - time.monotonic()))
        self.gather()

    def start(self, interval: float) -> None:
        """Ask each again and again, as long as the process lasts."""
        for each in self.sources:
            _in_background(_ask, each, interval)

    def gather(self) -> None:
        """Make figures of their latest answers, if there is a new one."""
        news = [
            (each, scrape)
            for each in self.sources
            if (scrape := each.scrape) is not None and scrape is not self._taken.get(each)
        ]
        for source, scrape in news:
            self._taken[source] = scrape
            self._growth.take(source.name, scrape, source.answered_at)
        if news or (self.figures is None and any(each.failure != UNASKED for each in self.sources)):
            self.figures = figures(self._taken.values(), self._growth.rates(time.monotonic()))

    @property
    def faults(self) -> list[str]:
        """A line for each address that fails."""
        return [fault for each in self.sources if (fault := each.fault) is not None]


def _ask(source: Source, interval: float) -> None:
    while True:
        asked_at = time.monotonic()
        source.poll()
        time.sleep(max(0.0, asked_at + interval - time.monotonic()))


def _in_background(work: Callable[..., None], *arguments: Any) -> Thread:
    """Start a thread that nobody waits for at the end of the process."""
    thread = Thread(target=work, args=arguments, daemon=True)
    thread.start()
    return thread


def run(arguments: Namespace) -> int:
    """Show the view in a terminal, else print the figures."""
    watch = Watch(sources(arguments))
    view = View(arguments.view or "threads", arguments.sort, arguments.filter)
    console = Console(_environ=environment_of_console())
    is_screen = sys.stdout.isatty() and console.is_terminal and not console.is_dumb_terminal
    if is_screen and not arguments.once:
        watch.start(arguments.interval or INTERVAL)
        return _show(watch, view, console)
    names = [view.name] if arguments.view else [*ORDERS]
    return _print(watch, view, names, None if arguments.once else arguments.interval)


def _print(watch: Watch, view: View, names: Sequence[str], interval: float | None) -> int:
    """Print the figures, once, or again and again if an interval is given."""
    complained: list[str] = []
    while True:
        began = time.monotonic()
        watch.ask_all()
        failures = [f"{each.name}: {each.failure}" for each in watch.sources if each.failure]
        for each in (each for each in failures if each not in complained):
            complain("top", each)
        complained = failures
        if all(each.scrape is None for each in watch.sources):
            return ALL_FAILED
        moment = f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}  " if interval else ""
        for line in lines(watch.figures or Figures(), view, names, time.time()):
            if line or not moment:
                say(f"{moment}{line}")
        if interval is None:
            return SOME_FAILED if failures else 0
        time.sleep(max(0.0, began + interval - time.monotonic()))


def _show(watch: Watch, view: View, console: Console) -> int:
    """Show the view until the user ends it; however it ends, the terminal is as before."""
    drawn: Any = None
    write = console.file.write
    with ExitStack() as stack:
        pressed = _keys(stack)
        live = stack.enter_context(Live(console=console, screen=True, auto_refresh=False))
        # A character that is wider than expected must not move the lines below.
        stack.callback(write, _WRAPPING)
        write(_NO_WRAPPING)
        keys = KEYS if pressed is not _wait else _NO_KEYS
        while not view.ended:
            watch.gather()
            known = drawn[0] if drawn and view.paused else watch.figures
            faults = watch.faults
            now = (known, view, faults, console.size)
            if now != drawn:
                drawn, moment, count = now, time.time(), len(watch.sources)
                beside: Any = {"addresses": count, "faults": faults, "now": moment, "keys": keys}
                shown = screen(known, view, console=console, **beside)
                live.update(shown, refresh=True)
            size = page(console.height, len(faults))
            for key in pressed(_PAUSE):
                view = press(view, key, page=size)
            if view.first:
                most = len(rows(known or Figures(), view)) - size
                view = replace(view, first=max(0, min(view.first, most)))
    return 0


def _keys(stack: ExitStack) -> Callable[[float], Sequence[str]]:
    """A function that waits some seconds for keys; a signal ends the view like an error."""
    # Ctrl-Z would leave the screen to the shell.
    for name, handler in (("SIGTERM", _end), ("SIGHUP", _end), ("SIGTSTP", signal.SIG_IGN)):
        if hasattr(signal, name):
            number = getattr(signal, name)
            stack.callback(signal.signal, number, signal.signal(number, handler))
    if termios is None or not sys.stdin.isatty():
        return _wait
    terminal = sys.stdin.fileno()
    stack.callback(termios.tcsetattr, terminal, termios.TCSAFLUSH, termios.tcgetattr(terminal))
    tty.setcbreak(terminal)
    return lambda seconds: _pressed(terminal, seconds)


def _end(number: int, _: object) -> None:
    sys.exit(128 + number)


def _pressed(terminal: int, seconds: float) -> Sequence[str]:
    if not select.select([terminal], [], [], seconds)[0]:
        return ()
    data = os.read(terminal, 1024)
    # Without a terminal nobody reads the view any more.
    return _KEY.findall(data.decode(errors="ignore")) if data else ("\x1b", "q")


def _wait(seconds: float) -> Sequence[str]:
    time.sleep(seconds)
    return ()
