"""The clocks of the members of a set: what each one's timestamps are on the timeline of the set (pure).

Theory of operation. The first member's timestamps are the set's. What is compared is a member's *lead*: by how much
its timestamps are ahead of the time at which they arrive, going by the messages of the last 10 to 20 s that the network
delayed least. A member whose lead agrees with that of the others within 0.5 s keeps its timestamps, or gets the shift
that another member has: outputs of one encoder have one clock, whenever each of them connected. Any other is measured
until a key frame comes, and is shifted by the difference of the leads.

That is as exact as the network is even. Key frames say more: where two of a member's came within 0.25 s of one of the
oldest member each, both by the same distance, they are of the same pictures, and its shift is corrected by that
distance if it is more than 10 ms. So clocks that drift apart are held together, in small steps, and one that the first
half second took for another's is told from it. Where key frames meet, a clock is right, however late it arrives. Where
they do not, a member that has come to arrive 1 s behind the others is moved up. Shifts change at key frames only.

A member never goes back in time. Moved back by a little, its timestamps go on in steps of 1 ms until their time comes;
by more, it is measured anew, and has no place in the set meanwhile. So has one whose timestamps jump.
"""

from __future__ import annotations

from collections import deque
from typing import Final

from flowctl.core.outcomes.offsets import LeastOffset
from flowctl.wire.rtmp.wire import CLOCK_MASK, signed_difference

_AGREE_MS: Final = 500
"""Clocks are the same if their leads differ by less: the delays of two connections of one encoder do, nearly always."""
_MEET_MS: Final = 250
"""Key frames of the same picture are no further apart: leads that were measured over a second are more exact."""
_SAME_MS: Final = 20
"""Distances of key frames are equal up to this: half of a picture at 25 a second, as for a switch between members."""
_EXACT_MS: Final = 10
"""Distance of key frames that is left alone, so that a correction is rare and rounding to ms is none."""
_APART_MS: Final = 1000
"""Difference of leads at which a member is moved: twice what is taken for agreement, so that it is not moved again."""
_JUMP_MS: Final = 1000
"""A lead that grows by more from one message to the next is another clock: delays that end do so message by message."""
_BACK_MS: Final = 3000
"""Timestamps that go back by more have begun anew: sound and pictures of one connection are less far apart."""
_MEASURED_S: Final = 1.5
"""How long a lead is measured at least: the pictures that waited for the connection have been sent by then, and the
second key frame comes behind it with the usual interval of 2 s."""
_WINDOW_S: Final = 10.0
"""Half of the time for which a lead is looked at: a stall of a publisher is over by then, what waited has been sent."""
_QUIET_S: Final = 10.0
"""A member that has sent nothing for so long says nothing of the others."""
_KEYS: Final = 16
"""Key frames of a member that are remembered: 32 s of the usual ones, so that those of a late one are found."""


