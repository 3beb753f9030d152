"""The docs' pictures of the terminal: the demo, and `top` beside it, at the end of its traffic.

`make picture` writes docs/images/demo.svg and top.svg.
"""

import argparse
import asyncio
import io
import logging
import re
import time
from contextlib import nullcontext
from pathlib import Path

from prometheus_client import generate_latest
from rich.console import Console, RenderableType
from rich.terminal_theme import MONOKAI

from langchain_quota.cli.demo import Traffic, table
from langchain_quota.cli.metrics import figures, of_text
from langchain_quota.cli.top import screen

IMAGES = Path(__file__).parents[1] / "docs" / "images"
THREADS = 6
SIZES = {"demo": (124, None), "top": (114, 22)}
"""In characters; the bars have the space that the names leave."""
FONTS = "ui-monospace, SFMono-Regular, Menlo, Consolas, monospace"


def drawn(seconds: int) -> dict[str, RenderableType]:
    """What the demo and `top` show when the demo's traffic is over."""
    logging.getLogger("langchain_quota").setLevel(logging.ERROR)
    traffic = Traffic(THREADS, seconds)
    asyncio.run(traffic.run(nullcontext()))
    known = figures([of_text(generate_latest().decode())])
    width, height = SIZES["top"]
    top = Console(width=width, height=height, file=io.StringIO())
    return {
        "demo": table(traffic.rows()),
        "top": screen(known, console=top, addresses=1, faults=(), now=time.time()),
    }


def svg(shown: RenderableType, name: str) -> str:
    """A terminal with something, drawn with fonts that the reader's machine has."""
    width, height = SIZES[name]
    console = Console(
        record=True,
        width=width,
        height=height,
        file=io.StringIO(),
        force_terminal=True,
        color_system="truecolor",
    )
    console.print(shown)
    made = console.export_svg(title=f"langchain-quota {name}", theme=MONOKAI, unique_id=name)
    # Rich's own style sheet loads a font from elsewhere.
    made = re.sub(r"@font-face \{.*?\}\s*", "", made, flags=re.DOTALL)
    return made.replace("Fira Code, monospace", FONTS) + "\n"


def main() -> None:
    """Write the pictures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--to", type=Path, default=IMAGES)
    parser.add_argument("--seconds", type=int, default=10, help="how long the traffic lasts")
    arguments = parser.parse_args()
    arguments.to.mkdir(parents=True, exist_ok=True)
    for name, shown in drawn(arguments.seconds).items():
        (arguments.to / f"{name}.svg").write_text(svg(shown, name), encoding="utf-8")


if __name__ == "__main__":
    main()
