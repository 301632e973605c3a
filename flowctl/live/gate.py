"""The gate of a live server: what its settings and hooks say about who may connect, publish and play."""

from __future__ import annotations

import hmac
import time
from collections.abc import Callable
from typing import Final

from flowctl.access.request import Kind, LiveRequest, Refusal, Why
from flowctl.access.rules import Access
from flowctl.live.config import LiveConfig
from flowctl.live.hooks import HookRunner, Question
from flowctl.live.settings.levels import Role

_ROLES: Final[dict[Kind, Role | None]] = {"connect": None, "publish": Role.PUBLISHER, "play": Role.VIEWER}
_LOG_IN: Final = Refusal("A user and a password are needed.", Why.UNAUTHORIZED)


class Gate:
    """Asked before anybody connects, publishes or plays, over RTMP and HTTP alike; any thread may call its methods.

    Args:
        config: returns the settings that hold now.
        now: seconds since 1970, for what expires.

    Attributes:
        hooks: of the application. None: it has none.
        decide_s: how long a question may be under way; who asks gives up then, with `TOO_SLOW`.
    """

    def __init__(self, config: Callable[[], LiveConfig], now: Callable[[], float] = time.time) -> None:
        self._config: Final = config
        self._now: Final = now
        self.hooks: HookRunner | None = None  # set before the first connection

    @property
    def decide_s(self) -> float:
        """See above."""
        return 0.0 if self.hooks is None else self.hooks.decide_s

    def access(self, request: LiveRequest) -> Access:
        """Return the settings for a request: those of its application, stream and role."""
        name = f"{request.stream}/" if request.kind == "connect" else request.stream
        return self._config().at(name, _ROLES[request.kind]).access

    def ask(
        self, request: LiveRequest, answer: Callable[[Question, Refusal | None], None]
    ) -> Question | Refusal | None:
        """Ask whether `request` is allowed. None: it is; a refusal: it is not; a question: that is being decided.

        Args:
            request: the request.
            answer: called once for a question that was returned, on any thread, with it and the refusal (None: it is
                allowed); not after `Question.cancel`.
        """
        refusal = self._log_in(request) or self.access(request).check(request, self._now())
        if refusal is not None:
            return refusal
        hooks = self.hooks
        return None if hooks is None or not hooks.decides[request.kind] else hooks.ask(request, answer)

    def _log_in(self, request: LiveRequest) -> Refusal | None:
        """Refuse who comes over HTTP without a password where RTMP, whose sessions see to that, asks for one."""
        credentials = self._config().rtmp.credentials
        if credentials is None or request.protocol == "rtmp" or request.user is not None:
            return None
        given = (request.url.password or "").encode("utf-8", "surrogatepass")
        known = credentials.get(request.url.user or "")
        same = hmac.compare_digest((known or "").encode("utf-8", "surrogatepass"), given)
        return None if same and known else _LOG_IN

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
