"""What a peer of object diffusion can do wrong: one class for each fault, each a `flowctl.RemoteProtocolError`.

A peer that caused one is dropped. What is merely too long or too large is a `flowctl.LimitExceededError`, which names
the limit. A peer that does not answer in time is dropped too, but need not be guilty of it.
"""

from __future__ import annotations

from typing import ClassVar

from flowctl.errors import BrokenError, RemoteProtocolError
from flowctl.nodes.diffusion.objects import short_id


class DiffusionError(RemoteProtocolError):
    """The peer broke a rule of object diffusion.

    The name of a class, without ``Error``, is that of the fault in the protocol, and the `code` of its errors.
    """

    text: ClassVar[str] = "{}"  # what happened, by the values that an error is made with

    def __init__(self, *values: object) -> None:
        shown = (short_id(value) if isinstance(value, bytes) else value for value in values)
        super().__init__(self.text.format(*shown), code=type(self).__name__.removesuffix("Error"))


class ObjectIdsNotRequestedError(DiffusionError):
    text = "{} ids came where {} were asked for"


class ObjectIdAlreadyKnownError(DiffusionError):
    """A peer announces an id again that it has announced already and that is not acknowledged, or is on its way."""

    text = "id {} was announced a second time"


class ObjectMissingError(DiffusionError):
    text = "object {} was asked for and did not come"


class ObjectNotRequestedError(DiffusionError):
    """A reply holds an object that its request did not name, or one of them twice."""

    text = "object {} came and was not asked for"


class ObjectSizeWrongError(DiffusionError):
    text = "object {} has {} bytes, {} were announced"


class AckedTooManyObjectIdsError(DiffusionError):
    text = "{} ids are acknowledged, {} were open"


class RequestedTooManyObjectIdsError(DiffusionError):
    text = "{} ids are asked for, which takes the open ones above the limit of {}"


class RequestedNothingError(DiffusionError):
    """A request neither asks for ids nor acknowledges any, or waits for none, or names no object."""

    text = "a request for ids asks for nothing"


class RequestedDuplicateObjectError(DiffusionError):
    text = "object {} is asked for twice"


class RequestedUnavailableObjectError(DiffusionError):
    """A request names an object that was not announced, or was acknowledged since."""

    text = "object {} is asked for and is not on offer"


class RequestBlockingError(DiffusionError):
    text = "a request for ids blocks while {} are open"


class RequestNonBlockingError(DiffusionError):
    text = "a request for ids does not block, and none are open"


class RequestedTooManyBytesError(DiffusionError):
    text = "a reply of {} bytes is asked for, the limit is {}"


class ObjectInvalidError(DiffusionError):
    text = "what came as an object is none: {}"


class ObjectRejectedError(DiffusionError):
    """The pool found an object invalid."""

    text = "object {} is invalid: {}"


class NoReplyError(BrokenError):
    """A reply did not come within its time: the peer or the way to it is too slow, or stands still."""
