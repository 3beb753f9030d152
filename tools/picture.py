"""The quickstart's picture: the demo's own view at the end of its own traffic, as SVG.

`make picture` writes docs/images/demo.svg. The demo's script decides every number in it, so that it
comes out the same each time.
"""

import argparse
import asyncio
import io
import logging
import re
from collections.abc import Sequence
from contextlib import redirect_stdout
from pathlib import Path
from tempfile import TemporaryDirectory

from opentelemetry.sdk.trace import TracerProvider
from rich.console import Console, RenderableType
from rich.terminal_theme import MONOKAI

from langchain_quota.cli.demo import _Traffic
from langchain_quota.cli.demo_board import Row
from langchain_quota.cli.demo_traffic import scripted_model
from langchain_quota.cli.demo_view import Display, table

IMAGES = Path(__file__).parents[1] / "docs" / "images"
PICTURE = IMAGES / "demo.svg"
TITLE = "langchain-quota demo"
THREADS = 6
WIDTH = 124
"""In characters; the bars have the space that the names leave."""
FONTS = "ui-monospace, SFMono-Regular, Menlo, Consolas, monospace"


def rows(seconds: int) -> Sequence[Row]:
    """The demo's threads when its traffic is over."""
    logging.getLogger("langchain_quota").setLevel(logging.ERROR)
    options = argparse.Namespace(threads=THREADS, seconds=seconds, model=None)
    traffic = _Traffic(options, scripted_model(), TracerProvider())
    with TemporaryDirectory() as directory, redirect_stdout(io.StringIO()):
        asyncio.run(traffic.run(Path(directory) / "threads.sqlite", Display()))
    return traffic.board.rows()


def svg(shown: RenderableType, *, title: str, width: int, height: int | None = None) -> str:
    """A terminal with something, drawn with fonts that the reader's machine has."""
    console = Console(
        record=True,
        width=width,
        height=height,
        file=io.StringIO(),
        force_terminal=True,
        color_system="truecolor",
    )
    console.print(shown)
    drawn = console.export_svg(title=title, theme=MONOKAI, unique_id=title.rsplit(maxsplit=1)[-1])
    # Rich's own style sheet loads a font from elsewhere.
    drawn = re.sub(r"@font-face \{.*?\}\s*", "", drawn, flags=re.DOTALL)
    return drawn.replace("Fira Code, monospace", FONTS) + "\n"


def main() -> None:
    """Write the picture."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--to", type=Path, default=PICTURE)
    parser.add_argument("--seconds", type=int, default=10, help="how long the traffic lasts")
    arguments = parser.parse_args()
    arguments.to.parent.mkdir(parents=True, exist_ok=True)
    made = table(rows(arguments.seconds), Console(width=WIDTH, file=io.StringIO()))
    arguments.to.write_text(svg(made, title=TITLE, width=WIDTH), encoding="utf-8")


if __name__ == "__main__":
    main()
