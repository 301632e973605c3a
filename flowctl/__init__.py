"""flowctl: flow control for servers that push data to many peers of unequal speed.

This package re-exports the public names and nothing else; what is not named here may change without notice. A name is
loaded when it is first used (PEP 562), because loading all of them costs 150 to 190 ms (the event loop and the socket
layer above all) and who asks for `Limits`, or for ``flowctl --help``, needs none of that.

Where to begin: derive from `Session` and hand the class to `serve`. Beside the names here there are
`flowctl.testing` (a test kit without sockets), `wire.rtmp` and `flowctl.flv` (wire formats without input or output),
`flowctl.live` (the live streaming server), what handlers are given (`nodes.rpc.message`, `nodes.messenger.message`)
and `flowctl.nodes.messenger.store`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:  # what type checkers and editors read; a test holds it equal to the table below
    from flowctl.connection import Connection, Session
    from flowctl.core.fanout.fanout import Fanout, FanoutStatistics
    from flowctl.core.fanout.following import Fanouts, FollowPlace
    from flowctl.core.flow.counts import Counts
    from flowctl.core.flow.forecast import Forecast
    from flowctl.core.flow.ledger import LedgerEntry, LedgerKind
    from flowctl.core.flow.limits import DEFAULT_LIMITS, NO_LIMITS, Axis, AxisLimits, HardPolicy, Limits
    from flowctl.core.flow.policy import (
        AudioFirst,
        DropDroppable,
        DropPolicy,
        KeepAll,
        LivePolicy,
        PicturesFirst,
        Thin,
        Verdict,
    )
    from flowctl.core.flow.state import Cause, Load, MessageClass, SendState, StateChange
    from flowctl.core.loop.sockets import SocketOptions
    from flowctl.core.loop.work import WorkLimits
    from flowctl.core.outgoing.streamlog import CacheLimits, Entry, Gop, StreamLog
    from flowctl.core.outgoing.transport import Transport
    from flowctl.core.sending.contract import Frontend, SendOutcome, SendResult
    from flowctl.core.sending.figures import SenderStatistics
    from flowctl.core.sending.settings import AgeSource, SenderSettings
    from flowctl.core.server.admission import AdmissionLimits
    from flowctl.core.server.bans import Ban, BanAction, BanList
    from flowctl.core.server.program import ServeOptions, ServerProgram
    from flowctl.core.server.server import Server, ServerStatistics, serve
    from flowctl.core.server.totals import FlowTotals
    from flowctl.deferred import DeferredProcessor, DeferredStatistics, Job, Registration
    from flowctl.errors import (
        BrokenError,
        BusyError,
        ClosedError,
        ConfigError,
        DamagedFlightError,
        ExhaustedError,
        FlowctlError,
        InternalError,
        LimitExceededError,
        LocalProtocolError,
        ReentryError,
        RemoteProtocolError,
        RpcError,
        RpcTimeoutError,
        StoreError,
    )
    from flowctl.live.judging.shares import ShareSettings, ViewerShares
    from flowctl.nodes.diffusion.diffusion import ObjectDiffusion
    from flowctl.nodes.messenger.delivery import DeliverySettings
    from flowctl.nodes.messenger.message import Destination
    from flowctl.nodes.messenger.messenger import Messenger
    from flowctl.nodes.rpc.access.access import Access, AuthLevel
    from flowctl.nodes.rpc.jobs.batch import Batch, JobResult
    from flowctl.nodes.rpc.node import RpcNode
    from flowctl.nodes.rpc.peers.peer import ConnectionID
    from flowctl.nodes.rpc.subscription import Subscription
    from flowctl.nodes.scheduler.scheduler import MessageScheduler
    from flowctl.pollgroup import GroupState, Pollable, PollGroup, PollGroupStatistics
    from flowctl.pollgroups import Move, PollGroups
    from flowctl.reasons import CloseReason, DropReason
    from flowctl.receiver import InputResult, InputVerdict, Receiver, ReceiverStatistics
    from flowctl.sender import FlushResult, Sender
    from flowctl.wire.zeromq.curve import KeyPair

__all__ = [
    "DEFAULT_LIMITS",
    "NO_LIMITS",
    "Access",
    "AdmissionLimits",
    "AgeSource",
    "AudioFirst",
    "AuthLevel",
    "Axis",
    "AxisLimits",
    "Ban",
    "BanAction",
    "BanList",
    "Batch",
    "BrokenError",
    "BusyError",
    "CacheLimits",
    "Cause",
    "CloseReason",
    "ClosedError",
    "ConfigError",
    "Connection",
    "ConnectionID",
    "Counts",
    "DamagedFlightError",
    "DeferredProcessor",
    "DeferredStatistics",
    "DeliverySettings",
    "Destination",
    "DropDroppable",
    "DropPolicy",
    "DropReason",
    "Entry",
    "ExhaustedError",
    "Fanout",
    "FanoutStatistics",
    "Fanouts",
    "FlowTotals",
    "FlowctlError",
    "FlushResult",
    "FollowPlace",
    "Forecast",
    "Frontend",
    "Gop",
    "GroupState",
    "HardPolicy",
    "InputResult",
    "InputVerdict",
    "InternalError",
    "Job",
    "JobResult",
    "KeepAll",
    "KeyPair",
    "LedgerEntry",
    "LedgerKind",
    "LimitExceededError",
    "Limits",
    "LivePolicy",
    "Load",
    "LocalProtocolError",
    "MessageClass",
    "MessageScheduler",
    "Messenger",
    "Move",
    "ObjectDiffusion",
    "PicturesFirst",
    "PollGroup",
    "PollGroupStatistics",
    "PollGroups",
    "Pollable",
    "Receiver",
    "ReceiverStatistics",
    "ReentryError",
    "Registration",
    "RemoteProtocolError",
    "RpcError",
    "RpcNode",
    "RpcTimeoutError",
    "SendOutcome",
    "SendResult",
    "SendState",
    "Sender",
    "SenderSettings",
    "SenderStatistics",
    "ServeOptions",
    "Server",
    "ServerProgram",
    "ServerStatistics",
    "Session",
    "ShareSettings",
    "SocketOptions",
    "StateChange",
    "StoreError",
    "StreamLog",
    "Subscription",
    "Thin",
    "Transport",
    "Verdict",
    "ViewerShares",
    "WorkLimits",
    "serve",
]

_HOMES: Final = {
    "flowctl.core.server.admission": ("AdmissionLimits",),
    "flowctl.core.server.bans": ("Ban", "BanAction", "BanList"),
    "flowctl.connection": ("Connection", "Session"),
    "flowctl.nodes.diffusion.diffusion": ("ObjectDiffusion",),
    "flowctl.core.flow.counts": ("Counts",),
    "flowctl.deferred": (
        "DeferredProcessor",
        "DeferredStatistics",
        "Job",
        "Registration",
    ),
    "flowctl.errors": (
        "BrokenError",
        "BusyError",
        "ClosedError",
        "ConfigError",
        "DamagedFlightError",
        "ExhaustedError",
        "FlowctlError",
        "InternalError",
        "LimitExceededError",
        "LocalProtocolError",
        "ReentryError",
        "RemoteProtocolError",
        "RpcError",
        "RpcTimeoutError",
        "StoreError",
    ),
    "flowctl.core.fanout.fanout": (
        "Fanout",
        "FanoutStatistics",
    ),
    "flowctl.core.fanout.following": (
        "Fanouts",
        "FollowPlace",
    ),
    "flowctl.core.flow.state": (
        "Cause",
        "Load",
        "MessageClass",
        "SendState",
        "StateChange",
    ),
    "flowctl.core.flow.forecast": ("Forecast",),
    "flowctl.live.judging.shares": (
        "ShareSettings",
        "ViewerShares",
    ),
    "flowctl.core.flow.ledger": (
        "LedgerEntry",
        "LedgerKind",
    ),
    "flowctl.core.flow.limits": (
        "DEFAULT_LIMITS",
        "Axis",
        "AxisLimits",
        "HardPolicy",
        "Limits",
        "NO_LIMITS",
    ),
    "flowctl.core.flow.policy": (
        "AudioFirst",
        "DropDroppable",
        "DropPolicy",
        "KeepAll",
        "LivePolicy",
        "PicturesFirst",
        "Thin",
        "Verdict",
    ),
    "flowctl.pollgroup": (
        "GroupState",
        "PollGroup",
        "PollGroupStatistics",
        "Pollable",
    ),
    "flowctl.pollgroups": (
        "Move",
        "PollGroups",
    ),
    "flowctl.reasons": (
        "CloseReason",
        "DropReason",
    ),
    "flowctl.receiver": (
        "InputResult",
        "InputVerdict",
        "Receiver",
        "ReceiverStatistics",
    ),
    "flowctl.nodes.scheduler.scheduler": ("MessageScheduler",),
    "flowctl.sender": (
        "FlushResult",
        "Sender",
    ),
    "flowctl.core.sending.contract": (
        "Frontend",
        "SendOutcome",
        "SendResult",
    ),
    "flowctl.core.sending.figures": ("SenderStatistics",),
    "flowctl.core.sending.settings": (
        "AgeSource",
        "SenderSettings",
    ),
    "flowctl.core.outgoing.transport": ("Transport",),
    "flowctl.core.server.server": (
        "Server",
        "ServerStatistics",
        "serve",
    ),
    "flowctl.core.server.program": (
        "ServeOptions",
        "ServerProgram",
    ),
    "flowctl.core.loop.sockets": ("SocketOptions",),
    "flowctl.nodes.messenger.delivery": ("DeliverySettings",),
    "flowctl.nodes.messenger.message": ("Destination",),
    "flowctl.nodes.messenger.messenger": ("Messenger",),
    "flowctl.core.outgoing.streamlog": (
        "CacheLimits",
        "Entry",
        "Gop",
        "StreamLog",
    ),
    "flowctl.core.server.totals": ("FlowTotals",),
    "flowctl.core.loop.work": ("WorkLimits",),
    "flowctl.nodes.rpc.access.access": (
        "Access",
        "AuthLevel",
    ),
    "flowctl.nodes.rpc.jobs.batch": (
        "Batch",
        "JobResult",
    ),
    "flowctl.nodes.rpc.node": ("RpcNode",),
    "flowctl.nodes.rpc.peers.peer": ("ConnectionID",),
    "flowctl.nodes.rpc.subscription": ("Subscription",),
    "flowctl.wire.zeromq.curve": ("KeyPair",),
}
"""Module of every public name."""
_HOME_OF: Final = {name: module for module, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> object:
    """Load a public name when it is first used; Python finds it without this function from then on."""
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        value: object = getattr(import_module(home), name)
    except ModuleNotFoundError as error:
        raise import_module("flowctl.core.text.extras").missing_extra(error, f"flowctl.{name}") or error from error
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
