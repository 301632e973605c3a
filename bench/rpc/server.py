"""A server that echoes one part: ``python -m rpc.server KIND ADDRESS``; a JSON line when it listens, then until ended.

KIND is ``async`` or ``sync`` (`nodes.rpc.RpcNode`, by its handler), ``zmq.asyncio``, ``rpyc``, or ``bare``: a loop of
pyzmq that receives and sends, and does nothing else. ADDRESS is ``tcp://127.0.0.1:PORT`` or ``ipc://PATH``.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import sys
from collections.abc import Callable
from typing import Final

import zmq
import zmq.asyncio

from flowctl.nodes.rpc.message import RpcMessage
from flowctl.nodes.rpc.node import RpcNode

COMMAND: Final = b"bench.echo"
REPLY: Final = b"REPLY"
FRAMES: Final = 4
"""Of a request, as a ROUTER gets it."""
MAX_SOCKETS: Final = 10_000


def ready() -> None:
    """Tell who started us that we listen."""
    print(json.dumps({"ready": True}), flush=True)


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop]:
    """Return the maker of loops for all who run on one: uvloop's where it is installed."""
    try:
        factory: Callable[[], asyncio.AbstractEventLoop] = importlib.import_module("uvloop").new_event_loop
    except ImportError:
        return asyncio.new_event_loop
    return factory


async def ours(address: str, *, in_threads: bool) -> None:
    """Echo by our node, on the running loop."""
    node = RpcNode()

    async def echo(message: RpcMessage) -> bytes:
        return message.data[0]

    def echo_sync(message: RpcMessage) -> bytes:
        return message.data[0]

    node.add_category("bench")
    node.add_request_command("bench", "echo", echo_sync if in_threads else echo)
    node.listen_plain(address)
    async with node:
        ready()
        await asyncio.Event().wait()


async def zmq_asyncio(address: str) -> None:
    """Echo by the sockets that pyzmq has for asyncio."""
    socket = zmq.asyncio.Context.instance().socket(zmq.ROUTER)
    socket.bind(address)
    ready()
    while True:
        frames = await socket.recv_multipart()
        if len(frames) == FRAMES and frames[1] == COMMAND:
            await socket.send_multipart([frames[0], REPLY, frames[2], frames[3]])


def bare(address: str) -> None:
    """Echo by a loop that waits in ZeroMQ."""
    with zmq.Context() as context, context.socket(zmq.ROUTER) as socket:
        socket.bind(address)
        ready()
        while True:
            frames = socket.recv_multipart()
            if len(frames) == FRAMES and frames[1] == COMMAND:
                socket.send_multipart([frames[0], REPLY, frames[2], frames[3]])


def rpyc_server(address: str) -> None:
    """Echo by RPyC: a thread per connection, as its manual shows it."""
    rpyc = importlib.import_module("rpyc")
    threaded = importlib.import_module("rpyc.utils.server").ThreadedServer

    class Echo(rpyc.Service):  # type: ignore[misc,name-defined]  # RPyC has no types
        def exposed_echo(self, part: bytes) -> bytes:
            return part

    if address.startswith("ipc://"):
        server = threaded(Echo, socket_path=address.removeprefix("ipc://"))
    else:
        host, _, port = address.removeprefix("tcp://").rpartition(":")
        server = threaded(Echo, hostname=host, port=int(port))
    ready()
    server.start()


def main(kind: str, address: str) -> None:
    """Serve until ended."""
    zmq.Context.instance().set(zmq.MAX_SOCKETS, MAX_SOCKETS)
    if kind == "bare":
        bare(address)
    elif kind == "rpyc":
        rpyc_server(address)
    else:
        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            runner.run(zmq_asyncio(address) if kind == "zmq.asyncio" else ours(address, in_threads=kind == "sync"))


if __name__ == "__main__":
    main(*sys.argv[1:3])
