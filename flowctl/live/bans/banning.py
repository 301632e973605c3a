"""Who is kept out of a live server: whom its ban file names, and whom commands and penalties have named.

A ban of a command or a penalty is in force at once. Where there is a store it is kept there, and the ban file is
others' alone. Without a store, but with a ban file, that of a command is written to that file, so that neither the
next reading of the file nor a restart undoes it: others write to the file too, so what is there is read under a lock
and joined with the new ban (`flowctl.core.server.bans.merge_bans`), and the file is replaced by rename. Where there is
neither, or it cannot be written to, the ban is kept in memory, and its maker is told.

All of it runs on the thread of `flowctl.live.reload.reload.Reload`, and before the start on the starting one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from flowctl.core.server.bans import MOST_BYTES, NO_BANS, Ban, BanList, fitting, merge_bans, render, utc_text
from flowctl.core.text.files import held, write_text
from flowctl.errors import ConfigError, FlowctlError, LocalProtocolError
from flowctl.live.bans.kept import KeptBans
from flowctl.live.reload.reload import rest
from flowctl.live.reload.watchfile import WatchedFile

PENALTY: Final = "penalty"
"""Source of a ban that the server has made by itself."""
_LOCK_S: Final = 5.0
"""How long another writer of the file is waited for; jobs of the pipeline hold it while they read and write."""


class Banned(NamedTuple):
    """What came of a ban.

    Attributes:
        ban: as it is in force: joined with what there was for the network.
        fault: why ban file or store do not; empty: one has it, or there is none.
        ended: connections that were ended when it came into force.
    """

    ban: Ban
    in_file: bool
    fault: str
    ended: int
    in_store: bool = False


class Banning:
    """The bans of a server, of all origins.

    Attributes:
        elsewhere: whether another process keeps the bans of commands, so that they go to no file here.
    """

    def __init__(
        self,
        enforce: Callable[[BanList], int],
        file: Callable[[], WatchedFile | None],
        kept: KeptBans | None = None,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._enforce: Final = enforce
        self._file: Final = file
        self._wall: Final = wall
        self._of_file = NO_BANS
        self._kept: Final = KeptBans(wall=wall) if kept is None else kept
        self.elsewhere = False

    def begin(self) -> None:
        """Put in force what the store has; before the start."""
        if self._kept.bans:
            self._put_in_force()

    def look(self) -> None:
        """Follow the clock, and write what could not be written; each second."""
        if self._kept.look():
            self._put_in_force()

    def close(self) -> None:
        """Let go of the store: a server that drains, or ends, leaves it to its successor."""
        self._kept.close()

    def take_file(self, bans: BanList) -> int:
        """Take what the ban file says, in place of what it said before; return how many connections that ended."""
        before, self._of_file = self._of_file, bans
        try:
            return self._put_in_force()
        except BaseException:
            self._of_file = before
            raise

    def ban(self, ban: Ban) -> Banned:
        """Keep out, or limit, a network, joined with what is in force for it."""
        if not ban.lasts(self._wall()):
            raise LocalProtocolError(f"the ban of {ban.cidr} is over already, it ended {utc_text(ban.expires)}")
        joined = self._kept.joined(ban)
        self._check_count([joined])
        self._kept.put([joined])
        ended = self._put_in_force()
        if self._kept.stored or self.elsewhere:
            fault = self._kept.fault
            return Banned(joined, in_file=False, fault=fault, ended=ended, in_store=self._kept.stored and not fault)
        file = self._file()
        if file is None or ban.source == PENALTY:
            return Banned(self._joined(ban), in_file=False, fault="", ended=ended)
        try:
            self._update(file, lambda there: fitting(merge_bans(there, [ban], self._wall())))
        except OSError as error:
            fault = f"{file.path}: {error.strerror or error}"
            return Banned(self._joined(ban), in_file=False, fault=fault, ended=ended)
        except FlowctlError as error:
            return Banned(self._joined(ban), in_file=False, fault=str(error), ended=ended)
        self._kept.drop([(ban.cidr, ban.action)])
        ended += self._put_in_force()
        return Banned(self._joined(ban), in_file=True, fault="", ended=ended)

    def punish(self, bans: Sequence[Ban]) -> int:
        """Put bans of penalties in force, all at once; return how many connections that ended."""
        joined = [self._kept.joined(ban) for ban in bans]
        self._check_count(joined)
        self._kept.put(joined)
        return self._put_in_force()

    def _check_count(self, new: Sequence[Ban]) -> None:
        """See that there is room for `new`."""
        BanList([*self._of_file.bans, *self._kept.bans, *new])

    def _joined(self, ban: Ban) -> Ban:
        """Return `ban` with what is in force for its network and action: to be told, not to be kept beside the file."""
        there = [item for item in self.here(ban.cidr) if item.action is ban.action]
        return merge_bans(there, [ban], 0.0)[0]

    def lift(self, cidr: str) -> list[Ban]:
        """Let a network in again: take it out of memory and out of the file; return what was in force for it."""
        found = self.here(cidr)
        if not found:
            raise self._not_banned(cidr)
        file, kept = self._file(), [ban for ban in self._kept.bans if ban.cidr == cidr]
        self._kept.drop([(ban.cidr, ban.action) for ban in kept])
        if file is not None and any(ban.cidr == cidr for ban in self._of_file.bans):
            try:
                self._update(file, lambda there: [ban for ban in there if ban.cidr != cidr])
            except BaseException:
                self._kept.put(kept)
                raise
        self._put_in_force()
        return found

    def here(self, cidr: str) -> list[Ban]:
        """Return what is in force for exactly this network."""
        now = self._wall()
        both = (*self._kept.bans, *self._of_file.bans)
        return [ban for ban in both if ban.cidr == cidr and ban.lasts(now)]

    def _not_banned(self, cidr: str) -> LocalProtocolError:
        wanted, now = Ban(cidr=cidr, expires=None).network, self._wall()
        for ban in (*self._kept.bans, *self._of_file.bans):
            if ban.lasts(now) and ban.network.version == wanted.version and ban.network.overlaps(wanted):
                relation = "it is part of" if ban.network.prefixlen < wanted.prefixlen else "part of it is"
                return LocalProtocolError(
                    f"{cidr} itself is not banned: {relation} {ban.cidr}, which is", hint=f"flowctl unban {ban.cidr}"
                )
        return LocalProtocolError(f"{cidr} is not banned", hint="flowctl bans lists who is")

    def _put_in_force(self) -> int:
        kept = self._kept.bans
        return self._enforce(BanList([*self._of_file.bans, *kept]) if kept else self._of_file)

    def _update(self, file: WatchedFile, change: Callable[[list[Ban]], list[Ban]]) -> None:
        """Read the file, change its list, and write it."""
        with held(file.path, _LOCK_S):
            data = file.contents()
            if len(data) > MOST_BYTES:
                raise ConfigError(f"{file.path}: it has more than {MOST_BYTES} bytes")
            there = self._of_file if file.in_force(data) else _parsed(data, str(file.path))
            new = change(there.bans)
            rendered = render(new)
            text = rendered.encode()
            if len(text) > MOST_BYTES:
                raise ConfigError(f"{file.path}: it would have more than {MOST_BYTES} bytes")
            if text != data:  # another process of the same server may have written just this
                write_text(file.path, rendered, shared=True)
            self._of_file = BanList(new)
            file.wrote(text)


def _parsed(data: bytes, where: str) -> BanList:
    try:
        return BanList.parse(data.decode(), where, rest=rest)
    except UnicodeDecodeError as error:
        raise ConfigError(f"{where}: not valid UTF-8") from error
