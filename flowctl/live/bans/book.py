"""The book of bans of a server: is this network kept out or limited, until when, why, and who said so.

It holds what commands, penalties and the other servers of a fleet have said (`flowctl.live.bans.words`), in memory and,
where there is one, in a store; and what the ban file says, which is read and never written. A network that a command
lets in again is let in although the file names it, as long as the file says nothing later than what was lifted.

A ban ends at a time of day. When the system's clock is set, the ends of what was said here move with it, so that a ban
lasts as long as it was to: it neither becomes one for ever nor ends early. That is told. A clock that was set back
while the server was not running shows in the store, which knows when it was written last.

What the store does not take (a full disk) is in force all the same, told of once, and tried again; but a ban is lifted
only where the store has it too, or it would be back after a restart.
"""

from __future__ import annotations

import errno
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from math import inf
from typing import TYPE_CHECKING, Final

import structlog

from flowctl.core.server.bans import MOST_BANS, NO_BANS, Ban, BanAction, BanList, merge_bans, utc_text
from flowctl.errors import ConfigError, LocalProtocolError
from flowctl.live.bans.words import Stamp, Word, WordKind, WordPlace, Words

if TYPE_CHECKING:  # it is loaded only where there is one
    from flowctl.live.bans.store import BanStore

_log: Final = structlog.get_logger("flowctl.live")
PENALTY: Final = "penalty"
"""Source of a ban that a server has made by itself."""
STEP_S: Final = 2.0
"""Difference between two clocks that is more than drift: a clock that is corrected smoothly moves by 1 in 2000."""
_NOTE_TIME_S: Final = 300.0
"""Time after which the store gets the present time, when nothing else is written: if the clock is set back while the
server is stopped, a ban lasts longer by this at most."""
_RETRY_S: Final = 10.0


def steady_s() -> float:
    """Return seconds of a clock that cannot be set; it counts sleep of the machine where the system does."""
    boot = getattr(time, "CLOCK_BOOTTIME", None)
    return time.monotonic() if boot is None else time.clock_gettime(boot)


