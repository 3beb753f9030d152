"""The site's hook: it adds the pages that are made of the code, and has guides found first."""  # noqa: INP001 - mkdocs loads it by its path

import sys
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

sys.path.append(str(Path(__file__).parents[1]))
from tools import reference

BOOSTS = {
    "reference/": 0.2,
    "runbooks/": 0.2,
    "changelog": 0.2,
    "benchmarks": 0.5,
    "troubleshooting": 0.2,
    "comparison": 0.5,
    "faq": 0.5,
    "migrating": 0.5,
    "quickstart": 2,
    "concepts": 3,
    "limits": 2,
    "waiting": 2,
    "budgets": 2,
    "customers": 2,
    "stores": 2,
    "operate": 2,
    "alerts": 2,
    "dashboards": 2,
    "observability": 1.5,
}
"""How much a page counts in the search, where it is not 1. Guides come before references."""

ALSO = {
    "alerts.md": ["Slack", "PagerDuty", "email"],
    "budgets.md": ["spend"],
    "comparison.md": ["429", "rate", "throttling"],
    "dashboards.md": ["which customer is refused"],
    "faq.md": [
        "frequently asked questions",
        "429",
        "runaway",
        "pytest",
        "timezone",
        "throttle",
        "helm",
    ],
    "limits.md": ["dry", "testing", "unit"],
    "migrating.md": ["migrate", "migration"],
    "operate.md": ["GDPR", "privacy"],
    "people.md": ["interrupt", "interrupts"],
    "production.md": ["multiprocess", "gunicorn", "uvicorn"],
}
"""Words that people type, and the page does not use."""


def on_files(files: Files, config: MkDocsConfig, **_: Any) -> Files:
    """Add the pages that are made of the code."""
    for path, text in reference.pages().items():
        files.append(File.generated(config, path, content=text))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Tell the search how much a page counts: on the page itself, GitHub would show it."""
    page.meta["tags"] = ALSO.get(page.file.src_uri, [])
    for begins, boost in BOOSTS.items():
        if page.file.src_uri.startswith(begins):
            page.meta["search"] = {"boost": boost}
    return markdown


def on_post_build(config: MkDocsConfig, **_: Any) -> None:
    """Write all guides into `llms-full.txt`, and what is made of the code as Markdown, too."""
    site = Path(config["site_dir"])
    for path, text in reference.pages().items():
        (site / path).write_text(text)
    pages = [
        path for path in _paths(config["nav"]) if not path.startswith(("runbooks/", "reference/"))
    ]
    docs = Path(config["docs_dir"])
    texts = [f"<!-- {path} -->\n\n{(docs / path).read_text()}" for path in pages]
    (site / "llms-full.txt").write_text("\n".join(texts))


def _paths(nav: Any) -> list[str]:
    """Return the pages of a part of the navigation."""
    if isinstance(nav, str):
        return [nav]
    parts = nav.values() if isinstance(nav, dict) else nav
    return [path for part in parts for path in _paths(part)]
