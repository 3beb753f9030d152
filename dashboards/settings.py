"""Every knob of the dashboards: names, UIDs, windows, thresholds, colours."""

TAG = "langchain-quota"

OVERVIEW_UID = "langchain-quota-overview"
OVERVIEW_TITLE = "LangChain quota: overview"
THREAD_UID = "langchain-quota-thread"
THREAD_TITLE = "LangChain quota: thread"

BUDGETS_UID = "langchain-quota-budgets"
BUDGETS_TITLE = "LangChain quota: tokens and money"

TIME_FROM = "now-3h"
REFRESH = "30s"

# The most rows of a table.
TOP = 100

# How far back a pace is measured, and how far ahead it is continued.
PACE_WINDOW = "15m"
PREDICTED_SECONDS = 1800
PREDICTED_TEXT = "30 min"
# Only what used calls within this time is about to run out.
ACTIVE_WINDOW = "5m"

# For so long the last value of a lost target is remembered.
LOOKBACK = "1h"
# A process is scraped for the first time at most so long after it began.
FIRST_SCRAPE_SECONDS = 300

# A refusal is marked for so long, as in the alert on breaches; evaluated at this step.
BREACH_WINDOW = "5m"
BREACH_SECONDS = "300"
BREACH_STEP = "1m"

RATE = "$__rate_interval"
RANGE = "$__range"
RANGE_SECONDS = "$__range_s"
# The time from one bar to the next. Grafana rounds $__interval down to whole minutes or hours.
BAR = "${__interval_ms}ms"
BAR_SECONDS = "${__interval_ms} / 1000"
# More bars than that cannot be told apart.
MOST_BARS = 100

QUANTILES = (0.5, 0.95, 0.99)

REFUSED_SHARE_WARNING = 0.05
REFUSED_SHARE_CRITICAL = 0.2
ESTIMATED_SHARE_WARNING = 0.5
LITTLE_TIME_SECONDS = 600
SOME_TIME_SECONDS = 3600

TRACES_SHOWN = 50
SPANS_PER_TRACE = 20

# One meaning each, on light and on dark ground, told apart by the colour-blind.
OK = "#2a7fd4"
WARNING = "#cc8400"
CRITICAL = "#d0103a"
NEUTRAL = "#8e8e9a"

# What is said of a limit's use, by how much is used.
STATES = {"ok": OK, "near": WARNING, "exhausted": CRITICAL}

# Grafana's unit for whole numbers: 12,345 and not 12.3 K.
COUNT = "locale"
ROUNDED = "short"
"""Of amounts that may have many digits, where a few of them say enough: `1.78 Mil`."""

# Grafana's unit for US dollars: $1.50, and $1.50K. A conversation may cost a tenth of a cent.
DOLLARS = "currencyUSD"
DECIMALS_OF_TOTALS = 2
DECIMALS_OF_THREADS = 4

NO_DATA = "no data"

ALERTS = "LangChainQuota.+"
