"""What the tests of a Sender that follows no log share: a viewer with messages of its own."""

from __future__ import annotations

from collections import Counter

from flow_kit import CLASS_OF, HEAD_BYTES, OWN, Viewer, frame

from flowctl.core.flow.limits import AxisLimits, HardPolicy, Limits
from flowctl.core.flow.state import SendState
from flowctl.core.sending.contract import SendOutcome
from flowctl.core.sending.settings import SenderSettings
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
