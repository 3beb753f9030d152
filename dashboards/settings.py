"""What one may want to change: names, UIDs, thresholds, colours."""

TAG = "langchain-quota"

OVERVIEW_UID = "langchain-quota-overview"
OVERVIEW_TITLE = "LangChain quota: overview"
THREAD_UID = "langchain-quota-thread"
THREAD_TITLE = "LangChain quota: thread"
BUDGETS_UID = "langchain-quota-budgets"
BUDGETS_TITLE = "LangChain quota: tokens and money"

TIME_FROM = "now-1h"
REFRESH = "30s"

# The most rows of a table.
TOP = 50

TRACES_SHOWN = 50
SPANS_PER_TRACE = 20

LITTLE_TIME_SECONDS = 600
SOME_TIME_SECONDS = 3600

# One meaning each, on light and on dark ground, told apart by the colour-blind.
OK = "#2a7fd4"
WARNING = "#cc8400"
CRITICAL = "#e02f44"
NEUTRAL = "#8e8e9a"
SEVERITIES = {"critical": CRITICAL, "warning": WARNING, "info": NEUTRAL}

REFUSED_SHARE = ((None, OK), (0.05, WARNING), (0.2, CRITICAL))
TIMES_YESTERDAY = ((None, OK), (1.5, WARNING), (3, CRITICAL))

# Grafana's units. A number of calls is whole: 12,345 and not 12.3 K.
COUNT = "locale"
SHARE = "percentunit"
ROUNDED = "short"
DOLLARS = "currencyUSD"

# More bars than that cannot be told apart.
MOST_BARS = 100
