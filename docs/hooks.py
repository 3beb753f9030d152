"""The site's hook: guides are found first, by the words that people type."""  # noqa: INP001 - mkdocs loads it by its path

from typing import Any

from mkdocs.structure.pages import Page

BOOSTS = {
    "reference/": 0.2,
    "runbooks/": 0.2,
    "changelog": 0.2,
    "glossary": 0.2,
    "benchmarks": 0.2,
    "troubleshooting": 0.2,
    "comparison": 0.5,
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
    "limits.md": ["dry", "testing", "unit"],
    "migrating.md": ["migrate", "migration"],
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
