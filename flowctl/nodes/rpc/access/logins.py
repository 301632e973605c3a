"""Users and their passwords: kept as hashes, compared in constant time, tried at a bounded rate.

Theory of operation. A hash costs a fifth of a second on purpose, so it is computed on a thread of its own, one at a
time, and few wait for it: a flood of logins costs one thread, and neither the loop nor the workers. A user that does
not exist costs a hash as well, against one that fits nothing, so that time does not tell who exists. One who has no
tries left is refused before the hash is computed: then the password is not even looked at.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import os
import re
from collections import OrderedDict
from collections.abc import Callable, Hashable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final, Self

from flowctl.core.text.printable import short
from flowctl.errors import ClosedError, ConfigError
from flowctl.nodes.rpc.access.access import AuthLevel
from flowctl.nodes.rpc.access.admission import AddressRates, rate_key
from flowctl.pollgroup import PollGroup

MOST_USER_BYTES: Final = 128
MOST_PASSWORD_BYTES: Final = 1024
"""Longest password of a login; a longer one is wrong without being checked."""
SALT_BYTES: Final = 16
HASH_BYTES: Final = 32

TRIES_PER_CONNECTION: Final = 5
"""Wrong passwords of one connection; after them its logins are refused unchecked, until it dials again."""
TRIES_PER_ADDRESS_AND_S: Final = 0.2
"""Tries a second of one address in the long run: 17,000 a day find no password of eight letters."""
BURST_PER_ADDRESS: Final = 20
"""Tries of one address at once: many users behind one address may start work at the same time."""
MOST_WAITING: Final = 32
"""Logins that may wait for the thread: some seconds of work."""
MOST_WAITING_PER_ADDRESS: Final = 8
"""Logins of one address that may wait: a flood from one address leaves places for the others."""
_MOST_CONNECTIONS: Final = 65_536
"""Connections whose wrong tries are remembered; beyond it, those that failed longest ago are forgotten."""

_STORED: Final = re.compile(r"\$scrypt\$ln=(\d{1,2}),r=(\d{1,2}),p=(\d{1,2})\$([A-Za-z0-9+/]{22})\$([A-Za-z0-9+/]{43})")
_MOST_MEMORY_BYTES: Final = 256 << 20


@dataclass(frozen=True, slots=True)
class HashCost:
    """What a hash costs (RFC 7914): time and memory grow with `log_n` and `r`, time alone with `p`.

    Args:
        r: block size, 1 to 32; memory is ``128 * r * 2 ** log_n`` octets, 256 MiB at most.
    """

    log_n: int = 14
    r: int = 8
    p: int = 5

    def __post_init__(self) -> None:
        for name, least, most in (("log_n", 1, 20), ("r", 1, 32), ("p", 1, 16)):
            value = getattr(self, name)
            if not least <= value <= most:
                raise ConfigError(f"{name} of scrypt is {value}, it must be {least} to {most}")
        if 128 * self.r << self.log_n > _MOST_MEMORY_BYTES:
            raise ConfigError(f"scrypt would use {128 * self.r << self.log_n} bytes, the limit is {_MOST_MEMORY_BYTES}")

    def hash(self, password: bytes, salt: bytes) -> bytes:
        memory = 2 * _MOST_MEMORY_BYTES
        return hashlib.scrypt(
            password, salt=salt, n=1 << self.log_n, r=self.r, p=self.p, maxmem=memory, dklen=HASH_BYTES
        )


DEFAULT_COST: Final = HashCost()
"""16 MiB and 0.2 s: one of the settings that OWASP's password storage cheat sheet names for scrypt."""


@dataclass(frozen=True, slots=True)
class PasswordHash:
    """A password as it is kept: it does not give the password away, and is never shown.

    As text it has the form ``$scrypt$ln=14,r=8,p=5$SALT$HASH``, salt and hash in base64 without padding.
    """

    cost: HashCost
    salt: bytes = field(repr=False)
    hash: bytes = field(repr=False)

    @classmethod
    def of(cls, password: str, cost: HashCost = DEFAULT_COST) -> Self:
        """Return the hash of a password, with a salt of its own; takes as long as a login."""
        octets = password.encode("utf-8", "surrogatepass")
        if not 1 <= len(octets) <= MOST_PASSWORD_BYTES:
            raise ConfigError(f"the password has {len(octets)} bytes, it must have 1 to {MOST_PASSWORD_BYTES}")
        if b"\0" in octets:
            raise ConfigError("the password has a zero byte, which scrypt does not tell from the end")
        salt = os.urandom(SALT_BYTES)
        return cls(cost, salt, cost.hash(octets, salt))

    @classmethod
    def parse(cls, text: str) -> Self:
        match = _STORED.fullmatch(text)
        if match is None:
            raise ConfigError(
                f"a text of {len(text)} letters is no stored password",
                hint="it looks like $scrypt$ln=14,r=8,p=5$...$...",
            )
        cost = HashCost(*map(int, match.groups()[:3]))
        return cls(cost, base64.b64decode(match[4] + "=="), base64.b64decode(match[5] + "="))

    def text(self) -> str:
        salt, octets = (base64.b64encode(part).decode().rstrip("=") for part in (self.salt, self.hash))
        return f"$scrypt$ln={self.cost.log_n},r={self.cost.r},p={self.cost.p}${salt}${octets}"

    def matches(self, password: bytes) -> bool:
        """Return whether it is the hash of `password`; how long that takes depends on the cost alone."""
        return hmac.compare_digest(self.cost.hash(password, self.salt), self.hash)


