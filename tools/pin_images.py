"""Add to each image in docker/ the digest that its registry names, because a tag can be moved."""

import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

DOCKER = Path(__file__).resolve().parents[1] / "docker"
FILES = (DOCKER / "compose.yaml", DOCKER / "agent" / "Dockerfile")
IMAGE = re.compile(
    r"^( *image: |ARG BASE_IMAGE=)([\w./-]+:[\w.-]+)(?:@sha256:[0-9a-f]{64})?$", re.MULTILINE
)


def pinned(text: str, digest_of: Callable[[str], str]) -> str:
    """Return the text of a file with a digest behind each image that has a tag."""
    return IMAGE.sub(lambda image: f"{image[1]}{image[2]}@{digest_of(image[2])}", text)


def registry_digest(image: str) -> str:
    """Ask the registry for the digest of an image for all platforms."""
    inspect = ("buildx", "imagetools", "inspect", "--format", "{{.Manifest.Digest}}", image)
    command = (os.environ.get("DOCKER") or "docker", *inspect)
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()


if __name__ == "__main__":
    for file in FILES:
        file.write_text(pinned(file.read_text(), registry_digest))
