"""Keys as text: the four encodings there and back, and what is no key."""

from __future__ import annotations

import base64

import pytest
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st

from flowctl.errors import ConfigError
from flowctl.wire.zmtp.keytext import KEY_BYTES, LETTERS, KeyEncoding, decode_key, encode_key, parse_key

KEYS = st.binary(min_size=KEY_BYTES, max_size=KEY_BYTES)


@settings(max_examples=200, deadline=None)
@given(KEYS)
def test_keys_when_encoded_and_decoded_are_the_same(key):
    for encoding in KeyEncoding:
        text = encode_key(key, encoding)
        assert (LETTERS[encoding], key, key) == (len(text), decode_key(text, encoding), parse_key(text, "key"))


@settings(max_examples=50, deadline=None)
@given(KEYS)
def test_keys_when_in_z85_and_base64_are_those_of_others(key):
    assert base64.b64encode(key).decode() == encode_key(key, KeyEncoding.BASE64) + "="
    public, secret = zmq.curve_keypair()
    for text in (public.decode(), secret.decode()):
        assert text == encode_key(parse_key(text, "key"), KeyEncoding.Z85)


def test_keys_when_in_base32z_are_those_of_the_maintainers():
    key = bytes.fromhex("f16ba5591039f089b42a834175093094074d0d937a79e53e5ce730f946e14b88")
    text = "6fi4kseo88aeupbkopyzknjo1odw4dcuxjh6kx1hhhax1tzbjqry"
    assert text == encode_key(key, KeyEncoding.BASE32Z)
    assert key == decode_key(text.upper(), KeyEncoding.BASE32Z)


@pytest.mark.parametrize(
    "text", ["", "g" * 64, "0" * 63, "l" * 52, "v" * 52, "é" * 64, "-" * 43, "~" * 40, "#" * 40, "0" * 64 + "\n"]
)
def test_text_when_no_key_is_refused_without_showing_it(text):
    with pytest.raises(ConfigError) as caught:
        parse_key(text, "the secret key")
    assert f"the secret key is a text of {len(text)} letters" in str(caught.value)
    assert not text or text not in str(caught.value)
