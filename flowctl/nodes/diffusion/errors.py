"""What a peer of object diffusion can do wrong: one class for each fault, each a `flowctl.RemoteProtocolError`.

A peer that caused one is dropped. `code` is the name that the fault has in the protocol, for logs and statistics. What
is merely too long or too large is a `flowctl.LimitExceededError`, which names the limit. A peer that does not answer in
time is dropped too, but need not be guilty of it.
"""

from __future__ import annotations

from typing import ClassVar

from flowctl.errors import BrokenError, RemoteProtocolError
from flowctl.nodes.diffusion.objects import ObjectId, short_id


class DiffusionError(RemoteProtocolError):
    """The peer broke a rule of object diffusion.

    Attributes:
        name: the fault's name in the protocol, which is the `code` of each error of the class.
    """

    name: ClassVar[str] = "ObjectDiffusion"

    def __init__(self, message: str) -> None:
        super().__init__(message, code=self.name)


class ObjectIdsNotRequestedError(DiffusionError):
    """A reply holds more ids than were asked for."""

    name = "ObjectIdsNotRequested"

    def __init__(self, received: int, requested: int) -> None:
        super().__init__(f"{received} ids came where {requested} were asked for")


class ObjectIdAlreadyKnownError(DiffusionError):
    """A peer announces an id again that it has announced already and that is not acknowledged, or is on its way."""

    name = "ObjectIdAlreadyKnown"

    def __init__(self, object_id: ObjectId) -> None:
        super().__init__(f"id {short_id(object_id)} was announced a second time")


class ObjectMissingError(DiffusionError):
    """A reply lacks an object that its request named."""

    name = "ObjectMissing"

    def __init__(self, object_id: ObjectId) -> None:
        super().__init__(f"object {short_id(object_id)} was asked for and did not come")


class ObjectNotRequestedError(DiffusionError):
    """A reply holds an object that its request did not name, or one of them twice."""

    name = "ObjectNotRequested"

    def __init__(self, object_id: ObjectId) -> None:
        super().__init__(f"object {short_id(object_id)} came and was not asked for")


class ObjectSizeWrongError(DiffusionError):
    """An object has another size than the peer announced."""

    name = "ObjectSizeWrong"

    def __init__(self, object_id: ObjectId, size_bytes: int, announced_bytes: int) -> None:
        super().__init__(f"object {short_id(object_id)} has {size_bytes} bytes, {announced_bytes} were announced")


class AckedTooManyObjectIdsError(DiffusionError):
    """A request acknowledges more ids than are unacknowledged."""

    name = "AckedTooManyObjectIds"

    def __init__(self, acked: int, unacknowledged: int) -> None:
        super().__init__(f"{acked} ids are acknowledged, {unacknowledged} were open")


class RequestedTooManyObjectIdsError(DiffusionError):
    """A request asks for more ids than may be unacknowledged."""

    name = "RequestedTooManyObjectIds"

    def __init__(self, requested: int, maximum: int) -> None:
        super().__init__(f"{requested} ids are asked for, which takes the open ones above the limit of {maximum}")
        self.requested = requested
        self.maximum = maximum


class RequestedNothingError(DiffusionError):
    """A request neither asks for ids nor acknowledges any, or waits for none."""

    name = "RequestedNothing"

    def __init__(self) -> None:
        super().__init__("a request for ids asks for nothing")


class RequestedDuplicateObjectError(DiffusionError):
    """A request names an object twice."""

    name = "RequestedDuplicateObject"

    def __init__(self, object_id: ObjectId) -> None:
        super().__init__(f"object {short_id(object_id)} is asked for twice")


class RequestedUnavailableObjectError(DiffusionError):
    """A request names an object that was not announced, or was acknowledged since."""

    name = "RequestedUnavailableObject"

    def __init__(self, object_id: ObjectId) -> None:
        super().__init__(f"object {short_id(object_id)} is asked for and is not on offer")


class RequestBlockingError(DiffusionError):
    """A request for ids blocks although ids stay unacknowledged."""

    name = "RequestBlocking"

    def __init__(self, unacknowledged: int) -> None:
        super().__init__(f"a request for ids blocks while {unacknowledged} are open")


class RequestNonBlockingError(DiffusionError):
    """A request for ids does not block although all are acknowledged."""

    name = "RequestNonBlocking"

    def __init__(self) -> None:
        super().__init__("a request for ids does not block, and none are open")


class RequestedTooManyBytesError(DiffusionError):
    """A request names more objects than fit into a reply."""

    name = "RequestedTooManyBytes"

    def __init__(self, size_bytes: int, maximum_bytes: int) -> None:
        super().__init__(f"a reply of {size_bytes} bytes is asked for, the limit is {maximum_bytes}")


class ObjectInvalidError(DiffusionError):
    """What came as an object is none."""

    name = "ObjectInvalid"

    def __init__(self, why: object) -> None:
        super().__init__(f"what came as an object is none: {why}")


class ObjectRejectedError(DiffusionError):
    """The pool found an object invalid."""

    name = "ObjectRejected"

    def __init__(self, object_id: ObjectId, why: str) -> None:
        super().__init__(f"object {short_id(object_id)} is invalid: {why}")


class NoReplyError(BrokenError):
    """A reply did not come within its time: the peer or the way to it is too slow, or stands still."""
