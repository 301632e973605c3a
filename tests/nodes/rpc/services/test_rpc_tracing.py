"""Spans of OpenTelemetry: a handler's is a child of its call's, across nodes, and one that failed is marked."""

from __future__ import annotations

import asyncio
import importlib
import sys

import pytest
from opentelemetry import trace
from opentelemetry.baggage import get_all
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from flowctl.errors import ConfigError, RpcError
from flowctl.nodes.rpc.node import RpcNode
from flowctl.nodes.rpc.tracing import trace_node

WAIT_S = 20.0


class Traced:
    """A server and a caller that are traced, and the spans of both as they end."""

    def __init__(self):
        self.exporter, provider = InMemorySpanExporter(), TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.tracer = provider.get_tracer("test")
        self.server, self.caller = RpcNode(on_error=lambda *_: None), RpcNode()
        for node in (self.server, self.caller):
            trace_node(node, tracer_provider=provider)
        self.server.add_category("a")
        for handler in (self.plain, self.coroutine, self.stream, self.fails, self.asks):
            self.server.add_request_command("a", handler.__name__, handler)

    def plain(self, message):
        return f"{trace.get_current_span().get_span_context().trace_id:x}"

    async def coroutine(self, message):
        await asyncio.sleep(0)
        return f"{trace.get_current_span().get_span_context().trace_id:x}"

    async def stream(self, message):
        for _ in range(2):
            yield f"{trace.get_current_span().get_span_context().trace_id:x}"

    async def fails(self, message):
        raise ValueError("secret of the handler")

    async def asks(self, message):
        return await self.server.call(self.itself, "a.plain")

    def run(self, play):
        async def run():
            address = self.server.listen_plain("tcp://127.0.0.1:*")
            async with self.server, self.caller:
                self.itself = await self.server.connect(address)
                return await play(await self.caller.connect(address))

        return asyncio.run(asyncio.wait_for(run(), WAIT_S))

    def spans(self):
        return sorted(self.exporter.get_finished_spans(), key=lambda span: span.start_time)


@pytest.mark.parametrize("kind", ["plain", "coroutine", "stream"])
def test_handler_when_called_has_a_span_that_is_a_child_of_its_calls(kind):
    traced = Traced()

    async def play(conn):
        with traced.tracer.start_as_current_span("root") as root:
            if kind == "stream":
                found = [parts async for parts in traced.caller.stream(conn, "a.stream")]
                assert trace.get_current_span() is root  # also between items, and behind them
            else:
                found = [await traced.caller.call(conn, f"a.{kind}")]
        return root, found

    root, found = traced.run(play)
    trace_id = root.get_span_context().trace_id
    assert found == [[f"{trace_id:x}".encode()]] * len(found)
    outer, client, server = traced.spans()
    assert [outer.name, client.name, server.name] == ["root", f"a.{kind}", f"a.{kind}"]
    assert [client.kind, server.kind] == [SpanKind.CLIENT, SpanKind.SERVER]
    assert [client.parent.span_id, server.parent.span_id] == [outer.context.span_id, client.context.span_id]
    assert dict(server.attributes) == {"rpc.system": "flowctl", "rpc.service": "a", "rpc.method": kind}


def test_handler_when_it_asks_others_is_the_parent_of_that():
    traced = Traced()
    traced.run(lambda conn: traced.caller.call(conn, "a.asks"))
    spans = traced.spans()
    assert [span.name for span in spans] == ["a.asks", "a.asks", "a.plain", "a.plain"]
    assert [span.parent and span.parent.span_id for span in spans] == [
        None,
        *(span.context.span_id for span in spans[:-1]),
    ]


def test_span_when_its_call_or_handler_fails_says_so():
    traced = Traced()

    async def play(conn):
        for command in ("a.fails", "a.nothing"):
            with pytest.raises(RpcError):
                await traced.caller.call(conn, command)

    traced.run(play)
    codes = [(span.kind, span.status.status_code, span.attributes["rpc.flowctl.code"]) for span in traced.spans()]
    assert codes == [
        (SpanKind.CLIENT, StatusCode.ERROR, "HANDLER_FAILED"),
        (SpanKind.SERVER, StatusCode.ERROR, "ValueError"),
        (SpanKind.CLIENT, StatusCode.ERROR, "UNKNOWNCOMMAND"),
    ]


def test_span_when_the_metadata_of_a_call_is_none_is_a_root():
    traced, untraced = Traced(), RpcNode()

    async def by_another():
        address = traced.server.listen_plain("tcp://127.0.0.1:*")
        async with traced.server, untraced:
            await untraced.call(await untraced.connect(address), "a.plain", metadata={"traceparent": "no such thing"})

    asyncio.run(asyncio.wait_for(by_another(), WAIT_S))
    (span,) = traced.spans()
    assert (span.kind, span.parent) == (SpanKind.SERVER, None)


@pytest.mark.parametrize("baggage", ["a=" + " " * 8000, "a=\x1b[31m", "tenant=blue"])
def test_baggage_when_it_comes_is_believed_as_far_as_it_can_be_read_and_goes_on(baggage, caplog):
    """Propagators log what they find, and take long for many blanks."""
    traced, untraced, seen = Traced(), RpcNode(), []

    async def looks(message):
        seen.append(dict(get_all()))
        return await traced.server.call(traced.itself, "a.further")

    async def further(message):
        seen.append(dict(get_all()))
        return "done"

    traced.server.add_request_command("a", "looks", looks)
    traced.server.add_request_command("a", "further", further)

    async def by_another():
        address = traced.server.listen_plain("tcp://127.0.0.1:*")
        async with traced.server, untraced:
            traced.itself = await traced.server.connect(address)
            return await untraced.call(await untraced.connect(address), "a.looks", metadata={"baggage": baggage})

    assert asyncio.run(asyncio.wait_for(by_another(), WAIT_S)) == [b"done"]
    assert seen == ([{"tenant": "blue"}] * 2 if baggage == "tenant=blue" else seen)
    assert "\x1b" not in caplog.text


def test_span_when_what_was_raised_says_much_holds_little_of_it():
    traced = Traced()

    async def says_much(message):
        raise KeyError("x" * 1_000_000)

    traced.server.add_request_command("a", "much", says_much)

    async def play(conn):
        with pytest.raises(RpcError):
            await traced.caller.call(conn, "a.much")

    traced.run(play)
    assert max(len(span.status.description) for span in traced.spans()) <= 500


def test_tracing_when_its_extra_is_not_installed_names_it(monkeypatch):
    monkeypatch.delitem(sys.modules, "flowctl.nodes.rpc.tracing")
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    with pytest.raises(ConfigError, match="needs the extra 'tracing': opentelemetry is not installed"):
        importlib.import_module("flowctl.nodes.rpc.tracing")
