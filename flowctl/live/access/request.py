"""Requests to connect, publish or play, over RTMP and HTTP alike, and the server's answers to them."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Final, Literal

from flowctl.core.text.fieldtypes import check_fields
from flowctl.wire.rtmp.url import Query, RtmpUrl

RequestKind = Literal["connect", "publish", "play"]
"""What a client asks for. Over HTTP it is always "play": a connection is for nothing else there."""
Use = Literal["publish", "play", "edge"]
"""What a token or key allows; one for an edge allows playing, too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveRequest:
    """Somebody asks to connect, or to publish or play a stream. Its ``repr`` shows no secret of the address.

    Args:
        url: the whole address; for HTTP without the suffix of the format, so that its path is that of the stream.
        connected: application that the connection was asked about; "" where it was asked about none, as over HTTP.
        user: who has logged in with a password. None: the server asks for none.
        bearer: what stands behind ``Bearer`` in the Authorization header of HTTP; "" for RTMP, or where there is none.
        protocol: ``"rtmp"``; of another, such as ``"http"``, connections are not asked about.
        face: name of the set of which a stream that is published is a rendition; "" for none. Whether its publisher may
            publish that, too, is asked next.
        page_url: page on which the player is (RTMP ``pageUrl``, HTTP ``Referer``); "" when it does not say.
    """

    kind: RequestKind
    connection: int
    peer: tuple[str, int]
    url: RtmpUrl
    connected: str = ""
    user: str | None = None
    user_agent: str = ""
    protocol: str = "rtmp"
    bearer: str = field(default="", repr=False)
    page_url: str = field(default="", repr=False)
    face: str = ""

    @property
    def stream(self) -> str:
        """The name of the stream, ``app/stream``; the application alone of one that connects."""
        return self.url.path

    def of_face(self) -> LiveRequest:
        """Return the request to publish the set of which the stream is a rendition, with the same proof."""
        name = self.url.stream[: len(self.face) - len(self.stream)]
        return replace(self, url=replace(self.url, stream=name), face="")

    @property
    def query(self) -> Query:
        """The parameters behind the name: where clients put keys and tokens."""
        return self.url.query


class Why(enum.Enum):
    """Why a request is refused; its value is the status code of HTTP."""

    UNAUTHORIZED = 401  #: a key or token is missing, wrong or has expired: another one may help
    FORBIDDEN = 403  #: whatever the client brings
    NOT_FOUND = 404  #: there is no such stream
    UNAVAILABLE = 503  #: it could not be decided, later it may be

    @property
    def denies(self) -> bool:
        """Whether access was denied; not that there is no such thing, or that the question could not be decided."""
        return self in {Why.UNAUTHORIZED, Why.FORBIDDEN}


NOT_GENUINE: Final = "The token is not one for this."
"""Refusal of a token that may be made up; a genuine one that is not good is refused with the reason."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """The answer to a request that is not allowed.

    Args:
        text: what the client is told; without a secret.
        guess: whether the client may have guessed; not where it brought no proof, or one that is genuine and not good
            here or now, nor where its network may not.
    """

    text: str
    why: Why = Why.FORBIDDEN
    guess: bool = True

    def __post_init__(self) -> None:
        check_fields(self)  # hooks make them, and what is wrong is theirs to hear of

    def __str__(self) -> str:
        return self.text


UNDECIDED: Final = Refusal("The server could not decide whether to allow this.", Why.UNAVAILABLE)
"""Refusal of a client whose hook raised an exception or returned an invalid answer."""
TOO_SLOW: Final = Refusal("The server did not decide in time.", Why.UNAVAILABLE)


class Question:
    """A decision under way."""

    __slots__ = ("_answer", "_cancelled", "under")

    def __init__(self, answer: Callable[[Question, Refusal | None], None]) -> None:
        self._answer = answer
        self._cancelled = False
        self.under: Question | None = None  # another one that this one waits for, which is cancelled with it

    def cancel(self) -> None:
        """Want no answer any more. Any thread."""
        self._cancelled = True
        if self.under is not None:
            self.under.cancel()

    @property
    def cancelled(self) -> bool:
        return self._cancelled

    def tell(self, refusal: Refusal | None) -> None:
        """Give the answer, if it is still wanted. Any thread."""
        if not self._cancelled:
            self._answer(self, refusal)
