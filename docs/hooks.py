"""The site's hooks: mermaid is drawn when the site is built, and readers load no script for it."""  # noqa: INP001 - mkdocs loads it by its path

from typing import Any

import mermaidx  # type: ignore[import-untyped]  # it has none
from mkdocs.config.defaults import MkDocsConfig


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Give the blocks called mermaid to `picture`."""
    fences = config.mdx_configs.setdefault("pymdownx.superfences", {})
    fences["custom_fences"] = [{"name": "mermaid", "class": "mermaid", "format": picture}]
    return config


def picture(source: str, *_: Any, **__: Any) -> str:
    """The picture that a mermaid block describes, as SVG within the page."""
    svg = mermaidx.render(source, theme="neutral", config={"htmlLabels": False}).svg()
    # Its colours are made for a white page.
    style = "background: white; padding: 1em; width: 100%"
    return f'<figure data-search-exclude style="{style}">{svg}</figure>'
