#!/usr/bin/env bash
# Builds the service's image and tries it. BASE_IMAGE may name any image with Python; arguments go to
# `docker build`.
set -euo pipefail
cd "$(dirname "$0")/.."
docker=${DOCKER:-docker}
image=langchain-quota-agent:test

if ! "$docker" info >/dev/null 2>&1; then
    echo "Docker's engine was not found: the image is not tested."
    exit 0
fi

# The Dockerfile mounts a secret: older engines need this setting for it.
DOCKER_BUILDKIT=1 "$docker" build "$@" --file docker/agent/Dockerfile --tag "$image" \
    ${BASE_IMAGE:+--build-arg "BASE_IMAGE=$BASE_IMAGE"} .

token=$(od -An -N24 -tx1 /dev/urandom | tr -d ' \n')
container=$("$docker" run --detach --init --env "METRICS_TOKEN=$token" "$image")
trap '"$docker" rm --force "$container" >/dev/null' EXIT
inspect() { "$docker" inspect --format "$1" "$container"; }

for _ in {1..60}; do
    [[ $(inspect '{{.State.Health.Status}}') == starting ]] || break
    sleep 1
done
health=$(inspect '{{.State.Health.Status}}')
if [[ $health != healthy ]] || ! "$docker" exec --interactive "$container" python - <docker/check.py; then
    "$docker" logs "$container"
    echo "The service in the container fails (its health: $health)."
    exit 1
fi

[[ $("$docker" exec "$container" id -u) != 0 ]] || { echo "The service runs as root."; exit 1; }
"$docker" stop "$container" >/dev/null
code=$(inspect '{{.State.ExitCode}}')
[[ $code == 0 ]] || { echo "The service ended with code $code when it was stopped."; exit 1; }
echo "The image works: it answers, refuses, shows its metrics and stops cleanly."
