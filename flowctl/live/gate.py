"""The gate of a live server: what its settings and hooks say about who may connect, publish and play."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from flowctl.access.request import Kind, LiveRequest, Refusal
from flowctl.live.config import LiveConfig
from flowctl.live.hooks import HookRunner, Question


class Gate:
    """Asked before anybody connects, publishes or plays, over RTMP and HTTP alike; any thread may call its methods.

    Args:
        config: of the server.

    Attributes:
        hooks: of the application. None: it has none.
        decide_s: how long a question may be under way; who asks gives up then, with `TOO_SLOW`.
    """

    def __init__(self, config: LiveConfig) -> None:
        self._config: Final = config
        self.hooks: HookRunner | None = None  # set before the first connection

    @property
    def decide_s(self) -> float:
        """See above."""
        return 0.0 if self.hooks is None else self.hooks.decide_s

    def ask(
        self, request: LiveRequest, answer: Callable[[Question, Refusal | None], None]
    ) -> Question | Refusal | None:
        """Ask whether `request` is allowed. None: it is; a refusal: it is not; a question: that is being decided.

        Args:
            request: the request.
            answer: called once for a question that was returned, on any thread, with it and the refusal (None: it is
                allowed); not after `Question.cancel`.
        """
        hooks = self.hooks
        return None if hooks is None or not hooks.decides[request.kind] else hooks.ask(request, answer)

    def hears(self, kind: Kind) -> bool:
        """Return whether anybody wants to hear of beginnings and ends of that kind; if not, no request need be kept."""
        return self.hooks is not None and kind in self.hooks.hears

    def check_news(self, request: LiveRequest) -> None:
        """See whether one more publication of this address can be told of; raises like `HookRunner.check_news`."""
        if self.hooks is not None:
            self.hooks.check_news(request)

    def began(self, request: LiveRequest) -> None:
        """Tell that what was asked for has begun."""
        if self.hooks is not None:
            self.hooks.began(request)

    def over(self, request: LiveRequest, why: str) -> None:
        """Tell that it is over; `why` as in the log."""
        if self.hooks is not None:
            self.hooks.over(request, why)