class BanBook:
    """The book of one server, or of the supervisor of several workers. One thread at a time."""

    def __init__(
        self,
        store: BanStore | None = None,
        wall: Callable[[], float] = time.time,
        steady: Callable[[], float] = steady_s,
    ) -> None:
        self._store = store
        self._wall: Final = wall
        self._steady: Final = steady
        self._apart_s = wall() - steady()  # how far the two clocks are apart
        self._set_back_s = 0.0  # by how much the clock was set back while the server was not running
        self._of_file = NO_BANS
        self._list: BanList | None = None  # in force, but for what `words.changed` names. None: it is made anew.
        self._handed_over: frozenset[WordPlace] = frozenset()  # what a store has that was let go of
        self._let_go: BanStore | None = None  # that one
        self._written_at = steady()  # when the store was written last, or tried
        self.words: Final = Words()  # what commands, penalties and other servers have said
        self.fault = ""  # why the store does not have all of it; empty: it has
        # told of each group of words that is said here
        self.listeners: Final[list[Callable[[Sequence[Word]], None]]] = []
        if store is not None:
            self._load(store)

    @property
    def stored(self) -> bool:
        return self._store is not None and not self.fault

    def join(self, node: str) -> None:
        """Take part in a fleet under a name; before anything is said."""
        if self.words.node != node:
            self.words.node = node
            self._follow_set_back()
        self.words.renamed(node)
        self._flush()

    # -- what is in force

    def in_force(self) -> BanList:
        """Return the list; O(networks of which something was said since the last time), if nothing else has changed.

        Lists that were returned before have these changes too, from then on. Bans that have ended go by `follow_clock`.
        """
        now, changed = self._wall(), self.words.changed
        self.words.changed = set()
        if self._list is not None and changed is not None:
            for cidr in changed - {""}:
                self._list = self._list.replaced(cidr, self._in_force_of(cidr, now))
            if len(self._list) <= MOST_BANS:
                return self._list
        words_in_force = [word.ban for word in self.words if word.ban is not None and word.ban.lasts(now)]
        file = [ban for ban in self._of_file.bans if not self._is_lifted(ban)]
        self._list = BanList([*words_in_force, *file][:MOST_BANS])
        return self._list

    def _in_force_of(self, cidr: str, now: float) -> list[Ban]:
        """Return what is said of a network, and what the file says."""
        words = sorted(self.words.of(cidr), key=lambda word: word.stamp)
        said = [word.ban for word in words if word.ban is not None and word.ban.lasts(now)]
        file = [self._of_file.get(cidr, action) for action in BanAction]
        return said + [ban for ban in file if ban is not None and not self._is_lifted(ban)]

    def replace_file_bans(self, bans: BanList) -> int:
        """Replace the bans of the ban file; return how many of the new ones commands have lifted."""
        self._of_file, self._list = bans, None
        return sum(map(self._is_lifted, bans.bans))

    def _is_lifted(self, ban: Ban) -> bool:
        lift = self.words.get(ban.cidr, WordKind.LIFT)
        return lift is not None and _ends_s(ban) <= lift.ends_s

    # -- what is said

    def ban(self, bans: Iterable[Ban]) -> list[Word]:
        """Keep out, or limit, networks, each joined with what was said of it: of two ends the later one counts."""
        self.follow_clock()
        now = self._wall()
        words = []
        for ban in bans:
            if not ban.lasts(now):
                raise LocalProtocolError(f"the ban of {ban.cidr} is over already, it ended {utc_text(ban.expires)}")
            there = [
                word.ban
                for word in self.words.of(ban.cidr)
                if word.ban is not None and word.ban.action is ban.action and word.ban.lasts(now)
            ]
            joined = merge_bans(there, [ban], 0.0)[0] if there else ban
            words.append(Word.of_ban(joined, self.words.next_stamp(now)))
        if len(self.words) + len(self._of_file) + len(words) > MOST_BANS:  # they may be, and then it raises
            listed = self.in_force()
            new = [ban for ban in (word.ban for word in words) if ban and listed.get(ban.cidr, ban.action) is None]
            if len(listed) + len(new) > MOST_BANS:
                raise ConfigError(f"there are more than {MOST_BANS} bans", hint="ban networks instead of addresses")
        return self._spread_words(words)

    def lift(self, cidr: str, there: Iterable[Ban], source: str) -> tuple[list[Ban], Word]:
        """Lift the bans of a network; return those that were in force (`there` has all that are), and the lifting."""
        self.follow_clock()
        now = self._wall()
        there = [ban for ban in there if ban.lasts(now)]
        lifted = [ban for ban in there if ban.cidr == cidr]
        if not lifted:
            raise _not_banned_error(cidr, there)
        if any(word.place in self._handed_over for word in self.words.of(cidr)):
            raise LocalProtocolError(
                "the ban store has been left to the server that takes this one's place",
                hint="flowctl unban lifts it there, once that server has started",
            )
        word = Word.lifting(cidr, max(map(_ends_s, lifted)), source or "command", self.words.next_stamp(now))
        gone: dict[WordPlace, Word | None] = {item.place: None for item in self.words.of(cidr) if item.ban is not None}
        if self._store is not None:
            self._write(self._store, self.words.touched | gone | {word.place: word})
            self.fault = ""
        self._spread_words([word])
        return lifted, word

    def say_limits(self, limits: Mapping[str, str]) -> None:
        self._spread_words([Word.of_limits(limits, self.words.next_stamp(self._wall()))])

    def merge(self, words: Iterable[Word]) -> list[Word]:
        """Enter what another server has said; return what of it was new."""
        entered = self.words.merge(words, self._wall())
        if entered:
            self._flush()
        return entered

    def _spread_words(self, words: list[Word]) -> list[Word]:
        self.merge(words)
        for listener in self.listeners:
            listener(words)
        return words

    # -- clocks and the store

    def follow_clock(self) -> bool:
        """Follow the clock, forget bans that have ended, retry a failed write; return whether the clock was set."""
        apart_s = self._wall() - self._steady()
        step_s, self._apart_s = apart_s - self._apart_s, apart_s
        was_set = abs(step_s) >= STEP_S
        if was_set:
            self._list = None
            _log.warning(
                "the clock was set, bans of commands and penalties last as long as they were to",
                by_s=round(step_s, 1),
                bans=self._move_ends(step_s),
                hint="bans of a ban file end at the time that it says, by the new clock",
            )
        self.words.forget(self._wall())
        waited_s = self._steady() - self._written_at
        if self._store is not None and (waited_s >= _RETRY_S if self.fault else not self._store.whole()):
            self._flush(anew=True)
        elif not self.fault and (self.words.touched or waited_s >= _NOTE_TIME_S):
            self._flush()
        return was_set

    def close(self) -> None:
        """Let go of the store, for another process to take it; bans of later calls last as long as this process."""
        store = self._store
        if store is not None:
            self._flush()
            self._store, self.fault = None, ""
            self._handed_over = frozenset(word.place for word in self.words if word.ban is not None)
            store.close()
            self._let_go = store

    def take_back(self) -> None:
        """Open the store again that was let go of, with what others have written there and what was said meanwhile."""
        store = self._let_go
        if store is not None:
            store.reopen()
            self._store, self._let_go, self._handed_over = store, None, frozenset()
            self._load(store)

    def _move_ends(self, by_s: float) -> int:
        """Move the ends of bans that were said here; what others said ends by their clocks."""
        moved = 0
        for word in self.words:
            if word.ban is None or word.ban.expires is None or word.stamp.node != self.words.node:
                continue
            try:
                ban = replace(word.ban, expires=word.ban.expires + timedelta(seconds=by_s))
            except (OverflowError, ConfigError):  # it leaves what a time can say
                continue
            # Just after the word that it stands for (`words.ROOM`): who lifted that has lifted this.
            stamp = Stamp(word.stamp.ms, word.stamp.counter + 1, word.stamp.node)
            self.words.replace(word, Word.of_ban(ban, stamp))
            moved += 1
        return moved

    def _follow_set_back(self) -> None:
        """Move the ends of bans from before the clock was set back; again once the server has its name."""
        if self._set_back_s:
            _log.warning(
                "the clock was set back while the server did not run, bans last as long as they had left",
                by_s=round(self._set_back_s, 1),
                bans=self._move_ends(self._set_back_s),
            )

    def _load(self, store: BanStore) -> None:
        try:
            found, seen = store.read()
        except OSError as error:
            raise ConfigError(f"ban_store: {error.filename}: {error.strerror}", hint="check the disk") from error
        now = self._wall()
        self.words.merge(found, -inf)
        if seen - now >= STEP_S:
            self._set_back_s = now - seen
            self._follow_set_back()
        ended = self.words.forget(now)
        self._flush(anew=True)
        bans = sum(word.ban is not None for word in self.words)
        _log.info("ban store read", file=str(store.path), bans=bans, ended_meanwhile=ended)

    def _flush(self, *, anew: bool = False) -> None:
        """Write the changes to the store, or everything; note and log whether that was done."""
        store = self._store
        if store is None:
            self.words.touched.clear()
            return
        self._written_at = self._steady()
        try:
            self._write(store, self.words.touched, anew=anew)
        except (OSError, ConfigError) as error:
            fault = f"{error.filename}: {error.strerror}" if isinstance(error, OSError) else str(error)
            if not self.fault:
                hint = "they are in force and are lost when the server ends; make room, it is tried again by itself"
                _log.error("ban store cannot be written to", fault=fault, hint=hint)
            self.fault = fault
        else:
            if self.fault:
                _log.info("ban store is written to again", bans=len(self.words))
            self.fault = ""

    def _write(self, store: BanStore, changed: Mapping[WordPlace, Word | None], *, anew: bool = False) -> None:
        """Write to the store, in a new file where its own is damaged or another; raises as it does."""
        try:
            store.write(self._everything(changed) if anew else changed, self._wall(), anew=anew)
        except OSError as error:
            if error.errno != errno.EUCLEAN:
                raise
            store.mend()
            store.write(self._everything(changed), self._wall(), anew=True)
        self.words.touched.clear()

    def _everything(self, changed: Mapping[WordPlace, Word | None]) -> dict[WordPlace, Word | None]:
        return {word.place: word for word in self.words} | dict(changed)


def _ends_s(ban: Ban) -> float:
    return inf if ban.expires is None else ban.expires.timestamp()


def _not_banned_error(cidr: str, there: Iterable[Ban]) -> LocalProtocolError:
    network = Ban(cidr=cidr, expires=None).network
    for ban in there:
        if ban.network.version == network.version and ban.network.overlaps(network):
            relation = "it is part of" if ban.network.prefixlen < network.prefixlen else "part of it is"
            return LocalProtocolError(
                f"{cidr} itself is not banned: {relation} {ban.cidr}, which is", hint=f"flowctl unban {ban.cidr}"
            )
    return LocalProtocolError(f"{cidr} is not banned", hint="flowctl bans lists who is")
