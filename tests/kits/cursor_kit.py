"""What the tests of the cursor share: a log, a cursor in it, and what it has handed over as letters."""

from __future__ import annotations

import gc
import re

import pytest
from flow_kit import CLASS_OF, HEADER, KEY, LOG, RESTART, frame, parse

from flowctl.core.flow.counts import as_counts, total
from flowctl.core.flow.limits import OFF_MARK
from flowctl.core.flow.policy import DROPPABLE_MASK, Headroom, LivePolicy, patience_of
from flowctl.core.flow.state import MessageClass
from flowctl.core.flow.timing import Timing
from flowctl.core.outgoing.cursor import LogCursor
from flowctl.core.outgoing.lateness import peek_in_time
from flowctl.core.outgoing.streamlog import StreamLog
from flowctl.core.outgoing.thinning import drop_droppable, skip_to_key, thin_to_key_frame
from flowctl.reasons import DropReason

ROOMY = Headroom(OFF_MARK, OFF_MARK, -float(OFF_MARK), 0)
LETTERS = "CHKIDAX"
TARGET_S = 1.0


class Wire(bytes):
    """A message that counts how many of its kind are alive (bytes cannot be referred to weakly)."""

    __slots__ = ()
    alive = 0

    def __new__(cls, data=b"x"):
        Wire.alive += 1
        return super().__new__(cls, data)

    def __del__(self):
        Wire.alive -= 1


@pytest.fixture
def alive():
    """Return how many `Wire` messages live; the cycle collector is off, so only reference counts free them."""
    gc.collect()
    gc.disable()
    Wire.alive = 0
    yield lambda: Wire.alive
    gc.enable()


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
        counts = as_counts(self.cursor.balance())[2]
        return "".join(LETTERS[item] * counts.messages[item] for item in MessageClass)

    def dropped(self, reason=None):
        """What was dropped, for one reason or all, as letters in the order of classes."""
        dropped = as_counts(self.cursor.balance())[1]
        counts = total(dropped.values()) if reason is None else total(dropped[key] for key in dropped if key is reason)
        return "".join(LETTERS[item] * counts.messages[item] for item in MessageClass)

    def take_in_time(self, rate, *, held=0, policy=None, most=1 << 60):
        """Take what is handed over now to a viewer that takes `rate` bytes a second, `held` of which wait."""
        patience = patience_of(policy or LivePolicy())
        letters = ""
        while most:
            items = peek_in_time(self.cursor, min(most, 3), 1 << 60, Timing(self.now, rate, held, TARGET_S, patience))
            if not items:
                break
            letters += "".join("r" if wire[:1] == b"R" else LETTERS[item] for item, wire, _ in items)
            held += sum(len(wire) for _, wire, _ in items)
            self.cursor.pass_messages(len(items))
            most -= len(items)
        return letters

    # -- scripts

    def step(self, name, argument):
        """Do one step of a script, see `play`; return what it says."""
        cursor, now = self.cursor, self.now
        if name == "refuse":
            return cursor.refuse(sum(1 << CLASS_OF[letter] for letter in argument), DropReason.REFUSED, now)
        if name == "hold":
            return cursor.refuse(DROPPABLE_MASK, DropReason.HELD, now)
        if name == "dropped":
            return self.dropped(DropReason[argument] if argument else None)
        if name in {"thin", "live"}:
            size, messages = map(int, argument.split(",")) if argument else (OFF_MARK, OFF_MARK)
            room = Headroom(size, messages, -float(OFF_MARK), 0)
            return skip_to_key(cursor, room, now) if name == "live" else thin_to_key_frame(cursor, room, now)
        steps = {
            "take": self.take,
            "in_time": lambda: self.take_in_time(int(argument)),
            "queued": lambda: self.queued,
            "poll": lambda: cursor.poll(now),
            "replace": lambda: cursor.poll(now, replace=True),
            "drop": lambda: drop_droppable(cursor, DropReason.REQUESTED, now),
            "finish": lambda: cursor.finish(now),
            "join": lambda: setattr(cursor, "joining_to", self.log.tail),
            "load": cursor.load,
            "late": lambda: cursor.account.late,
            "pictures": cursor.pictures,
            "oldest_s": lambda: now - cursor.oldest_at(),
        }
        return steps[name]() if name in steps else getattr(cursor, name)


def play(script):
    """Play a script of steps, each with what it must say after ``=``; letters after ``+`` are published.

    ``log:KI`` is what was published before the viewer came, ``wait`` that it waits for a key frame, ``after:2`` that
    2 s pass, ``refuse:ID`` that inter and disposable frames are refused from here on (``refuse``: nothing).
    """
    words = script.split()
    before = words.pop(0).removeprefix("log:") if words[0].startswith("log:") else ""
    wait = words[0] == "wait"
    follower = Follower(before, **({"wait_for_key": True} if wait else {}))
    for word in words[wait:]:
        if word[0] == "+":
            text, _, size = word[1:].partition("*")
            follower.publish(text, int(size or 11))
        elif word.startswith("after:"):
            follower.now += float(word.removeprefix("after:"))
        else:
            name, argument, expected = re.fullmatch(r"(\w+)(?::([^=]*))?(?:=(.*))?", word).groups()
            said = follower.step(name, argument or "")
            assert expected is None or str(said).replace(" ", "") == expected, f"{word} says {said}"


def scripts(text):
    """Return the scripts of a text as parameters: a line with the fact, indented ones with its script."""
    parts = re.findall(r"^(\S.*)\n((?:[ ]+.*\n)+)", text, re.MULTILINE)
    return [pytest.param(script, id=fact.replace(" ", "_")) for fact, script in parts]
