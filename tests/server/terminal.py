"""A real terminal, by tmux: a program runs in it, keys are pressed, the screen is read."""

import os
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from tests.forked import COMMAND_LINE
from tests.server.programs import required_program
from tests.server.prometheus import eventually

_ANY: Mapping[int, str] = {}


def command(*arguments: str, program: str = COMMAND_LINE) -> str:
    """A line for a shell that runs `langchain-quota`, or another program with its arguments."""
    return shlex.join([sys.executable, "-c", program, *arguments])


class Terminal:
    """A terminal with a shell in it; its server listens on a socket of its own."""

    def __init__(self, tmux: str, socket: Path) -> None:
        self._command = [tmux, "-u", "-f", os.devnull, "-S", str(socket)]

    def start(self, width: int, height: int, environment: Mapping[str, str]) -> None:
        """Start the shell."""
        given = [each for name, value in environment.items() for each in ("-e", f"{name}={value}")]
        self._tmux("new-session", "-d", "-x", str(width), "-y", str(height), *given, "sh")
        self._tmux("set-option", "-g", "status", "off")

    def type(self, text: str) -> None:
        """Type a line, and press Enter."""
        self._tmux("send-keys", "-l", text)
        self._tmux("send-keys", "Enter")

    def press(self, *keys: str) -> None:
        """Press keys, by tmux' names."""
        self._tmux("send-keys", *keys)

    def resize(self, width: int, height: int) -> None:
        """Make it larger or smaller."""
        self._tmux("resize-window", "-x", str(width), "-y", str(height))

    @property
    def lines(self) -> list[str]:
        """What is on the screen."""
        return self._tmux("capture-pane", "-p").splitlines()

    @property
    def text(self) -> str:
        """The same as one text."""
        return "\n".join(self.lines)

    @property
    def escaped(self) -> str:
        """The same with the sequences that color it."""
        return self._tmux("capture-pane", "-p", "-e")

    def flags(self) -> dict[str, bool]:
        """Whether the second screen is shown, the cursor is, and long lines are wrapped."""
        names = ("alternate_on", "cursor_flag", "wrap_flag")
        told = self._tmux("display-message", "-p", " ".join(f"#{{{name}}}" for name in names))
        return {name: value == "1" for name, value in zip(names, told.split(), strict=True)}

    def wait_for(
        self, *texts: str, begins: Mapping[int, str] = _ANY, without: str | None = None
    ) -> list[str]:
        """Wait until all of these are on the screen, and lines begin with these words: its lines.

        A program draws its screen piece by piece, and a half of it may be seen: so what a test
        says of several lines must be waited for, not looked up in the lines that come back.
        """

        def shown() -> list[str] | None:
            lines = self.lines
            text = "\n".join(lines)
            words = {at: " ".join(lines[at].split()) for at in begins if at < len(lines)}
            found = all(each in text for each in texts) and (without is None or without not in text)
            if found and all(words.get(at, "").startswith(each) for at, each in begins.items()):
                return lines
            return None

        try:
            return eventually(shown)
        except AssertionError as error:
            wanted = f"{texts} with {begins} without {without!r}"
            raise AssertionError(f"{wanted} is not in\n{self.text}") from error

    def close(self) -> None:
        """End everything in it."""
        self._tmux("kill-server")

    def _tmux(self, *arguments: str) -> str:
        done = subprocess.run(
            [*self._command, *arguments], capture_output=True, text=True, check=True, timeout=30
        )
        return done.stdout


@contextmanager
def running_terminal(
    directory: Path, *, width: int = 80, height: int = 24, **environment: str
) -> Iterator[Terminal]:
    """Run a terminal with a shell in it."""
    terminal = Terminal(required_program("tmux", "tmux"), directory / "tmux")
    terminal.start(width, height, {"LC_ALL": "C.UTF-8", "PS1": "$ ", **environment})
    try:
        yield terminal
    finally:
        terminal.close()
