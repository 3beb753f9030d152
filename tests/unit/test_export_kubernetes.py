"""The export for Kubernetes: objects of the form that a cluster takes, with the same texts."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator

from langchain_quota.cli import main
from langchain_quota.monitoring import exports
from langchain_quota.monitoring.checks import namespace_fault

ADDRESS = "https://grafana.example.org"
CONFIG_MAP_LIMIT = 1024 * 1024
"""What the API server takes."""

ANNOTATION_LIMIT = 256 * 1024
"""`kubectl apply` keeps the whole object in an annotation, and those may have so much."""

TEXT = {"type": "string"}
TEXTS = {"type": "object", "additionalProperties": TEXT}
DURATION = {"type": "string", "pattern": "^([0-9]+(ms|[smhdwy]))+$"}


def fields(required: dict[str, Any], optional: dict[str, Any] | None = None) -> dict[str, Any]:
    """An object with these fields and no other."""
    return {
        "type": "object",
        "properties": required | (optional or {}),
        "required": list(required),
        "additionalProperties": False,
    }


def items(form: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "minItems": 1, "items": form}


def an_object(version: str, kind: str, **rest: dict[str, Any]) -> dict[str, Any]:
    name = {"type": "string", "pattern": "^[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?$"}
    return fields(
        {
            "apiVersion": {"const": version},
            "kind": {"const": kind},
            "metadata": fields({"name": name}, {"labels": TEXTS}),
            **rest,
        }
    )


RECORDED = fields({"record": TEXT, "expr": TEXT}, {"labels": TEXTS})
ALERT = fields(
    {"alert": TEXT, "expr": TEXT, "labels": TEXTS, "annotations": TEXTS},
    {"for": DURATION, "keep_firing_for": DURATION},
)

FORMS = {
    "Kustomization": fields(
        {
            "apiVersion": {"const": "kustomize.config.k8s.io/v1beta1"},
            "kind": {"const": "Kustomization"},
            "resources": items(TEXT),
        },
        {"namespace": TEXT},
    ),
    "ConfigMap": an_object("v1", "ConfigMap", data=TEXTS),
    "PodMonitor": an_object(
        "monitoring.coreos.com/v1",
        "PodMonitor",
        spec=fields(
            {
                "selector": fields({"matchLabels": TEXTS}),
                "jobLabel": TEXT,
                "podMetricsEndpoints": items(
                    fields(
                        {
                            "port": TEXT,
                            "path": TEXT,
                            "relabelings": items(
                                fields({"sourceLabels": items(TEXT), "targetLabel": TEXT})
                            ),
                        }
                    )
                ),
            }
        ),
    ),
    "PrometheusRule": an_object(
        "monitoring.coreos.com/v1",
        "PrometheusRule",
        spec=fields(
            {
                "groups": items(
                    fields(
                        {"name": TEXT, "rules": items({"oneOf": [RECORDED, ALERT]})},
                        {"interval": DURATION},
                    )
                )
            }
        ),
    ),
}
"""The fields that the export uses: the Operator's CRDs, kustomize and Kubernetes have more."""


def export(directory: Path, *options: str) -> dict[str, str]:
    """What the command writes, by file."""
    assert main(["export", "kubernetes", "--to", str(directory), *options]) == 0
    return {path.name: path.read_text(encoding="utf-8") for path in directory.iterdir()}


def objects(files: dict[str, str]) -> dict[str, Any]:
    """The objects in files, by kind and name."""
    read = {name: yaml.safe_load(text) for name, text in files.items()}
    return {
        f"{each['kind']}/{each.get('metadata', {}).get('name')}": each for each in read.values()
    }