class Logins:
    """Users with their passwords and access levels. Filled before it is used; then read by any thread."""

    __slots__ = ("_nobody", "_users")

    def __init__(self) -> None:
        self._users: dict[bytes, tuple[AuthLevel, PasswordHash]] = {}
        self._nobody: PasswordHash | None = None  # fits no password

    def __len__(self) -> int:
        return len(self._users)

    def add(self, user: str, password: PasswordHash, level: AuthLevel) -> None:
        name = user.encode("utf-8", "surrogatepass")
        if not 1 <= len(name) <= MOST_USER_BYTES:
            raise ConfigError(f"user {short(user)} has {len(name)} bytes, it must have 1 to {MOST_USER_BYTES}")
        if name in self._users:
            raise ConfigError(f"user {short(user)} was added before")
        if level not in (AuthLevel.BASIC, AuthLevel.ADMIN):
            raise ConfigError(f"user {short(user)}: a login gives AuthLevel.BASIC or AuthLevel.ADMIN")
        if self._nobody is None:
            self._nobody = PasswordHash(password.cost, os.urandom(SALT_BYTES), os.urandom(HASH_BYTES))
        elif self._nobody.cost != password.cost:
            raise ConfigError(
                f"the password of user {short(user)} has another cost ({password.cost}) than those before",
                hint="store all passwords at one cost",
            )
        self._users[name] = (level, password)

    def level_of(self, user: bytes, password: bytes) -> AuthLevel | None:
        """Return the level of a login; None: user or password is wrong, and either case takes the same time."""
        if self._nobody is None:
            return None
        fits = len(user) <= MOST_USER_BYTES and len(password) <= MOST_PASSWORD_BYTES and b"\0" not in password
        level, stored = self._users.get(user, (None, self._nobody)) if fits else (None, self._nobody)
        return level if stored.matches(password if fits else b"") else None


class LoginTries:
    """How many logins a connection and an address may still try (pure); for one thread."""

    __slots__ = ("_failed", "_rates", "_waiting", "waiting_count")

    def __init__(self) -> None:
        self._failed: OrderedDict[Hashable, int] = OrderedDict()  # wrong passwords, by connection
        self._rates: Final = AddressRates(TRIES_PER_ADDRESS_AND_S, BURST_PER_ADDRESS)
        self._waiting: dict[str, int] = {}  # by address
        #: Logins begun and not ended.
        self.waiting_count = 0

    def begin(self, connection: Hashable, address: str, now: float) -> bool:
        """Count a try that begins; return whether it may, and then `end` has to follow."""
        key = rate_key(address)
        waiting = self._waiting.get(key, 0)
        if self._failed.get(connection, 0) >= TRIES_PER_CONNECTION:
            return False
        if self.waiting_count >= MOST_WAITING or waiting >= MOST_WAITING_PER_ADDRESS:
            return False
        if not self._rates.take(address, now):
            return False
        self._waiting[key] = waiting + 1
        self.waiting_count += 1
        # Counted as wrong until it is known to be right: many at once are as many as one after the other.
        self._failed[connection] = self._failed.pop(connection, 0) + 1
        if len(self._failed) > _MOST_CONNECTIONS:
            self._failed.popitem(last=False)
        return True

    def end(self, connection: Hashable, address: str, *, right: bool) -> None:
        key = rate_key(address)
        self.waiting_count -= 1
        self._waiting[key] -= 1
        if not self._waiting[key]:
            del self._waiting[key]
        if right:
            self._failed.pop(connection, None)


class LoginDesk:
    """Takes logins on a poll group's thread and has them checked on one of its own."""

    __slots__ = ("_group", "_logins", "_thread", "_tries")

    def __init__(self, group: PollGroup, logins: Logins) -> None:
        self._group: Final = group
        self._logins: Final = logins
        self._tries: Final = LoginTries()
        self._thread: ThreadPoolExecutor | None = None  # most nodes have no logins

    def login(
        self,
        connection: Hashable,
        address: str,
        user: bytes,
        password: bytes,
        done: Callable[[AuthLevel | None], object],
    ) -> bool:
        if not self._tries.begin(connection, address, self._group.now()):
            return False
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"{self._group.name}-login")

        def check() -> None:
            level: AuthLevel | None = None
            try:
                level = self._logins.level_of(user, password)
            except Exception as error:  # noqa: BLE001  (no memory for a hash, say: the try has to end all the same)
                self._group.report("checking a login", error)
            with suppress(ClosedError):
                self._group.call_soon(told, level)

        def told(level: AuthLevel | None) -> None:
            self._tries.end(connection, address, right=level is not None)
            done(level)

        self._thread.submit(check)
        return True

    def close(self) -> None:
        """Take no more logins; those that wait are dropped."""
        if self._thread is not None:
            self._thread.shutdown(wait=False, cancel_futures=True)
