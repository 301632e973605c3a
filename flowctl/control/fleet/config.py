"""What an agent is told at its start: a TOML file, the same for all members but for a few lines."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from flowctl.control.fleet.wire import MOST_NAME
from flowctl.core.text.printable import short
from flowctl.core.text.tomltext import MOST_BYTES, TomlText
from flowctl.errors import ConfigError
from flowctl.nodes.rpc.wire.addresses import Address, Transport
from flowctl.wire.zeromq.keytext import parse_key

MOST_MEMBERS: Final = 32
"""Members of one fleet: each speaks with each. Servers by the hundred want a tree, which this is not."""
_NAME: Final = re.compile(rf"[A-Za-z0-9._-]{{1,{MOST_NAME}}}")
_TOP: Final = frozenset({"name", "folder", "server", "listen", "key_file", "members"})
_MEMBER: Final = frozenset({"address", "key"})
_MOST_PATH_BYTES: Final = 107
"""Of the path of a unix socket (unix(7))."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MemberAddress:
    """Where the agent of a member is.

    Args:
        address: as ZeroMQ writes it: ``tcp://host:port`` or ``ipc://path``.
        pubkey: its public key, 32 octets. None: what is sent to it is not encrypted.
    """

    address: str
    pubkey: bytes | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class FleetConfig:
    """What an agent is told at its start.

    Args:
        server: the server that it keeps, as ``--server`` of ``flowctl stats``. None: the only one on this machine.
        listen: where it listens for the others. None: at its member's address.
        key_file: file with its key pair. None: nothing is encrypted.
    """

    name: str
    folder: Path
    server: str | None = None
    listen: str | None = None
    key_file: Path | None = None
    members: Mapping[str, MemberAddress]

    @property
    def others(self) -> dict[str, MemberAddress]:
        return {name: item for name, item in self.members.items() if name != self.name}

    @property
    def listens_at(self) -> str:
        """Where it listens for the others."""
        return self.listen or self.members[self.name].address

    @property
    def status_socket(self) -> Path:
        """Where it is asked for its status."""
        return self.folder / "status.sock"


def read_config(path: Path) -> FleetConfig:
    """Return what a file says."""
    try:
        with path.open("rb") as file:
            data = file.read(MOST_BYTES + 1)
        text = data.decode()
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}", hint="docs/fleet.toml is a sample") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not valid UTF-8") from error
    return parse_config(text, str(path), path.absolute().parent)


def parse_config(text: str, where: str, base: Path) -> FleetConfig:
    """Return what the text of a file says."""
    return _Reader(TomlText(text, where, "docs/fleet.toml"), base).read()


