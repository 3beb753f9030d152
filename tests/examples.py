"""How many examples the property tests draw, and which.

`make test` draws few and always the same, `make test-all` many and always the same: what a change
must pass does not depend on chance. `make explore` draws new ones. What it finds becomes an
`@example` or a row of a table.
"""

import os

from hypothesis import HealthCheck, Phase, settings
from hypothesis.internal.conjecture import engine

DEPTH = os.environ.get("PROPERTIES", "quick")
"""`quick`, `deep` or `explore`."""

if DEPTH != "explore":
    # What fails is told within a minute, if not in its simplest form: Hypothesis has no setting.
    assert engine.MAX_SHRINKING_SECONDS > 0
    engine.MAX_SHRINKING_SECONDS = 20

settings.register_profile(
    "tests",
    phases=set(Phase) - ({Phase.explain} if DEPTH != "explore" else set()),
    report_multiple_bugs=DEPTH == "explore",
    derandomize=DEPTH != "explore",
    database=None,
    deadline=None,
    max_examples=50 if DEPTH == "quick" else 200,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("tests")


def examples(deep: int) -> settings:
    """So many examples in `make test-all`, and an eighth of them in `make test`."""
    return settings(max_examples=max(6, deep // 8) if DEPTH == "quick" else deep)
