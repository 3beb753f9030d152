"""Settings for property tests, and certificates."""

import pytest
from hypothesis import HealthCheck, settings

from tests.certificates import Certificate, make_certificate

# What property tests find must not depend on how busy the machine is.
settings.register_profile(
    "unit", deadline=None, max_examples=200, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("unit")


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Certificate]:
    """Self-signed certificates for a server on 127.0.0.1, for a client, and for a stranger."""
    directory = tmp_path_factory.mktemp("certificates")
    return {name: make_certificate(directory, name) for name in ("server", "client", "other")}
