"""The whole stack as plain processes, from the files that docker/compose.yaml mounts."""

import re
from pathlib import Path
from uuid import uuid4

import httpx
import pytest
import yaml

from langchain_quota.monitoring import exports
from tests.servers.prometheus import DEADLINE, eventually
from tests.servers.service import Event, events, question
from tests.servers.stack import REPLICAS, WORKERS, Stack, running_stack

AGENT = "librarian"
ALERT = "LangChainQuotaLimitBreached"
THREE = "oak ash elm"
"""The scripted model searches for each word: four model calls, three searches."""
LIMITS = {"model": 60, "tool:search": 10, "tokens": 14_000}
"""The service's thread limits."""
TOKENS = "model.total_tokens"
COUNTERS = {"model": "model", "tool:search": "search", "tokens": TOKENS}
"""What they count."""
USED_BY_SHARED = 13_440
"""The tokens of sixteen calls of the scripted model, each with all that was said before."""
TOLD_BEFORE_KILL = 3
RATIO = "job_agent_limit_thread_id:langchain_quota_thread_used:ratio"


def ask(url: str, thread_id: str, text: str) -> httpx.Response:
    """Ask on a connection of its own: one that is kept open leads to one worker."""
    body = question(text)
    address = f"{url}/threads/{thread_id}/messages"
    return httpx.post(address, json=body, timeout=DEADLINE, trust_env=False)


def used_in_prometheus(stack: Stack) -> dict[tuple[str, str], int]:
    """What each thread has used, by counter and thread, by the expression of the package's rule."""
    [text] = exports.rules(per_thread=True).values()
    groups = yaml.safe_load(text)["groups"]
    (expression,) = (
        rule["expr"] for group in groups for rule in group["rules"] if rule.get("record") == RATIO
    )
    return {
        (COUNTERS[each.labels["limit"]], each.labels["thread_id"]): round(
            each.value * LIMITS[each.labels["limit"]]
        )
        for each in stack.prometheus.query(expression)
    }


def counted(stack: Stack, decision: str, limit: str) -> float:
    """A counter's value, over all processes."""
    selector = f'langchain_quota_limit_decisions_total{{limit="{limit}",decision="{decision}"}}'
    return stack.prometheus.value(f"sum({selector})") or 0


@pytest.mark.parametrize("shape", [REPLICAS, WORKERS])
def test_the_stack(shape: str, tmp_path: Path) -> None:
    """Load breaches a limit, the alert arrives, and all agree on what was used, kills included."""
    with running_stack(shape, tmp_path) as stack:
        said = stack.load()
        assert re.search(r"(model|repeats) \(run\)", said)

        shared = f"shared-{uuid4().hex}"
        for index in (0, 1, 0, 1):
            with stack.served_by(index) as url:
                assert ask(url, shared, THREE).status_code == 200
        assert stack.kept(shared) == {
            ("model", shared): 16,
            ("search", shared): 10,
            (TOKENS, shared): USED_BY_SHARED,
        }
        stack.scraped()
        if shape == REPLICAS:  # each has told of the thread: their numbers cannot be added up
            told = stack.prometheus.query(f'langchain_quota_thread_used{{thread_id="{shared}"}}')
            assert sorted(each.value for each in told) == [9, 10, 12, 16]
        assert used_in_prometheus(stack) == stack.kept()
        the_service_says_what_is_kept(stack)
        the_counters_say_what_is_kept(stack)

        charged = counted(stack, "allowed", "model")
        killed = f"killed-{uuid4().hex}"
        a_killed_run_is_counted(stack, killed)
        stack.wait_for_restart(0)
        before = stack.kept(killed)
        with stack.served_by(1) as url:
            assert ask(url, killed, "oak").status_code == 200
        after = stack.kept(killed)
        assert after["model", killed] == before["model", killed] + 2
        assert after["search", killed] == before["search", killed] + 1
        assert after[TOKENS, killed] > before[TOKENS, killed]
        stack.scraped()
        # A killed process has forgotten its threads' series: they come back when they are used.
        assert stack.kept(killed).items() <= used_in_prometheus(stack).items()
        the_service_says_what_is_kept(stack)
        if shape == WORKERS:  # what a worker has counted outlives it
            assert counted(stack, "allowed", "model") >= charged + TOLD_BEFORE_KILL + 2

        alertmanager_has_the_alert(stack)
        if shape == REPLICAS:
            # Where workers share a port, prometheus_client loses exemplars; alerts go the same way.
            exemplars_lead_to_traces(stack)
            the_alert_arrives(stack)


