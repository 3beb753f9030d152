"""The compose stack's files: each under its own checker, and all together; Kubernetes' overlay."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml

from langchain_quota.cli import export
from tests.server.programs import required_program
from tests.server.prometheus import DEADLINE
from tools import pin_images

ROOT = Path(__file__).parents[2]
DOCKER = ROOT / "docker"
COMPOSE = DOCKER / "compose.yaml"
GRAFANA = DOCKER / "grafana" / "provisioning"
SOURCES = GRAFANA / "datasources" / "datasources.yaml"
PROVIDERS = GRAFANA / "dashboards" / "dashboards.yaml"
PROMETHEUS = DOCKER / "prometheus" / "prometheus.yaml"
RULES = "/etc/prometheus/rules/langchain-quota-rules.yaml"
ALERTMANAGER = "/etc/alertmanager/alertmanager.yaml"
DASHBOARDS = "/etc/grafana/dashboards"
SECRETS = {"METRICS_TOKEN", "POSTGRES_PASSWORD", "REDIS_PASSWORD"}
AGENTS = ["agent-1", "agent-2"]
IMAGE = "langchain-quota-agent"
VARIABLE = re.compile(r"\$(?:\$|\{(?P<name>\w+)(?:(?P<kind>:-|:\?)(?P<rest>[^}]*))?\})")
VERSION = re.compile(r"v?\d+\.\d+(\.\d+)?(-alpine(\d+\.\d+)?)?(@sha256:[0-9a-f]{64})?")
OF_GRAFANA = """
datasources: name uid type access url isDefault editable
datasources.jsonData: httpMethod timeInterval
datasources.jsonData.exemplarTraceIdDestinations: name datasourceUid urlDisplayLabel
datasources.jsonData.tracesToMetrics: datasourceUid spanStartTimeShift spanEndTimeShift
datasources.jsonData.tracesToMetrics.tags: key value
datasources.jsonData.tracesToMetrics.queries: name query
providers: name type folder disableDeletion allowUiUpdates
providers.options: path
"""
"""The fields that Grafana documents for its provisioning, as far as we use them."""
SWITCHES = {"isDefault", "editable", "disableDeletion", "allowUiUpdates"}
OF_ITS_USER = {"CHOWN", "DAC_OVERRIDE", "FOWNER", "SETGID", "SETUID"}
"""What an entry point needs that becomes its server's user."""


def load(path: Path) -> Any:
    return yaml.safe_load(path.read_text())


SERVICES: dict[str, dict[str, Any]] = load(COMPOSE)["services"]


def unset(text: str) -> str:
    """A text as it is without settings."""
    return VARIABLE.sub(lambda found: found["rest"], text)


def published_ports(service: str) -> list[list[str]]:
    """Address, port, and port in the container."""
    return [unset(each).rsplit(":", 2) for each in SERVICES[service].get("ports", [])]


def mounts() -> Iterator[tuple[str, Path, str, list[str]]]:
    """What is mounted from the repository: in which service, from where to where, and how."""
    for name, service in SERVICES.items():
        for volume in service.get("volumes", []):
            source, target, *options = volume.split(":")
            if source.startswith("."):
                yield name, Path(os.path.normpath(DOCKER / source)), target, options


def mounted(service: str, target: str) -> Path:
    """The file of the repository that a container has at a path."""
    (found,) = (each[1] for each in mounts() if (each[0], each[2]) == (service, target))
    return found


def values(node: Any, key: str) -> Iterator[Any]:
    """Everything that stands under a key, anywhere in a document."""
    for name, value in node.items() if isinstance(node, Mapping) else enumerate(node):
        if name == key:
            yield value
        if isinstance(value, Mapping | list):
            yield from values(value, key)


