"""The compose stack's files: each under its own checker, and all of them together."""

import json
import os
import re
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.compose import (
    COMPOSE,
    DOCKER,
    ENV_EXAMPLE,
    IMAGE,
    ROOT,
    SECRETS,
    interpolated,
    load,
    mounted,
    mounts,
    replaced,
    services,
    variables,
)
from tests.servers.programs import required_program

SCHEMAS = ROOT / "tests" / "assets" / "grafana"
DATASOURCES = DOCKER / "grafana" / "provisioning" / "datasources" / "datasources.yaml"
PROVIDERS = DOCKER / "grafana" / "provisioning" / "dashboards" / "dashboards.yaml"
TEMPO = DOCKER / "tempo" / "tempo.yaml"
PROMETHEUS = DOCKER / "prometheus" / "prometheus.yaml"
DOCKERFILES = sorted(DOCKER.rglob("Dockerfile"))

RULES_IN_CONTAINER = "/etc/prometheus/rules/langchain-quota-rules.yaml"
ALERTMANAGER_IN_CONTAINER = "/etc/alertmanager/alertmanager.yaml"
DASHBOARDS_IN_CONTAINER = "/etc/grafana/dashboards"

NO_HEALTHCHECK = {"tempo"}  # its image has neither a shell nor a program that asks
VERSION = re.compile(r"v?\d+\.\d+(\.\d+)?(-alpine(\d+\.\d+)?)?")
PYTHON_VERSION = re.compile(r"python:\d+\.\d+\.\d+-slim(-[a-z]+)?")
NOT_DOCKER = "no-such-docker"
UP = DOCKER / "up.sh"
OF_ITS_USER = {"CHOWN", "DAC_OVERRIDE", "FOWNER", "SETGID", "SETUID"}
"""What an entry point needs that becomes its server's user."""


def run(*command: str | Path, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, capture_output=True, text=True, timeout=120, check=False, **options
    )


def beside_python(name: str) -> str:
    """A program of a package that is installed with the tests."""
    return str(Path(sys.executable).with_name(name))


def check_schema(*arguments: str | Path) -> None:
    done = run(beside_python("check-jsonschema"), *arguments)
    assert done.returncode == 0, done.stdout + done.stderr


def environments() -> dict[str, Mapping[str, str]]:
    return {
        name: service["environment"]
        for name, service in services().items()
        if "environment" in service
    }


def agents() -> list[str]:
    """The services that are replicas of the example service."""
    return [name for name, service in services().items() if name.startswith("agent-")]


def datasources() -> dict[str, Any]:
    """The provisioned data sources by their UID."""
    return {each["uid"]: each for each in load(DATASOURCES)["datasources"]}


def container_port(service: str) -> int:
    """The port that a service with one published port has in its container."""
    (port,) = {int(each.rsplit(":", 1)[1]) for each in services()[service]["ports"]}
    return port


def values(node: Any, key: str) -> Iterator[Any]:
    """Everything that stands under a key, anywhere in a document."""
    if isinstance(node, Mapping):
        for name, value in node.items():
            if name == key:
                yield value
            yield from values(value, key)
    elif isinstance(node, list):
        for each in node:
            yield from values(each, key)


# Each file under its own checker.


def test_the_compose_file_has_the_form_of_one() -> None:
    """The compose specification's schema accepts it."""
    check_schema("--builtin-schema", "vendor.compose-spec", COMPOSE)


def test_the_compose_file_builds_the_dockerfile() -> None:
    """The one image that is built is that of the one Dockerfile, from the repository's root."""
    built = [each["build"] for each in services().values() if "build" in each]
    assert [ROOT / each["dockerfile"] for each in built] == DOCKERFILES
    assert [os.path.normpath(DOCKER / each["context"]) for each in built] == [str(ROOT)]


def test_dockerfiles_are_clean() -> None:
    """Hadolint has nothing to say."""
    assert DOCKERFILES
    done = run(beside_python("hadolint"), "--no-color", *DOCKERFILES)
    assert (done.returncode, done.stdout) == (0, "")


def test_prometheus_takes_its_configuration(tmp_path: Path) -> None:
    """Promtool accepts it, with the rules that are mounted."""
    token = tmp_path / "metrics_token"
    token.write_text("secret")
    config = tmp_path / "prometheus.yaml"
    rules = mounted("prometheus", RULES_IN_CONTAINER)
    config.write_text(
        replaced(
            PROMETHEUS.read_text(),
            {RULES_IN_CONTAINER: str(rules), "/run/secrets/metrics_token": str(token)},
        )
    )
    done = run(required_program("promtool", "prometheus"), "check", "config", config)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "rules found" in done.stdout


