"""The smallest legal AAC-LC stream: stereo silence, in frames of any size.

How it works: a frame is a list of elements. A channel pair with no scale factor bands is silent and has six octets
together with the end mark; data stream elements, which decoders skip, carry whatever else the frame is to hold. As the
first element of a frame, a data stream element with fewer than 255 octets is aligned to octets by itself.

Source: ISO/IEC 14496-3 1.6.2.1 (AudioSpecificConfig), 4.4.2.1 (elements), 4.5.2 (raw data block).
"""

from __future__ import annotations

from typing import Final

from flowctl.errors import ConfigError
from flowctl.wire.media.tiny_h264 import BitWriter

FRAME_SAMPLES: Final = 1024
MAX_FRAME_BYTES: Final = 1536  # 6144 bits a channel, 4.5.3.1

SAMPLE_RATES: Final = (96000, 88200, 64000, 48000, 44100, 32000, 24000, 22050, 16000, 12000, 11025, 8000, 7350)
"""Rates by samplingFrequencyIndex (table 1.16)."""

_AAC_LC: Final = 2
_STEREO: Final = 2
_DATA_STREAM: Final = 0x80  # element 4, instance 0, not byte aligned
_MAX_ELEMENT_DATA: Final = 254  # one more needs a second length octet


def audio_specific_config(sample_rate: int) -> bytes:
    """Return the AudioSpecificConfig of AAC-LC stereo: 2 octets."""
    if sample_rate not in SAMPLE_RATES:
        raise ConfigError(f"sample_rate {sample_rate} is not one of {', '.join(map(str, SAMPLE_RATES))}")
    return BitWriter().u(_AAC_LC, 5).u(SAMPLE_RATES.index(sample_rate), 4).u(_STEREO, 4).u(0, 3).to_bytes()


def _make_silence() -> bytes:
    bits = BitWriter().u(1, 3).u(0, 4).u(1, 1)  # channel pair, instance 0, common window
    bits.u(0, 1).u(0, 2).u(0, 1).u(0, 6).u(0, 1)  # reserved, long window, shape, 0 scale factor bands, no prediction
    bits.u(0, 2)  # no mid/side coding
    for _ in range(_STEREO):
        bits.u(0, 8).u(0, 3)  # gain; no pulses, noise shaping, gain control
    return bits.u(7, 3).to_bytes()  # end of the frame


SILENCE: Final = _make_silence()
"""A silent channel pair and the end mark: the last octets of a frame."""


def data_element(data: bytes) -> bytes:
    """Return a data stream element with `data`, at most 254 octets; to stand in front of everything else."""
    return bytes((_DATA_STREAM, len(data))) + data


def padding(size: int) -> bytes:
    """Return data stream elements of `size` octets in total; of 1, which no element can have, none at all."""
    elements: list[bytes] = []
    left = size if size > 1 else 0
    while left:
        taken = min(left, _MAX_ELEMENT_DATA + 2)
        if left - taken == 1:
            taken -= 1
        elements.append(data_element(bytes(taken - 2)))
        left -= taken
    return b"".join(elements)
