"""Label values: bounded, printable and safe to render, from any input."""

import hashlib
import hmac
import re
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import islice

from langchain_quota.runtime.sync_async import fork_safe_lock

_MIN_KEY_BYTES = 16

MAX_LENGTH = 64
MAX_DESCRIPTION = 1000
"""The longest text of an exception, in characters."""
_PREFIX_LENGTH = 40
_SEARCHED_LENGTH = 256
"""Number of characters that are searched for printable ones: callers may send a megabyte."""
_DIGITS = 12
Label = Callable[[object], str]
"""A function that makes the label of a thread or of a subject."""

TOOL = re.compile(r"[A-Za-z0-9_.-]{1,64}")
"""Pattern of the names of tools that providers accept."""

UNNAMED = "unnamed"
"""The label of an agent without a name, and of a model without one."""
NONE = "none"
"""The label if there is no value."""
OTHER = "_other"
"""The label of tools and models that are out of bounds, or beyond the bounded number of names."""


def label(value: object) -> str:
    """Return the label of a value: `str(value)` if that is short, printable and encodable.

    Otherwise the label has three parts: up to 40 printable characters from the first 256, `~`, and
    12 hex digits of the SHA-256 of the whole text. The empty string gets such a label, too, so no
    label is empty.
    """
    text = str(value)
    if 0 < len(text) <= MAX_LENGTH and text.isprintable():
        return text
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
    return f"{_printable(text, _PREFIX_LENGTH)}~{digest[:_DIGITS]}"


limit_label = lru_cache(maxsize=1024)(label)
"""`label` of a limit's or an agent's name, cached: there are few, and every call has some."""


def describe(error: BaseException) -> str:
    """Return the exception's text, bounded and printable: a model may have invented parts of it."""
    return _printable(str(error), MAX_DESCRIPTION, MAX_DESCRIPTION)


def _printable(text: str, max_length: int, searched_length: int = _SEARCHED_LENGTH) -> str:
    """Return the first printable characters of a text's beginning."""
    printable = (char for char in text[:searched_length] if char.isprintable())
    return "".join(islice(printable, max_length))


def custom_label(make: Label, value: object, argument: str) -> str:
    """Return the label that a user's function makes of a value."""
    result: object = make(value)
    if not isinstance(result, str):
        raise TypeError(f"{argument} must return a string, not a {type(result).__name__}")
    return label(result)


@dataclass(frozen=True, slots=True)
class _HmacLabel:
    key: bytes = field(repr=False)

    def __call__(self, value: object) -> str:
        message = str(value).encode("utf-8", "surrogatepass")
        return hmac.new(self.key, message, hashlib.sha256).hexdigest()[:20]


def hmac_label(key: str | bytes) -> Label:
    """Return a function that hides ids: it makes 20 hex digits of HMAC-SHA256 under a secret key.

    Use it for `thread_label`, and for the quotas in `subject_label`. Ids are often e-mail addresses
    or phone numbers. A plain hash of one can be guessed in seconds, a keyed one cannot. With the
    key, you can compute the label of an id that you know: `hmac_label(key)(thread_id)`.

    Args:
        key: The secret, at least 16 bytes.

    Raises:
        TypeError: The key is neither a string nor bytes.
        ValueError: The key is shorter than 16 bytes (its value is not shown).

    Examples:
        >>> from langchain_quota import hmac_label
        >>> label = hmac_label("a secret of 16 bytes or more")
        >>> label("ada@example.org")
        '57d2846abe13c8d7044b'
    """
    if not isinstance(key, str | bytes):
        raise TypeError(f"key must be a string or bytes, not a {type(key).__name__}")
    secret = key.encode() if isinstance(key, str) else key
    if len(secret) < _MIN_KEY_BYTES:
        raise ValueError(f"key must have at least {_MIN_KEY_BYTES} bytes, not {len(secret)}")
    return _HmacLabel(secret)


class BoundedLabels(dict[tuple[str, str | None], str]):
    """The labels of names by group, such as an agent's tools, with a bound for each group."""

    # Models and callers invent names all the time. A known name costs one look into a dict.

    def __init__(
        self, max_names: int, *, nameless: str = UNNAMED, allowed: re.Pattern[str] | None = None
    ) -> None:
        super().__init__()
        self._max_names = max_names
        self._nameless = nameless
        self._allowed = allowed
        self._exempt_names: set[str] = set()
        self._sizes = Counter[str]()
        self._lock = fork_safe_lock()

    def exempt(self, names: Iterable[str]) -> None:
        """Give these names their own labels, without counting them for the bound."""
        with self._lock:
            self._exempt_names.update(names)

    def __missing__(self, key: tuple[str, str | None]) -> str:
        group, name = key
        if not name and (name is None or self._allowed is None):
            return self.setdefault(key, self._nameless)
        with self._lock:
            # Another thread may have added the name in the meantime.
            if key not in self:
                if name not in self._exempt_names:
                    if self._allowed is not None and not self._allowed.fullmatch(name):
                        return OTHER
                    if self._sizes[group] >= self._max_names:
                        return OTHER
                    self._sizes[group] += 1
                self[key] = label(name)
            return self[key]