def test_alertmanager_takes_its_configuration() -> None:
    """Amtool accepts the example that is mounted."""
    program = required_program("amtool", "prometheus-alertmanager")
    done = run(program, "check-config", mounted("alertmanager", ALERTMANAGER_IN_CONTAINER))
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("schema", "path"),
    [("datasources.schema.json", DATASOURCES), ("dashboards.schema.json", PROVIDERS)],
    ids=["datasources", "dashboards"],
)
def test_grafana_is_provisioned_as_documented(schema: str, path: Path) -> None:
    """Only fields that Grafana documents, with values of their kind."""
    check_schema("--schemafile", SCHEMAS / schema, path)


# What reaches out.


def test_ports_are_published_on_loopback_only() -> None:
    """No other machine reaches a port, and no port is published twice."""
    ports = [each for service in services().values() for each in service.get("ports", [])]
    published = [interpolated(each, {}).rsplit(":", 2) for each in ports]
    assert len(published) > 5
    assert {address for address, _, _ in published} == {"127.0.0.1"}
    assert len({port for _, port, _ in published}) == len(published)


def test_no_service_uses_the_hosts_network() -> None:
    """Nothing reaches the network past the published ports."""
    modes = {name: each.get("network_mode") for name, each in services().items()}
    assert {name: mode for name, mode in modes.items() if mode} == {
        "webhook": "service:alertmanager"
    }


def test_containers_are_confined() -> None:
    """Every service starts without rights, with a read-only root, bounded memory and short logs."""
    for name, service in services().items():
        assert service["cap_drop"] == ["ALL"], name
        assert set(service.get("cap_add", [])) <= OF_ITS_USER, name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        # Compose cannot write a secret from the environment into a container with such a root.
        assert service["read_only"] == ("secrets" not in service), name
        assert re.fullmatch(r"\d+[mg]", service["mem_limit"]), name
        assert service["logging"]["options"].keys() == {"max-size", "max-file"}, name


def test_the_image_leaves_no_volume_behind() -> None:
    """The image declares none: every container would get one without a name."""
    assert [path for path in DOCKERFILES if "\nVOLUME" in path.read_text()] == []


def test_the_image_can_be_built_from_a_private_clone() -> None:
    """What the last stage copies from the checkout has a mode of its own."""
    for path in DOCKERFILES:
        last = path.read_text().rpartition("\nFROM ")[2]
        copied = [line for line in last.splitlines() if line.startswith("COPY ")]
        assert copied
        for line in copied:
            assert line.startswith(("COPY --from=build ", "COPY --chmod=")), line


def test_the_build_knows_no_secret() -> None:
    """A package index is given as a secret of the build, and the build's tool is pinned."""
    (built,) = [each["build"] for each in services().values() if "build" in each]
    (secret,) = built["secrets"]
    default = interpolated(load(COMPOSE)["secrets"][secret], {})["file"]
    # Compose from 2.37 on lets a build read no file outside its context.
    path = Path(os.path.normpath(DOCKER / default))
    assert path.is_relative_to(ROOT)
    assert [line for line in path.read_text().splitlines() if not line.startswith("#")] == []
    for path in DOCKERFILES:
        text = path.read_text()
        assert f"--mount=type=secret,id={secret},target=/etc/pip.conf" in text
        assert "--build-constraint constraints.txt" in text
    assert re.search("^hatchling==", (ROOT / "constraints.txt").read_text(), re.MULTILINE)


def test_images_are_pinned() -> None:
    """Every image that is pulled has a full version; ours are never pulled."""
    pulled = {}
    for name, service in services().items():
        if service["image"] == IMAGE:
            assert service["pull_policy"] == "never", name
        else:
            pulled[name] = service["image"].partition(":")[2]
    assert len(pulled) > 5
    assert {name: tag for name, tag in pulled.items() if not VERSION.fullmatch(tag)} == {}


def test_the_base_image_is_pinned() -> None:
    """What the service is built on has a full version, unless `BASE_IMAGE` says otherwise."""
    for path in DOCKERFILES:
        defaults = re.findall(r"^ARG BASE_IMAGE=(.+)$", path.read_text(), re.MULTILINE)
        assert len(defaults) == 1
        assert PYTHON_VERSION.fullmatch(defaults[0]), defaults


# Secrets and settings.