@pytest.mark.parametrize("options", [[], ["--per-thread-alerts", "--namespace", "agents"]], ids=len)
def test_objects_have_the_form_that_a_cluster_takes(options: list[str], tmp_path: Path) -> None:
    """Each object has fields of its kind only, and its YAML has neither anchors nor aliases."""
    files = export(tmp_path, *options)
    found = objects(files)
    assert sorted(found) == [
        "ConfigMap/langchain-quota-budgets",
        "ConfigMap/langchain-quota-overview",
        "ConfigMap/langchain-quota-thread",
        "Kustomization/None",
        "PodMonitor/langchain-quota",
        "PrometheusRule/langchain-quota",
    ]
    faults = [
        f"{name} {error.json_path}: {error.message}"
        for name, each in found.items()
        for error in Draft202012Validator(FORMS[each["kind"]]).iter_errors(each)
    ]
    assert faults == []
    marks = [token for text in files.values() for token in yaml.scan(text)]
    assert not any(isinstance(each, yaml.AnchorToken | yaml.AliasToken) for each in marks)


def test_rules_are_those_of_the_other_export(tmp_path: Path) -> None:
    """The PrometheusRule is what `export prometheus --format prometheusrule` writes."""
    options = [
        *("--selector", 'cluster="eu"', "--grafana-url", ADDRESS),
        *("--runbooks", "https://wiki.example.org", "--per-thread-alerts"),
    ]
    files = export(tmp_path / "base", *options)
    other = ["export", "prometheus", "--format", "prometheusrule", "--to", str(tmp_path / "rules")]
    assert main([*other, *options]) == 0
    (rules,) = (tmp_path / "rules").iterdir()
    assert files[rules.name] == rules.read_text()
    assert 'cluster="eu"' in files[rules.name]


def test_dashboards_are_those_of_the_other_export(tmp_path: Path) -> None:
    """A ConfigMap has a dashboard as `export grafana` writes it, and the sidecar's label."""
    selector = 'namespace="agents",team=~"ä|\\"b"'
    found = objects(export(tmp_path, "--selector", selector))
    boards = exports.dashboards(selector=selector)
    assert len(boards) == 3
    for file, board in boards.items():
        config = found[f"ConfigMap/{file.removesuffix('.json')}"]
        assert config["data"] == {file: board}
        assert config["metadata"]["labels"] == {"grafana_dashboard": "1"}


def test_dashboards_fit_into_an_object() -> None:
    """A ConfigMap is less than what the server takes, and what `kubectl apply` keeps of it."""
    sizes = {
        name: len(text.encode())
        for name, text in exports.kubernetes(selector='cluster="eu-1",namespace="agents"').items()
    }
    assert max(sizes.values()) < min(CONFIG_MAP_LIMIT, ANNOTATION_LIMIT), sizes


def test_the_namespace_is_in_one_place(tmp_path: Path) -> None:
    """The kustomization has the namespace, as a text even if it is a number, and nothing else."""
    plain, placed = exports.kubernetes(), exports.kubernetes(namespace="123")
    assert {name for name in plain if plain[name] != placed[name]} == {"kustomization.yaml"}
    assert yaml.safe_load(placed["kustomization.yaml"])["namespace"] == "123"
    assert export(tmp_path, "--namespace", "123") == placed


def test_what_is_no_namespace() -> None:
    """A name that Kubernetes would refuse is refused, and the message has it."""
    for name in ("a", "agents", "team-1-agents", "0", "a" * 63):
        assert namespace_fault(name) is None
    for name in ("", "-a", "a-", "Agents", "a.b", "a_b", "a\n", "ä", "a" * 64, "a\nb: c"):
        fault = namespace_fault(name)
        assert fault is not None
        assert repr(name) in fault


def test_a_bad_namespace_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The command ends with 2 and one line that names the option, and writes nothing."""
    directory = tmp_path / "base"
    with pytest.raises(SystemExit) as ended:
        main(["export", "kubernetes", "--to", str(directory), "--namespace", "My Agents"])
    assert ended.value.code == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert "--namespace" in last
    assert "'My Agents'" in last
    assert not directory.exists()
