"""Self-signed certificates, for servers and clients that speak TLS."""

import subprocess
from dataclasses import dataclass
from pathlib import Path

from tests.server.programs import required_program


@dataclass(frozen=True)
class Certificate:
    """A self-signed certificate and its key, in PEM files."""

    certfile: str
    keyfile: str


def make_certificate(directory: Path, name: str) -> Certificate:
    """Make a certificate for 127.0.0.1."""
    openssl = required_program("openssl", "openssl")
    certfile, keyfile = (str(directory / f"{name}.{each}") for each in ("pem", "key"))
    command = [openssl, "req", "-x509", "-nodes", "-days", "1", "-subj", f"/CN={name}"]
    command += ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"]
    command += ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", keyfile, "-out", certfile]
    subprocess.run(command, check=True, capture_output=True)
    return Certificate(certfile, keyfile)
