"""The names of keys in Redis."""

import re
from dataclasses import dataclass
from hashlib import sha256


@dataclass(frozen=True, slots=True)
class Names:
    """The names of keys in Redis."""

    prefix: str
    """What all names begin with: the hash tag, by which a cluster finds the node."""
    is_in_keys: bool = False
    """Whether keys begin with it, too."""

    def count(self, key: str) -> bytes:
        """The name of a count in Redis."""
        rest = key.removeprefix(f"{self.prefix}/") if self.is_in_keys else key
        return f"{{{self.prefix}}}:count:{rest}".encode(errors="surrogatepass")

    def key(self, name: bytes | str) -> str:
        """The key of a count, by its name in Redis; the client may have decoded the name.

        Raises:
            ValueError: It is not the name of a count.
        """
        text = name if isinstance(name, str) else name.decode(errors="surrogatepass")
        before, found, key = text.partition(f"{{{self.prefix}}}:count:")
        if before or not found:
            raise ValueError(f"not the name of a count: {text!r}")
        return key

    def pattern(self, keys: str) -> bytes:
        """The pattern for Redis that finds all counts whose keys match a glob, and maybe others."""
        # Redis reads character classes and escapes differently.
        simple, *others = re.split(r"[\[\\]", keys, maxsplit=1)
        found = f"{{{self.prefix}}}:count:{simple}{'*' if others else ''}"
        return found.encode(errors="surrogatepass")

    def marker(self, kind: str, name: str) -> bytes:
        """The key in Redis that remembers something by a name of any length."""
        digest = sha256(name.encode(errors="surrogatepass")).hexdigest()
        return f"{{{self.prefix}}}:{kind}:{digest}".encode()
