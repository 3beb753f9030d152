"""Every knob of the dashboards: names, UIDs, windows, thresholds, colours."""

TAG = "langchain-quota"

OVERVIEW_UID = "langchain-quota-overview"
OVERVIEW_TITLE = "LangChain quota: overview"
THREAD_UID = "langchain-quota-thread"
THREAD_TITLE = "LangChain quota: thread"

TIME_FROM = "now-3h"
REFRESH = "30s"

# The share of a limit from which it counts as near: the default of `Telemetry(near=…)`.
NEAR = 0.8
# In the ranking, an exhausted thread comes after all near ones and before all others.
RANK_OF_EXHAUSTED = 0.7999

# How far back a thread's pace is measured, and how far ahead it is continued.
PACE_WINDOW = "15m"
PREDICTED_SECONDS = 1800
PREDICTED_TEXT = "30 min"
# Only a thread that used calls within this time is about to run out.
ACTIVE_WINDOW = "5m"

# A counter not seen for this long before a window was born in that window.
BORN_LOOKBACK = "1h"

# A refusal is marked for so long, as in the alert on breaches; evaluated at this step.
BREACH_WINDOW = "5m"
BREACH_STEP = "1m"

RATE = "$__rate_interval"
RANGE = "$__range"

QUANTILES = (0.5, 0.95, 0.99)

REFUSED_SHARE_WARNING = 0.05
REFUSED_SHARE_CRITICAL = 0.2
LITTLE_TIME_SECONDS = 600
SOME_TIME_SECONDS = 3600

TRACES_SHOWN = 50
SPANS_PER_TRACE = 20

OK, WARNING, CRITICAL, NEUTRAL = "green", "orange", "red", "text"

NO_DATA = "no data"
