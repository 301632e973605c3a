"""Composition times of pictures: put into a message that says the same of all else, as `inspect` reads it."""

from __future__ import annotations

import pytest

from flowctl.wire.rtmp.media.composition import is_composed, with_composition
from flowctl.wire.rtmp.media.media import inspect
from flowctl.wire.rtmp.wire import TYPE_AUDIO, TYPE_VIDEO

NAL = b"\x00\x00\x00\x02\x41\x9a"


@pytest.mark.parametrize(
    "payload",
    [
        b"\x27\x01\x00\x00\x50" + NAL,
        b"\x2c\x01\x00\x00\x50" + NAL,
        b"\xa1hvc1\x00\x00\x50" + NAL,
        b"\xa3hvc1" + NAL,
        b"\xa1avc1\x00\x00\x50" + NAL,
    ],
)
@pytest.mark.parametrize(("asked", "told"), [(0, 0), (7, 7), (-5, 0), (1 << 30, 0x7FFFFF)])
def test_picture_when_given_another_composition_time_has_that_and_is_the_same(payload, asked, told):
    before, made = inspect(TYPE_VIDEO, payload), with_composition(payload, inspect(TYPE_VIDEO, payload), asked)
    after = inspect(TYPE_VIDEO, made)
    assert (after.message_class, after.codec, after.composition_ms) == (before.message_class, before.codec, told)
    assert made.endswith(NAL)


@pytest.mark.parametrize(
    ("type_id", "payload"),
    [
        (TYPE_VIDEO, b"\x17\x00\x00\x00\x00\x01\x64\x00\x1f\xff"),  # a header
        (TYPE_VIDEO, b"\xa1av01\x12\x00\x0a"),  # a codec without
        (TYPE_VIDEO, b"\x22" + NAL),  # H.263
        (TYPE_VIDEO, b"\x27\x01"),  # cut
        (TYPE_AUDIO, b"\xaf\x01" + NAL),
    ],
)
def test_message_without_a_composition_time_is_given_none(type_id, payload):
    info = inspect(type_id, payload)
    assert not is_composed(payload, info)
    assert with_composition(payload, info, 40) is None
