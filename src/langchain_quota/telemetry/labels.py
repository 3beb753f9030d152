"""Label values: bounded, printable and safe to render, from any input."""

import hashlib
import hmac
import inspect
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import islice

from langchain_quota.locks import fork_safe_lock

_MIN_KEY_BYTES = 16

MAX_LENGTH = 64
MAX_DESCRIPTION = 256
"""The longest text of an exception, in characters."""
_KEPT = 40
_LOOKED_AT = 256
"""How many characters are searched for printable ones: callers may send a megabyte."""
_DIGITS = 12
Label = Callable[[object], str]
"""Makes the label of a thread or of a subject."""

_TOOL = re.compile(r"[A-Za-z0-9_.-]{1,64}")

UNNAMED = "unnamed"
"""The label of an agent without a name, and of a model without one."""
NONE = "none"
"""The label if there is no value."""
OTHER = "_other"
"""The label of tools and models that are out of bounds, or beyond the bounded number of names."""


def label(value: object) -> str:
    """The label of a value: `str(value)` if that is short, printable and encodable.

    Otherwise it has three parts: up to 40 printable characters from the first 256, `~`, and 12 hex
    digits of the SHA-256 of the whole text. The empty string gets such a label, too: no label is
    empty.
    """
    text = str(value)
    if 0 < len(text) <= MAX_LENGTH and text.isprintable():
        return text
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
    return f"{_printable(text, _KEPT)}~{digest[:_DIGITS]}"


limit_label = lru_cache(maxsize=1024)(label)
"""`label` of a limit's name, cached: there are few names, and every call needs them."""


def described(error: BaseException) -> str:
    """The exception's text, bounded and printable: it may have names that a model invented."""
    return _printable(str(error), MAX_DESCRIPTION)


def _printable(text: str, most: int) -> str:
    """The first printable characters of a text's beginning."""
    return "".join(islice((char for char in text[:_LOOKED_AT] if char.isprintable()), most))


def own_label(make: Label, value: object, argument: str) -> str:
    """The label that a user's function makes of a value."""
    made: object = make(value)
    if inspect.iscoroutine(made):
        made.close()
    if not isinstance(made, str):
        raise TypeError(f"{argument} must return a string, not a {type(made).__name__}")
    return label(made)


@dataclass(frozen=True, slots=True)
class _HmacLabel:
    key: bytes = field(repr=False)

    def __call__(self, value: object) -> str:
        message = str(value).encode("utf-8", "surrogatepass")
        return hmac.new(self.key, message, hashlib.sha256).hexdigest()[:20]


def hmac_label(key: str | bytes) -> Label:
    """A label that hides ids of threads and users: 20 hex digits of HMAC-SHA256 under a secret key.

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


def agent_name(name: str | None) -> str:
    """The name of an agent in logs and spans, where the number of names has no bound."""
    return label(name) if name else UNNAMED


class BoundedLabels:
    """The bounded labels of agents or models: there may be new names all the time.

    Args:
        most: How many distinct names there may be.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._seen: dict[str, str] = {}
        self._lock = fork_safe_lock()

    def label(self, name: str | None) -> str:
        """The label of a name."""
        if not name:
            return UNNAMED
        if name in self._seen:
            return self._seen[name]
        made = label(name)
        with self._lock:
            if len(self._seen) < self._most:
                self._seen[name] = made
            return self._seen.get(name, OTHER)


class ToolLabels:
    """The bounded names of tools: models invent names, and every new name would be a new series.

    Args:
        max_tools: How many distinct names an agent may have beside those that limits name.
    """

    def __init__(self, max_tools: int) -> None:
        self._max_tools = max_tools
        self._kept: dict[str, str] = {}
        self._seen: dict[str, set[str]] = {}
        self._lock = fork_safe_lock()

    def keep(self, names: tuple[str, ...]) -> None:
        """Always label these tools by their names."""
        with self._lock:
            self._kept.update((name, label(name)) for name in names)

    def offer(self, agent: str, names: Iterable[str]) -> None:
        """Give labels to the tools that an agent really has, before its model invents others."""
        with self._lock:
            seen = self._seen.setdefault(agent, set())
            new = (
                name
                for name in dict.fromkeys(names)
                if name not in seen and name not in self._kept and _TOOL.fullmatch(name)
            )
            seen.update(list(islice(new, self._room(seen))))

    def _room(self, seen: set[str]) -> int:
        return max(0, self._max_tools - len(seen))

    def label(self, agent: str, name: str | None) -> str:
        """The label of a tool; `none` for a model call."""
        if name is None:
            return NONE
        if name in self._kept:
            return self._kept[name]
        if name in self._seen.get(agent, ()):
            return name
        if not _TOOL.fullmatch(name):
            return OTHER
        with self._lock:
            seen = self._seen.setdefault(agent, set())
            if name not in seen:
                if not self._room(seen):
                    return OTHER
                seen.add(name)
        return name
