"""Secrets that are sent through every door of a server: none is in anything that leaves its process."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import random
import socket
from pathlib import Path

from cli_kit import served
from pyarrow import parquet

from flowctl.control.client import call_operation
from flowctl.errors import FlowctlError
from flowctl.load.hostile.peer import Peer, PeerGoneError, RefusedError
from flowctl.wire.rtmp.amf import amf0
from flowctl.wire.rtmp.wire import TYPE_DATA_AMF0, Message

MARK = "kanarie7d1f"
"""In every secret, with a number behind it that tells by which door it went in."""


class Marks:
    """Makes marked secrets, and remembers what each was."""

    def __init__(self):
        self.doors = {}

    def __call__(self, door):
        mark = f"{MARK}x{len(self.doors):02d}x"
        self.doors[mark] = door
        return mark

    def found_in(self, data):
        """Return the doors whose secret is in `data`."""
        return sorted(door for mark, door in self.doors.items() if mark.encode() in data)


async def peer_of(port, **connect):
    peer = Peer("127.0.0.1", port, app=connect.pop("app", "live"), rng=random.Random(1))
    await peer.open()
    await peer.handshake()
    try:
        await peer.connect(**connect)
    except RefusedError:
        peer.close()
        raise
    return peer


async def through_rtmp(port, mark):
    """Send secrets wherever clients of RTMP put them, let in and refused, well formed and not."""
    peers = []

    async def tried(step):
        with contextlib.suppress(PeerGoneError, RefusedError, FlowctlError, TimeoutError, OSError):
            async with asyncio.timeout(1):
                await step

    async def connected(**connect):
        with contextlib.suppress(PeerGoneError, RefusedError, FlowctlError, TimeoutError, OSError):
            async with asyncio.timeout(1):
                peers.append(await peer_of(port, **connect))
                return peers[-1]
        return None

    host = f"127.0.0.1:{port}"
    members = {
        "pageUrl": f"https://page.example/?token={mark('pageUrl')}",
        "swfUrl": f"https://page.example/a.swf?key={mark('swfUrl')}",
        "flashVer": f"agent/1 https://a.example/?token={mark('flashVer')}",
    }
    for verb in ("publish", "play"):
        for name in (
            f"room?key={mark(f'key of {verb}')}",
            f"room?token={mark(f'token of {verb}')}&u={mark(f'any parameter of {verb}')}",
            f"room?{mark(f'bare query of {verb}')}",
            f"room{chr(10)}?key={mark(f'refused name of {verb}')}",
            f"{'n' * 300}?secret={mark(f'long name of {verb}')}",
            f"a?b?key={mark(f'two queries of {verb}')}",
        ):
            peer = await connected(**members)
            if peer is not None:
                await tried(getattr(peer, verb)(name))
    user = f"rtmp://user:{mark('password in tcUrl')}@{host}/live?secret={mark('query of tcUrl')}"
    for connect in (
        {"tc_url": user},
        {"app": f"live?token={mark('query of app')}", "tc_url": f"rtmp://{host}/live"},
        {"app": f"live?authmod=adobe&user=ann&response={mark('response of Adobe')}&opaque=x&challenge=y"},
        {"app": f"live?authmod=adobe&user={mark('user of Adobe, wrong')}"},
        {"tc_url": f"nonsense?key={mark('tcUrl that is none')}"},
        {"tc_url": f"rtmp://[{mark('host that is none')}/live"},
    ):
        peer = await connected(**connect)
        if peer is not None:
            await tried(peer.publish("fine"))
    peer = await connected()
    if peer is not None:
        await tried(peer.command(f"nope?key={mark('name of a command')}", f"key={mark('argument of a command')}"))
        await tried(peer.command("FCPublish", None, f"room?key={mark('FCPublish')}"))
        await tried(peer.command("releaseStream", None, f"room?key={mark('releaseStream')}"))
        await tried(peer.publish("fine2"))
        metadata = amf0.encode("@setDataFrame", "onMetaData", {"key": mark("metadata")})
        await tried(peer.send(Message(5, 0, TYPE_DATA_AMF0, peer.stream_id, metadata)))
        await tried(peer.check_alive())
    for peer in peers:
        peer.close()


def through_http(address, mark):
    """The same over HTTP: path, query, headers, and requests that are wrong."""
    host, _, port = address.rpartition(":")
    headers = {
        "Authorization": f"Bearer {mark('bearer')}",
        "Cookie": f"token={mark('cookie')}",
        "Referer": f"https://page.example/?token={mark('referer')}",
        "User-Agent": f"player https://a.example/?key={mark('user agent')}",
    }
    for path in (
        f"/live/none.flv?token={mark('query of HTTP')}&u={mark('any parameter of HTTP')}",
        f"/live/none.flv?{mark('bare query of HTTP')}",
        f"/nowhere?key={mark('query of no path')}",
        f"/live/none.m3u8?token={mark('query of HLS')}",
    ):
        client = http.client.HTTPConnection(host, int(port), timeout=0.5)
        with contextlib.suppress(OSError, http.client.HTTPException):
            client.request("GET", path, headers=headers)
            client.getresponse().read(100)
        client.close()
    for raw in (
        f"GET /live/x.flv?key={mark('wrong version')} HTTP/9.9\r\n\r\n",
        f"NO SPACE ?key={mark('wrong request line')} x y z\r\n\r\n",
        f"GET / HTTP/1.1\r\nAuthorization Bearer {mark('wrong header')}\r\n\r\n",
    ):
        with socket.create_connection((host, int(port)), timeout=1) as sock, contextlib.suppress(OSError):
            sock.sendall(raw.encode())
            sock.recv(4096)


def through_control(control, mark):
    """Calls of operations, right and wrong, with secrets in their arguments; returns what was answered."""
    answers = []
    for name, given in (
        ("stats", {"stream": f"live/room?key={mark('stream of stats')}"}),
        ("kick", {"stream": f"live/room?key={mark('stream of kick')}", "reason": f"token={mark('reason of kick')}"}),
        ("ban", {"network": "192.0.2.1", "reason": f"sent key={mark('reason of ban')}"}),
        ("limits", {"soft": f"key={mark('soft')}"}),
    ):
        with contextlib.suppress(FlowctlError):
            call_operation(control, name, given)
    for name, given in (
        ("stats", {"viewers": "all"}),
        ("changes", {}),
        ("streams", {}),
        ("connections", {}),
        ("events", {}),
    ):
        with contextlib.suppress(FlowctlError):
            answers.append(json.dumps(call_operation(control, name, given)))
    return "\n".join(answers).encode()


def through_admin(address, mark):
    """Ask the HTTP API, with secrets in wrong places; return all that it says."""
    host, _, port = address.rpartition(":")
    found = []
    for path in (
        "/metrics",
        "/api/v1/streams",
        "/api/v1/connections",
        "/api/v1/stats",
        "/api/v1/bans",
        "/api/v1/changes",
        "/",
        f"/api/v1/nothing?token={mark('query of the API')}",
        f"/api/v1/connections?sort=key%3D{mark('argument of the API')}",
    ):
        client = http.client.HTTPConnection(host, int(port), timeout=10)
        client.request("GET", path, headers={"Authorization": f"Bearer {mark('bearer of the API')}"})
        answer = client.getresponse()
        body = answer.read()
        if answer.status < 400:  # an error may quote to the caller what he sent
            found.append(body)
        client.close()
    return b"\n".join(found)


def records_of(folder):
    found = [repr(item.read_bytes()) for item in sorted(Path(folder).rglob("*")) if item.is_file()]
    for path in sorted(Path(folder).rglob("*.parquet")):
        table = parquet.read_table(path)
        found += [json.dumps(table.to_pylist(), default=repr), repr(table.schema.metadata), repr(path)]
    return "\n".join(found).encode()


def free_port():
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


def test_secrets_when_sent_through_every_door_leave_by_none(tmp_path, monkeypatch):
    monkeypatch.setenv("FLOWCTL_LOG_LEVEL", "debug")
    mark, http_address, admin_address = Marks(), f"127.0.0.1:{free_port()}", f"127.0.0.1:{free_port()}"
    hook = f"http://me:{mark('password of a hook')}@127.0.0.1:9/hook?token={mark('query of a hook')}"
    config = tmp_path / "flowctl.toml"
    config.write_text(
        f"on_publish = ['{hook}']\non_end = ['{hook}']\nhook_failure = 'allow'\nhttp = '{http_address}'\n"
        f"admin = '{admin_address}'\nevents = '{tmp_path / 'events'}'\nevents_streams = 'plain'\nflights = '100%'\n"
    )
    with served("live", "--config", str(config), "--log-json") as server:
        asyncio.run(through_rtmp(server.ready["port"], mark))
        through_http(http_address, mark)
        said = through_control(server.ready["control"][0], mark)
        pages = through_admin(admin_address, mark)
        title = Path(f"/proc/{server.process.pid}/cmdline").read_bytes()
        threads = b"".join(item.read_bytes() for item in Path(f"/proc/{server.process.pid}/task").glob("*/comm"))
        server.stop()
    assert server.status == 0
    left = {
        "log": server.log.encode(),
        "answers": said,
        "pages": pages,
        "records": records_of(tmp_path / "events"),
        "title": title + threads,
        "ready": json.dumps(server.ready).encode(),
    }
    assert {where: mark.found_in(data) for where, data in left.items()} == {where: [] for where in left}
    assert len(left["log"]) > 2000
    assert len(left["records"]) > 2000
    assert len(said) > 500
    assert b"flowctl_" in pages


async def named_through_rtmp(port, mark):
    """Play and publish under applications and names that carry secrets, as an agent that carries one."""
    asked = (
        ("live", f"room%3Fkey%3D{mark('encoded query')}", "x"),
        ("live", f"room;{mark('parameter of a path')}", "x"),
        ("live", f"room%2526token%253D{mark('query encoded twice')}", "x"),
        (f"live%3Fkey%3D{mark('encoded query of an application')}", "room", "x"),
        (f"live;key:{mark('parameter of an application')}", "room", "x"),
        ("live", "plain", f"OBS rtmp://h/live/{mark('address in an agent')}"),
        ("live", "plain", f"player Bearer {mark('token in an agent')}"),
        ("live", "plain", f"player rtmp%3A%2F%2Fh/{mark('encoded address in an agent')}"),
    )
    for app, name, agent in asked:
        for verb in (Peer.play, Peer.publish):
            async with asyncio.timeout(5):
                with contextlib.suppress(RefusedError):  # a query in the name of an application, at once
                    peer = await peer_of(port, app=app, flashVer=agent)
                    with contextlib.closing(peer):
                        await verb(peer, name)


def named_through_http(address, mark):
    """Ask over HTTP for paths that carry secrets, as agents that do."""
    for path, agent in (
        (f"/live%3Fkey%3D{mark('encoded query over HTTP')}/room.flv", "x"),
        (f"/live;{mark('parameter of a first part')}/room;key:{mark('parameter over HTTP')}.flv", "x"),
        ("/live/plain.flv", f"Mozilla Basic {mark('password in an agent over HTTP')}"),
    ):
        client = http.client.HTTPConnection(address, timeout=0.5)
        with contextlib.suppress(OSError, http.client.HTTPException):
            client.request("GET", path, headers={"User-Agent": agent})
            client.getresponse().read(100)
        client.close()


def test_names_when_they_carry_secrets_are_hashed_in_log_and_records_alike(tmp_path, monkeypatch):
    monkeypatch.setenv("FLOWCTL_LOG_LEVEL", "debug")
    mark, address, folder = Marks(), f"127.0.0.1:{free_port()}", tmp_path / "events"
    asked = ("--http", address, "--events", str(folder), "--events-streams", "plain")
    with served("live", *asked) as server:
        asyncio.run(named_through_rtmp(server.ready["port"], mark))
        named_through_http(address, mark)
        server.stop()
    assert server.status == 0
    assert mark.found_in(server.log.encode()) == []
    assert mark.found_in(records_of(folder)) == []
    assert "stream=live/plain" in server.log
    assert "stream=live/h:" in server.log
