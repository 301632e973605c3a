"""Origins of an edge from DNS: the addresses of a name, or the services that it lists, looked up again and again.

How it works. A look asks for A records, for AAAA where there are none, or for SRV records and the addresses of each
host in them. Behind each look comes the next one when the shortest-lived of its records ends, within `LEAST_S` and
`MOST_S`. What a look finds replaces what the one before found; one that finds nothing, for whatever reason, changes
nothing: a server of DNS that is down, or a service without ready members, is no reason to leave origins that serve. A
thread for each name asks (dnspython), so the thread of the edge waits for no answer.

An answer is not trusted: no more than `MOST_ORIGINS` of its addresses are used, chosen by a hash, so that an answer in
another order, or with other addresses beside them, changes little; and none that can be no origin's.
"""

from __future__ import annotations

import ipaddress
import threading
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from random import Random
from typing import Final, TypeVar

import structlog
from dns.exception import DNSException
from dns.name import root
from dns.resolver import Resolver

from flowctl.core.outcomes.backoff import Backoff
from flowctl.core.text.addresses import meanings
from flowctl.errors import ConfigError
from flowctl.live.cluster.edge.upstream import OriginAddress

_log: Final = structlog.get_logger("flowctl.cluster")
HOSTS: Final = "dns+"
SERVICES: Final = "dnssrv+"
"""What stands before an address that is to be looked up, as in Thanos, Loki and Mimir."""
MOST_ORIGINS: Final = 64
"""Origins that one name stands for at most: an edge asks each of them, and keeps a connection to it."""
LEAST_S: Final = 2.0
"""Least time between two looks: records that say 0 are not to be asked for all the time."""
MOST_S: Final = 60.0
"""Longest time between two looks, whatever records say: an origin that is new is found within it."""
_RETRY: Final = Backoff(first_s=1.0, factor=2.0, most_s=30.0)
_LIFETIME_S: Final = 5.0
"""Time for one question, to all servers of DNS together; the default of the resolver of the C library."""
_DNS_PORT: Final = 53
_WHY_CHARS: Final = 200

ItemT = TypeVar("ItemT")


@dataclass(frozen=True, slots=True)
class OriginName:
    """A name in DNS that stands for any number of origins."""

    origin: OriginAddress  #: what all of them have in common; its host is the name
    services: bool = False  #: whether SRV records tell of host and port

    def at(self, host: str, port: int | None = None) -> OriginAddress:
        """Return one of the origins. Its certificate is for the name that was given: what DNS says proves nothing."""
        name = self.origin.host
        while self.services and name.startswith("_"):  # _segments._tcp.origins.example is a service of origins.example
            name = name.partition(".")[2]
        return replace(self.origin, host=host, port=port or self.origin.port, name=name.rstrip("."))

    def __str__(self) -> str:
        return f"{SERVICES}{self.origin.host}" if self.services else f"{HOSTS}{self.origin}"


def parse_origin(text: str) -> OriginAddress | OriginName:
    for prefix in (HOSTS, SERVICES):
        if text.startswith(prefix):
            break
    else:
        return OriginAddress.parse(text)
    origin, services = OriginAddress.parse(text.removeprefix(prefix)), prefix == SERVICES
    shown = text.partition("?")[0]  # without the key
    if services and ":" in shown.removeprefix(prefix).removeprefix("rtmps://"):
        raise ConfigError(f"{shown!r:.100} has a port, which SRV records tell", hint=f"write {SERVICES}{origin.host}")
    if _address(origin.host) is not None:
        raise ConfigError(f"{shown!r:.100} is an address and no name", hint=f"write it without {prefix}")
    return OriginName(origin, services)


def parse_server(text: str) -> tuple[str, int] | None:
    """Return address and port of a server of DNS. None: those of the system."""
    if not text:
        return None
    host, port = text, str(_DNS_PORT)
    if _address(text) is None:
        host, _, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if _address(host) is None or not (port.isascii() and port.isdigit() and 0 < int(port) < 65_536):
        raise ConfigError(f"{text!r:.100} is no server of DNS", hint="write its address, like 10.0.0.2 or 127.0.0.1:53")
    return host, int(port)


def _address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(text.removeprefix("[").removesuffix("]"))
    except ValueError:
        return None


def _may_be_origin(host: str) -> bool:
    """Whether an address can be that of an origin. Private ones can; 169.254.0.0/16 is where clouds keep secrets."""
    found = meanings(host)
    return bool(found) and not any(
        item.is_unspecified or item.is_multicast or item.is_link_local or (item.version == 4 and item.is_reserved)
        for item in found
    )


