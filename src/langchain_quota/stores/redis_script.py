"""The scripts in Redis, and the names of keys there."""

import re
from hashlib import sha1
from importlib.resources import files
from typing import NamedTuple

from langchain_quota.stores import CORRECTED, GRACE, REMEMBERED
from langchain_quota.stores.wire import Ask


class Script(NamedTuple):
    """A script, and the name by which a server knows it."""

    text: str
    sha: str

    @classmethod
    def of(cls, text: str) -> "Script":
        """Return the script of a text."""
        return cls(text, sha1(text.encode(), usedforsecurity=False).hexdigest())


def _text(name: str) -> str:
    return (files("langchain_quota.stores") / f"{name}.lua").read_text("utf-8")


_TIMES = f"local REMEMBERED, CORRECTED, GRACE = {REMEMBERED}, {CORRECTED}, {GRACE}"
SCRIPTS = {
    name: Script.of("\n".join([_TIMES, _text("common"), _text(name)]))
    for name in ("acquire", "operations")
}


class ScriptCall:
    """One call of a script: what is asked, and the keys that it may use."""

    def __init__(self, script: str, prefix: str, ask: Ask) -> None:
        self.script = SCRIPTS[script]
        self._prefix = prefix
        self._keys: dict[bytes, int] = {}
        self._asked = ask(self._place)

    def arguments(self) -> list[int | bytes | str]:
        """Return the arguments of `EVALSHA` after the script: number of keys, keys, request."""
        return [len(self._keys), *self._keys, self._asked]

    def again(self, reply: object) -> bool:
        """Return whether the script must be called again, with further keys that it needs."""
        if not (isinstance(reply, list) and reply and reply[0] in (b"again", "again")):
            return False
        number = len(self._keys)
        for name in reply[1:]:
            self._keys.setdefault(name if isinstance(name, bytes) else str(name).encode(), 0)
        if len(self._keys) == number:
            raise ValueError("it asks for keys that it has")
        return True

    def _place(self, kind: str, key: str) -> int:
        keys = self._keys
        return keys.setdefault(name_of(self._prefix, kind, key), len(keys) + 1)


def name_of(prefix: str, kind: str, key: str) -> bytes:
    """Return the name of what is kept of a kind for a key, which may begin with the prefix."""
    # The prefix is the hash tag, by which a cluster finds the node.
    return f"{{{prefix}}}:{kind}:{key.removeprefix(f'{prefix}/')}".encode(errors="surrogatepass")


def key_of(prefix: str, kind: str, name: bytes | str) -> str | None:
    """Return the key of a name in Redis, which may be decoded; `None` for another's name."""
    try:
        text = name if isinstance(name, str) else name.decode(errors="surrogatepass")
    except UnicodeDecodeError:
        return None
    return text.removeprefix(f"{{{prefix}}}:{kind}:")


def pattern_of(prefix: str, kind: str, keys: str) -> bytes:
    """Return a pattern that finds all names whose keys match a glob, and maybe others."""
    # Redis reads character classes and escapes differently.
    simple, *rest = re.split(r"[\[\\]", keys, maxsplit=1)
    return name_of(prefix, kind, f"{simple}{'*' if rest else ''}")
