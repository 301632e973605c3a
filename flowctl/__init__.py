"""flowctl: flow control for servers that push data to many peers of unequal speed.

This package re-exports the public names and nothing else; what is not named here may change without notice. A name is
loaded when it is first used (PEP 562), because loading all of them costs 150 to 190 ms (the event loop and the socket
layer above all) and who asks for `Limits`, or for ``flowctl --help``, needs none of that.

Where to begin: derive from `Session` and hand the class to `serve`. Beside the names here there are
`flowctl.testing` (a test kit without sockets), `flowctl.asgi` (WebSockets of a FastAPI application), `wire.rtmp` and
`flowctl.flv` (wire formats without input or output), `flowctl.live` (the live streaming server), what handlers are
given (`nodes.rpc.message`, `nodes.messenger.message`) and `flowctl.nodes.messenger.store`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:  # what type checkers and editors read; a test holds it equal to the table below
    from flowctl.connection import Connection as Connection
    from flowctl.connection import Session as Session
    from flowctl.core.fanout.fanout import Fanout as Fanout
    from flowctl.core.fanout.fanout import FanoutStatistics as FanoutStatistics
    from flowctl.core.fanout.following import Fanouts as Fanouts
    from flowctl.core.fanout.following import FollowPlace as FollowPlace
    from flowctl.core.flow.counts import Counts as Counts
    from flowctl.core.flow.ledger import LedgerEntry as LedgerEntry
    from flowctl.core.flow.ledger import LedgerKind as LedgerKind
    from flowctl.core.flow.limits import DEFAULT_LIMITS as DEFAULT_LIMITS
    from flowctl.core.flow.limits import NO_LIMITS as NO_LIMITS
    from flowctl.core.flow.limits import Axis as Axis
    from flowctl.core.flow.limits import AxisLimits as AxisLimits
    from flowctl.core.flow.limits import HardPolicy as HardPolicy
    from flowctl.core.flow.limits import Limits as Limits
    from flowctl.core.flow.policy import AudioFirst as AudioFirst
    from flowctl.core.flow.policy import DropDroppable as DropDroppable
    from flowctl.core.flow.policy import DropPolicy as DropPolicy
    from flowctl.core.flow.policy import KeepAll as KeepAll
    from flowctl.core.flow.policy import LivePolicy as LivePolicy
    from flowctl.core.flow.policy import PicturesFirst as PicturesFirst
    from flowctl.core.flow.policy import Thin as Thin
    from flowctl.core.flow.policy import Verdict as Verdict
    from flowctl.core.flow.state import Cause as Cause
    from flowctl.core.flow.state import Load as Load
    from flowctl.core.flow.state import MessageClass as MessageClass
    from flowctl.core.flow.state import SendState as SendState
    from flowctl.core.flow.state import StateChange as StateChange
    from flowctl.core.flow.timing import Forecast as Forecast
    from flowctl.core.loop.sockets import SocketOptions as SocketOptions
    from flowctl.core.loop.work import WorkLimits as WorkLimits
    from flowctl.core.outgoing.outbox import Transport as Transport
    from flowctl.core.outgoing.streamlog import CacheLimits as CacheLimits
    from flowctl.core.outgoing.streamlog import Entry as Entry
    from flowctl.core.outgoing.streamlog import Gop as Gop
    from flowctl.core.outgoing.streamlog import StreamLog as StreamLog
    from flowctl.core.sending.contract import Frontend as Frontend
    from flowctl.core.sending.contract import SendOutcome as SendOutcome
    from flowctl.core.sending.contract import SendResult as SendResult
    from flowctl.core.sending.figures import SenderStatistics as SenderStatistics
    from flowctl.core.sending.settings import AgeSource as AgeSource
    from flowctl.core.sending.settings import SenderSettings as SenderSettings
    from flowctl.core.server.admission import AdmissionLimits as AdmissionLimits
    from flowctl.core.server.bans import Ban as Ban
    from flowctl.core.server.bans import BanAction as BanAction
    from flowctl.core.server.bans import BanList as BanList
    from flowctl.core.server.program import ServeOptions as ServeOptions
    from flowctl.core.server.program import ServerProgram as ServerProgram
    from flowctl.core.server.server import Server as Server
    from flowctl.core.server.server import ServerStatistics as ServerStatistics
    from flowctl.core.server.server import serve as serve
    from flowctl.core.server.totals import FlowTotals as FlowTotals
    from flowctl.deferred import DeferredProcessor as DeferredProcessor
    from flowctl.deferred import DeferredStatistics as DeferredStatistics
    from flowctl.deferred import Job as Job
    from flowctl.deferred import Registration as Registration
    from flowctl.errors import BrokenError as BrokenError
    from flowctl.errors import BusyError as BusyError
    from flowctl.errors import ClosedError as ClosedError
    from flowctl.errors import ConfigError as ConfigError
    from flowctl.errors import DamagedFlightError as DamagedFlightError
    from flowctl.errors import ExhaustedError as ExhaustedError
    from flowctl.errors import FlowctlError as FlowctlError
    from flowctl.errors import InternalError as InternalError
    from flowctl.errors import LimitExceededError as LimitExceededError
    from flowctl.errors import LocalProtocolError as LocalProtocolError
    from flowctl.errors import ReentryError as ReentryError
    from flowctl.errors import RemoteProtocolError as RemoteProtocolError
    from flowctl.errors import RpcError as RpcError
    from flowctl.errors import RpcTimeoutError as RpcTimeoutError
    from flowctl.errors import StoreError as StoreError
    from flowctl.live.judging.shares import ShareSettings as ShareSettings
    from flowctl.live.judging.shares import ViewerShares as ViewerShares
    from flowctl.nodes.diffusion.diffusion import ObjectDiffusion as ObjectDiffusion
    from flowctl.nodes.messenger.delivery import DeliverySettings as DeliverySettings
    from flowctl.nodes.messenger.message import Destination as Destination
    from flowctl.nodes.messenger.messenger import Messenger as Messenger
    from flowctl.nodes.rpc.access.access import Access as Access
    from flowctl.nodes.rpc.access.access import AuthLevel as AuthLevel
    from flowctl.nodes.rpc.jobs.batch import Batch as Batch
    from flowctl.nodes.rpc.jobs.batch import JobResult as JobResult
    from flowctl.nodes.rpc.message import served_message as served_message
    from flowctl.nodes.rpc.node import RpcNode as RpcNode
    from flowctl.nodes.rpc.peers.peer import ConnectionID as ConnectionID
    from flowctl.nodes.rpc.subscription import Subscription as Subscription
    from flowctl.nodes.scheduler.scheduler import MessageScheduler as MessageScheduler
    from flowctl.pollgroup import GroupState as GroupState
    from flowctl.pollgroup import Pollable as Pollable
    from flowctl.pollgroup import PollGroup as PollGroup
    from flowctl.pollgroup import PollGroupStatistics as PollGroupStatistics
    from flowctl.pollgroups import Move as Move
    from flowctl.pollgroups import PollGroups as PollGroups
    from flowctl.reasons import CloseReason as CloseReason
    from flowctl.reasons import DropReason as DropReason
    from flowctl.receiver import InputResult as InputResult
    from flowctl.receiver import InputVerdict as InputVerdict
    from flowctl.receiver import Receiver as Receiver
    from flowctl.receiver import ReceiverStatistics as ReceiverStatistics
    from flowctl.sender import FlushResult as FlushResult
    from flowctl.sender import Sender as Sender
    from flowctl.streamset import SetPlace as SetPlace
    from flowctl.streamset import StreamSet as StreamSet
    from flowctl.websocket import HttpAnswer as HttpAnswer
    from flowctl.websocket import Topic as Topic
    from flowctl.websocket import TopicStatistics as TopicStatistics
    from flowctl.websocket import WebSocketRequest as WebSocketRequest
    from flowctl.websocket import WebSocketSession as WebSocketSession
    from flowctl.wire.zmtp.keys import KeyPair as KeyPair

_HOMES: Final = {
    "flowctl.connection": "Connection Session",
    "flowctl.core.fanout.fanout": "Fanout FanoutStatistics",
    "flowctl.core.fanout.following": "Fanouts FollowPlace",
    "flowctl.core.flow.counts": "Counts",
    "flowctl.core.flow.timing": "Forecast",
    "flowctl.core.flow.ledger": "LedgerEntry LedgerKind",
    "flowctl.core.flow.limits": "Axis AxisLimits DEFAULT_LIMITS HardPolicy Limits NO_LIMITS",
    "flowctl.core.flow.policy": "AudioFirst DropDroppable DropPolicy KeepAll LivePolicy PicturesFirst Thin Verdict",
    "flowctl.core.flow.state": "Cause Load MessageClass SendState StateChange",
    "flowctl.core.loop.sockets": "SocketOptions",
    "flowctl.core.loop.work": "WorkLimits",
    "flowctl.core.outgoing.streamlog": "CacheLimits Entry Gop StreamLog",
    "flowctl.core.outgoing.outbox": "Transport",
    "flowctl.core.sending.contract": "Frontend SendOutcome SendResult",
    "flowctl.core.sending.figures": "SenderStatistics",
    "flowctl.core.sending.settings": "AgeSource SenderSettings",
    "flowctl.core.server.admission": "AdmissionLimits",
    "flowctl.core.server.bans": "Ban BanAction BanList",
    "flowctl.core.server.program": "ServeOptions ServerProgram",
    "flowctl.core.server.server": "Server ServerStatistics serve",
    "flowctl.core.server.totals": "FlowTotals",
    "flowctl.deferred": "DeferredProcessor DeferredStatistics Job Registration",
    "flowctl.errors": "BrokenError BusyError ClosedError ConfigError DamagedFlightError ExhaustedError FlowctlError"
    " InternalError LimitExceededError LocalProtocolError ReentryError RemoteProtocolError RpcError RpcTimeoutError"
    " StoreError",
    "flowctl.live.judging.shares": "ShareSettings ViewerShares",
    "flowctl.nodes.diffusion.diffusion": "ObjectDiffusion",
    "flowctl.nodes.messenger.delivery": "DeliverySettings",
    "flowctl.nodes.messenger.message": "Destination",
    "flowctl.nodes.messenger.messenger": "Messenger",
    "flowctl.nodes.rpc.access.access": "Access AuthLevel",
    "flowctl.nodes.rpc.jobs.batch": "Batch JobResult",
    "flowctl.nodes.rpc.message": "served_message",
    "flowctl.nodes.rpc.node": "RpcNode",
    "flowctl.nodes.rpc.peers.peer": "ConnectionID",
    "flowctl.nodes.rpc.subscription": "Subscription",
    "flowctl.nodes.scheduler.scheduler": "MessageScheduler",
    "flowctl.pollgroup": "GroupState PollGroup PollGroupStatistics Pollable",
    "flowctl.pollgroups": "Move PollGroups",
    "flowctl.reasons": "CloseReason DropReason",
    "flowctl.receiver": "InputResult InputVerdict Receiver ReceiverStatistics",
    "flowctl.sender": "FlushResult Sender",
    "flowctl.streamset": "SetPlace StreamSet",
    "flowctl.websocket": "HttpAnswer Topic TopicStatistics WebSocketRequest WebSocketSession",
    "flowctl.wire.zmtp.keys": "KeyPair",
}
"""Module of every public name."""
_HOME_OF: Final = {name: module for module, names in _HOMES.items() for name in names.split()}
if not TYPE_CHECKING:  # checkers go by the imports above
    __all__ = list(_HOME_OF)


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
    return sorted({*globals(), *_HOME_OF})
