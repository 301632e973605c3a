"""What the tests of a Sender that follows no log share: a viewer with messages of its own."""

from __future__ import annotations

import re
from collections import Counter

from flow_kit import CLASS_OF, HEAD_BYTES, OWN, Peer, Viewer, check_accounts, check_edges, frame

from flowctl.core.flow.limits import AxisLimits, HardPolicy, Limits
from flowctl.core.flow.policy import DropDroppable, LivePolicy, Thin
from flowctl.core.flow.state import SendState
from flowctl.core.sending.contract import SendOutcome
from flowctl.core.sending.settings import SenderSettings
from flowctl.reasons import DropReason
from flowctl.testing import ManualGroup

READY, OVERLOADED, SOFT_LIMIT, HARD_LIMIT = SendState
TIMELESS = SenderSettings(stuck_s=0, soft_too_long_s=0, close_deadline_s=0)


class Talker(Viewer):
    """A viewer that is sent messages of its own, numbered from 0."""

    def __init__(self, peer=None, **settings):
        super().__init__(ManualGroup(), peer, **settings)
        self.offered = Counter()
        self.number = 0

    def say(self, text, size=HEAD_BYTES, **options):
        """Send one message per letter of `text` (C H K I D A X); return the results."""
        results = []
        for letter in text:
            item = CLASS_OF[letter]
            results.append(self.sender.send(frame(OWN, item, self.number, size), item, **options))
            self.number += 1
            self.offered[item] += results[-1].outcome is not SendOutcome.CLOSED
        return results

    def heard(self):
        return self.numbers(OWN)

    def states(self):
        return [change.new for change in self.edges.changes]


def by_messages(soft, hard=None, low=None, policy=HardPolicy.CLOSE):
    marks = AxisLimits(soft=soft, hard=hard, low=low)
    return Limits(messages=marks, hard_policy=policy, target_delay_ms=0)


POLICIES = {"live": LivePolicy(), "soft": DropDroppable(SOFT_LIMIT, SOFT_LIMIT)}


def play(script):
    """Play a script of what is said to a peer and what it takes, each step with what it must say after ``=``.

    First what the Sender is made with: ``limits:4,100,2`` (messages: soft, hard, low), ``hold``, ``marks:0,0,1s``
    (soft; hard is twice that), ``policy:live``, ``stuck:15``, ``soft:60``, ``close:5`` (seconds), ``now`` (immediate
    mode). Then steps: ``say:XA`` (each message is a: accepted, d: dropped, c: closed), ``keep:X`` (not droppable),
    ``room:5`` what the kernel takes from now on without telling, ``give:5`` and telling, ``run:2`` for 2 s, ``wait``
    for the queue to be taken.
    """
    words, made, times = script.split(), {}, {}
    hard = HardPolicy.HOLD if "hold" in words else HardPolicy.CLOSE
    options = {
        "hold": lambda _: None,
        "limits": lambda marks: made.update(limits=by_messages(*map(int, marks.split(",")), policy=hard)),
        "marks": lambda marks: made.update(limits=Limits.parse(marks)),
        "policy": lambda name: made.update(policy=POLICIES[name]),
        "now": lambda _: made.update(deferred=False),
        "stuck": lambda seconds: times.update(stuck_s=float(seconds)),
        "soft": lambda seconds: times.update(soft_too_long_s=float(seconds)),
        "close": lambda seconds: times.update(close_deadline_s=float(seconds)),
    }
    while (option := words[0].partition(":"))[0] in options:
        options[option[0]](option[2])
        words.pop(0)
    viewer, told = Talker(Peer(), settings=SenderSettings(**times), **made), []
    sender, group = viewer.sender, viewer.group

    def said(text, **options):
        letters, _, size = text.partition("*")
        results = viewer.say(letters, int(size or HEAD_BYTES), **options)
        return "".join(result.outcome.value[0] for result in results)

    def names(items):
        return "".join(item.name[0] for item in items)

    steps = {
        "say": said,
        "keep": lambda text: said(text, droppable=False),
        "room": lambda room: setattr(viewer.peer, "room", int(room) if room else None),
        "give": lambda room: viewer.give(int(room) if room else None),
        "run": lambda seconds: group.run(float(seconds or 0)),
        "drain": lambda _: viewer.drain(),
        "end": lambda _: sender.close_after_flush(),
        "thin": lambda _: sender.thin(Thin.DROPPABLE),
        "set": lambda marks: sender.set_limits(by_messages(*map(int, marks.split(",")))),
        "wait": lambda _: sender.when_drained(told.append),
        "told": lambda _: "".join(str(taken)[0] for taken in told),
        "heard": lambda _: ",".join(map(str, viewer.heard())),
        "classes": lambda _: viewer.classes(),
        "states": lambda _: names(viewer.states()),
        "state": lambda _: names([sender.state]),
        "ended": lambda _: ",".join(reason.name for reason, _ in viewer.host.closed),
        "writes": lambda _: viewer.peer.writes,
        "queued": lambda _: sender.load().messages,
        "watched": lambda _: viewer.host.wants_writable,
        "drained": lambda _: sender.drained,
        "lost": lambda reason: sender.statistics().dropped[DropReason[reason]].total_messages,
        "stalled": lambda _: round(sender.statistics().longest_stall_s, 1),
    }
    for word in words:
        name, argument, expected = re.fullmatch(r"(\w+)(?::([^=]*))?(?:=(.*))?", word).groups()
        says = steps[name](argument or "")
        assert expected is None or str(says) == expected, f"{word} says {says}"
    check_accounts(viewer, None if sender.closed else viewer.offered)
    check_edges(viewer)
