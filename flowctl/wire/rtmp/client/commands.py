"""What a client asks of an RTMP server, in the form that OBS and FFmpeg use, since servers are made for them."""

from __future__ import annotations

from typing import Any, Final

from flowctl.wire.rtmp.amf import amf0
from flowctl.wire.rtmp.amf.values import EcmaArray
from flowctl.wire.rtmp.session_config import ClientSessionConfig
from flowctl.wire.rtmp.url import DEFAULT_APP, RtmpUrl

_AUDIO_FOURCCS: Final = frozenset({"Opus", "fLaC", "ac-3", "ec-3", "mp4a", ".mp3"})
_CAN_ALL: Final = 7.0
"""FourCcInfoMask: can decode, encode and forward (Enhanced RTMP v2)."""

# Bits of section 7.2.1.1 as FFmpeg sets them when it plays: every codec but the two reserved, and all of video.
_AUDIO_CODECS: Final = 4071.0
_VIDEO_CODECS: Final = 252.0
_CAPABILITIES: Final = 15.0


SET_DATA_FRAME: Final = amf0.encode("@setDataFrame")
"""What stands before metadata and other script data that a server is to keep and pass on."""


def connect_object(
    config: ClientSessionConfig, url: RtmpUrl, *, parameters: str, app: str | None, playing: bool
) -> dict[str, Any]:
    name = ("" if url.app == DEFAULT_APP else url.app) if app is None else app
    values: dict[str, Any] = {
        "app": name + parameters,
        "type": "nonprivate",
        "flashVer": config.flash_version,
        "tcUrl": url.tc_url + parameters,
    }
    if playing:
        values |= {
            "fpad": False,
            "capabilities": _CAPABILITIES,
            "audioCodecs": _AUDIO_CODECS,
            "videoCodecs": _VIDEO_CODECS,
            "videoFunction": 1.0,
        }
    values["objectEncoding"] = 0.0
    if config.fourcc_list:
        codecs = dict.fromkeys(config.fourcc_list, _CAN_ALL)
        values |= {
            "fourCcList": list(config.fourcc_list),
            "videoFourCcInfoMap": {name: mask for name, mask in codecs.items() if name not in _AUDIO_FOURCCS},
            "audioFourCcInfoMap": {name: mask for name, mask in codecs.items() if name in _AUDIO_FOURCCS},
            "capsEx": float(config.caps_ex),
        }
    return values


def metadata_payload(values: dict[str, Any]) -> bytes:
    """Return the body of the data message by which a publisher sets its metadata, as OBS sends it."""
    return SET_DATA_FRAME + amf0.encode("onMetaData", EcmaArray(values))