class SetClock:
    """The timeline of one set. Not thread-safe: its caller holds the set's lock."""

    def __init__(self) -> None:
        self._members: dict[str, MemberClock] = {}
        self._kept: tuple[int, float] | None = None  # shift and lead on the timeline of the member that ended last

    def join(self, name: str) -> MemberClock:
        """Return the clock of a member that begins, for the first time or again."""
        member = self._members.setdefault(name, MemberClock(self, name))
        member.begin()
        return member

    def leave(self, name: str) -> None:
        """Go on without a member, which may join again."""
        self._members[name].begin()

    def keep(self, shift_ms: int, lead_ms: float) -> None:
        """Remember what a member had that begins anew, so that the timeline goes on where all have."""
        self._kept = shift_ms, lead_ms

    def others(self, member: MemberClock, now: float) -> list[MemberClock]:
        """Return the other members that have a place in the set, the oldest first: those that send, if any does."""
        settled = sorted(
            (other for other in self._members.values() if other is not member and other.settled),
            key=MemberClock.age,
        )
        return [other for other in settled if now - other.heard_at < _QUIET_S] or settled

    def lead_ms(self, others: list[MemberClock]) -> float | None:
        """Return the lead of the set: the middle one of its members', the later of two. None: it has no timeline.

        The middle, so that one broken clock of three moves no other; of two the one that arrives early is right, since
        delays are more frequent than clocks that run fast.
        """
        leads = sorted(other.lead_ms for other in others)
        if leads:
            return leads[len(leads) // 2]
        return None if self._kept is None else self._kept[1]

    def shifts(self, others: list[MemberClock]) -> list[tuple[int, str]]:
        """Return the shifts that are in use, and whose they are."""
        kept = [] if self._kept is None else [(self._kept[0], "")]
        return [(other.shift_ms, other.name) for other in others] + kept


class MemberClock:
    """One member's clock; made by `SetClock.join`."""

    def __init__(self, clocks: SetClock, name: str) -> None:
        self.name: Final = name
        self.why = ""  # how its timestamps are mapped and why, in words
        self.moves = 0  # how often `why` has changed
        self.last_ms = 0  # timestamp on the set's timeline of what was mapped last: for headers, which have none
        self.heard_at = float("-inf")
        self.settled = False  # whether it has a place in the set; else it is being measured
        self.shift_ms = 0  # added to timestamps
        self.keys: deque[int] = deque(maxlen=_KEYS)  # its own times of its last key frames
        self.since = 0.0  # when it was settled, or began to be measured
        self._clocks: Final = clocks
        self._end: int | None = None  # latest time that it has had, on a clock that does not wrap
        self._held: int | None = None  # last time that was given in steps of 1 ms, after it was moved back
        self._offset = LeastOffset(_WINDOW_S)  # the lead, negative
        self.begin()

    def begin(self) -> None:
        """Measure anew: another publisher, or another clock of the same one."""
        if self.settled:
            self._clocks.keep(self.shift_ms, self.lead_ms)
        self.settled = False
        self.keys.clear()
        self._raw: int | None = None  # its own time of the last message, on a clock that does not wrap
        self._offset.restart()

    def age(self) -> tuple[float, str]:
        """Return what sorts members by how long each has had its place in the set."""
        return self.since, self.name

    @property
    def lead_ms(self) -> float:
        """By how much it is ahead of its arrival, on the timeline of the set."""
        return self.shift_ms - self._offset.least

    def late_ms(self, now: float) -> int:
        """Return by how much it arrives later than the set, negative: earlier. 0 while it is being measured."""
        if not self.settled:
            return 0
        lead = self._clocks.lead_ms([*self._clocks.others(self, now), self])
        return 0 if lead is None else round(lead - self.lead_ms)

    def map(self, timestamp: int, now: float, *, key: bool = False) -> int | None:
        """Return the time on the set's timeline of a picture or of sound, in ms, which wraps as timestamps do.

        None: its time in the set is not known yet. Headers and metadata have no time of their own: `last_ms` is theirs.
        """
        raw = self._follow(timestamp, now)
        if key:
            self.keys.append(raw)
        if not self.settled:
            self._settle(raw, now, key=key)
        elif key:
            self._correct(now)
        if not self.settled:
            return None
        at = raw + self.shift_ms
        if self._held is not None:
            self._held = at = max(at, self._held + 1)
            if at == raw + self.shift_ms:
                self._held = None
        self._end = at if self._end is None else max(at, self._end)
        self.last_ms = at & CLOCK_MASK
        return self.last_ms

    def _follow(self, timestamp: int, now: float) -> int:
        """Return the member's own time without wraps; begin anew where it jumps."""
        raw = timestamp if self._raw is None else self._raw + signed_difference(timestamp, self._raw & CLOCK_MASK)
        lead = raw - now * 1000
        if self._raw is not None and (raw < self._raw - _BACK_MS or lead > _JUMP_MS - self._offset.least):
            self.begin()
            self._say("being measured: its clock jumped")
            raw = timestamp
            lead = raw - now * 1000
        if self._raw is None:
            self.since = now
        self._raw, self.heard_at = raw, now
        self._offset.add(-lead, now)
        return raw

    def _settle(self, raw: int, now: float, *, key: bool) -> None:
        """Find the member's shift, if it can be known by now."""
        others = self._clocks.others(self, now)
        target = self._clocks.lead_ms(others)
        lead = -self._offset.least
        if target is None:
            self._take(0, raw, now, "as they are")
            return
        lap = CLOCK_MASK + 1  # one clock may have wrapped, and the other begun later
        candidates = [
            (shift - round((lead + shift - target) / lap) * lap, name) for shift, name in self._clocks.shifts(others)
        ]
        shift, name = min(candidates, key=lambda candidate: abs(lead + candidate[0] - target))
        if abs(lead + shift - target) <= _AGREE_MS:
            self._take(shift, raw, now, f"as those of {name} are" if name else "as before")
            return
        if not others:
            self._take(round(target - lead), raw, now, "to go on where the set was")
        elif key and now - self.since >= _MEASURED_S:
            shift = round(target - lead)
            self._take(shift - (self._distance(shift, others) or 0), raw, now, "by when they arrive")
        elif not self.why.startswith("being measured"):
            self._say("being measured: its clock is not that of the others")

    def _take(self, shift_ms: int, raw: int, now: float, reason: str) -> None:
        """Give the member a place in the set, unless it would go back in time by much: its time has to come then."""
        at = raw + shift_ms
        if self._end is not None and at <= self._end:
            if at < self._end - _AGREE_MS:
                return
            self._held = self._end
        self.shift_ms, self.settled, self.since = shift_ms, True, now
        self._say_shift(reason)

    def _correct(self, now: float) -> None:
        """Go on with another shift from this key frame, if the clocks have come to differ."""
        others = self._clocks.others(self, now)
        target = self._clocks.lead_ms(others)
        if not others or target is None:
            return
        follows = self.age() > others[0].age()
        distance = self._distance(self.shift_ms, others)
        if distance is not None:  # its clock is right, however late it arrives
            if follows and abs(distance) > _EXACT_MS:
                self._meet(distance, others[0].name)
            return
        late_ms, behind_ms = self.late_ms(now), round(target - self.lead_ms)
        distance = self._distance(self.shift_ms + behind_ms, others)
        if follows and distance is not None and abs(behind_ms) <= _APART_MS:
            self._meet(distance - behind_ms, others[0].name)
        elif late_ms > _APART_MS:
            self._move(late_ms - (distance or 0), f"they had come to arrive {late_ms / 1000:.1f} s late")
        elif late_ms < -_APART_MS:
            self.begin()
            self._say(f"being measured: they had come to arrive {-late_ms / 1000:.1f} s early")

    def _meet(self, distance_ms: int, reference: str) -> None:
        words = f"{abs(distance_ms) / 1000:.3f} s {'before' if distance_ms < 0 else 'behind'} those of {reference}"
        self._move(-distance_ms, f"their key frames came {words}")

    def _move(self, by_ms: int, reason: str) -> None:
        self.shift_ms += by_ms
        if by_ms < 0:
            self._held = self._end
        self._say_shift(reason)

    def _distance(self, shift_ms: int, others: list[MemberClock]) -> int | None:
        """Return by how much the key frames come behind those of the oldest other member. None: they do not meet."""
        reference = [at + others[0].shift_ms for at in others[0].keys]
        found: list[int] = []
        for own in reversed(self.keys):
            distance = min((own + shift_ms - at for at in reference), key=abs, default=_MEET_MS + 1)
            if abs(distance) <= _MEET_MS:
                found.append(distance)
            if len(found) == 2:
                return found[0] if abs(found[0] - found[1]) <= _SAME_MS else None
        return None

    def _say_shift(self, reason: str) -> None:
        shift = signed_difference(self.shift_ms & CLOCK_MASK, 0)
        self._say(reason if not shift else f"shifted by {shift / 1000:+.3f} s, {reason}")

    def _say(self, words: str) -> None:
        if words != self.why:
            self.why = words
            self.moves += 1