def test_each_file_passes_its_checker(tmp_path: Path) -> None:
    """Compose's schema, Hadolint, promtool and amtool accept what is there."""
    token, config = tmp_path / "metrics_token", tmp_path / "prometheus.yaml"
    token.write_text("secret")
    text = PROMETHEUS.read_text()
    places = {RULES: str(mounted("prometheus", RULES)), "/run/secrets/metrics_token": str(token)}
    for old, new in places.items():
        assert old in text
        text = text.replace(old, new)
    config.write_text(text)
    beside_python = Path(sys.executable).parent
    check = beside_python / "check-jsonschema"
    amtool = required_program("amtool", "prometheus-alertmanager")
    commands: list[tuple[str | Path, ...]] = [
        (check, "--builtin-schema", "vendor.compose-spec", COMPOSE),
        (beside_python / "hadolint", "--no-color", *DOCKER.rglob("Dockerfile")),
        (required_program("promtool", "prometheus"), "check", "config", config),
        (amtool, "check-config", mounted("alertmanager", ALERTMANAGER)),
    ]
    for command in commands:
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


def fields(node: Any, path: str = "") -> Iterator[tuple[str, str, object]]:
    """The path, the name and the value of each field that has no further ones."""
    for name, value in node.items():
        for each in value if isinstance(value, list) else [value]:
            if isinstance(each, Mapping):
                yield from fields(each, f"{path}.{name}".strip("."))
            else:
                yield path, name, each


def test_grafana_knows_each_field() -> None:
    """Grafana's files have the fields that it documents, of which it ignores any other.

    A single $ in a text would be a variable of the environment.
    """
    lines = (line.split(": ") for line in OF_GRAFANA.strip().splitlines())
    known = {(path, name) for path, names in lines for name in names.split()}
    found = [*fields(load(SOURCES)), *fields(load(PROVIDERS))]
    assert {each[:2] for each in found} == {*known, ("", "apiVersion")}
    for path, name, value in found:
        kind = int if not path else bool if name in SWITCHES else str
        assert type(value) is kind, (path, name)
        assert not re.search(r"(^|[^$])\$(\$\$)*([^$]|$)", str(value)), (path, name)
    assert {value for _, name, value in found if name in ("access", "apiVersion")} == {"proxy", 1}


def test_what_others_reach() -> None:
    """Ports are published once, and on loopback only; no service uses the host's network.

    Only agents and their load reach the databases, and who watches reaches no agent.
    """
    published = [each for service in SERVICES for each in published_ports(service)]
    assert {address for address, _, _ in published} == {"127.0.0.1"}
    assert len({port for _, port, _ in published}) == len(published) > 5
    modes = {each["network_mode"] for each in SERVICES.values() if "network_mode" in each}
    assert modes == {"service:alertmanager"}
    of = {name: service.get("networks", []) for name, service in SERVICES.items()}
    assert [name for name in of if "data" in of[name]] == [*AGENTS, "load", "redis", "postgres"]
    watch = ["prometheus", "alertmanager", "tempo", "grafana"]
    assert [name for name in of if "watch" in of[name]] == watch
    assert load(COMPOSE)["networks"]["data"] == {"internal": True}


def test_containers_are_confined() -> None:
    """Every service has no rights, a read-only root, bounds, short logs, and a fixed image."""
    for name, service in SERVICES.items():
        assert service["cap_drop"] == ["ALL"], name
        assert set(service.get("cap_add", [])) <= OF_ITS_USER, name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        # Compose cannot write a secret from the environment into a container with such a root.
        assert service["read_only"] == ("secrets" not in service), name
        assert re.fullmatch(r"\d+[mg]", service["mem_limit"]), name
        assert service["cpus"] > 0 < service["pids_limit"], name
        assert service["logging"]["options"].keys() == {"max-size", "max-file"}, name
        image, _, tag = service["image"].partition(":")
        assert service.get("pull_policy") == "never" if image == IMAGE else VERSION.fullmatch(tag)
    # Digests can be added to the images of others, and renewed.
    pinned = pin_images.pinned(COMPOSE.read_text(), lambda _: "sha256:" + "0" * 64)
    images = re.findall(r"image: (\S+):(\S+)@new", pin_images.pinned(pinned, lambda _: "new"))
    assert len(images) == len({service["image"] for service in SERVICES.values()} - {IMAGE})


