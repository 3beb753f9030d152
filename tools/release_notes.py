"""Print the newest section of CHANGELOG.md: the text of a release on GitHub."""

import re
import sys
from pathlib import Path

CHANGELOG = Path(__file__).resolve().parents[1] / "CHANGELOG.md"
SECTION = re.compile(r"^## \[.+?\].*?\n(.+?)(?=^## |^\[|\Z)", re.MULTILINE | re.DOTALL)


def main() -> None:
    """Print the section without its heading.

    Raises:
        SystemExit: The changelog has no section.
    """
    section = SECTION.search(CHANGELOG.read_text())
    if section is None:
        raise SystemExit("CHANGELOG.md has no section: begin one with ## [Unreleased]")
    sys.stdout.write(section[1].strip() + "\n")


if __name__ == "__main__":
    main()