def example() -> dict[str, str]:
    """The settings in the example, those that are commented out too."""
    lines = re.findall(r"^#?([A-Z][A-Z0-9_]*)=(.*)$", ENV_EXAMPLE.read_text(), re.MULTILINE)
    return dict(lines)


def test_every_setting_is_in_the_example() -> None:
    """What the compose file reads stands in .env.example, and nothing else does."""
    text = "\n".join(
        line for line in COMPOSE.read_text().splitlines() if not line.lstrip().startswith("#")
    )
    used = {each.name for each in variables(text)}
    used.update(
        arg for each in services().values() for arg in each.get("build", {}).get("args", [])
    )
    assert set(example()) == used


def test_the_example_says_the_defaults() -> None:
    """A setting's value in the example is what holds without it."""
    defaults = {each.name: each.default for each in variables(COMPOSE.read_text())}
    assert {name: default or "" for name, default in defaults.items()} == {
        name: value for name, value in example().items() if name in defaults
    }


def test_secrets_have_no_default() -> None:
    """The stack does not start without secrets, and the repository has none."""
    found = [each for each in variables(COMPOSE.read_text()) if each.name in SECRETS]
    assert {each.name for each in found} == SECRETS
    assert {each.default for each in found} == {None}
    assert {example()[name] for name in SECRETS} == {""}
    assert ".env" in (ROOT / ".gitignore").read_text().splitlines()


def test_no_secret_stands_in_the_compose_file() -> None:
    """What is called a password, a token or a secret comes from a variable."""
    named = {
        key: value
        for environment in environments().values()
        for key, value in environment.items()
        if re.search("PASSWORD|TOKEN|SECRET", key) and value not in {"true", "false"}
    }
    assert {"METRICS_TOKEN", "POSTGRES_PASSWORD", "PGPASSWORD"} == named.keys()
    assert [key for key, value in named.items() if not value.startswith("${")] == []


def test_secrets_may_be_any_text() -> None:
    """A secret stands alone in its variable: in a URL some characters would mean something."""
    found = [
        value
        for environment in environments().values()
        for value in environment.values()
        if any(name in value for name in SECRETS)
    ]
    assert found
    assert [value for value in found if not re.fullmatch(r"\$\{\w+:\?[^}]*\}", value)] == []
    assert not re.search(r"^\s*(\.|source)\s", UP.read_text(), re.MULTILINE)  # no shell reads them


# What fits together.


def test_what_is_mounted_is_there() -> None:
    """Each mounted path is in the repository, and read-only."""
    found = list(mounts())
    assert len(found) > 5
    assert [each for each in found if not each.source.exists() or each.options != "ro"] == []
    assert [each for each in found if not each.source.is_relative_to(ROOT)] == []


def test_dashboards_and_rules_are_mounted_not_copied() -> None:
    """The stack shows what is shipped, and has no dashboard or rule of its own."""
    dashboards = ROOT / "dashboards"
    assert mounted("grafana", DASHBOARDS_IN_CONTAINER) == dashboards / "grafana"
    assert mounted("prometheus", RULES_IN_CONTAINER).parent == dashboards / "prometheus"
    data = ROOT / "src" / "langchain_quota" / "monitoring"
    assert mounted("alertmanager", ALERTMANAGER_IN_CONTAINER) == data / "alertmanager.yaml"
    assert [path for path in DOCKER.rglob("*.json") if "panels" in path.read_text()] == []
    rule = re.compile(r"^\s*expr:", re.MULTILINE)
    assert [path for path in DOCKER.rglob("*.yaml") if rule.search(path.read_text())] == []


def test_named_volumes_are_declared() -> None:
    """Every volume that is used is declared, and the other way round."""
    used = {
        volume.split(":")[0]
        for service in services().values()
        for volume in service.get("volumes", [])
        if not volume.startswith(".")
    }
    assert used == set(load(COMPOSE)["volumes"])


def test_services_wait_for_what_they_need() -> None:
    """Whoever waits for a service to be healthy waits for one whose health is checked."""
    checked = {name for name, each in services().items() if "test" in each.get("healthcheck", {})}
    assert set(services()) - checked == NO_HEALTHCHECK
    assert all("/readyz" in str(services()[agent]["healthcheck"]["test"]) for agent in agents())
    awaited = {
        (name, needed, condition["condition"])
        for name, service in services().items()
        for needed, condition in service.get("depends_on", {}).items()
    }
    assert {needed for _, needed, how in awaited if how == "service_healthy"} <= checked
    for agent in agents():
        assert {
            (agent, "redis", "service_healthy"),
            (agent, "postgres", "service_healthy"),
        } <= awaited
        assert ("load", agent, "service_healthy") in awaited