def test_settings_and_secrets() -> None:
    """All that compose reads is in .env.example, with its default; a secret has none.

    It stands alone in its variable: in a URL some characters would mean something.
    """
    settings = (DOCKER / ".env.example").read_text()
    example = dict(re.findall(r"(?m)^#?([A-Z][A-Z0-9_]*)=(.*)$", settings))
    text = re.sub(r"(?m)^\s*#.*$", "", COMPOSE.read_text())
    defaults = {
        each["name"]: each["rest"] if each["kind"] == ":-" else None
        for each in VARIABLE.finditer(text)
        if each["name"]
    }
    built = {each for args in values(load(COMPOSE), "args") for each in args}
    assert example.keys() == {*defaults, *built}
    assert {(name, default or "") for name, default in defaults.items()} <= example.items()
    assert {name for name, default in defaults.items() if default is None} == SECRETS
    assert ".env" in (ROOT / ".gitignore").read_text().splitlines()
    environments = [each.get("environment", {}) for each in SERVICES.values()]
    named = [pair for each in environments for pair in each.items()]
    secret = [value for _, value in named if any(name in value for name in SECRETS)]
    assert all(re.fullmatch(r"\$\{\w+:\?[^}]*\}", value) for value in secret)
    hidden = {key for key, value in named if value in secret}
    of_redis = {"LANGCHAIN_QUOTA_REDIS_PASSWORD", "REDISCLI_AUTH"}
    assert hidden == {"METRICS_TOKEN", "POSTGRES_PASSWORD", "PGPASSWORD", *of_redis}
    redis = SERVICES["redis"]
    assert redis["environment"]["REDISCLI_AUTH"] in redis["command"]


def test_what_is_mounted_is_what_is_shipped() -> None:
    """Mounted paths are in the repository, and read-only: rules and dashboards are no copies."""
    found = list(mounts())
    assert all(source.exists() and options == ["ro"] for _, source, _, options in found)
    assert all(source.is_relative_to(ROOT) for _, source, _, _ in found)
    assert mounted("grafana", DASHBOARDS) == ROOT / "dashboards" / "grafana"
    assert mounted("prometheus", RULES).parent == ROOT / "dashboards" / "prometheus"
    [route] = export.alertmanager().values()
    config = load(mounted("alertmanager", ALERTMANAGER))
    del config["receivers"], config["route"]["receiver"]
    assert config == yaml.safe_load(route)
    (provider,) = load(PROVIDERS)["providers"]
    assert provider["options"]["path"] == DASHBOARDS


def test_everything_reaches_its_end() -> None:
    """Prometheus scrapes each replica, alerts reach the webhook, spans Tempo, links Grafana."""
    (scraped,) = load(PROMETHEUS)["scrape_configs"]
    assert list(values(scraped, "targets")) == [[f"{agent}:8000" for agent in AGENTS]]
    assert scraped["authorization"] == {"credentials_file": "/run/secrets/metrics_token"}
    assert "--enable-feature=exemplar-storage" in SERVICES["prometheus"]["command"]
    assert list(values(load(PROMETHEUS)["alerting"], "targets")) == [["alertmanager:9093"]]
    receivers = values(load(mounted("alertmanager", ALERTMANAGER)), "webhook_configs")
    (place,) = {urlsplit(each["url"]).netloc for receiver in receivers for each in receiver}
    assert f"--port={place.removeprefix('127.0.0.1:')}" in SERVICES["webhook"]["entrypoint"]
    ((_, port, _),) = published_ports("grafana")
    links = [*values(load(mounted("prometheus", RULES)), "dashboard_url")]
    links += [unset(SERVICES[agent]["environment"]["DASHBOARDS_URL"]) for agent in AGENTS]
    assert {urlsplit(each)[:2] for each in links} == {("http", f"localhost:{port}")}
    tempo = load(DOCKER / "tempo" / "tempo.yaml")
    otlp = urlsplit(SERVICES["agent-1"]["environment"]["OTEL_EXPORTER_OTLP_ENDPOINT"])
    protocol = tempo["distributor"]["receivers"]["otlp"]["protocols"]["http"]
    assert (otlp.hostname, protocol["endpoint"]) == ("tempo", f"0.0.0.0:{otlp.port}")
    sources = {each["uid"]: each for each in load(SOURCES)["datasources"]}
    places = {"prometheus:9090", f"tempo:{tempo['server']['http_listen_port']}"}
    assert {urlsplit(each["url"]).netloc for each in sources.values()} == places
    (trace,) = sources["prometheus"]["jsonData"]["exemplarTraceIdDestinations"]
    assert (trace["name"], sources[trace["datasourceUid"]]["type"]) == ("trace_id", "tempo")


