#!/usr/bin/env bash
# Says where the stack's pages are: addresses.sh <settings>
set -euo pipefail
# shellcheck source=/dev/null
. "$1"
cat <<BANNER

  Dashboards    http://localhost:${GRAFANA_PORT:-3000}
  Alerts        http://localhost:${ALERTMANAGER_PORT:-9093}  and as a receiver has them: http://localhost:${WEBHOOK_PORT:-5001}
  Prometheus    http://localhost:${PROMETHEUS_PORT:-9090}
  The service   http://localhost:${AGENT_1_PORT:-8081}  and http://localhost:${AGENT_2_PORT:-8082}, two replicas:
    curl -d '{"text": "what is there on limits", "user_id": "me"}' -H content-type:application/json \\
      http://localhost:${AGENT_1_PORT:-8081}/threads/mine/messages

  The load driver plays for a while; the first alert comes within two minutes.
  Traces are in Grafana: click the dot of a blocked call. Stop everything: make down
BANNER
