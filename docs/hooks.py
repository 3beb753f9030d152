"""The site's hook: guides are found first, by the words that people type."""  # noqa: INP001 - mkdocs loads it by its path

from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.pages import Page

BOOSTS = {
    "reference/": 0.2,
    "runbooks/": 0.2,
    "changelog": 0.2,
    "glossary": 0.2,
    "benchmarks": 0.2,
    "troubleshooting": 0.2,
    "comparison": 0.5,
    "faq": 0.5,
    "migrating": 0.5,
    "quickstart": 2,
    "concepts": 3,
    "limits": 2,
    "budgets": 2,
    "customers": 2,
    "alerts": 2,
    "dashboards": 2,
    "observability": 1.5,
}
"""How much a page counts in the search, where it is not 1. Guides come before references."""

ALSO = {
    "alerts.md": ["Slack", "PagerDuty", "email"],
    "budgets.md": ["spend"],
    "comparison.md": ["429", "rate", "throttling"],
    "customers.md": ["GDPR", "privacy"],
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
    "people.md": ["interrupt", "interrupts"],
    "production.md": ["multiprocess", "gunicorn", "uvicorn"],
}
"""Words that people type, and the page does not use."""


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Tell the search how much a page counts: on the page itself, GitHub would show it."""
    page.meta["tags"] = ALSO.get(page.file.src_uri, [])
    for begins, boost in BOOSTS.items():
        if page.file.src_uri.startswith(begins):
            page.meta["search"] = {"boost": boost}
    return markdown


def on_post_build(config: MkDocsConfig, **_: Any) -> None:
    """Write `llms-full.txt`: all guides in one file, in the order of the navigation."""
    pages = [
        path for path in _paths(config["nav"]) if not path.startswith(("runbooks/", "reference/"))
    ]
    docs = Path(config["docs_dir"])
    texts = [f"<!-- {path} -->\n\n{(docs / path).read_text()}" for path in pages]
    (Path(config["site_dir"]) / "llms-full.txt").write_text("\n".join(texts))


def _paths(nav: Any) -> list[str]:
    """Return the pages of a part of the navigation."""
    if isinstance(nav, str):
        return [nav]
    parts = nav.values() if isinstance(nav, dict) else nav
    return [path for part in parts for path in _paths(part)]