class _Reader:
    """Turns the tables of one file into values, and knows the lines for its errors."""

    def __init__(self, toml: TomlText, base: Path) -> None:
        self._toml: Final = toml
        self._base = base

    def read(self) -> FleetConfig:
        """Return what the file says."""
        table = self._toml.table
        self._known("", table, _TOP)
        members = self._members(table.get("members"))
        name = self._text("", table, "name")
        if name is None or name not in members:
            listed = ", ".join(sorted(members)) or "there are none"
            raise self._error("", "name", name, f"one of the members: {listed}")
        folder = self._text("", table, "folder")
        if folder is None:
            raise self._error("", "folder", None, "a folder of this agent's own")
        key_file, listen = self._text("", table, "key_file"), self._text("", table, "listen")
        config = FleetConfig(
            name=name,
            folder=self._base / folder,
            server=self._text("", table, "server"),
            listen=None if listen is None else self._address("", "listen", listen),
            key_file=None if key_file is None else self._base / key_file,
            members=members,
        )
        self._check(config)
        return config

    def _members(self, table: object) -> dict[str, MemberAddress]:
        if not isinstance(table, dict):
            raise self._error("", "members", table, "tables, each of which begins with [members.NAME]")
        if not 1 <= len(table) <= MOST_MEMBERS:
            raise ConfigError(f"{self._toml.where}: it has {len(table)} members, 1 to {MOST_MEMBERS} are allowed")
        found: dict[str, MemberAddress] = {}
        for name, item in table.items():
            section = f"members.{name}"
            if not _NAME.fullmatch(name):
                raise ConfigError(
                    f"{self._toml.where}: the member {short(name)}: a name has 1 to {MOST_NAME} letters, "
                    "digits, . _ or -"
                )
            if not isinstance(item, dict):
                raise self._error("members", name, item, "a table with an address")
            self._known(section, item, _MEMBER)
            address, key = self._text(section, item, "address"), self._text(section, item, "key")
            if address is None:
                raise self._error(section, "address", None, "tcp://host:port or ipc:///path")
            address = self._address(section, "address", address)
            if any(other.address == address for other in found.values()):
                raise self._error(section, "address", address, "one that no other member has")
            try:
                pubkey = None if key is None else parse_key(key, "key")
            except ConfigError as error:
                raise ConfigError(f"{self._place(section, 'key')}: {error}", hint=error.hint) from error
            found[name] = MemberAddress(address=address, pubkey=pubkey)
        return found

    def _address(self, section: str, key: str, text: str) -> str:
        try:
            address = Address.parse(text)
        except ConfigError as error:
            raise ConfigError(f"{self._place(section, key)}: {key}: {error}", hint="tcp://host:port") from error
        if address.transport is Transport.INPROC or address.pubkey:
            raise self._error(section, key, text, "tcp://host:port or ipc:///path; the key has a line of its own")
        if address.transport is Transport.IPC:
            return f"ipc://{self._base / address.socket}"
        return address.zmq_address

    def _check(self, config: FleetConfig) -> None:
        """See that nothing comes in that anybody could have sent."""
        bare = [name for name, item in config.members.items() if item.pubkey is None]
        addresses = [item.address for item in config.members.values()] + [config.listens_at]
        tcp = next((address for address in addresses if address.startswith("tcp://")), None)
        keyed = len(bare) < len(config.members) or config.key_file is not None
        if (tcp or keyed) and (bare or config.key_file is None):
            missing = f"members.{bare[0]} has no key" if bare else "key_file is missing"
            why = f"others than its user reach {tcp}" if tcp else "some have keys"
            raise ConfigError(
                f"{self._toml.where}: {missing}, but {why}: anybody could lift the bans of the fleet",
                hint="flowctl rpc keygen FILE makes a key pair: key_file names the file, key is the public one",
            )
        owners: dict[bytes, str] = {}
        for name, item in config.members.items():
            if item.pubkey is not None and owners.setdefault(item.pubkey, name) != name:
                raise ConfigError(
                    f"{self._toml.where}: members.{name} has the key of members.{owners[item.pubkey]}",
                    hint="a member is known by its key: flowctl rpc keygen FILE makes one for each",
                )
        if len(str(config.status_socket).encode()) > _MOST_PATH_BYTES:
            raise self._error("", "folder", str(config.folder), f"shorter: its socket has {_MOST_PATH_BYTES} bytes")

    def _text(self, section: str, table: Mapping[str, Any], name: str) -> str | None:
        value = table.get(name)
        if value is not None and (not isinstance(value, str) or not value or not value.isprintable()):
            raise self._error(section, name, value, "a text in quotes")
        return value

    def _known(self, section: str, table: Mapping[str, Any], names: frozenset[str]) -> None:
        for name in table:
            if name not in names:
                which = f"[{section}] has " if section else "there are "
                raise ConfigError(
                    f"{self._place(section, name)}: unknown key {short(name)}", hint=which + ", ".join(sorted(names))
                )

    def _error(self, section: str, key: str, value: object, allowed: str) -> ConfigError:
        shown = "is missing" if value is None else f"is {short(value)}"
        return ConfigError(
            f"{self._place(section, key)}: {key} {shown}, it must be {allowed}", hint="see docs/fleet.md"
        )

    def _place(self, section: str, key: str) -> str:
        return self._toml.place(*filter(None, (*section.split(".", 1), key)))
