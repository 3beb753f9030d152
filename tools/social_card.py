"""The card that chats and social networks show for a link to the documentation.

`make picture` draws docs/images/social-card.png, from tools/social_card.html. `make docs` looks at
the built site with `--check`. Exit status 1 if a page does not name the card.
"""

import argparse
import re
import sys
from pathlib import Path

from tools.screenshot import screenshot

CARD = Path(__file__).resolve().parents[1] / "docs" / "images" / "social-card.png"
WIDTH, HEIGHT = 1200, 630
"""What Open Graph's readers expect, in pixels."""
URL = "https://raw.githubusercontent.com/langchain-quota/langchain-quota/main/docs/images/"
NEEDED = {
    "og:title": ".+",
    "og:description": ".+",
    "og:image": re.escape(URL + CARD.name),
    "twitter:card": "summary_large_image",
}
"""What a page must say, as regular expressions."""


def faults(site: Path) -> list[str]:
    """The pages of a site that lack a part of the card."""
    wrong = []
    for page in sorted(site.rglob("*.html")):
        text = page.read_text(encoding="utf-8")
        said = dict(re.findall(r'<meta (?:property|name)="(.+?)" content="(.*?)">', text))
        wrong += [
            f"{page.relative_to(site)} has no right {name}"
            for name, right in NEEDED.items()
            if not re.fullmatch(right, said.get(name, ""))
        ]
    return wrong


def main() -> int:
    """Draw the card, or check the site."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", type=Path, metavar="SITE", help="the built site")
    arguments = parser.parse_args()
    if arguments.check is None:
        page = Path(__file__).with_suffix(".html")
        screenshot(page, CARD, width=WIDTH, height=HEIGHT)
        return 0
    wrong = faults(arguments.check)
    for fault in wrong:
        print(f"social card: {fault}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
