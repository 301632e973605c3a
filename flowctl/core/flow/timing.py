"""Whether a message would reach a viewer that lags in time, and when a queue reaches its hard limit (pure).

The rule. A viewer has a *target delay*. When its next picture is to be handed to the kernel, its arrival is reckoned:
how old it is, and what the kernel still holds for the viewer and the picture itself over the rate at which the viewer
takes. One that arrives within the target delay is handed over. Otherwise the rest of its group of pictures is left out,
up to the next key frame that arrives in time; the first pictures of a group need nothing that comes after them, so what
was handed over decodes. A key frame for which no newer one waits is left out where it would make sound late as well;
else it goes whatever it takes. Nothing is waited for longer than the hard limits hold of the stream.

There is no state but "until which key frame" (see `flowctl.core.outgoing.cursor`), so nothing flaps, nothing is probed,
and who recovers is served whole with the next key frame.

How long the classes of messages are waited for is the drop policy's (`DropPolicy.patience`), in multiples of the target
delay. Precedent for judging by arrival and not by what is queued: CoDel (RFC 8289), which judges by time in the queue.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import Final, NamedTuple

from flowctl.core.flow.limits import OFF_MARK, Axis, Limits
from flowctl.core.flow.state import CLASS_COUNT, Load, MessageClass

LEAST_TARGET_S: Final = 1.5
"""Smallest target delay. Below it, more of the line is left unused than delay is saved, unless groups are shorter."""
MOST_TARGET_S: Final = 4.0
_TARGET_PER_GROUP: Final = 0.75
"""Share of the time between key frames that is the default target delay. With less, a viewer on a line of 85 % is cut
so early that its line stands idle."""

_CARRYING_SHARE: Final = 0.9
"""Share of the last group's rate that a line needs to carry the stream: groups differ, and the rate is measured."""
_KEY_WAIT_SHARE: Final = 1 / 3
"""Pictures behind a large key frame may be late by the time that it takes to send plus this share of their usual wait,
if that is more than the usual wait. With a smaller share a line of 105 % loses whole groups of 10 s that are a fifth
larger than others; with a larger one delays grow where they need not."""
_BEHIND_SHARE: Final = 1 / 4
"""Share of the usual wait of pictures by which those behind a large key frame may fall behind that. With a third sound
that is never left out is 0.3 s later on a line of 20 %."""
_WAIT_PER_HARD_MARK: Final = 0.8
"""Share of what the hard marks hold that may be used for waiting: the rate is a mean over seconds, and more arrives
while a picture is on its way."""
_CROWDED_SHARE: Final = 0.9
"""Share of a hard mark from which a queue counts as crowded; it lies between the longest wait and the end."""

_HELD_PER_HARD_AGE: Final = 2.0
"""Times the hard mark of age for which pictures may be held up by the key frame before them. With 1.5 a shared screen
with key frames each 10 s shows nothing on a line of 60 %; with 3 a line of 30 % stands idle for a tenth of the time."""

AHEAD_S: Final = 0.3
"""Time of a lagging viewer's rate that the kernel is given ahead: what it holds is decided that much too early."""
PACE_SHARE: Final = 2 / 3
"""Share of that time after which a viewer that lags has its next turn: the rest is for uneven lines, and a thread that
comes a little late. With a turn each 200 ms viewers see as many pictures as with one at each readiness; 2 % fewer on
lines with pauses."""
CUT_PACE_S: Final = AHEAD_S
"""Time between two turns of a viewer that has taken all and waits for a key frame, which gives it a turn at once: what
comes meanwhile is sound beside a picture that stands."""
LONGEST_PACE_S: Final = 0.25
"""Longest time between two turns of a viewer that takes something: what a faster line can stand idle."""
EVEN_S: Final = 6.0
"""Time after which a rate that has stayed within `EVEN_RATIO` is taken to stay: three groups of pictures."""
EVEN_RATIO: Final = 1.25
"""Most that it may be off, up or down: lines that change each 5 s, or pause for 0.4 s of each 2 s, are not even."""
EVEN_AHEAD_S: Final = 0.45
"""As `AHEAD_S`, of such a rate that does not carry the stream. On lines of 50 to 85 % viewers see as much, as soon,
with three turns in place of four; on ones that change or pause 6 % fewer pictures, or 0.3 s later, and with 0.6 s here
less of streams with a key frame each second."""
EVEN_PACE_S: Final = 0.3
"""As `LONGEST_PACE_S`, of such a rate."""
LEAST_AHEAD_BYTES: Final = 3000
"""Least that the kernel is given ahead, two packets (MTU 1500): with less, a line stands idle between two writes."""
MOST_AHEAD_BYTES: Final = 128 * 1024
"""Most that the kernel is given ahead: as usual, see `flowctl.core.loop.sockets.NOTSENT_LOWAT_BYTES`."""

_KEY: Final = MessageClass.KEY
_INTER: Final = MessageClass.INTER
_BEHIND: Final = (_INTER, MessageClass.DISPOSABLE)


