"""The addresses of `/metrics` that `top` asks, and how their answers are read."""

import math
import ssl
import sys
import time
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import httpx
from prometheus_client.parser import text_string_to_metric_families

from langchain_quota.cli.command import CommandError, printable
from langchain_quota.cli.top_options import DEFAULT, TOKEN_VARIABLE, token_of_environment
from langchain_quota.telemetry import names

Series = tuple[str, ...]
"""A series: the metric's name, and the values of the metric's own labels, in their order."""

Scrape = dict[Series, float]
"""What a process said at one moment."""

WANTED = {
    spec.name: spec.labels for spec in names.METRICS if spec.labels and spec.kind != "histogram"
}
"""The labels of the metrics that are read, by name."""

SILENCE = 10.0
"""How many seconds an address may stay silent; Prometheus waits as long by default."""
LONGEST = 60.0
"""The seconds that a whole answer may take."""
MOST_BYTES = 100 << 20
UNASKED = "no answer yet"

_SHOWN = 200
_LOOPBACK = ("localhost", "127.", "::1")
_NO_ACCESS = (401, 403)


class SourceError(Exception):
    """An address does not say what it should; the message says why."""


class Source:
    """An address that is asked again and again: its latest answer, or why it cannot be used."""

    def __init__(self, name: str, client: httpx.Client) -> None:
        self.name = name
        self.scrape: Scrape | None = None
        self.answered_at = 0.0
        self.failure: str | None = UNASKED
        self._client = client

    def poll(self) -> None:
        """Ask it, and keep its answer, or why there is none."""
        try:
            scrape = self._ask()
        except Exception as error:  # noqa: BLE001 - it is shown; the others go on
            self.failure = _reason(error)
        else:
            # The scrape is last: who sees that it is new reads its time.
            self.answered_at, self.failure, self.scrape = time.monotonic(), None, scrape

    @property
    def fault(self) -> str | None:
        """What is wrong with it, in one line, with the age of figures that are old."""
        age = f" (figures {time.monotonic() - self.answered_at:.0f} s old)" if self.scrape else ""
        return self.failure and f"{self.name}{age}: {self.failure}"

    def _ask(self) -> Scrape:
        with self._client.stream("GET", self.name) as response:
            if response.status_code != httpx.codes.OK:
                raise SourceError(self._refusal(response))
            scrape = of_text(b"".join(_parts(response)).decode())
        if not scrape:
            raise SourceError("it answers, but has no metrics of langchain-quota")
        return scrape

    def _refusal(self, response: httpx.Response) -> str:
        """Why it answers with an error."""
        answer = f"it answers {response.status_code} {response.reason_phrase}".rstrip()
        if response.status_code in _NO_ACCESS:
            asked = f"give a token in {TOKEN_VARIABLE} or with --token-file"
            has_token = "Authorization" in self._client.headers
            return f"{answer}: {'it does not take the token' if has_token else asked}"
        if "Location" in response.headers:
            return f"{answer}: give the address {response.headers['Location']}"
        return answer


def _reason(error: Exception) -> str:
    """Why nothing is answered, in one short line."""
    text = str(error)[:_SHOWN] or type(error).__name__
    if isinstance(error, httpx.TimeoutException):
        text = f"no answer within {SILENCE:g} s"
    elif not isinstance(error, (SourceError, httpx.HTTPError)):
        text = f"it answers, but not with metrics: {text}"
    return printable(" ".join(text.split()))


def _parts(response: httpx.Response) -> Iterator[bytes]:
    """An answer, bounded in size and time."""
    end, size = time.monotonic() + LONGEST, 0
    for part in response.iter_bytes():  # as they come: a slow answer must not take longer
        size += len(part)
        if size > MOST_BYTES:
            raise SourceError(f"its answer is longer than {MOST_BYTES >> 20} MiB")
        if time.monotonic() > end:
            raise SourceError(f"its answer takes longer than {LONGEST:g} s")
        yield part


def of_text(text: str) -> Scrape:
    """The series in a text of metrics that are finite numbers."""
    wanted = (line for line in text.split("\n") if line.partition("{")[0] in WANTED)
    return {
        # One object for equal texts: a thread is in many series.
        (sample.name, *(sys.intern(sample.labels[each]) for each in WANTED[sample.name])): float(
            sample.value
        )
        for family in text_string_to_metric_families("\n".join(wanted))
        for sample in family.samples
        if math.isfinite(sample.value)
    }


def sources(arguments: Namespace) -> list[Source]:
    """The addresses that the arguments name, each once."""
    token = _token(arguments.token_file)
    headers = {"Accept": "text/plain; version=0.0.4", "Accept-Encoding": "identity"}
    if token:
        headers["Authorization"] = f"Bearer {token}"
    context = ssl.create_default_context()
    # Nobody closes a client: threads ask with it until the process ends.
    closed = httpx.Limits(max_keepalive_connections=0)

    def client(url: str) -> httpx.Client:
        # This machine asks itself without a proxy.
        outside = not (urlsplit(url).hostname or "").startswith(_LOOPBACK)
        return httpx.Client(
            verify=context, headers=headers, timeout=SILENCE, trust_env=outside, limits=closed
        )

    return [Source(url, client(url)) for url in dict.fromkeys(arguments.addresses or (DEFAULT,))]


def _token(file: Path | None) -> str:
    """The token to send; empty for none."""
    token, where = token_of_environment(), TOKEN_VARIABLE
    if file is not None:
        where = f"--token-file {str(file)!r}"
        try:
            token = file.read_text().strip()
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "it is no text"
            raise CommandError(f"cannot read {where}: {reason}") from error
        if not token:
            raise CommandError(f"{where} is empty")
    if not all("!" <= each <= "~" for each in token):
        raise CommandError(f"{where} is no token: it must have visible ASCII characters only")
    return token
