"""Holds what a viewer received against what was published, frame by frame (pure).

The publisher notes each audio and video frame with its class; a viewer notes the frames it gets. What lies between a
viewer's first frame and the end of its time, and did not come, is missing. A picture that came is decodable if no
picture it builds upon is missing: after the loss of a key or inter frame nothing decodes until the next key frame,
while the loss of a disposable frame costs only itself.
"""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from flowctl.flow import MessageClass
from flowctl.flv import TAG_AUDIO, TAG_VIDEO

_FRAMES: Final = frozenset({MessageClass.KEY, MessageClass.INTER, MessageClass.DISPOSABLE, MessageClass.AUDIO})
_BREAKING: Final = frozenset({MessageClass.KEY, MessageClass.INTER})


def frame_key(type_id: int, timestamp: int) -> int:
    """Return the identity of a frame in one number: each track has at most one frame at a time."""
    return type_id << 32 | timestamp


class Published:
    """What was published, in order. One writer; readers only when it is done."""

    __slots__ = ("_classes", "_keys")

    def __init__(self) -> None:
        self._keys = array("Q")
        self._classes = array("B")

    def add(self, type_id: int, timestamp: int, message_class: MessageClass) -> None:
        """Note one frame; headers and metadata are none."""
        if message_class in _FRAMES and type_id in (TAG_AUDIO, TAG_VIDEO):
            self._keys.append(frame_key(type_id, timestamp))
            self._classes.append(message_class)

    def __len__(self) -> int:
        return len(self._keys)

    def audit(self, received: Sequence[int], *, to_end: bool) -> Audit:
        """Return what came, what is missing, and whether it could be decoded.

        Args:
            received: `frame_key` of each frame, in the order of arrival.
            to_end: whether all that was published after the first frame was for this viewer; if not, its time ended
                with the last frame that came.
        """
        audit = Audit()
        if not received:
            return audit
        places = {key: place for place, key in enumerate(self._keys)}
        got = set(received)
        audit.unknown = sum(key not in places for key in got)
        audit.repeated = len(received) - len(got)
        known = [places[key] for key in received if key in places]
        audit.disordered = sum(after < before for before, after in itertools.pairwise(known))
        if not known:
            return audit
        first, last = min(known), len(self._keys) - 1 if to_end else max(known)
        self._walk(audit, got, first, last)
        return audit

    def _walk(self, audit: Audit, got: set[int], first: int, last: int) -> None:
        decodable = False  # whether a key frame came and nothing was lost since that matters
        for place in range(first, last + 1):
            message_class = MessageClass(self._classes[place])
            if self._keys[place] not in got:
                # Audio from before the first picture is not the viewer's: it joins at a key frame.
                audit.missing[message_class.name.lower()] = audit.missing.get(message_class.name.lower(), 0) + 1
                decodable = decodable and message_class not in _BREAKING
                continue
            audit.received += 1
            if message_class is MessageClass.KEY:
                decodable = True
            elif message_class is not MessageClass.AUDIO and not decodable:
                audit.undecodable += 1


@dataclass(slots=True)
class Audit:
    """What became of the frames for one viewer.

    Args:
        received: frames that came.
        missing: frames that did not, by class.
        undecodable: pictures that came although something they build upon is missing.
        repeated: frames that came twice.
        disordered: frames that came after a later one.
        unknown: frames that nobody published.
    """

    received: int = 0
    missing: dict[str, int] = field(default_factory=dict)
    undecodable: int = 0
    repeated: int = 0
    disordered: int = 0
    unknown: int = 0

    @property
    def missing_total(self) -> int:
        """Frames of all classes that did not come."""
        return sum(self.missing.values())

    @property
    def faults(self) -> dict[str, int]:
        """What must never happen to anybody, slow or not, by name; without what did not."""
        names = ("undecodable", "repeated", "disordered", "unknown")
        return {name: getattr(self, name) for name in names if getattr(self, name)}

    def as_dict(self) -> dict[str, Any]:
        """Return plain values."""
        return {"received": self.received, "missing": dict(self.missing), "faults": self.faults}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Audit:
        """Return the audit that `as_dict` described."""
        return cls(received=values["received"], missing=dict(values["missing"]), **values["faults"])