def test_the_replicas_are_alike() -> None:
    """Two replicas with one worker each, which differ in name and port only."""
    assert len(agents()) == 2
    environment = [dict(environments()[name]) for name in agents()]
    assert [each.pop("OTEL_RESOURCE_ATTRIBUTES") for each in environment] == [
        f"service.instance.id={name}" for name in agents()
    ]
    assert environment[0] == environment[1]
    assert "WORKERS" not in environment[0]
    assert "PROMETHEUS_MULTIPROC_DIR" not in environment[0]


def test_the_load_driver_grants_in_the_agents_store() -> None:
    """It has the address of the Redis that the agents count in."""
    url = "LANGCHAIN_QUOTA_REDIS_URL"
    assert {environments()[name][url] for name in ("load", *agents())} == {"redis://redis:6379/0"}


def test_counters_have_no_second_series() -> None:
    """The agents expose no `_created` series."""
    for agent in agents():
        assert environments()[agent]["PROMETHEUS_DISABLE_CREATED_SERIES"] == "true"


def test_the_store_keeps_what_it_counts() -> None:
    """Redis evicts nothing and survives a restart."""
    command = services()["redis"]["command"]
    pairs = dict(zip(command[1::2], command[2::2], strict=True))
    assert pairs == {
        "--appendonly": "yes",
        "--maxmemory": "256mb",  # it refuses writes, before its container runs out of memory
        "--maxmemory-policy": "noeviction",
    }


def test_prometheus_scrapes_every_replica() -> None:
    """All replicas are targets, on the port where they listen, and shown the token."""
    (scraped,) = load(PROMETHEUS)["scrape_configs"]
    (targets,) = values(scraped, "targets")
    assert targets == [f"{agent}:{container_port(agent)}" for agent in agents()]
    assert scraped["authorization"] == {"credentials_file": "/run/secrets/metrics_token"}
    assert services()["prometheus"]["secrets"] == ["metrics_token"]
    assert load(COMPOSE)["secrets"]["metrics_token"] == {"environment": "METRICS_TOKEN"}
    assert "--enable-feature=exemplar-storage" in services()["prometheus"]["command"]


def test_prometheus_tells_alertmanager() -> None:
    """The alerts go to the service that Alertmanager is."""
    ((target,),) = values(load(PROMETHEUS)["alerting"], "targets")
    assert target == "alertmanager:9093"
    assert "127.0.0.1:${ALERTMANAGER_PORT:-9093}:9093" in services()["alertmanager"]["ports"]


def test_all_alerts_reach_the_webhook() -> None:
    """Every receiver of Alertmanager leads to the webhook that shares its network."""
    receivers = values(load(mounted("alertmanager", ALERTMANAGER_IN_CONTAINER)), "webhook_configs")
    urls = [urlsplit(each["url"]) for receiver in receivers for each in receiver]
    assert len(urls) > 1
    assert {url.hostname for url in urls} == {"127.0.0.1"}
    (port,) = {url.port for url in urls}
    assert f"--port={port}" in services()["webhook"]["entrypoint"]
    assert any(each.endswith(f":{port}") for each in services()["alertmanager"]["ports"])


def test_the_links_in_alerts_lead_to_grafana() -> None:
    """The rules' links have the address on which Grafana is published."""
    rules = load(mounted("prometheus", RULES_IN_CONTAINER))
    links = list(values(rules, "dashboard_url"))
    assert links
    (port,) = (interpolated(each, {}) for each in services()["grafana"]["ports"])
    assert {urlsplit(link).netloc for link in links} == {f"localhost:{port.split(':')[1]}"}


def test_spans_reach_tempo() -> None:
    """The agents send OTLP to a port where Tempo listens, by that port's protocol."""
    protocols = load(TEMPO)["distributor"]["receivers"]["otlp"]["protocols"]
    for agent in agents():
        endpoint = urlsplit(environments()[agent]["OTEL_EXPORTER_OTLP_ENDPOINT"])
        protocol = environments()[agent]["OTEL_EXPORTER_OTLP_PROTOCOL"]
        assert endpoint.hostname == "tempo"
        assert protocols[protocol.partition("/")[0]]["endpoint"] == f"0.0.0.0:{endpoint.port}"


