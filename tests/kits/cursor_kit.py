"""What the tests of the cursor share: a log, a cursor in it, and what it has handed over as letters."""

from __future__ import annotations

from flow_kit import CLASS_OF, HEADER, KEY, LOG, RESTART, frame, parse

from flowctl.core.flow.counts import as_counts, total
from flowctl.core.flow.limits import OFF_MARK
from flowctl.core.flow.policy import Room
from flowctl.core.flow.state import MessageClass
from flowctl.core.outgoing.cursor import LogCursor
from flowctl.core.outgoing.streamlog import StreamLog

ROOMY = Room(OFF_MARK, OFF_MARK, -float(OFF_MARK), 0)
LETTERS = "CHKIDAX"


class Follower:
    """A log with `text` on it, a cursor at its end, and a clock; what is handed over is kept as letters and numbers."""

    def __init__(self, text="", **options):
        self.now = 100.0
        self.log = StreamLog()
        self.classes = ""
        self.publish(text)
        self.cursor = LogCursor(self.log, now=self.now, **options)
        self.cursor.joining_to = None
        self.got = ""
        self.numbers = []
        self.restarted = set()  # key frames whose restart messages were handed over

    def publish(self, text, size=11):
        """Publish a message per letter; in lower case leading pictures and their key frames."""
        for letter in text:
            item, number = CLASS_OF[letter.upper()], len(self.classes)
            self.classes += letter.upper()
            restart = (frame(RESTART, HEADER, number), frame(RESTART, HEADER, number, 20)) if item is KEY else ()
            leading = letter.islower()
            self.log.append(frame(LOG, item, number, size), item, self.now, restart=restart, leading=leading)
        return self.log.tail

    def take(self, count=OFF_MARK, budget_bytes=OFF_MARK):
        """Take up to `count` messages, asking as often as it needs; return their letters (r: restart message)."""
        letters = ""
        while count:
            items = self.cursor.peek(count, budget_bytes)
            if not items:
                break
            self.cursor.pass_messages(len(items))
            count -= len(items)
            for _, wire, _ in items:
                ((origin, message_class, number, _),) = parse(wire)[0]
                letters += "r" if origin == RESTART else LETTERS[message_class]
                if origin == LOG:
                    self.numbers.append(number)
                else:
                    self.restarted.add(number)
        self.got += letters
        return letters

    @property
    def queued(self):
        """What is queued, as letters in the order of classes."""
        counts = as_counts(self.cursor.books())[2]
        return "".join(LETTERS[item] * counts.messages[item] for item in MessageClass)

    def dropped(self, reason=None):
        """What was dropped, for one reason or all, as letters in the order of classes."""
        dropped = as_counts(self.cursor.books())[1]
        counts = total(dropped.values()) if reason is None else total(dropped[key] for key in dropped if key is reason)
        return "".join(LETTERS[item] * counts.messages[item] for item in MessageClass)
