"""Settings for property tests: what they find must not depend on how busy the machine is."""

from hypothesis import HealthCheck, settings

settings.register_profile(
    "unit", deadline=None, max_examples=200, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("unit")
