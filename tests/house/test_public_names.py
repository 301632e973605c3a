"""The public names of flowctl: who changes this list changes the package for its users (see CHANGELOG.md)."""

from __future__ import annotations

import ast
import importlib
import inspect

import pytest
from source_kit import module_files, tree_of

import flowctl

PUBLIC = """
    AgeSource Forecast AudioFirst PicturesFirst ShareSettings ViewerShares
    AdmissionLimits Axis AxisLimits Ban BanAction BanList BrokenError BusyError CacheLimits Cause CloseReason
    ClosedError ConfigError Connection Counts DEFAULT_LIMITS DamagedFlightError DeferredProcessor
    DeferredStatistics DeliverySettings Destination DropDroppable Messenger
    DropPolicy DropReason Entry Fanout FanoutStatistics Fanouts FlowTotals FlowctlError FlushResult FollowPlace
    Frontend Gop GroupState HardPolicy InputResult InputVerdict InternalError Job KeepAll LedgerEntry LedgerKind
    LimitExceededError Limits LivePolicy Load LocalProtocolError MessageClass Move NO_LIMITS PollGroup
    PollGroupStatistics PollGroups Pollable Receiver ReceiverStatistics ReentryError Registration
    RemoteProtocolError RpcError RpcTimeoutError
    SendOutcome SendResult SendState Sender SenderSettings SenderStatistics ServeOptions Server
    ServerProgram ServerStatistics Session SocketOptions StateChange StoreError StreamLog Thin Transport Verdict
    WorkLimits serve ObjectDiffusion SetPlace StreamSet
    MessageScheduler ExhaustedError Access AuthLevel Batch ConnectionID JobResult KeyPair RpcNode Subscription
    served_message
    HttpAnswer Topic TopicStatistics WebSocketRequest WebSocketSession
"""
CONNECTION = """
    call_soon close close_after_flush core delay_ms drained ended gather_input group live_on now number opened_at
    pause_input peer place receiver renditions resume_input run_coroutine secure sender session set_timer turn_over
    when_drained why window_bytes work writable
"""
"""What an application calls and reads of a connection, which is what it finds there. `core` is for all else."""
TESTING = (
    "Driven drive ManualClock ManualGroup ManualHost ScriptedTransport ThrottledPeer check_drop_policy would_block"
)


def test_public_names_when_listed_are_these():
    assert sorted(PUBLIC.split()) == sorted(flowctl.__all__)


def test_public_names_when_of_the_test_kit_are_these():
    assert sorted(TESTING.split()) == sorted(importlib.import_module("flowctl.testing").__all__)


def test_public_names_when_of_the_bridge_to_asgi_are_these():
    assert importlib.import_module("flowctl.asgi").__all__ == ["Bridge", "WebSocketProtocol"]


def test_public_names_when_of_a_connection_are_these():
    assert CONNECTION.split() == [name for name in dir(flowctl.Connection) if not name.startswith("_")]


def test_public_names_when_used_are_loaded_from_their_modules_and_explained():
    for name in sorted(PUBLIC.split()):
        value = getattr(flowctl, name)
        assert value is getattr(flowctl, name)
        assert name in dir(flowctl)
        if inspect.isclass(value) or inspect.isfunction(value):
            assert (value.__doc__ or "").strip(), name


def test_public_names_when_type_checkers_read_them_are_the_same():
    block = next(node for node in tree_of(module_files()["flowctl"]).body if isinstance(node, ast.If))
    for_checkers = {
        name.asname or name.name: (str(node.module), name.name)
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for name in node.names
    }
    at_run_time = {name: (module, name) for module, names in flowctl._HOMES.items() for name in names.split()}
    assert for_checkers == at_run_time
    assert set(flowctl.__all__) == at_run_time.keys()


def test_unknown_name_when_asked_for_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'Sessions'"):
        flowctl.Sessions  # noqa: B018  (that is the test)


def test_exceptions_when_public_derive_from_one_base():
    errors = importlib.import_module("flowctl.errors")
    public = {name for name in flowctl.__all__ if name.endswith("Error")}
    assert {name for name, value in vars(errors).items() if inspect.isclass(value)} == public
    assert all(issubclass(getattr(flowctl, name), flowctl.FlowctlError) for name in public)