def test_the_data_sources_are_services() -> None:
    """Each data source's address is a service of the stack, on its port."""
    tempo = load(TEMPO)["server"]["http_listen_port"]
    ports = {"prometheus": container_port("prometheus"), "tempo": tempo}
    found = {urlsplit(each["url"]).netloc for each in datasources().values()}
    assert found == {f"{name}:{port}" for name, port in ports.items()}


def test_an_exemplar_leads_to_its_trace() -> None:
    """Prometheus' data source links the exemplars' label to Tempo's, and Tempo's leads back."""
    (destination,) = datasources()["prometheus"]["jsonData"]["exemplarTraceIdDestinations"]
    assert destination["name"] == "trace_id"
    assert datasources()[destination["datasourceUid"]]["type"] == "tempo"
    back = datasources()["tempo"]["jsonData"]["tracesToMetrics"]["datasourceUid"]
    assert datasources()[back]["type"] == "prometheus"


def test_the_dashboards_find_their_data_sources() -> None:
    """A dashboard's data source is provisioned, or a variable of a type that is."""
    provisioned = {each["type"] for each in datasources().values()}
    paths = sorted(mounted("grafana", DASHBOARDS_IN_CONTAINER).glob("*.json"))
    assert paths
    for path in paths:
        dashboard = json.loads(path.read_text())
        variable_types = {
            each["name"]: each["query"]
            for each in dashboard["templating"]["list"]
            if each["type"] == "datasource"
        }
        assert set(variable_types.values()) <= provisioned
        known = {f"${{{name}}}" for name in variable_types} | datasources().keys()
        used = {each["uid"] for each in values(dashboard, "datasource") if isinstance(each, dict)}
        assert used
        assert used - known - {"-- Grafana --", "grafana"} == set()


def test_the_dashboards_are_found() -> None:
    """Grafana looks for dashboards where they are mounted, and opens one that is there."""
    (provider,) = load(PROVIDERS)["providers"]
    assert provider["options"]["path"] == DASHBOARDS_IN_CONTAINER
    home = environments()["grafana"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    name = home.removeprefix(f"{DASHBOARDS_IN_CONTAINER}/")
    assert (mounted("grafana", DASHBOARDS_IN_CONTAINER) / name).is_file()


# The targets of make.


def make(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run make, without what an outer make told its children."""
    program = shutil.which("make")
    if program is None:
        pytest.skip("make not found")
    environment = {key: value for key, value in os.environ.items() if not key.startswith("MAKE")}
    return run(program, "--no-print-directory", *arguments, cwd=ROOT, env=environment)


def settings(path: Path) -> dict[str, str]:
    lines = [each for each in path.read_text().splitlines() if re.match("[A-Z]", each)]
    return dict(line.split("=", 1) for line in lines)


def test_make_writes_the_settings(tmp_path: Path) -> None:
    """The settings are the example's, with secrets of their own that only their owner can read."""
    made = []
    for name in ("one", "two"):
        path = tmp_path / name
        done = make(f"ENV_FILE={path}", path)
        assert done.returncode == 0, done.stderr
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        made.append(settings(path))
    secrets = [found[name] for found in made for name in SECRETS]
    assert len(set(secrets)) == len(secrets)
    assert all(re.fullmatch("[0-9a-f]{48}", secret) for secret in secrets)
    plain = {name: value for name, value in settings(ENV_EXAMPLE).items() if name not in SECRETS}
    for found in made:
        assert {name: value for name, value in found.items() if name not in SECRETS} == plain


def test_make_keeps_the_settings(tmp_path: Path) -> None:
    """Settings that are there stay as they are."""
    path = tmp_path / ".env"
    path.write_text("METRICS_TOKEN=mine\n")
    os.utime(path, (0, 0))  # older than the example
    assert make(f"ENV_FILE={path}", path).returncode == 0
    assert path.read_text() == "METRICS_TOKEN=mine\n"


@pytest.mark.parametrize("target", ["up", "down"])
def test_without_docker_make_says_so(target: str, tmp_path: Path) -> None:
    """Where there is no Docker, one line says what is missing, and nothing is made."""
    path = tmp_path / ".env"
    done = make(f"ENV_FILE={path}", f"DOCKER={NOT_DOCKER}", target)
    assert done.returncode != 0
    assert re.fullmatch(r"Docker.+\n", done.stdout)
    assert not path.exists()


@pytest.mark.parametrize("target", ["docker-test", "stack-test"])
def test_without_docker_its_tests_are_left_out(target: str) -> None:
    """Where there is no Docker, its tests say so in one line and do not fail."""
    done = make(f"DOCKER={NOT_DOCKER}", target)
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(r"Docker.+\n", done.stdout)
