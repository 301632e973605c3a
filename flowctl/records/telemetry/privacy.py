"""What of a peer may stand in a record: addresses, stream names and texts are let through, cut or hashed here.

Query strings, passwords and tokens are never handed to the recorder. The *name* of a stream is a secret on most servers
(an RTMP publisher is known by it alone), so a record holds a keyed hash of it unless names are public; the name is
everything behind the first part of the path. Texts of a peer are cut, cleaned, and lose what looks like an address or a
token. Hashes are BLAKE2b with a key (RFC 7693; NIST SP 800-122, 4.2): nobody finds a name by trying.
"""

from __future__ import annotations

import hashlib
import ipaddress
import secrets
from pathlib import Path
from typing import Final

from flowctl.core.text.addresses import NETWORK_BITS, embedded_ipv4, meanings
from flowctl.core.text.printable import carries_secret, without_secret
from flowctl.core.text.private import check_private
from flowctl.core.text.userfiles import without_mark
from flowctl.errors import ConfigError
from flowctl.records.telemetry.options import Addresses, RecordedStreams

_HASH_PREFIX: Final = "h:"
"""Prefix of every hash: a stored hash is not taken for a name or an address."""
_DIGEST_BYTES: Final = 8
"""Length of a hash: with 64 bits, two of a million names have the same hash with a probability of 3e-8."""
_MOST_KEPT_HASHES: Final = 16_384
"""Most hashes that are kept, some 3 MB; then all are forgotten and made again, at 2 us each."""
_MOST_TEXT_CHARS: Final = 120
"""Longest text of a peer in a record; user agents are 20 to 60 characters."""
_MAPPED: Final = "::ffff:"
_KEY_BYTES: Final = 32
_MOST_KEY_BYTES: Final = 4096


def read_key(path: Path) -> bytes:
    """Return the key in a file: all of its bytes but white space at both ends."""
    hint = f"head -c {_KEY_BYTES} /dev/urandom > {path}; chmod 600 {path}"
    try:
        check_private(path)
        key = without_mark(path.read_bytes()).strip()
    except OSError as error:
        raise ConfigError(f"cannot read events_key_file {path}: {error.strerror}", hint=hint) from error
    if not 16 <= len(key) <= _MOST_KEY_BYTES:
        raise ConfigError(
            f"events_key_file {path} has {len(key)} bytes, it must have 16 to {_MOST_KEY_BYTES}", hint=hint
        )
    return key


class Privacy:
    """Lets names and addresses into records as the settings say. Any thread."""

    __slots__ = ("_addresses", "_key", "_known", "_streams")

    def __init__(self, addresses: Addresses, streams: RecordedStreams, key: bytes | None = None) -> None:
        self._addresses = addresses
        self._streams = streams
        # BLAKE2b takes keys of up to 64 bytes; a longer one is hashed first.
        self._key = hashlib.blake2b(key or secrets.token_bytes(_KEY_BYTES)).digest()
        self._known: dict[str, str] = {}  # what was stored for a text; a race makes one twice, which is harmless

    def hashed(self, text: str) -> str:
        """Return the keyed hash of a text: ``h:`` and 16 hexadecimal digits."""
        raw = text.encode("utf-8", "surrogatepass")
        return _HASH_PREFIX + hashlib.blake2b(raw, digest_size=_DIGEST_BYTES, key=self._key).hexdigest()

    def address(self, address: str) -> str:
        """Return what is stored of the address of a peer."""
        known = self._known.get(address)
        if known is None:
            known = self._remember(address, self._address(address))
        return known

    def _address(self, address: str) -> str:
        plain = address.partition("%")[0]  # an IPv6 address may name its interface
        if plain.lower().startswith(_MAPPED) and "." in plain:
            plain = plain[len(_MAPPED) :]  # a socket for both kinds shows IPv4 so: one peer, one name
        if self._addresses is Addresses.PLAIN:
            return plain
        # One peer, one name; and what is left of a tunnel's address could be the whole of the one in it.
        if found := meanings(plain):
            plain = str(found[-1])
        if self._addresses is Addresses.HASHED:
            return self.hashed(plain)
        if not found:  # a socket without addresses
            return ""
        bits = NETWORK_BITS[found[-1].version]
        return str(ipaddress.ip_network(f"{plain}/{bits}", strict=False))  # with its length: x.y.z.0 is an address too

    def network(self, cidr: str) -> str | None:
        """Return what is stored of a network, widened to what `address` shows of its members; None: nothing."""
        if self._addresses is Addresses.PLAIN:
            return cidr
        if self._addresses is Addresses.HASHED:
            return None
        found = ipaddress.ip_network(cidr, strict=False)
        if embedded_ipv4(found.network_address) is not None:
            return None
        bits = NETWORK_BITS[found.version]
        return str(found if found.prefixlen <= bits else found.supernet(new_prefix=bits))

    def stream(self, path: str, *, app_named: bool = True) -> tuple[str, str]:
        """Return (application, stream) as they are stored, of a path such as ``live/name`` or ``live/name/720p``."""
        app, slash, name = path.partition("/")
        if not slash:
            app, name = "", path
        if self._streams is RecordedStreams.PLAIN and not carries_secret(path):
            return self._app(app), self.text(name)
        # The hash is over the whole path: the same name in two applications is two streams.
        known = self._known.get("/" + path)
        if known is None:
            known = self._remember("/" + path, self.hashed(path))
        return self._app(app) if app_named else "", known

    def _app(self, app: str) -> str:
        return self.hashed(app) if carries_secret(app) else self.text(app)

    def text(self, text: str) -> str:
        """Return a text of a peer fit for a record: printable, short, without what is behind ``?`` or ``://``."""
        return without_secret(text, _MOST_TEXT_CHARS, self.hashed)

    def _remember(self, text: str, stored: str) -> str:
        if len(self._known) >= _MOST_KEPT_HASHES:
            self._known.clear()
        self._known[text] = stored
        return stored
