"""The whole exception tree of flowctl on one screen.

Theory: whose fault is it? A caller of ours (`LocalProtocolError`, `ConfigError`), the peer (`RemoteProtocolError`,
of which `LimitExceededError` is the kind that names a limit), the circumstances (`ClosedError` by us, `BrokenError`
by them, `BusyError` between two users), or us (`InternalError`). A slow peer is no exception: it is a
`flowctl.CloseReason`, counted and visible in statistics.
"""

from __future__ import annotations


class FlowctlError(Exception):
    """Base of every exception that flowctl raises on purpose.

    Args:
        message: what went wrong, where, and the limit, in one line.
        hint: what the reader can do about it; shown after ``hint:`` by the command line, and below a traceback. None:
            nothing to add.
    """

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.hint = hint
        if hint:
            self.add_note(f"hint: {hint}")

    @property
    def with_hint(self) -> str:
        """Message and hint in one line, for figures and logs."""
        return f"{self}; {self.hint}" if self.hint else str(self)


class ConfigError(FlowctlError, ValueError):
    """A setting has a value that it may not have; names the field, the value and what is allowed."""


class LocalProtocolError(FlowctlError):
    """Our caller asked for something that the present state does not allow."""


class ReentryError(LocalProtocolError):
    """A `send_state_changed` handler, or a policy, called a Sender: the one that calls it, or another."""


class RemoteProtocolError(FlowctlError):
    """The peer sent something that its protocol does not allow.

    Args:
        message: what was wrong, with the value.
        code: short stable identifier for logs and statistics, for example ``"amf-truncated"``.
        hint: see `FlowctlError`.
    """

    def __init__(self, message: str, *, code: str = "protocol", hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.code = code


class LimitExceededError(RemoteProtocolError):
    """The peer went over a named limit.

    Args:
        limit: name of the setting, for example ``"message_size_bytes"``.
        value: what the peer asked for or reached.
        maximum: the limit in force, in the unit of the setting's name.
        message: overrides the sentence made from the three.
    """

    def __init__(self, limit: str, value: float, maximum: float, message: str | None = None) -> None:
        super().__init__(message or f"{limit} is {value:g}, the limit is {maximum:g}", code=f"limit:{limit}")
        self.limit = limit
        self.value = value
        self.maximum = maximum


class ClosedError(FlowctlError):
    """The object was closed by us; nothing more can be done with it."""


class BrokenError(FlowctlError):
    """The peer or the network ended the connection."""


class BusyError(FlowctlError):
    """Two users want what only one may have, for example a stream name."""


class RpcError(FlowctlError):
    """A request to another node ended without its reply.

    Args:
        message: which request, and why.
        code: why, as it stands on the wire: ``UNKNOWNCOMMAND``, ``FORBIDDEN``, ``HANDLER_FAILED``, ``QUEUE_FULL``,
            ``DISCONNECTED``, ``TIMEOUT``, ``SHUTTING_DOWN``, ...
        hint: see `FlowctlError`.
    """

    def __init__(self, message: str, *, code: str, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.code = code


class RpcTimeoutError(RpcError, TimeoutError):
    """The deadline of a request passed; its code is ``TIMEOUT``."""


class ExhaustedError(FlowctlError, TimeoutError):
    """A question was asked of peer after peer, and none had an answer of use before time or budget were used up."""


class InternalError(FlowctlError):
    """A bug of flowctl; please report it with the message."""


class DamagedFlightError(FlowctlError):
    """The rows of a recorded flight are not those that were written: some are missing, or were changed."""


class StoreError(FlowctlError):
    """The file of a messenger's store cannot be used, or did not take what was to be written.

    Args:
        message: which file, and why.
        code: ``"full"``, ``"damaged"``, ``"foreign"``, ``"version"``, ``"busy"``, ``"path"``, ``"effect"`` or
            ``"closed"``.
        hint: see `FlowctlError`.
    """

    def __init__(self, message: str, *, code: str, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.code = code
