"""A price list of a FastAPI application under uvicorn, which sends itself, or hands its sockets over to flowctl.

Run by `web/asgi.py`; its lines are those of `prices.py`. By itself it sends as FastAPI's documents say, in a loop that
awaits each client. uvicorn runs with uvloop and httptools, as with its extra ``standard``.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import uvicorn
import uvloop
from fastapi import FastAPI, WebSocket
from starlette.websockets import WebSocketDisconnect

from flowctl import AdmissionLimits, Topic, WebSocketSession
from flowctl.asgi import Bridge, WebSocketProtocol
from programs.prices import Publisher, serve_on_uvloop

_START_LOOK_S = 0.01


class Shop:
    """The application."""

    def __init__(self) -> None:
        self.bridge = Bridge(admission=AdmissionLimits(connections_per_address=0, new_per_address_and_s=0))
        self.prices = Topic("prices")
        self.clients: set[WebSocket] = set()

    async def hand_over(self, websocket: WebSocket) -> None:
        """Have flowctl serve a client."""
        prices = self.prices

        class Browser(WebSocketSession):
            def accepted(self) -> None:
                self.follow(prices)

        await self.bridge.hand_over(websocket, Browser())

    async def keep(self, websocket: WebSocket) -> None:
        """Serve a client here."""
        await websocket.accept()
        self.clients.add(websocket)
        try:
            while True:
                await websocket.receive_text()
        except WebSocketDisconnect:
            pass
        finally:
            self.clients.discard(websocket)

    async def publish_to_topic(self, text: str) -> None:
        self.prices.publish(text)

    async def publish_to_each(self, text: str) -> None:
        for client in list(self.clients):
            await client.send_text(text)


@asynccontextmanager
async def run_shop(ws: str) -> AsyncIterator[Publisher]:
    """Run it under uvicorn with a protocol of WebSockets; ours has it hand its sockets over."""
    shop, hands_over = Shop(), ws == "flowctl"
    application = FastAPI(lifespan=shop.bridge.lifespan)
    application.websocket("/")(shop.hand_over if hands_over else shop.keep)
    protocol = WebSocketProtocol if hands_over else ws
    config = uvicorn.Config(
        application,
        port=0,
        ws=protocol,
        http="httptools",
        log_level="error",
        ws_per_message_deflate=False,
        backlog=1024,
    )
    server = uvicorn.Server(config)
    running = asyncio.create_task(server.serve())
    while not server.started:  # noqa: ASYNC110 - uvicorn has no event for it
        await asyncio.sleep(_START_LOOK_S)
    yield server.servers[0].sockets[0].getsockname()[1], shop.publish_to_topic if hands_over else shop.publish_to_each
    server.should_exit = True
    await running


def main() -> None:
    """Serve until the end of input."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("ws", choices=["flowctl", "wsproto", "websockets-sansio"])
    uvloop.run(serve_on_uvloop(run_shop(parser.parse_args().ws), patience_s=120.0))


if __name__ == "__main__":
    main()
