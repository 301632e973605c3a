"""Tells the application and publishers that have subscribed how the viewers of a stream are doing.

`Signals.subscribe` is for the application. A publisher asks with the parameter ``viewer_states`` of its stream name
(``room?viewer_states=5``) and gets a data message ``onViewerStates`` at most every so many seconds. A publisher
that did not ask is not told: encoders do not know the message.

Threads: subscribing and cancelling from any; callbacks are called on the server's first poll group, one at a time, with
no lock held. They must not block. What they raise is reported and does not end the subscription.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from flowctl.core.flow.state import SendState
from flowctl.core.loop.faults import as_exception
from flowctl.core.loop.locks import OwnedLock
from flowctl.live.judging.shares import ShareSettings, ViewerShares, is_worth_telling

PARAMETER: Final = "viewer_states"
"""Parameter of a publisher's stream name; its value is the least time between two messages in seconds."""
EVENT_NAME: Final = "onViewerStates"
LEAST_PUBLISHER_S: Final = 2.0
_USUAL_PUBLISHER_S: Final = 5.0
_MOST_PUBLISHER_S: Final = 3600.0

SharesCallback = Callable[[ViewerShares], object]


@dataclass(eq=False, slots=True)
class ShareSubscription:
    """One subscriber; see `Signals.subscribe`."""

    signals: Signals
    stream: str | None  # None: all
    callback: SharesCallback
    settings: ShareSettings  # when it is told
    _told: dict[str, ViewerShares] = field(default_factory=dict)  # last, by stream; the first poll group's thread
    _cancelled: bool = False

    def cancel(self) -> None:
        """End it: the callback is not called again, but for a call that is under way. Any thread; idempotent."""
        self._cancelled = True
        self.signals.remove(self)

    def tell(self, shares: ViewerShares) -> None:
        if not self._cancelled and is_worth_telling(shares, self._told.get(shares.stream), self.settings):
            self._told[shares.stream] = shares
            self.callback(shares)

    def forget(self, present: Mapping[str, ViewerShares]) -> None:
        for name in self._told.keys() - present.keys():
            del self._told[name]


class Signals:
    """All subscriptions of a server."""

    def __init__(self, report: Callable[[str, Exception], None]) -> None:
        self._report = report
        self._lock = OwnedLock()
        self._subscriptions: tuple[ShareSubscription, ...] = ()  # guarded by _lock

    def subscribe(
        self, callback: SharesCallback, *, stream: str | None = None, settings: ShareSettings | None = None
    ) -> ShareSubscription:
        """Have `callback` called with a `ViewerShares` when the shares of viewers have changed. Any thread."""
        subscription = ShareSubscription(self, stream, callback, settings or ShareSettings())
        with self._lock:
            self._subscriptions = (*self._subscriptions, subscription)
        return subscription

    def remove(self, subscription: ShareSubscription) -> None:
        with self._lock:
            self._subscriptions = tuple(item for item in self._subscriptions if item is not subscription)

    @property
    def wanted(self) -> bool:
        with self._lock:
            return bool(self._subscriptions)

    def tell(self, present: Mapping[str, ViewerShares]) -> None:
        """Tell the subscribers what is worth telling. The first poll group's thread."""
        with self._lock:
            subscriptions = self._subscriptions
        for subscription in subscriptions:
            subscription.forget(present)
            if subscription.stream is None:
                wanted = list(present.values())
            else:
                wanted = [present[subscription.stream]] if subscription.stream in present else []
            for shares in wanted:
                try:
                    subscription.tell(shares)
                except BaseException as error:  # noqa: BLE001 - a subscriber's fault must not cost the others theirs
                    self._report("subscriber of viewer shares", as_exception(error))


def publisher_settings(text: str) -> ShareSettings:
    """Return how often a publisher that asked with ``viewer_states=text`` is told.

    What is no number means five seconds. A message is repeated after twelve times that even where nothing changes, so
    that a publisher can tell silence from a server that does not know the parameter.
    """
    try:
        asked_s = float(text)
    except ValueError:
        asked_s = _USUAL_PUBLISHER_S
    asked_s = asked_s if math.isfinite(asked_s) and asked_s > 0 else _USUAL_PUBLISHER_S
    interval_s = min(max(asked_s, LEAST_PUBLISHER_S), _MOST_PUBLISHER_S)
    return ShareSettings(interval_s=interval_s, settle_s=2 * interval_s, repeat_s=12 * interval_s)


def message_values(shares: ViewerShares) -> dict[str, Any]:
    """Return the properties of ``onViewerStates``: numbers of viewers, shares from 0 to 1, the worst delay in ms."""
    return {
        "viewers": float(shares.viewers),
        "ready": round(shares.in_state(SendState.READY), 4),
        "overloaded": round(shares.in_state(SendState.OVERLOADED), 4),
        "softLimit": round(shares.in_state(SendState.SOFT_LIMIT), 4),
        "hardLimit": round(shares.in_state(SendState.HARD_LIMIT), 4),
        "missingPictures": round(shares.missing_share, 4),
        "pictures": round(shares.picture_share, 4),
        "worstDelayMs": float(round(shares.worst_delay_ms)),
    }