def the_service_says_what_is_kept(stack: Stack) -> None:
    """What the threads in PostgreSQL say of themselves is what Redis keeps of them."""
    for (counter, thread_id), used in stack.kept().items():
        url = f"{stack.urls[0]}/threads/{thread_id}/usage"
        said = httpx.get(url, trust_env=False).json()["thread"]
        count = said["tools"].get(counter, 0)
        if counter == "model":
            count = said["model"]
        elif counter == TOKENS:
            count = said["tokens"]
            if thread_id.startswith("killed-"):
                # What was charged after the last step that was saved only the store knows.
                assert 0 < count <= used
                continue
        assert (thread_id, counter, count) == (thread_id, counter, used)


def the_counters_say_what_is_kept(stack: Stack) -> None:
    """What all processes have charged together is what Redis keeps of all threads."""
    for limit, counter in COUNTERS.items():
        kept = sum(used for (found, _), used in stack.kept().items() if found == counter)
        if counter == TOKENS:
            spent = 'sum(langchain_quota_spent_tokens_total{limit="tokens"})'
            assert stack.prometheus.value(spent) == kept
            continue
        assert counted(stack, "allowed", limit) - counted(stack, "refunded", limit) == kept


def a_killed_run_is_counted(stack: Stack, thread_id: str) -> None:
    """If a run's process is killed, every call that it has reported stays counted."""
    told: list[Event] = []

    def follow(url: str) -> None:
        body = question("oak ash elm pine birch larch")
        address = f"{url}/threads/{thread_id}/messages/stream"
        with httpx.stream(
            "POST", address, json=body, timeout=DEADLINE, trust_env=False
        ) as response:
            for event in events(response):
                if event.name == "tool_calls":
                    told.append(event)
                    if len(told) == TOLD_BEFORE_KILL:
                        stack.kill(0)

    with stack.served_by(0) as url, pytest.raises(httpx.TransportError):
        follow(url)
    kept = stack.kept(thread_id)
    assert kept["model", thread_id] >= len(told)
    assert kept["search", thread_id] >= len(told) - 1


def alertmanager_has_the_alert(stack: Stack) -> None:
    """Prometheus has told Alertmanager of the breach."""
    url = f"{stack.alertmanager_url}/api/v2/alerts"

    def found() -> bool:
        alerts = httpx.get(url, trust_env=False).json()
        return ALERT in {each["labels"]["alertname"] for each in alerts}

    eventually(found)


def the_alert_arrives(stack: Stack) -> None:
    """The chat's webhook is told."""

    def found() -> bool:
        return any(
            (each.receiver, each.status, each.labels["alertname"], each.labels["agent"])
            == ("chat", "firing", ALERT, AGENT)
            for each in stack.alerts()
        )

    eventually(found)


def exemplars_lead_to_traces(stack: Stack) -> None:
    """The traces that blocked calls point to are those that were sent to Tempo's address."""
    blocked = 'langchain_quota_calls_total{decision="blocked"}'
    exemplars = eventually(lambda: stack.prometheus.exemplars(blocked))
    linked = {each.labels["trace_id"] for each in exemplars}
    eventually(lambda: linked <= {span.trace_id for span in stack.otlp.spans})
