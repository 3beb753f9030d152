"""The names of keys in Redis."""

import re
from hashlib import sha256

from langchain_quota.stores.keys import split_shard


class Names:
    """The names of keys in Redis.

    Args:
        prefix: What all names begin with.
        shard: The shard whose hash slot has the markers.
    """

    def __init__(self, prefix: str, shard: str = "") -> None:
        self.prefix = prefix
        self._plain = _tag(prefix, "")
        self._tag = _tag(prefix, shard)

    def of(self, shard: str) -> "Names":
        """The names for requests to one shard."""
        return Names(self.prefix, shard) if shard else self

    def count(self, key: str) -> bytes:
        """The name of a count in Redis."""
        shard, rest = split_shard(key)
        tag = _tag(self.prefix, shard) if shard else self._plain
        return f"{tag}count:{rest}".encode(errors="surrogatepass")

    def key(self, name: bytes | str) -> str:
        """The key of a count, by its name in Redis; the client may have decoded the name.

        Raises:
            ValueError: It is not the name of a count.
        """
        text = name if isinstance(name, str) else name.decode(errors="surrogatepass")
        known = rf"\{{{re.escape(self.prefix)}(?::([^:{{}}]+))?\}}:count:(.*)"
        found = re.fullmatch(known, text, re.DOTALL)
        if found is None:
            raise ValueError(f"not the name of a count: {text!r}")
        shard, rest = found.groups()
        key = rest if shard is None else f"{shard}/{rest}"
        if split_shard(key) != (shard or "", rest):
            raise ValueError(f"not the name of a count: {text!r}")
        return key

    def pattern(self, keys: str) -> bytes:
        """The pattern for Redis that finds all counts whose keys match a pattern, and maybe others.

        Args:
            keys: The pattern of keys, as in Python's `fnmatch.fnmatchcase`.
        """
        # Redis reads character classes and escapes differently.
        simple, *others = re.split(r"[\[\\]", keys, maxsplit=1)
        more = "*" if others else ""
        shard, slash, rest = simple.partition("/")
        literal = re.split(r"[*?]", simple.lstrip("*"), maxsplit=1)[0]
        if slash:
            found = f"{_tag(self.prefix, shard)}count:{rest}{more}"
        elif ":" not in literal:  # it may be the beginning of a shard
            found = f"{{{self.prefix}[:}}]*count:*"
        elif simple.startswith("*"):
            found = f"{{{self.prefix}[:}}]*count:{simple}{more}"
        else:
            found = f"{self._plain}count:{simple}{more}"
        return found.encode(errors="surrogatepass")

    def marker(self, kind: str, name: str) -> bytes:
        """The key in Redis that remembers something by a name of any length."""
        digest = sha256(name.encode(errors="surrogatepass")).hexdigest()
        return f"{self._tag}{kind}:{digest}".encode()


def _tag(prefix: str, shard: str) -> str:
    """What the names of a shard begin with: the hash tag. A cluster computes the slot from it."""
    return f"{{{prefix}:{shard}}}:" if shard else f"{{{prefix}}}:"
