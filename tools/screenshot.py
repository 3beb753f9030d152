"""A picture of a page on this machine: Chromium draws it, and `pngquant` makes it small."""

import subprocess
from pathlib import Path


def screenshot(page: Path, to: Path, *, width: int, height: int) -> None:
    """Draw a page.

    Args:
        page: The HTML file.
        to: The PNG file.
        width: The picture's width, in pixels.
        height: Its height.
    """
    chromium = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
    places = [f"--window-size={width},{height}", f"--screenshot={to}", page.resolve().as_uri()]
    subprocess.run([*chromium, *places], check=True, capture_output=True, timeout=60)
    make_small(to)


def make_small(picture: Path) -> None:
    """Leave 64 colours in a PNG file: enough for dashboards and text."""
    subprocess.run(["pngquant", "--force", "--output", picture, "64", picture], check=True)
