"""Parameter sets in front of key frames: which message gets which, where, and which is left as it is."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowctl.core.flow.state import MessageClass
from flowctl.wire.rtmp.media.media import inspect
from flowctl.wire.rtmp.media.parameters import with_parameter_sets

VIDEO = 9
SPS, PPS = "0000000567640028ac", "0000000468ebe3cb"
AVC_HEADER = "1700000000" + "01640028ffe1" + "0005" + SPS[8:] + "01" + "0004" + PPS[8:] + "fdf8f800"
IDR, SEI, AVC_DELIMITER, SLICE = "00000002" + "6588", "00000003" + "0605ff", "00000002" + "09f0", "00000002" + "419a"
VPS, HSPS, HPPS = "000000034001aa", "000000034201bb", "000000034401cc"
HVC_CONFIG = "01" + "00" * 20 + "0f" + "04"
HVC_CONFIG += "".join(f"{0x80 | kind:02x}0001000{(len(unit) - 8) // 2}{unit[8:]}" for kind, unit in
                      [(32, VPS), (33, HSPS), (34, HPPS), (39, "000000024e01")])  # fmt: skip
HVC_HEADER = "9068766331" + HVC_CONFIG
CRA, HVC_DELIMITER = "000000032a01ff", "00000003460150"


@pytest.mark.parametrize(
    ("frame", "header", "expected"),
    [
        (f"1701000050 {SEI} {IDR}", AVC_HEADER, f"1701000050 {SPS} {PPS} {SEI} {IDR}"),
        (f"1701000050 {AVC_DELIMITER} {SEI} {IDR} {IDR}", AVC_HEADER,
         f"1701000050 {AVC_DELIMITER} {SPS} {PPS} {SEI} {IDR} {IDR}"),
        (f"1701000000 {SEI} {SLICE}", AVC_HEADER, f"1701000000 {SPS} {PPS} {SEI} {SLICE}"),  # a recovery point
        (f"91 61766331 000050 {IDR}", AVC_HEADER, f"91 61766331 000050 {SPS} {PPS} {IDR}"),
        (f"93 61766331 {IDR}", AVC_HEADER, f"93 61766331 {SPS} {PPS} {IDR}"),
        # ModEx: 3 octets of nanoseconds in front of the FourCC.
        (f"97 02 00000a 01 61766331 000050 {IDR}", AVC_HEADER, f"97 02 00000a 01 61766331 000050 {SPS} {PPS} {IDR}"),
        (f"91 68766331 000000 {CRA}", HVC_HEADER, f"91 68766331 000000 {VPS} {HSPS} {HPPS} {CRA}"),
        (f"93 68766331 {HVC_DELIMITER} {CRA}", HVC_HEADER, f"93 68766331 {HVC_DELIMITER} {VPS} {HSPS} {HPPS} {CRA}"),
        (f"1c01000000 {CRA}", HVC_HEADER, f"1c01000000 {VPS} {HSPS} {HPPS} {CRA}"),  # before there were FourCCs
    ],
)  # fmt: skip
def test_key_frame_gets_the_parameter_sets_of_its_header(frame, header, expected):
    made = with_parameter_sets(bytes.fromhex(frame), bytes.fromhex(header))
    assert made == bytes.fromhex(expected)
    assert inspect(VIDEO, made) == inspect(VIDEO, bytes.fromhex(frame))
    assert inspect(VIDEO, made).message_class is MessageClass.KEY
    assert with_parameter_sets(made, bytes.fromhex(header)) is made


@pytest.mark.parametrize(
    ("frame", "header"),
    [
        (f"1701000000 {SPS} {PPS} {IDR}", AVC_HEADER),
        (f"1701000000 {SEI} {SPS} {IDR}", AVC_HEADER),
        (f"1701000000 {SEI}", AVC_HEADER),  # no picture
        (f"1701000000 0000ffff {IDR[8:]}", AVC_HEADER),  # a length beyond the message
        (f"1701000000 00000000 {IDR}", AVC_HEADER),
        ("1701000000", AVC_HEADER),
        ("1702000000", AVC_HEADER),
        (AVC_HEADER, AVC_HEADER),
        (f"96 01 61766331 02 000050 {IDR}", AVC_HEADER),  # of a track
        (f"1701000000 {IDR}", HVC_HEADER),
        (f"91 61763031 {IDR}", AVC_HEADER),
        (f"1701000000 {IDR}", f"1701000000 {IDR}"),
        (f"1701000000 {IDR}", AVC_HEADER.replace("28ffe1", "28fde1")),  # lengths of two octets
        (f"1701000000 {IDR}", AVC_HEADER[:-16]),  # cut within its last set
        (f"1701000000 {IDR}", AVC_HEADER[:20]),
        (f"1701000000 {IDR}", "1700000000 0164002823e0 00"),  # no sets
        (f"1701000000 {IDR}", f"1700000000 0164002823e1 2000 67 {'00' * 8191} 00"),  # far too long
        (
            f"1701000000 {IDR}",
            f"1700000000 0164002823e1 0258 67 {'00' * 599} 00",
        ),  # more than a picture this short gets
        (f"91 68766331 000000 {CRA}", HVC_HEADER[:60]),
        (f"91 68766331 000000 {CRA}", HVC_HEADER.replace("000f04", "000d04")),
        ("", AVC_HEADER),
        (f"1701000000 {IDR}", ""),
    ],
)
def test_message_when_there_is_nothing_to_add_is_the_same_object(frame, header):
    message = bytes.fromhex(frame)
    assert with_parameter_sets(message, bytes.fromhex(header)) is message


HEADS = st.sampled_from(["1701000000", "91617663310000", "9161766331000000", "9168766331000000", "1c01000000"])


@given(
    st.builds(lambda head, rest: bytes.fromhex(head) + rest, HEADS, st.binary(max_size=60)),
    st.builds(lambda head, rest: bytes.fromhex(head) + rest, st.sampled_from([AVC_HEADER[:22], HVC_HEADER[:56]]),
              st.binary(max_size=60)),
)  # fmt: skip
def test_any_octets_lose_nothing_and_get_no_more_than_the_header_has(frame, header):
    made = with_parameter_sets(frame, header)
    assert len(made) - len(frame) <= 2 * len(header)
    left = iter(made)
    assert all(octet in left for octet in frame)
