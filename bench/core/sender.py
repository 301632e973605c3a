"""What a message costs in a Sender, in a stream log and in a cohort, beside the plainest thing that does the same.

Run ``python bench sender``. No sockets: all transports take everything and keep nothing, so that only our
own work is measured. Each way of ours stands beside a rival of a few lines: a Sender beside a `collections.deque`
with a lock, a log beside a list, a cohort beside a bare loop over the viewers' ``send``. The rivals know no limits,
states, classes, accounts or lagging viewers, so the ratio is the price of these. Figures of one machine at one moment
mean little by themselves: compare the ratio. The best of several repetitions counts, ours and the rival's in turns.
"""

from __future__ import annotations

import argparse
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

from flowctl.core.fanout.fanout import Fanout
from flowctl.core.flow.limits import Limits
from flowctl.core.flow.policy import LivePolicy
from flowctl.core.flow.state import MessageClass
from flowctl.core.outgoing.splice import splice
from flowctl.core.outgoing.streamlog import Entry, StreamLog
from flowctl.core.sending.contract import Hop
from flowctl.sender import FlushResult, Sender
from flowctl.testing import ManualGroup, ManualHost

MESSAGE: Final = bytes(1200)
"""About a video frame at 300 kbit/s and 30 frames a second: small, so that the cost per message shows."""

BATCH: Final = 32
"""Messages that are queued between two flushes in deferred mode: 40 ms of a busy stream."""

GROUP: Final = 60
"""Messages from one key frame to the next."""

LIMITS: Final = Limits.parse("2MiB,2048,4s")
"""On all three axes, as a live server has them; no measurement reaches them."""


class NullTransport:
    """A kernel that takes everything at once and keeps nothing."""

    def send(self, data: bytes, /) -> int:
        """Take all of it."""
        return len(data)

    def sendmsg(self, buffers: Sequence[bytes | memoryview], /) -> int:
        """Take all of them."""
        return sum(map(len, buffers))


class BenchHost(ManualHost):
    """A host whose flushes are called by the measurement itself; its time stands still and costs nothing."""

    def request_flush(self) -> None:
        """Do nothing: the measurement flushes after each batch."""


def make_sender(*, deferred: bool) -> Sender:
    """Return a Sender with limits and a policy, as a viewer of a live server has them."""
    host = BenchHost()
    host.sender = Sender(host, NullTransport(), limits=LIMITS, policy=LivePolicy(), deferred=deferred)
    return host.sender


def immediate(count: int) -> float:
    """Send messages that are written at once; seconds per message."""
    send = make_sender(deferred=False).send
    began = time.perf_counter()
    for _ in range(count):
        send(MESSAGE, MessageClass.DISPOSABLE)
    return (time.perf_counter() - began) / count


def immediate_lock(count: int) -> float:
    """Do the same with a lock around the write, where nothing is queued."""
    lock, queue, write = threading.Lock(), deque[bytes](), NullTransport().send
    began = time.perf_counter()
    for _ in range(count):
        with lock:
            if queue:
                queue.append(MESSAGE)
            elif write(MESSAGE) < len(MESSAGE):
                raise AssertionError("a null transport takes everything")
    return (time.perf_counter() - began) / count


