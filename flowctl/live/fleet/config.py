"""The file of a fleet: TOML, the same for all members but for its first lines."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from flowctl.core.text.printable import short
from flowctl.core.text.tomltext import MOST_BYTES, TomlText
from flowctl.core.text.userfiles import text_of
from flowctl.errors import ConfigError
from flowctl.nodes.messenger.message import Destination
from flowctl.nodes.rpc.wire.addresses import Address, AddressTransport
from flowctl.wire.zmtp.keys import KeyPair
from flowctl.wire.zmtp.keytext import parse_key

MOST_MEMBERS: Final = 32
"""Members of one fleet: each speaks with each. Servers by the hundred need a tree, which a fleet is not."""
_NAME: Final = re.compile(r"[A-Za-z0-9._-]{1,64}")
_TOP: Final = frozenset({"name", "listen", "key_file", "members"})
_MEMBER: Final = frozenset({"address", "key"})


@dataclass(frozen=True, kw_only=True, slots=True)
class FleetConfig:
    """A fleet, as one of its members is told of it."""

    name: str
    members: Mapping[str, Destination]  # where each is, and its public key, by name
    listen: Destination  # where this one listens for the others
    keys: KeyPair | None = None  # its key pair. None: nothing is encrypted.

    @property
    def others(self) -> dict[str, Destination]:
        return {name: item for name, item in self.members.items() if name != self.name}


def read_config(path: Path) -> FleetConfig:
    try:
        with path.open("rb") as file:
            text = text_of(file.read(MOST_BYTES + 1))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}", hint="docs/fleet.toml is a sample") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not valid UTF-8") from error
    return _FleetReader(TomlText(text, str(path), "docs/fleet.toml"), path.absolute().parent).read()


class _FleetReader:
    """Turns the tables of one file into values, and knows the lines for its errors."""

    def __init__(self, toml: TomlText, base: Path) -> None:
        self._toml: Final = toml
        self._base: Final = base  # what paths are relative to

    def read(self) -> FleetConfig:
        top = self._texts((), self._toml.table, _TOP, {"members"})
        tables = self._toml.table.get("members")
        if not isinstance(tables, dict) or not 1 <= len(tables) <= MOST_MEMBERS:
            raise self._error(("members",), f"1 to {MOST_MEMBERS} tables, each of which begins with [members.NAME]")
        members = {name: self._member(name, table) for name, table in tables.items()}
        name = top.get("name", "")
        if name not in members:
            raise self._error(("name",), f"one of the members: {', '.join(sorted(members))}")
        own = members[name]
        listen = self._address(("listen",), top["listen"]) if "listen" in top else own.endpoint
        keys = KeyPair.read(self._base / top["key_file"]) if "key_file" in top else None
        self._check(members, listen, keys is not None)
        if keys is not None and keys.public != own.pubkey:
            raise self._error(("members", name, "key"), f"the public key of {top['key_file']}: {keys.public.hex()}")
        return FleetConfig(name=name, members=members, listen=Destination(name, listen), keys=keys)

    def _member(self, name: str, table: object) -> Destination:
        place = ("members", name)
        if not _NAME.fullmatch(name) or not isinstance(table, dict):
            raise self._error(place, "a table whose name has 1 to 64 letters, digits, . _ or -")
        said = self._texts(place, table, _MEMBER, set())
        if "address" not in said:
            raise self._error((*place, "address"), "tcp://host:port or ipc:///path")
        try:
            pubkey = parse_key(said["key"], "key") if "key" in said else b""
        except ConfigError as error:
            raise ConfigError(f"{self._toml.place(*place, 'key')}: {error}", hint=error.hint) from error
        return Destination(name, self._address((*place, "address"), said["address"]), pubkey)

    def _address(self, place: tuple[str, ...], text: str) -> str:
        try:
            address = Address.parse(text)
        except ConfigError as error:
            raise ConfigError(f"{self._toml.place(*place)}: {place[-1]}: {error}", hint="tcp://host:port") from error
        if address.transport is AddressTransport.INPROC or address.pubkey:
            raise self._error(place, "tcp://host:port or ipc:///path; the key has a line of its own")
        return (
            f"ipc://{self._base / address.socket}" if address.transport is AddressTransport.IPC else address.zmq_address
        )

    def _check(self, members: Mapping[str, Destination], listen: str, keyed: bool) -> None:  # noqa: FBT001 - private
        """See that no two members are one, and that nothing comes in that anybody could have sent."""
        addresses: dict[str, str] = {}
        owners: dict[bytes, str] = {}
        for name, item in members.items():
            if addresses.setdefault(item.endpoint, name) != name:
                raise self._error(("members", name, "address"), "one that no other member has")
            if item.pubkey and owners.setdefault(item.pubkey, name) != name:
                raise self._error(("members", name, "key"), "one that no other member has: it is known by it")
        bare = [name for name, item in members.items() if not item.pubkey]
        reached = next((item for item in [*addresses, listen] if item.startswith("tcp://")), None)
        if (reached or owners or keyed) and (bare or not keyed):
            missing = f"members.{bare[0]} has no key" if bare else "key_file is missing"
            why = f"others than its user reach {reached}" if reached else "some have keys"
            raise ConfigError(
                f"{self._toml.where}: {missing}, but {why}: anybody could lift the bans of the fleet",
                hint="flowctl rpc keygen FILE makes a key pair: key_file names the file, key is the public one",
            )

    def _texts(
        self, place: tuple[str, ...], table: Mapping[str, Any], names: frozenset[str], tables: set[str]
    ) -> dict[str, str]:
        for name, value in table.items():
            if name not in names:
                where = self._toml.place(*place, name)
                raise ConfigError(f"{where}: unknown key {short(name)}", hint=f"there are {', '.join(sorted(names))}")
            if name not in tables and (not isinstance(value, str) or not value or not value.isprintable()):
                raise self._error((*place, name), "a text in quotes")
        return {name: value for name, value in table.items() if name not in tables}

    def _error(self, place: tuple[str, ...], allowed: str) -> ConfigError:
        value: Any = self._toml.table
        for name in place:
            value = value.get(name) if isinstance(value, dict) else None
        shown = "is missing" if value is None else f"is {short(value)}"
        told = f"{self._toml.place(*place)}: {'.'.join(place)} {shown}, it must be {allowed}"
        return ConfigError(told, hint="see docs/fleet.md")
