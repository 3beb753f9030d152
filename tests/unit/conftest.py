"""Certificates."""

import pytest

from tests.certificates import Certificate, make_certificate


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Certificate]:
    """Self-signed certificates for a server on 127.0.0.1, for a client, and for a stranger."""
    directory = tmp_path_factory.mktemp("certificates")
    return {name: make_certificate(directory, name) for name in ("server", "client", "other")}