class Lookup:
    """Asks DNS for the origins of names."""

    def __init__(self, server: tuple[str, int] | None = None, seed: int = 0) -> None:
        self._server: Final = server
        self._seed: Final = seed  # of the choice among too many: edges do not all make the same

    def find(self, name: OriginName) -> tuple[list[OriginAddress], float]:
        """Return the origins of a name, and for how long that holds, in seconds.

        Raises:
            OSError: there is no answer, or none that tells of an origin.
        """
        try:
            resolver = self._resolver()
            found, ttl_s = (self._services if name.services else self._addresses)(resolver, name)
        except Exception as error:  # what comes in a packet may be anything, and the next one may be good
            raise OSError(f"{type(error).__name__}: {error}"[:_WHY_CHARS]) from error
        if not found:
            raise OSError("it has no address that can be an origin's")
        return self._choose(found), ttl_s

    def _resolver(self) -> Resolver:
        """Return what asks: a new one for each look, since the files of the system may have changed."""
        resolver = Resolver(configure=self._server is None)
        resolver.lifetime = _LIFETIME_S
        if self._server is not None:
            resolver.nameservers, resolver.port = [self._server[0]], self._server[1]
        return resolver

    def _addresses(self, resolver: Resolver, name: OriginName) -> tuple[list[OriginAddress], float]:
        hosts, ttl_s = _hosts_of(resolver, name.origin.host, search=True)
        return [name.at(host) for host in hosts], ttl_s

    def _services(self, resolver: Resolver, name: OriginName) -> tuple[list[OriginAddress], float]:
        answer = resolver.resolve(name.origin.host, "SRV", search=True, raise_on_no_answer=False)
        ttl_s = float(answer.chaining_result.minimum_ttl)
        targets = {(str(item.target), item.port) for item in answer if item.port and item.target != root}
        found: list[OriginAddress] = []
        failure: DNSException | None = None
        for target, port in self._choose(targets):
            try:
                hosts, host_ttl_s = _hosts_of(resolver, target, search=False)
            except DNSException as error:  # of one host: the others may be there
                failure = error
                continue
            found += [name.at(host, port) for host in hosts]
            ttl_s = min(ttl_s, host_ttl_s)
        if failure is not None and not found:
            raise failure
        return found, ttl_s

    def _choose(self, items: Iterable[ItemT]) -> list[ItemT]:
        """Return `MOST_ORIGINS` of them at most: the same ones of the same, and of nearly the same nearly those."""
        return sorted(items, key=lambda item: (zlib.crc32(str(item).encode(), self._seed), str(item)))[:MOST_ORIGINS]


def _hosts_of(resolver: Resolver, host: str, *, search: bool) -> tuple[list[str], float]:
    """Return the addresses of a host: of IPv4 where it has them, or one that has both would be two origins."""
    hosts: set[str] = set()
    for kind in ("A", "AAAA"):
        answer = resolver.resolve(host, kind, search=search, raise_on_no_answer=False)
        hosts = {item.address for item in answer}
        if hosts:
            break
    return [item for item in hosts if _may_be_origin(item)], float(answer.chaining_result.minimum_ttl)


class OriginWatch:
    """Looks a name up again and again, on a thread of its own, and tells which origins it stands for."""

    def __init__(
        self,
        name: OriginName,
        find: Callable[[OriginName], tuple[list[OriginAddress], float]],
        tell: Callable[[OriginName, list[OriginAddress]], object],
        rng: Random,
    ) -> None:
        self.name: Final = name
        self._find: Final = find
        self._tell: Final = tell
        self._rng: Final = rng
        self._ended: Final = threading.Event()
        self._known: list[OriginAddress] = []
        self._failures = 0  # in a row
        self._why = ""  # the last one failed, as the log said it

    def start(self) -> None:
        threading.Thread(target=self._run, name="flowctl-dns", daemon=True).start()

    def stop(self) -> None:
        """Look it up no more; a look that is under way tells nothing. Any thread."""
        self._ended.set()

    def _run(self) -> None:
        while not self._ended.wait(self.look()):
            pass

    def look(self) -> float:
        """Look the name up; return the time until the next look, in seconds."""
        try:
            found, ttl_s = self._find(self.name)
        except OSError as error:
            self._failures += 1
            if str(error) != self._why and not self._ended.is_set():
                self._why = str(error)
                kept = len(self._known)
                _log.warning("origins not looked up", name=str(self.name), why=self._why, goes_on_with=kept)
            return _RETRY.delay_s(self._failures, self._rng)
        self._failures, self._why = 0, ""
        if set(found) != set(self._known):
            _log.info("origins looked up", name=str(self.name), origins=sorted(map(str, found)), for_s=ttl_s)
            self._known = found
        if not self._ended.is_set():
            self._tell(self.name, found)
        return min(max(ttl_s, LEAST_S), MOST_S)
