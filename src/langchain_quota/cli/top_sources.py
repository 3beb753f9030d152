"""The sources of figures, `/metrics` addresses or a Prometheus, and how answers are read."""

import json
import math
import re
import ssl
import time
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import httpx

from langchain_quota.cli.command import CommandError, printable
from langchain_quota.cli.top_options import DEFAULT, TOKEN_VARIABLE, token_of_environment
from langchain_quota.telemetry import names

Series = tuple[str, ...]
"""A series: the metric's name, and the values of the metric's own labels, in their order."""

Process = tuple[str, str]
"""Who counts: the job in Prometheus, empty for a `/metrics` address; and the job's process."""

Scrape = dict[Process, dict[Series, float]]
"""What was read at one moment."""

WANTED = {
    spec.name: spec.labels for spec in names.METRICS if spec.labels and spec.kind != "histogram"
}
"""The labels of the metrics that are read, by name."""

SILENCE = 10.0
"""How many seconds an address may stay silent; Prometheus waits as long by default."""
LONGEST = 60.0
"""The seconds that a whole answer may take."""
MOST_BYTES = 100 << 20
MOST_SERIES = 500_000
"""The most series of one address. 20,000 threads with three limits have 420,000."""
MOST_SERIES_IN_ALL = 2_000_000

_LONGEST_LINE = 1 << 20
_SHOWN = 200
_LOOPBACK = ("localhost", "127.", "::1")
_NO_ACCESS = (401, 403)

# prometheus_client's parser takes 80 microseconds for a line, and minutes for some long ones.
_STRING = r'"([^"\\]*(?:\\.[^"\\]*)*)"'
_SAMPLE = re.compile(r'\{([^"}]*(?:"[^"\\]*(?:\\.[^"\\]*)*"[^"}]*)*)\}\s*(\S+)')
_LABEL = re.compile(rf"([a-zA-Z_]\w*)\s*=\s*{_STRING}")
_ESCAPED = re.compile(r"\\(.)")


class SourceError(Exception):
    """An address does not say what it should; the message says why."""


class Source:
    """An address that is asked again and again.

    Args:
        name: Its URL.
        client: Asks it.
        most: How many series it may have.
        query: What to ask a Prometheus; empty for a `/metrics` address.

    Attributes:
        scrape: What it answered last.
        answered_at: When that was, by `time.monotonic`.
        failure: Why the latest answer cannot be used; `None` if it can.
    """

    def __init__(self, name: str, client: httpx.Client, most: int, query: str = "") -> None:
        self.name = name
        self.scrape: Scrape | None = None
        self.answered_at = 0.0
        self.failure: str | None = "no answer yet"
        self._client = client
        self._most = most
        self._query = query

    def poll(self) -> None:
        """Ask it, and keep its answer, or why there is none."""
        try:
            self.scrape = self._ask()
        except Exception as error:  # noqa: BLE001 - it is shown; the others go on
            self.failure = self._reason(error)
        else:
            self.answered_at, self.failure = time.monotonic(), None

    @property
    def fault(self) -> str | None:
        """What is wrong with it, in one line, with the age of figures that are old."""
        if self.failure is None:
            return None
        old = f"{time.monotonic() - self.answered_at:.0f} s old"
        age = "" if self.scrape is None else f" (figures {old})"
        return f"{self.name}{age}: {self.failure}"

    def _ask(self) -> Scrape:
        """What it answers.

        Raises:
            SourceError: It answers with an error, or with nothing that can be used.
        """
        asked = (
            self._client.stream("POST", f"{self.name}/api/v1/query", data={"query": self._query})
            if self._query
            else self._client.stream("GET", self.name)
        )
        with asked as response:
            if response.status_code != httpx.codes.OK:
                raise SourceError(self._refusal(response))
            parts = _parts(response)
            if self._query:
                scrape = of_prometheus(b"".join(parts), self._most)
            else:
                scrape = {("", self.name): of_text(parts, self._most)}
        if not any(scrape.values()):
            raise SourceError("it answers, but has no metrics of langchain-quota")
        return scrape

    def _refusal(self, response: httpx.Response) -> str:
        """Why it answers with an error."""
        answer = f"it answers {response.status_code} {response.reason_phrase}".rstrip()
        if response.status_code in _NO_ACCESS:
            if "Authorization" in self._client.headers:
                return f"{answer}: it does not take the token"
            return f"{answer}: give a token in {TOKEN_VARIABLE} or with --token-file"
        if "Location" in response.headers:
            return f"{answer}: give the address {response.headers['Location']}"
        # Prometheus says there what is wrong with a query.
        body = next(response.iter_bytes(_SHOWN), b"") if self._query else b""
        return f"{answer}: {body.decode(errors='replace')}" if body else answer

    def _reason(self, error: Exception) -> str:
        """Why nothing is answered, in one short line."""
        text = str(error)[:_SHOWN] or type(error).__name__
        if isinstance(error, httpx.TimeoutException):
            text = f"no answer within {SILENCE:g} s"
        elif "certificate verify failed" in text:
            text += "; see --cafile"
        elif not isinstance(error, (SourceError, httpx.HTTPError)):
            text = f"it answers, but not with metrics: {text}"
        return printable(" ".join(text.split()))


def _parts(response: httpx.Response) -> Iterator[bytes]:
    """An answer, bounded in size and time.

    Raises:
        SourceError: It is too long, or takes too long.
    """
    end = time.monotonic() + LONGEST
    size = 0
    for part in response.iter_bytes():  # as they come: a slow answer must not take longer
        size += len(part)
        if size > MOST_BYTES:
            raise SourceError(f"its answer is longer than {MOST_BYTES >> 20} MiB")
        if time.monotonic() > end:
            raise SourceError(f"its answer takes longer than {LONGEST:g} s")
        yield part


