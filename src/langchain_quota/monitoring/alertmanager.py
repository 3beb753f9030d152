"""An example of Alertmanager's configuration for the alerts."""

FILE = "alertmanager.yaml"

_TEXT = """\
# An example of Alertmanager's configuration for the alerts of langchain-quota (0.22 or newer).
# Take over the route and the inhibit_rules; put your own receivers in place of these.

route:
  receiver: chat
  routes:
    - matchers: ['alertname =~ "LangChainQuota.+"']
      receiver: chat
      # One message for each limit of an agent, whatever the number of its threads.
      group_by: [job, agent, limit, alertname]
      group_wait: 30s
      group_interval: 5m
      repeat_interval: 12h
      routes:
        # EnforcementDegraded: the only alert that is worth being woken for.
        - matchers: ['severity = "critical"']
          receiver: pager
          group_wait: 0s
          repeat_interval: 1h
        # About single threads, and about what dashboards do not show: nobody is called.
        - matchers: ['severity = "info"']
          receiver: log
          repeat_interval: 24h

inhibit_rules:
  # Exhausted inhibits near: of a thread that is refused nobody needs to know that it was near ...
  - source_matchers: ['alertname = "LangChainQuotaThreadKeepsHitting"']
    target_matchers:
      - 'alertname =~ "LangChainQuotaThread(NearLimit|ExhaustionPredicted)"'
    equal: [job, agent, limit, thread_id]
  # ... and where many threads are exhausted, single ones that are near are no news.
  - source_matchers: ['alertname = "LangChainQuotaManyThreadsExhausted"']
    target_matchers:
      - 'alertname =~ "LangChainQuotaThread(NearLimit|ExhaustionPredicted)"'
    equal: [job, agent, limit]
  # A thread is near: said once.
  - source_matchers: ['alertname = "LangChainQuotaThreadExhaustionPredicted"']
    target_matchers: ['alertname = "LangChainQuotaThreadNearLimit"']
    equal: [job, agent, limit, thread_id]
  # A store that fails refuses calls and counts errors: the page says it.
  - source_matchers: ['alertname = "LangChainQuotaEnforcementDegraded"']
    target_matchers: ['alertname =~ "LangChainQuota(BlockRatioHigh|ThreadKeepsHitting)"']
    equal: [job, agent]
  - source_matchers: ['alertname = "LangChainQuotaEnforcementDegraded"']
    target_matchers:
      - 'alertname = "LangChainQuotaTelemetryErrors"'
      - 'component = "store"'
    equal: [job]

receivers:
  - name: pager
    webhook_configs:
      - url: http://127.0.0.1:5001/pager
  - name: chat
    webhook_configs:
      - url: http://127.0.0.1:5001/chat
  - name: log
    webhook_configs:
      - url: http://127.0.0.1:5001/log
"""


def files() -> dict[str, str]:
    """The example: its text by its name."""
    return {FILE: _TEXT}
