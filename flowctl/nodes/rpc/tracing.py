"""Calls and handlers as spans of OpenTelemetry, across processes: needs the extra ``tracing``.

The API package alone is needed; without its SDK, spans cost next to nothing and go nowhere. The context travels in the
metadata of each call, as the propagators that are set write it (``traceparent``), so a span of a handler is a child of
that of its call, also where the other side is another library.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from typing import Any, Final

from flowctl.core.text.extras import missing_extra
from flowctl.errors import RpcError
from flowctl.nodes.rpc.asking import RpcCall
from flowctl.nodes.rpc.calling import Caller
from flowctl.nodes.rpc.commands import Handler, HandlerKind, kind_of
from flowctl.nodes.rpc.message import RpcMessage
from flowctl.nodes.rpc.node import RpcNode
from flowctl.nodes.rpc.wire.frames import MOST_TEXT_BYTES

try:
    from opentelemetry import context, propagate, trace
    from opentelemetry.context import Context
    from opentelemetry.trace import Span, SpanKind, Status, StatusCode, TracerProvider
except ModuleNotFoundError as error:
    raise missing_extra(error, "flowctl.nodes.rpc.tracing", "tracing") or error from error

_SYSTEM: Final = "flowctl"
_NAME: Final = "flowctl.rpc"
_AS_IT_IS: Final[dict[str, Any]] = {"record_exception": False, "set_status_on_exception": False}


def trace_node(node: RpcNode, *, tracer_provider: TracerProvider | None = None) -> None:
    """Have each call of a node, and each handler that runs for others, be a span; before the start.

    A span is named as its command; its attributes are ``rpc.system``, ``rpc.service`` (the category), ``rpc.method``
    and, of one that failed, ``rpc.flowctl.code``. Add what else wraps handlers or calls before this, if it is to
    be outside of the span.

    Args:
        node: whose.
        tracer_provider: where spans go. None: the global one.

    Raises:
        LocalProtocolError: the node was started.
    """
    spans = _Spans(trace.get_tracer(_NAME, tracer_provider=tracer_provider))
    node.add_caller_middleware(spans.around_call)
    node.add_middleware(spans.around_handler)


@dataclass(frozen=True)
class _Spans:
    _tracer: trace.Tracer

    @contextmanager
    def _span(self, command: str, kind: SpanKind, parent: Context | None = None) -> Iterator[Span]:
        category, _, name = command.partition(".")
        attributes = {"rpc.system": _SYSTEM, "rpc.service": category, "rpc.method": name}
        current = self._tracer.start_span(command, parent, kind, attributes)
        try:
            yield current
        except Exception as error:
            code = error.code if isinstance(error, RpcError) else type(error).__name__
            current.set_attribute("rpc.flowctl.code", code)
            current.set_status(Status(StatusCode.ERROR, str(error)[:MOST_TEXT_BYTES]))
            raise
        finally:
            current.end()

    def around_call(self, make: Caller) -> Caller:
        async def call(asked: RpcCall) -> Any:
            with self._span(asked.command, SpanKind.CLIENT) as current, trace.use_span(current, **_AS_IT_IS):
                propagate.inject(asked.metadata)
                return await make(asked)

        async def stream(asked: RpcCall) -> AsyncIterator[Any]:
            # Not the current one between items: what takes them runs in this context too.
            with self._span(asked.command, SpanKind.CLIENT) as current:
                propagate.inject(asked.metadata, trace.set_span_in_context(current))
                async with aclosing(make(asked)) as items:
                    async for item in items:
                        yield item

        return stream if kind_of(make) is HandlerKind.STREAM else call

    @contextmanager
    def _serves(self, message: RpcMessage) -> Iterator[None]:
        try:
            parent = propagate.extract(_believed(message.metadata))
        except Exception:  # noqa: BLE001  (what a peer says of its trace costs nobody his request)
            parent = Context()
        name = message.command.decode(errors="replace")
        with self._span(name, SpanKind.SERVER, parent) as current:
            token = context.attach(trace.set_span_in_context(current, parent))  # with the baggage that came
            try:
                yield
            finally:
                context.detach(token)

    def around_handler(self, handler: Handler) -> Handler:
        def plain(message: RpcMessage) -> Any:
            with self._serves(message):
                return handler(message)

        async def coroutine(message: RpcMessage) -> Any:
            with self._serves(message):
                return await handler(message)

        async def stream(message: RpcMessage) -> AsyncIterator[Any]:
            with self._serves(message):
                async with aclosing(handler(message)) as items:
                    async for item in items:
                        yield item

        kinds = {HandlerKind.PLAIN: plain, HandlerKind.COROUTINE: coroutine, HandlerKind.STREAM: stream}
        return kinds[kind_of(handler)]


def _believed(metadata: dict[str, str]) -> dict[str, str]:
    """Return what propagators may read: they log what they find, and take long for many blanks."""
    return {name: " ".join(text.split()) for name, text in metadata.items() if text.isascii() and text.isprintable()}