_LEAST_FILL_BYTES: Final = 16 * 1024
"""Least that the kernel takes ahead. With less, a usual burst (messages that gathered in a pause of the network) would
meet EAGAIN."""


def fill_bytes(bytes_per_s: float, largest_bytes: int, before_bytes: int) -> int:
    """Return how much the kernel is given ahead of a viewer that keeps up: a second of its stream; 0: as usual.

    As usual is that of a stream of 1 Mbit/s and more. Of a radio it is 11 s, and of a line that carries less than the
    radio 26 s that nobody would see, since all of that is taken.
    """
    least_bytes = int(max(bytes_per_s, 2 * largest_bytes, _LEAST_FILL_BYTES)) if bytes_per_s else MOST_AHEAD_BYTES
    size = 1 << (least_bytes - 1).bit_length()
    if size <= before_bytes < 4 * size:
        return before_bytes
    return size if size < MOST_AHEAD_BYTES else 0


def target_s(target_delay_ms: int | None, gop_s: float) -> float:
    if target_delay_ms is not None:
        return target_delay_ms / 1000
    return min(max(LEAST_TARGET_S, _TARGET_PER_GROUP * gop_s), MOST_TARGET_S)


def carries(rate: float, stream_bytes_per_s: float) -> bool:
    """Return whether a line of `rate` bytes per second carries a stream, with what is usual between groups."""
    return 0 < _CARRYING_SHARE * stream_bytes_per_s <= rate


def most_wait_s(limits: Limits, bytes_per_s: float, messages_per_s: float) -> float:
    """Return the longest useful wait in seconds: what comes meanwhile has to fit the hard limits."""
    age_ms = min(limits.age_ms.hard or OFF_MARK, OFF_MARK)
    return _WAIT_PER_HARD_MARK * min(_fills_s(limits, bytes_per_s, messages_per_s), age_ms / 1000)


def most_held_s(limits: Limits, bytes_per_s: float, messages_per_s: float) -> float:
    """Return how long what comes may be held up by one large message, in seconds.

    A `crowded` queue gives up more, and who limits age does not want to wait for several times that.
    """
    age_ms = min(limits.age_ms.hard or OFF_MARK, OFF_MARK)
    return min(_CROWDED_SHARE * _fills_s(limits, bytes_per_s, messages_per_s), _HELD_PER_HARD_AGE * age_ms / 1000)


def _fills_s(limits: Limits, bytes_per_s: float, messages_per_s: float) -> float:
    size, messages = (min(axis.hard or OFF_MARK, OFF_MARK) for axis in (limits.size, limits.messages))
    charged_per_s = bytes_per_s + messages_per_s * limits.overhead_bytes
    by_size = size / charged_per_s if charged_per_s else inf
    return min(by_size, messages / messages_per_s if messages_per_s else inf)


def crowded(limits: Limits, load: Load) -> bool:
    """Return whether `load` nears a hard mark of bytes or messages although what is late is left out.

    What is waited for fits the hard marks at the rates of the stream. So this is a burst: of sound, key frames, or
    frames that no other needs, too fast for its rate to be known, or so small that none is late. An axis without a
    soft mark is one on which nothing is to be thinned.
    """
    pairs = ((load.size_bytes, limits.size), (load.messages, limits.messages))
    return any(axis.soft and value >= _CROWDED_SHARE * (axis.hard or OFF_MARK) for value, axis in pairs)


def ahead_bytes(rate: float, *, even: bool = False) -> int:
    return min(max(int(rate * (EVEN_AHEAD_S if even else AHEAD_S)), LEAST_AHEAD_BYTES), MOST_AHEAD_BYTES)


