"""On what it was measured."""

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

PACKAGES = (
    "langchain-quota",
    "langchain",
    "langchain-core",
    "langgraph",
    "langgraph-checkpoint",
    "langgraph-checkpoint-sqlite",
    "langgraph-checkpoint-postgres",
    "opentelemetry-sdk",
    "prometheus-client",
    "redis",
)


def machine() -> str:
    """The machine, and how busy it is."""
    load = os.getloadavg()[0]
    cores = os.cpu_count()
    return f"{_processor()}, {cores} cores, {platform.system()}; load at the start {load:.1f}"


def versions() -> str:
    """Python, and the packages that matter."""
    found = [f"{platform.python_implementation()} {platform.python_version()}"]
    for package in PACKAGES:
        try:
            found.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            found.append(f"no {package}")
    return ", ".join(found)


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    for line in info.read_text().splitlines() if info.exists() else ():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
