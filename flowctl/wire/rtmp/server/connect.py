"""What a client says when it connects, as Adobe RTMP 1.0 section 7.2.1.1 and Enhanced RTMP have it.

Members of the command object are all optional and of any type: what is missing or odd counts as not said.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Final

from flowctl.errors import RemoteProtocolError
from flowctl.wire.rtmp import commands
from flowctl.wire.rtmp.adobe_auth import LoginResult, split_answer
from flowctl.wire.rtmp.events import ConnectRequested
from flowctl.wire.rtmp.messages import Command
from flowctl.wire.rtmp.session_config import ServerSessionConfig
from flowctl.wire.rtmp.url import ENCODED_CHARS, RtmpUrl, from_connect, unquote

_SHARED_ADDRESSES: Final = 256
_SHARED_CHARS: Final = 256
"""How many addresses of connect commands are shared between peers, and how long each may be."""
_OWN_MARKS: Final = ("?", "@", "vhost...")
"""What an address contains that has a query or credentials ("app...vhost...name" is an old spelling of a query)."""

_ALL_CODECS: Final = frozenset({"avc1", "hvc1", "av01", "vp08", "vp09", "vvc1"})
_CAN_DECODE: Final = 1
_ENHANCED: Final = ("fourCcList", "videoFourCcInfoMap", "audioFourCcInfoMap")
_ADDRESS_CHARS: Final = 65536
_PAGE_CHARS: Final = 2048
"""Most characters that are read of an address, and of the address of a page."""


def read_connect(command: Command, config: ServerSessionConfig, now: float) -> ConnectRequested | LoginResult:
    """Return what a connect asks for, or the refusal where there are credentials that it does not prove to know."""
    # The object has been seen as an ECMA array, and behind a null in its place.
    values = commands.first_properties([command.object, *command.arguments])
    if not values:
        raise RemoteProtocolError("connect has no command object", code="bad-connect")
    tc_url, answer = split_answer(unquote(commands.text(commands.member(values, "tcUrl"), _ADDRESS_CHARS)))
    app, app_answer = split_answer(unquote(commands.text(commands.member(values, "app"), _ADDRESS_CHARS)))
    user = None
    if config.authenticator is not None:
        verdict = config.authenticator.check(answer or app_answer, now)
        if not verdict.accepted:
            return verdict
        user = verdict.user
    url = _address(tc_url, app, ENCODED_CHARS * config.name_max_chars)
    caps_ex = int(commands.number(commands.member(values, "capsEx"), 0)) & 0xFFFFFFFF
    return ConnectRequested(
        tc_url=tc_url,
        url=url,
        flash_ver=commands.shared(commands.text(commands.member(values, "flashVer"))),
        # Anything but exactly 3 (null, undefined and missing occur) means AMF0, which all of them read.
        object_encoding=3 if commands.member(values, "objectEncoding") == 3 else 0,
        page_url=commands.text(commands.member(values, "pageUrl"), _PAGE_CHARS),
        user=user,
        enhanced=bool(caps_ex or any(commands.member(values, name) for name in _ENHANCED)),
        caps_ex=caps_ex,
        video_codecs=_video_codecs(values),
    )


def _video_codecs(values: dict[str, Any]) -> frozenset[str]:
    """Return the codecs of pictures that a client says it decodes: in the map of Enhanced RTMP v2, else in the list."""
    told = commands.member(values, "videoFourCcInfoMap")
    if isinstance(told, dict):
        said = [name for name, bits in told.items() if int(commands.number(bits, 0)) & _CAN_DECODE]
    else:
        told = commands.member(values, "fourCcList")
        said = [name for name in told if isinstance(name, str)] if isinstance(told, list) else []
    return _shared_codecs(_ALL_CODECS if "*" in said else _ALL_CODECS.intersection(said))


@lru_cache(1 << len(_ALL_CODECS))
def _shared_codecs(codecs: frozenset[str]) -> frozenset[str]:
    """Return one object for all clients that say the same."""
    return codecs


def _address(tc_url: str, app: str, name_max_chars: int) -> RtmpUrl:
    """Return the address that a connect states: one object, parsed once, for all clients of the same address.

    One with a query or with credentials is its peer's own, and must not outlive the connection.
    """
    text = tc_url + app
    if len(text) > _SHARED_CHARS or any(mark in text for mark in _OWN_MARKS):
        return from_connect(tc_url or None, app or None, name_max_chars=name_max_chars)
    return _shared_address(tc_url, app, name_max_chars)


@lru_cache(_SHARED_ADDRESSES)
def _shared_address(tc_url: str, app: str, name_max_chars: int) -> RtmpUrl:
    return from_connect(tc_url or None, app or None, name_max_chars=name_max_chars)
