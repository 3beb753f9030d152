"""The base for Kubernetes and the page's overlay, built by kubectl; no cluster is asked."""

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from langchain_quota.cli import export
from tests.server.prometheus import DEADLINE

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
