"""A server that acknowledges messages: ``python -m messenger.server KIND ADDRESS [STORE]``, until it is ended.

KIND is ``memory`` or ``durable`` (`nodes.messenger.messenger.Messenger`, whose handler does nothing; durable with a
file at STORE), or ``zmq.asyncio``, which echoes the number of each message, with no more than that: a message that is
lost is lost.
"""

from __future__ import annotations

import asyncio
import json
import sys

import zmq
import zmq.asyncio

from flowctl.nodes.messenger.message import Destination
from flowctl.nodes.messenger.messenger import Messenger
from flowctl.nodes.messenger.store import open_store
from rpc.server import MAX_SOCKETS, loop_factory


def ready() -> None:
    """Tell who started us that we listen."""
    print(json.dumps({"ready": True}), flush=True)


async def ours(address: str, store: str | None) -> None:
    """Acknowledge by our messenger, on the running loop."""
    async with Messenger(None, "server", open_store=open_store(store) if store else None) as messenger:
        messenger.listen_for_connection(Destination("server", address), "server", lambda _messenger, _message: None)
        ready()
        await asyncio.Event().wait()


async def zmq_asyncio(address: str) -> None:
    """Acknowledge by the sockets that pyzmq has for asyncio."""
    context = zmq.asyncio.Context.instance()
    context.set(zmq.MAX_SOCKETS, MAX_SOCKETS)
    socket = context.socket(zmq.ROUTER)
    socket.bind(address)
    ready()
    while True:
        identity, _, message = await socket.recv_multipart()
        await socket.send_multipart([identity, b"server", b"", b"%b-0-2-" % message.partition(b"-")[0]])


def main(kind: str, address: str, store: str | None = None) -> None:
    """Serve until ended."""
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        runner.run(zmq_asyncio(address) if kind == "zmq.asyncio" else ours(address, store))


if __name__ == "__main__":
    main(*sys.argv[1:])