def of_text(parts: Iterator[bytes], most: int) -> dict[Series, float]:
    """The series in a text of metrics; only one part of the text is kept at a time.

    Args:
        parts: The text.
        most: How many series it may have.

    Raises:
        SourceError: It has more.
        ValueError: It is no text of metrics.
    """
    found: dict[Series, float] = {}
    strings: dict[str, str] = {}  # one object for equal texts: a thread is in many series
    for lines in _lines(parts):
        for line in lines:
            name = line.partition("{")[0]
            wanted = WANTED.get(name)
            if wanted is None:
                continue
            sample = _SAMPLE.match(line, len(name))
            labels = dict(_LABEL.findall(sample[1])) if sample else {}
            if sample is None or not labels.keys() >= {*wanted}:
                raise ValueError(line[:_SHOWN])
            values = (_ESCAPED.sub(_unescaped, labels[each]) for each in wanted)
            _add(found, (name, *(strings.setdefault(each, each) for each in values)), sample[2])
        if len(found) > most:
            raise SourceError(_too_many(most))
    return found


def of_prometheus(answer: bytes, most: int) -> Scrape:
    """The series in what Prometheus answers to an instant query.

    Args:
        answer: The answer.
        most: How many series it may have.

    Raises:
        SourceError: It has more.
        ValueError: It is no such answer.
    """
    found: Scrape = {}
    try:
        result = json.loads(answer)["data"]["result"]
        if len(result) > most:
            raise SourceError(_too_many(most))
        for each in result:
            labels = {**each["metric"]}
            name = labels.pop("__name__")
            series = (name, *(str(labels.pop(label)) for label in WANTED[name]))
            # The rest is what the scrape adds: it says which process it is.
            job = str(labels.pop("job", ""))
            process = (job, ",".join(str(labels[key]) for key in sorted(labels)))
            _add(found.setdefault(process, {}), series, each["value"][1])
    except (LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError("it is not as Prometheus answers") from error
    return found


def _lines(parts: Iterator[bytes]) -> Iterator[list[str]]:
    """The lines in parts of a text.

    Raises:
        ValueError: It has no lines.
    """
    left = b""
    for part in parts:
        whole, newline, rest = part.rpartition(b"\n")
        if newline:
            yield (left + whole).decode().split("\n")
            left = rest
        else:
            left += part
        if len(left) > _LONGEST_LINE:
            raise ValueError(f"a line is longer than {_LONGEST_LINE >> 20} MiB")
    yield left.decode().split("\n")


def _add(found: dict[Series, float], series: Series, text: str) -> None:
    """Add a value, if it is a finite number."""
    value = float(text)
    if math.isfinite(value):
        found[series] = value


def _unescaped(match: re.Match[str]) -> str:
    return "\n" if match[1] == "n" else match[1]


def _too_many(most: int) -> str:
    return f"it has more than {most:,} series: lower max_exported_threads, or watch fewer addresses"


def sources(arguments: Namespace) -> list[Source]:
    """The addresses that the arguments name, each once.

    Raises:
        CommandError: The token or a certificate cannot be read, or options do not fit together.
    """
    if arguments.prometheus and arguments.addresses:
        raise CommandError("takes addresses or --prometheus, not both")
    if arguments.selector and not arguments.prometheus:
        raise CommandError("--selector needs --prometheus")
    token, context = _token(arguments.token_file), _context(arguments)
    headers = {"Accept": "text/plain; version=0.0.4", "Accept-Encoding": "identity"}
    if token:
        headers["Authorization"] = f"Bearer {token}"

    def client(url: str) -> httpx.Client:
        # This machine asks itself without a proxy.
        outside = not (urlsplit(url).hostname or "").startswith(_LOOPBACK)
        return httpx.Client(
            verify=context,
            headers=headers,
            timeout=SILENCE,
            trust_env=outside,
            # Nobody closes the client: threads ask with it until the process ends.
            limits=httpx.Limits(max_keepalive_connections=0),
        )

    if arguments.prometheus:
        matchers = [f'__name__=~"{"|".join(WANTED)}"', arguments.selector or ""]
        query = f"{{{','.join(filter(None, matchers))}}}"
        return [Source(arguments.prometheus, client(arguments.prometheus), MOST_SERIES, query)]
    addresses = [*dict.fromkeys(arguments.addresses or (DEFAULT,))]
    most = min(MOST_SERIES, MOST_SERIES_IN_ALL // len(addresses))
    return [Source(url, client(url), most) for url in addresses]


def _token(file: Path | None) -> str:
    """The token to send; empty for none.

    Raises:
        CommandError: The file cannot be read, or has no token.
    """
    if file is None:
        token, where = token_of_environment(), TOKEN_VARIABLE
    else:
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


def _context(arguments: Namespace) -> ssl.SSLContext:
    """What is trusted, and the certificate that is sent.

    Raises:
        CommandError: A file cannot be read, or there is a key without a certificate.
    """
    if arguments.keyfile and not arguments.certfile:
        raise CommandError("--keyfile needs --certfile")
    option = "--cafile"
    try:
        context = ssl.create_default_context(cafile=arguments.cafile)
        if arguments.certfile:
            option = "--certfile"
            # A key with a password would be asked for in the middle of the screen.
            context.load_cert_chain(arguments.certfile, arguments.keyfile, password="")
    except OSError as error:
        name = repr(arguments.cafile if option == "--cafile" else arguments.certfile)
        raise CommandError(f"cannot use {option} {name}: {error.strerror or error}") from error
    return context