PAGE = Path(__file__).parents[2] / "docs" / "production.md"


def built(directory: Path) -> dict[str, Any]:
    """The objects of a kustomization, by kind and name."""
    kubectl = shutil.which("kubectl")
    if kubectl is None:  # no package of the distributions that CI runs on is new enough
        pytest.skip("kubectl not found")
    command = [kubectl, "kustomize", str(directory)]
    made = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE, check=False)
    assert made.returncode == 0, made.stderr
    objects = yaml.safe_load_all(made.stdout)
    return {f"{each['kind']}/{each['metadata']['name']}": each for each in objects}


def on_the_page(kind: str) -> str:
    """The page's example of a kind."""
    blocks = re.findall(r"^```yaml\n(.+?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    (found,) = [block for block in blocks if yaml.safe_load(block).get("kind") == kind]
    return str(found)


def test_the_overlay_of_the_page_builds(tmp_path: Path) -> None:
    """The base builds unchanged; the page's overlay adds namespace, label and Secret."""
    files = export.kubernetes()
    overlay, base = tmp_path / "overlay", tmp_path / "overlay" / "langchain-quota"
    base.mkdir(parents=True)
    for name, text in files.items():
        (base / name).write_text(text)
    (overlay / "kustomization.yaml").write_text(on_the_page("Kustomization"))
    objects = [each for each in map(yaml.safe_load, files.values()) if "metadata" in each]
    assert built(base) == {f"{each['kind']}/{each['metadata']['name']}": each for each in objects}
    found = built(overlay)
    assert {each["metadata"]["namespace"] for each in found.values()} == {"agents"}
    labels = [each["metadata"]["labels"]["release"] for each in found.values()]
    assert labels == ["kube-prometheus-stack"] * 5
    [endpoint] = found["PodMonitor/langchain-quota"]["spec"]["podMetricsEndpoints"]
    secret = {"name": "agents-metrics", "key": "token"}
    assert endpoint["authorization"] == {"credentials": secret}
    pod = yaml.safe_load(on_the_page("Deployment"))["spec"]["template"]["spec"]
    [container] = pod["containers"]
    [token] = [each for each in container["env"] if each["name"] == "METRICS_TOKEN"]
    assert token["valueFrom"]["secretKeyRef"] == secret


def test_the_pods_of_the_page_are_scraped() -> None:
    """The page's Deployment has the labels and the port that the PodMonitor selects."""
    deployment = yaml.safe_load(on_the_page("Deployment"))
    monitor = yaml.safe_load(export.kubernetes()["langchain-quota-podmonitor.yaml"])["spec"]
    pod = deployment["spec"]["template"]
    labels = pod["metadata"]["labels"]
    assert monitor["selector"]["matchLabels"].items() <= labels.items()
    assert monitor["jobLabel"] in labels
    assert deployment["spec"]["selector"]["matchLabels"].items() <= labels.items()
    ports = [port["name"] for each in pod["spec"]["containers"] for port in each["ports"]]
    assert ports == [endpoint["port"] for endpoint in monitor["podMetricsEndpoints"]]
