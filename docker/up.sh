#!/usr/bin/env bash
# Starts the stack: up.sh <settings>. Ends with 0 when all of it runs, with 1 and a report if not.
#
# `docker compose up --wait` is not used. Its behaviour depends on Compose's version if a service has
# no health check, ends by itself or crashes again and again.
set -euo pipefail
cd "$(dirname "$0")/.."
settings=$1
docker=${DOCKER:-docker}
compose=("$docker" compose --file docker/compose.yaml --env-file "$settings")
patience=${UP_SECONDS:-300} # for all services together, once the image is built
restarts=3                  # so many make a crash loop
quiet=15                    # seconds without a further restart, if there was one

log=$(mktemp)
starting=
trap '[[ -z $starting ]] || kill "$starting" 2>/dev/null || true; rm -f "$log"' EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

# A line for every container: service, state, health, exit code, restarts, id.
containers() {
    local ids
    ids=$("${compose[@]}" ps --all --quiet)
    # shellcheck disable=SC2086 # one word for every id
    [[ -z $ids ]] || "$docker" inspect --format '{{index .Config.Labels "com.docker.compose.service"}} {{.State.Status}} {{if .State.Health}}{{.State.Health.Status}}{{else}}none{{end}} {{.State.ExitCode}} {{.RestartCount}} {{.ID}}' $ids
}

# Sets `broken` (lines: service, id, what is wrong), `waiting` (services), `restarted` (their counts).
look() {
    local service state health code count id old
    broken='' waiting='' restarted=''
    while read -r service state health code count id; do
        old=$(awk -v id="$id" '$6 == id { print $5 }' <<<"$before")
        ((count == ${old:-0})) || restarted+="$service $count "
        if ((count - ${old:-0} >= restarts)); then
            broken+="$service $id ends again and again"$'\n'
            continue
        fi
        case $state/$health in
            running/healthy | running/none) ;;
            running/unhealthy) broken+="$service $id runs, but is not healthy"$'\n' ;;
            exited/*)
                if [[ $service != load || $code != 0 ]]; then
                    broken+="$service $id has ended with exit code $code"$'\n'
                fi
                ;;
            *) waiting+="$service " ;;
        esac
    done < <(containers)
}

# One sentence on what to do, from the output of Compose and of the broken services: remedy <text>
remedy() {
    local port name
    port=$(grep -iE 'already allocated|already in use|not available' <<<"$1" |
        grep -oE '127\.0\.0\.1:[0-9]+' | head -n 1 | cut -d: -f2 || true)
    if [[ -n $port ]]; then
        # A setting that is left out has the example's value.
        name=$(grep -hoE "^[A-Z0-9_]+_PORT=[\"']?$port\b" "$settings" docker/.env.example | head -n 1 | cut -d= -f1 || true)
        echo "Port $port is in use: choose another one for ${name:-it} in $settings, or stop what uses it."
    elif grep -q 'password authentication failed' <<<"$1"; then
        echo "POSTGRES_PASSWORD in $settings is not the one that the database was made with: put that one back, or forget the database with: make down ARGS=--volumes"
    elif grep -qiE "^[A-Z_]+ is wrong: |exit code 2$|missing a value|invalid (hostPort|interpolation|proto)|unexpected character|failed to read .*env" <<<"$1"; then
        echo "A setting in $settings is wrong, and the lines above say which: correct it, and run make up again."
    else
        echo "All that a service has said: ${compose[*]} logs <service>"
    fi
}

fail() { # fail <what Compose said>: says what does not run, and why
    local service id what said text=$1
    {
        echo
        echo "The stack does not run."
        if [[ -n $1 ]]; then sed 's/^/  /' <<<"$1"; fi
        while read -r service id what; do
            [[ -n $service ]] || continue
            echo "  $service $what. Its last lines:"
            said=$("$docker" logs --tail 200 "$id" 2>&1)
            if [[ $what == *"not healthy"* ]]; then
                said+=$'\n'$("$docker" inspect --format '{{if .State.Health}}{{range .State.Health.Log}}{{.Output}}{{end}}{{end}}' "$id")
            fi
            grep -E '^\S' <<<"$said" | tail -n 8 | sed 's/^/    /' || true
            text+=$'\n'$said$'\n'$what
        done <<<"$broken"
        [[ -z $waiting ]] || echo "  Not there yet: $waiting"
        remedy "$text"
        echo "make down stops what runs of it."
    } >&2
    exit 1
}

port() { "${compose[@]}" port "$1" "$2" | sed 's/.*:/localhost:/'; }

addresses() {
    cat <<BANNER

  Dashboards    http://$(port grafana 3000)
  Alerts        http://$(port alertmanager 9093)  and as a receiver has them: http://$(port alertmanager 5001)
  Prometheus    http://$(port prometheus 9090)
  The service   http://$(port agent-1 8000)  and http://$(port agent-2 8000), two replicas:
    curl -d '{"text": "what is there on limits"}' -H content-type:application/json -H x-forwarded-user:me \\
      http://$(port agent-1 8000)/threads/mine/messages

  The page      http://$(port agent-1 8000)/quota/  user quota, with the password METRICS_TOKEN of docker/.env

  The load driver plays for a while; the first alert comes within two minutes.
  Traces are in Grafana: click the dot of a blocked call. Stop everything: make down
BANNER
}

broken='' waiting='' before=''
"${compose[@]}" config --quiet 2>"$log" || fail "$(<"$log")"

# The containers' users must be able to read mounted files, also in a clone made under umask 077.
"${compose[@]}" config | sed -nE 's/^ +source: (\/.*)$/\1/p' | sort -u | while read -r path; do
    find "$path" \( -type d ! -perm -005 -o ! -type d ! -perm -004 \) -exec chmod a+rX {} +
done

# Crashed services start anew. Compose then makes the webhook anew with Alertmanager's network.
look
crashed=$(cut -d' ' -f1 <<<"$broken" | sed '/^load$/d')
# shellcheck disable=SC2086 # one word for every service
[[ -z $crashed ]] || "${compose[@]}" rm --stop --force --volumes $crashed

broken='' waiting=''
"${compose[@]}" create --build ||
    fail "The containers were not made: the lines above say why. BASE_IMAGE and PIP_CONF in $settings name another base image, and a package index of your own."
before=$(containers)

start() {
    "${compose[@]}" up --detach --no-build >"$log" 2>&1 </dev/null &
    starting=$!
}

echo "Starting …"
start
last='' since=$SECONDS end=$((SECONDS + patience))
while ((SECONDS < end)); do
    sleep 1
    look
    [[ -z $broken ]] || fail ''
    [[ $restarted == "$last" ]] || last=$restarted since=$SECONDS
    ! kill -0 "$starting" 2>/dev/null || continue
    if ! wait "$starting"; then
        said=$(grep -vE '^ *(Container|Network|Volume) ' "$log" || true)
        # Compose gives up at the first crash of a service that others wait for. The service may
        # recover, or be in a loop.
        if [[ $said != *"dependency failed to start"* ]]; then look; fail "$said"; fi
        start
    elif [[ -z $waiting ]] && { [[ -z $restarted ]] || ((SECONDS - since >= quiet)); }; then
        addresses
        exit 0
    fi
done
look
while read -r service _ _ _ _ id; do
    if [[ " $waiting" == *" $service "* ]]; then broken+="$service $id is not healthy after $patience seconds"$'\n'; fi
done < <(containers)
waiting=''
fail ''