class Timing:
    """What decides at one moment which messages would be late for one viewer.

    Attributes:
        now: that moment, in seconds.
        held_bytes: what goes to the viewer before the messages that are judged.
        due: how late a message may be, in seconds, by class; inf: as late as it likes.
        seconds_per_byte: what a byte takes at the rate of the viewer.
        steady_per_byte: the same at its rate over some seconds, for what takes as long: losses halve that of a second.
    """

    __slots__ = (
        "_carried",
        "_most_behind_s",
        "_most_held_s",
        "due",
        "held_bytes",
        "key_firm",
        "now",
        "seconds_per_byte",
        "sound_last",
        "steady_per_byte",
    )

    def __init__(
        self,
        now: float,
        rate: float,
        held_bytes: int,
        target_s: float,
        patience: Sequence[float],
        most_s: float = inf,
        held_s: float = inf,
        *,
        carried: bool = False,
        sound: bool = True,
    ) -> None:
        self.tell(now, rate, held_bytes)
        due = self.due = [min(item * target_s, most_s) if item < inf else inf for item in patience]
        # A key frame that a newer one could stand in for is waited for no longer than the pictures after it.
        due[_KEY] = min(due[_KEY], due[_INTER])
        self.key_firm = patience[_KEY] < inf  # late, it is left out even where no newer one waits
        self.sound_last = patience[MessageClass.AUDIO] >= patience[_INTER]  # left out only beside pictures
        self._carried = carried
        self._most_held_s = held_s
        # Sound that is kept longest must not be late for pictures, but where all of them will be in time again.
        sound_s = due[MessageClass.AUDIO]
        kept = sound and self.sound_last and not carried
        self._most_behind_s = (sound_s if sound_s < inf else 0.0) if kept else inf

    def tell(self, now: float, rate: float, held_bytes: int, steady: float = 0.0) -> None:
        """Set the moment, the rate in bytes per second, the bytes that go first, and the rate over some seconds."""
        self.now = now
        self.seconds_per_byte = 1 / rate
        self.steady_per_byte = 1 / (steady or rate)
        self.held_bytes = held_bytes

    def late(
        self,
        message_class: MessageClass,
        size_bytes: int,
        since: float,
        ahead_bytes: int,
        key_bytes: int = 0,
        behind_bytes: int = 0,
        key_since: float = 0.0,
        key_s_ago: float = 0.0,
    ) -> bool:
        """Return whether a message would arrive later than it is waited for.

        `key_bytes` to `key_s_ago`: of the key frame of its group, the size, what came between it and the message, since
        when it waits, and how long before the message it was published.
        """
        due = self.due[message_class]
        if due == inf:
            return False
        before_bytes = self.held_bytes + ahead_bytes
        late_s = self.now - since + (before_bytes + size_bytes) * self.seconds_per_byte
        if late_s <= due:
            return False
        pictures_s = self.due[_INTER]
        if message_class is not _KEY and self.large(key_bytes):  # else, and long after it, the queue is thinned
            steady_per_byte = self.steady_per_byte
            if message_class in _BEHIND:
                # How late its last byte goes, or went: what is behind it has gone since, or is among what is ahead.
                wait_s = self.now - key_since + (before_bytes - behind_bytes) * steady_per_byte
                if key_s_ago / 2 <= wait_s <= self._most_held_s:
                    behind_s = (behind_bytes + size_bytes) * steady_per_byte
                    return behind_s > key_s_ago + _BEHIND_SHARE * pictures_s
            elif (key_s := key_bytes * steady_per_byte) <= self._most_held_s:
                # It has begun no later than pictures are waited for. Long after it, less and less late.
                most_s = key_s + (1 + _KEY_WAIT_SHARE) * pictures_s
                steady_s = self.now - since + (before_bytes + size_bytes) * steady_per_byte
                return steady_s > max(min(most_s, 2 * most_s - key_s_ago), due)
        if pictures_s == inf or not (message_class in _BEHIND or (self._carried and due >= pictures_s)):
            return True
        wait_s = min(key_bytes * self.seconds_per_byte + _KEY_WAIT_SHARE * pictures_s, self._most_behind_s)
        return late_s > (wait_s * due / pictures_s if message_class is MessageClass.DISPOSABLE else wait_s)

    def large(self, size_bytes: int) -> bool:
        """Return whether a key frame takes longer to send than a picture is waited for.

        It is on its way then for so long that what comes behind it is no later: left out, that would make nothing
        younger. So it is late where it falls behind the key frame, and not behind the time at which it was published.
        """
        return size_bytes * self.steady_per_byte > self.due[_INTER]


ENDLESS: Final = (inf,) * CLASS_COUNT
"""Patience of a policy that leaves nothing out."""


class Forecast(NamedTuple):
    """When the hard limit will be reached.

    Attributes:
        seconds: from now on; 0: it is reached.
        axis: the axis that gets there first.
    """

    seconds: float
    axis: Axis


def time_to_hard(
    load: Load, limits: Limits, *, fill_bytes_per_s: float, fill_messages_per_s: float, drain_bytes_per_s: float
) -> Forecast | None:
    """Return when the first axis reaches its hard mark if filling and draining go on as they do now.

    The age of the oldest message grows by a second each second while nothing is taken, and by the share of the stream
    that is not taken otherwise: a peer that takes 80 % of the rate falls behind by a fifth of a second each second.
    """
    share = drain_bytes_per_s / fill_bytes_per_s if fill_bytes_per_s > 0 else 1.0
    messages_per_s = fill_messages_per_s * (1 - share)
    bytes_per_s = fill_bytes_per_s - drain_bytes_per_s + messages_per_s * limits.overhead_bytes
    axes = (
        (Axis.BYTES, limits.size.marks[2], load.size_bytes, bytes_per_s),
        (Axis.MESSAGES, limits.messages.marks[2], load.messages, messages_per_s),
        (Axis.AGE, limits.age_ms.marks[2], load.age_ms, 1000 * (1 - share) if load.messages else 0.0),
    )
    earliest: Forecast | None = None
    for axis, mark, value, growth in axes:
        if mark >= OFF_MARK or (value < mark and growth <= 0):
            continue
        seconds = max(mark - value, 0.0) / growth if growth > 0 else 0.0
        if earliest is None or seconds < earliest.seconds:
            earliest = Forecast(seconds, axis)
    return earliest
