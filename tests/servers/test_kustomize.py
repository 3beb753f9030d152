"""The base for Kubernetes and the page's overlay, built by kubectl; no cluster is asked."""

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from langchain_quota.monitoring import exports
from tests.servers.prometheus import DEADLINE

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "kubernetes.md"


def built(directory: Path) -> dict[str, Any]:
    """The objects of a kustomization, by kind and name."""
    kubectl = shutil.which("kubectl")
    if kubectl is None:  # no package of the distributions that CI runs on is new enough
        pytest.skip("kubectl not found")
    made = subprocess.run(
        [kubectl, "kustomize", str(directory)],
        capture_output=True,
        text=True,
        timeout=DEADLINE,
        check=False,
    )
    assert made.returncode == 0, made.stderr
    return {
        f"{each['kind']}/{each['metadata']['name']}": each
        for each in yaml.safe_load_all(made.stdout)
    }


def write(directory: Path, files: dict[str, str]) -> None:
    directory.mkdir()
    for name, text in files.items():
        (directory / name).write_text(text)


def on_the_page(kind: str) -> str:
    """The page's example of a kind."""
    blocks = re.findall(r"^```yaml\n(.+?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    (found,) = [block for block in blocks if yaml.safe_load(block)["kind"] == kind]
    return str(found)


def test_the_base_builds(tmp_path: Path) -> None:
    """The objects are those of the files, unchanged but for the namespace."""
    files = exports.kubernetes(namespace="agents")
    write(tmp_path / "base", files)
    expected = {}
    for text in files.values():
        each = yaml.safe_load(text)
        if each["kind"] != "Kustomization":
            each["metadata"]["namespace"] = "agents"
            expected[f"{each['kind']}/{each['metadata']['name']}"] = each
    assert built(tmp_path / "base") == expected


def test_the_overlay_of_the_page_builds(tmp_path: Path) -> None:
    """The page's overlay gives every object the label, and the PodMonitor the token's Secret."""
    overlay = tmp_path / "overlay"
    write(overlay, {"kustomization.yaml": on_the_page("Kustomization")})
    write(overlay / "langchain-quota", exports.kubernetes(namespace="agents"))
    found = built(overlay)
    labels = {name: each["metadata"]["labels"]["release"] for name, each in found.items()}
    assert labels == dict.fromkeys(found, "kube-prometheus-stack")
    assert len(found) == 5
    [endpoint] = found["PodMonitor/langchain-quota"]["spec"]["podMetricsEndpoints"]
    secret = {"name": "agents-metrics", "key": "token"}
    assert endpoint["authorization"] == {"credentials": secret}
    [container] = yaml.safe_load(on_the_page("Deployment"))["spec"]["template"]["spec"][
        "containers"
    ]
    variables = {each["name"]: each for each in container["env"]}
    assert variables["METRICS_TOKEN"]["valueFrom"]["secretKeyRef"] == secret


def test_the_pods_of_the_page_are_scraped() -> None:
    """The page's Deployment has the labels and the port that the PodMonitor selects."""
    deployment = yaml.safe_load(on_the_page("Deployment"))
    monitor = yaml.safe_load(exports.kubernetes()["langchain-quota-podmonitor.yaml"])["spec"]
    pod = deployment["spec"]["template"]
    labels = pod["metadata"]["labels"]
    assert monitor["selector"]["matchLabels"].items() <= labels.items()
    assert monitor["jobLabel"] in labels
    assert deployment["spec"]["selector"]["matchLabels"].items() <= labels.items()
    ports = [port["name"] for each in pod["spec"]["containers"] for port in each["ports"]]
    assert ports == [endpoint["port"] for endpoint in monitor["podMetricsEndpoints"]]