def deferred(count: int) -> float:
    """Queue messages and flush each batch; seconds per message."""
    sender = make_sender(deferred=True)
    send, flush = sender.send, sender.flush
    began = time.perf_counter()
    for _ in range(count // BATCH):
        for _ in range(BATCH):
            send(MESSAGE, MessageClass.DISPOSABLE)
        flush()
    return (time.perf_counter() - began) / (count // BATCH * BATCH)


def deferred_deque(count: int) -> float:
    """Do the same with a deque and a lock."""
    lock, queue, write = threading.Lock(), deque[bytes](), NullTransport().sendmsg
    began = time.perf_counter()
    for _ in range(count // BATCH):
        for _ in range(BATCH):
            with lock:
                queue.append(MESSAGE)
        with lock:
            write(queue)
            queue.clear()
    return (time.perf_counter() - began) / (count // BATCH * BATCH)


def append(count: int) -> float:
    """Append to a stream log that nobody follows; seconds per message."""
    log = StreamLog()
    began = time.perf_counter()
    for number in range(count):
        log.append(MESSAGE, MessageClass.INTER if number % GROUP else MessageClass.KEY, number / 1000)
    return (time.perf_counter() - began) / count


def append_list(count: int) -> float:
    """Do the same with a list that begins anew at each key frame."""
    cache: list[tuple[bytes, MessageClass, float]] = []
    began = time.perf_counter()
    for number in range(count):
        if not number % GROUP:
            cache.clear()
        cache.append((MESSAGE, MessageClass.INTER if number % GROUP else MessageClass.KEY, number / 1000))
    return (time.perf_counter() - began) / count


def cohort(viewers: int, flushes: int) -> float:
    """Publish a message and flush it to a cohort; seconds per viewer and flush."""
    group = ManualGroup()
    log = StreamLog()
    fanout = Fanout(log, group, flush_interval_s=0)
    senders = []  # held here: a fan-out's viewers belong to their connections
    for _ in range(viewers):
        host = ManualHost(group)
        host.sender = Sender(host, NullTransport(), limits=LIMITS, policy=LivePolicy(), deferred=True)
        host.sender.follow(fanout)
        senders.append(host.sender)
    group.run()
    members = fanout.statistics().members
    if members != viewers:
        raise AssertionError(f"{members} of {viewers} viewers are in the cohort: something else would be measured")
    began = time.perf_counter()
    for _ in range(flushes):
        log.append(MESSAGE, MessageClass.INTER, 0.0)
        fanout.flush()
    taken_s = time.perf_counter() - began
    sent = senders[-1].statistics().bytes_sent
    if sent != flushes * len(MESSAGE):
        raise AssertionError(f"a viewer was sent {sent} bytes of {flushes * len(MESSAGE)}")
    return taken_s / flushes / viewers


def cohort_loop(viewers: int, flushes: int) -> float:
    """Do the same with a bare loop over the sends of all viewers."""
    sends = [NullTransport().send for _ in range(viewers)]
    began = time.perf_counter()
    for _ in range(flushes):
        for send in sends:
            if send(MESSAGE) < len(MESSAGE):
                raise AssertionError("a null transport takes everything")
    return (time.perf_counter() - began) / flushes / viewers


PRICE: Final = bytes(60)
"""About the text of one price."""
KEYS: Final = tuple(map(str, range(1000)))


def append_keyed(count: int) -> float:
    """Append values of a thousand keys to a log that nobody follows; seconds per message."""
    log = StreamLog(max_keys=len(KEYS))
    began = time.perf_counter()
    for number in range(count):
        log.append(PRICE, MessageClass.DATA, number / 1000, KEYS[number % len(KEYS)])
    return (time.perf_counter() - began) / count


def append_dict(count: int) -> float:
    """Do the same with a dict that keeps the newest at its end."""
    latest: dict[str, tuple[bytes, float]] = {}
    began = time.perf_counter()
    for number in range(count):
        key = KEYS[number % len(KEYS)]
        latest.pop(key, None)
        latest[key] = PRICE, number / 1000
    return (time.perf_counter() - began) / count


def wake_up(count: int) -> float:
    """Have a viewer take all thousand values, after ten thousand updates that it has missed; seconds per time."""
    group, host = ManualGroup(), BenchHost()
    log = StreamLog(max_keys=len(KEYS))
    host.sender = Sender(host, NullTransport(), limits=LIMITS)
    host.sender.follow(Fanout(log, group, flush_interval_s=0))
    taken_s = 0.0
    for _ in range(count):
        for number in range(10 * len(KEYS)):
            log.append(PRICE, MessageClass.DATA, 0.0, KEYS[number % len(KEYS)])
        before = host.sender.statistics().bytes_sent
        began = time.perf_counter()
        while host.sender.flush() is FlushResult.MORE:
            pass
        taken_s += time.perf_counter() - began
        sent = host.sender.statistics().bytes_sent - before
        if sent != len(KEYS) * len(PRICE):
            raise AssertionError(f"a viewer was sent {sent} bytes in place of its {len(KEYS)} values")
    return taken_s / count


def wake_up_dict(count: int) -> float:
    """Do the same with a dict of the newest values: join them, and one write."""
    latest, write = dict.fromkeys(KEYS, PRICE), NullTransport().send
    began = time.perf_counter()
    for _ in range(count):
        write(b"".join(latest.values()))
    return (time.perf_counter() - began) / count


class Onward:
    """A guide that has every viewer go on in another log at once, by the work that a `StreamSet` does for it."""

    def __init__(self, to: Fanout) -> None:
        self._to = to

    def choose_log(self, key: Entry) -> Hop | None:
        """Go on at the newest key frame, with the headers and what sound is missing."""
        twin = self._to.log.cached
        found = None if twin is None else splice(key, twin, heard=-2)
        return None if found is None else Hop(self._to, found.start, found.prefix)


def change(viewers: int, *, guided: bool) -> float:
    """Have a whole cohort change over to another log at one key frame; seconds per viewer.

    Args:
        viewers: how many there are.
        guided: whether they go on there by a guide. If not, they leave their log and join the other one.
    """
    group = ManualGroup()
    small, large = (Fanout(StreamLog(), group, flush_interval_s=0) for _ in range(2))
    senders = []
    for _ in range(viewers):
        host = ManualHost(group)
        host.sender = Sender(host, NullTransport(), limits=LIMITS, policy=LivePolicy(), deferred=True)
        host.sender.follow(small)
        senders.append(host.sender)
    group.run()
    guide = Onward(large)
    began = time.perf_counter()
    if guided:
        for sender in senders:
            sender.set_guide(guide)
    for message_class in (MessageClass.KEY, MessageClass.AUDIO, MessageClass.AUDIO, MessageClass.INTER):
        for fanout in (small, large):
            fanout.log.append(MESSAGE, message_class, 0.0, restart=(MESSAGE,) if fanout is large else ())
    if not guided:
        for sender in senders:
            sender.unfollow()
            sender.follow(large, start=large.log.cached, prefix=(MESSAGE,))
    group.run()
    taken_s = time.perf_counter() - began
    members = large.statistics().members
    if members != viewers:
        raise AssertionError(f"{members} of {viewers} viewers are in the other cohort")
    return taken_s / viewers


QUICK: Final[dict[str, Any]] = {"count": 2000, "repeat": 1}
"""Arguments of `run` for a look at whether it works, in a second or so."""


def run(*, count: int = 100_000, repeat: int = 3) -> list[dict[str, Any]]:
    """Measure every way beside its plain rival."""
    ways: list[tuple[str, Callable[[], float], str, Callable[[], float]]] = [
        ("Sender, immediate", partial(immediate, count), "lock and write", partial(immediate_lock, count)),
        (f"Sender, deferred by {BATCH}", partial(deferred, count), "deque and lock", partial(deferred_deque, count)),
        ("StreamLog.append", partial(append, count), "list per group", partial(append_list, count)),
        ("StreamLog.append with a key", partial(append_keyed, count), "dict", partial(append_dict, count)),
        (
            "wake-up with 1,000 keys",
            partial(wake_up, count // 2000),
            "join of a dict",
            partial(wake_up_dict, count // 2000),
        ),
    ]
    for viewers in (1, 10, 100, 1000):
        flushes = max(1, count // max(viewers, 10))  # one viewer alone costs a whole flush each time
        ways.append(
            (
                f"cohort of {viewers:,}, per viewer and flush",
                partial(cohort, viewers, flushes),
                "bare loop of sends",
                partial(cohort_loop, viewers, flushes),
            )
        )
    ways.append(
        (
            "500 viewers change over, per viewer",
            partial(change, 500, guided=True),
            "leave and join",
            partial(change, 500, guided=False),
        )
    )
    rows = []
    for way, ours, rival, theirs in ways:
        pairs = [(ours(), theirs()) for _ in range(repeat)]  # in turns: a busy machine hurts both
        best, rival_best = (min(figures) for figures in zip(*pairs, strict=True))
        rows.append(
            {
                "way": way,
                "us": round(best * 1e6, 3),
                "rival": rival,
                "rival_us": round(rival_best * 1e6, 3),
                "ratio": round(best / rival_best, 2),
            }
        )
    return rows


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--count", type=int, default=100_000, help="messages per measurement (default 100000)")
    parser.add_argument("--repeat", type=int, default=3, help="measurements of each; the fastest counts (default 3)")
    arguments = parser.parse_args()
    print(f"{'way':<36} {'us':>8}  {'rival':<20} {'us':>8} {'ratio':>6}")
    for row in run(count=max(1000, arguments.count), repeat=max(1, arguments.repeat)):
        print(f"{row['way']:<36} {row['us']:>8.3f}  {row['rival']:<20} {row['rival_us']:>8.3f} {row['ratio']:>6.2f}")


if __name__ == "__main__":
    main()
