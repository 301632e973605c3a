"""flowctl: flow control for servers that push data to many peers of unequal speed.

This package re-exports the public names and nothing else; what is not named here may change without notice. A name is
loaded when it is first used (PEP 562), because loading all of them costs 150 to 190 ms (the event loop and the socket
layer above all) and who asks for `Limits`, or for ``flowctl --help``, needs none of that.

Where to begin: derive from `Session` and hand the class to `serve`. Beside the names here there are
`flowctl.testing` (a test kit without sockets), `flowctl.rtmp` and `flowctl.flv` (wire formats without input or output),
`flowctl.live` (the live streaming server), what handlers are given (`flowctl.rpc.message`, `flowctl.messenger.message`)
and `flowctl.messenger.store`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:  # what type checkers and editors read; a test holds it equal to the table below
    from flowctl.connection import Connection, Session
    from flowctl.deferred import DeferredProcessor, DeferredStatistics, Job, Registration
    from flowctl.diffusion.diffusion import ObjectDiffusion
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
    from flowctl.fanout.fanout import Fanout, FanoutStatistics
    from flowctl.fanout.following import Fanouts, FollowPlace
    from flowctl.flow.counts import Counts
    from flowctl.flow.forecast import Forecast
    from flowctl.flow.ledger import LedgerEntry, LedgerKind
    from flowctl.flow.limits import DEFAULT_LIMITS, NO_LIMITS, Axis, AxisLimits, HardPolicy, Limits
    from flowctl.flow.policy import (
        AudioFirst,
        DropDroppable,
        DropPolicy,
        KeepAll,
        LivePolicy,
        PicturesFirst,
        Thin,
        Verdict,
    )
    from flowctl.flow.state import Cause, Load, MessageClass, SendState, StateChange
    from flowctl.judging.shadow import Candidate, ShadowReport
    from flowctl.judging.shares import ShareSettings, ViewerShares
    from flowctl.loop.sockets import SocketOptions
    from flowctl.loop.work import WorkLimits
    from flowctl.messenger.delivery import DeliverySettings
    from flowctl.messenger.message import Destination
    from flowctl.messenger.messenger import Messenger
    from flowctl.outgoing.streamlog import CacheLimits, Entry, Gop, StreamLog
    from flowctl.outgoing.transport import Transport
    from flowctl.pollgroup import GroupState, Pollable, PollGroup, PollGroupStatistics
    from flowctl.pollgroups import Move, PollGroups
    from flowctl.reasons import CloseReason, DropReason
    from flowctl.receiver import InputResult, InputVerdict, Receiver, ReceiverStatistics
    from flowctl.rpc.access.access import Access, AuthLevel
    from flowctl.rpc.jobs.batch import Batch, JobResult
    from flowctl.rpc.node import RpcNode
    from flowctl.rpc.peers.peer import ConnectionID
    from flowctl.rpc.subscription import Subscription
    from flowctl.scheduler.scheduler import MessageScheduler
    from flowctl.sender import FlushResult, Sender
    from flowctl.sending.contract import Frontend, SendOutcome, SendResult
    from flowctl.sending.figures import SenderStatistics
    from flowctl.sending.settings import AgeSource, SenderSettings
    from flowctl.server.admission import AdmissionLimits
    from flowctl.server.bans import Ban, BanAction, BanList
    from flowctl.server.program import ServeOptions, ServerProgram
    from flowctl.server.server import Server, ServerStatistics, serve
    from flowctl.server.totals import FlowTotals
    from flowctl.zeromq.curve import KeyPair

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
    "Candidate",
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
    "ShadowReport",
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
    "flowctl.server.admission": ("AdmissionLimits",),
    "flowctl.server.bans": ("Ban", "BanAction", "BanList"),
    "flowctl.connection": ("Connection", "Session"),
    "flowctl.diffusion.diffusion": ("ObjectDiffusion",),
    "flowctl.flow.counts": ("Counts",),
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
    "flowctl.fanout.fanout": (
        "Fanout",
        "FanoutStatistics",
    ),
    "flowctl.fanout.following": (
        "Fanouts",
        "FollowPlace",
    ),
    "flowctl.flow.state": (
        "Cause",
        "Load",
        "MessageClass",
        "SendState",
        "StateChange",
    ),
    "flowctl.flow.forecast": ("Forecast",),
    "flowctl.judging.shadow": (
        "Candidate",
        "ShadowReport",
    ),
    "flowctl.judging.shares": (
        "ShareSettings",
        "ViewerShares",
    ),
    "flowctl.flow.ledger": (
        "LedgerEntry",
        "LedgerKind",
    ),
    "flowctl.flow.limits": (
        "DEFAULT_LIMITS",
        "Axis",
        "AxisLimits",
        "HardPolicy",
        "Limits",
        "NO_LIMITS",
    ),
    "flowctl.flow.policy": (
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
    "flowctl.scheduler.scheduler": ("MessageScheduler",),
    "flowctl.sender": (
        "FlushResult",
        "Sender",
    ),
    "flowctl.sending.contract": (
        "Frontend",
        "SendOutcome",
        "SendResult",
    ),
    "flowctl.sending.figures": ("SenderStatistics",),
    "flowctl.sending.settings": (
        "AgeSource",
        "SenderSettings",
    ),
    "flowctl.outgoing.transport": ("Transport",),
    "flowctl.server.server": (
        "Server",
        "ServerStatistics",
        "serve",
    ),
    "flowctl.server.program": (
        "ServeOptions",
        "ServerProgram",
    ),
    "flowctl.loop.sockets": ("SocketOptions",),
    "flowctl.messenger.delivery": ("DeliverySettings",),
    "flowctl.messenger.message": ("Destination",),
    "flowctl.messenger.messenger": ("Messenger",),
    "flowctl.outgoing.streamlog": (
        "CacheLimits",
        "Entry",
        "Gop",
        "StreamLog",
    ),
    "flowctl.server.totals": ("FlowTotals",),
    "flowctl.loop.work": ("WorkLimits",),
    "flowctl.rpc.access.access": (
        "Access",
        "AuthLevel",
    ),
    "flowctl.rpc.jobs.batch": (
        "Batch",
        "JobResult",
    ),
    "flowctl.rpc.node": ("RpcNode",),
    "flowctl.rpc.peers.peer": ("ConnectionID",),
    "flowctl.rpc.subscription": ("Subscription",),
    "flowctl.zeromq.curve": ("KeyPair",),
}
"""Module of every public name."""
_HOME_OF: Final = {name: module for module, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> object:
    """Load a public name when it is first used; Python finds it without this function from then on."""
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
