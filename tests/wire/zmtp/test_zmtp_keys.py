"""Key pairs of CURVE: what belongs together, what is never shown, and files that only their owner can read."""

from __future__ import annotations

import errno
import os
import pickle
import stat
import traceback
from pathlib import Path

import pytest
import zmq.auth

from flowctl.errors import ConfigError
from flowctl.wire.zmtp.keys import KeyPair, public_of
from flowctl.wire.zmtp.keytext import KeyEncoding, encode_key


def test_keys_when_generated_belong_together():
    keys, others = KeyPair.generate(), KeyPair.generate()
    assert (32, 32, keys.public) == (len(keys.public), len(keys.secret), public_of(keys.secret))
    assert keys != others


@pytest.mark.parametrize("case", ["other public", "short public", "long secret", "text", "no secret"])
def test_keys_when_they_do_not_belong_together_are_refused_without_showing_them(case):
    """A pair of wrong lengths, or of two different pairs, is none; the error says which, and shows no key (OX-69)."""
    keys = KeyPair.generate()
    public, secret, match = {
        "other public": (KeyPair.generate().public, keys.secret, "does not belong"),
        "short public": (keys.public[:31], keys.secret, "public key has 31 bytes, it must have 32"),
        "long secret": (keys.public, keys.secret + b"x", "secret key has 33 bytes"),
        "text": (keys.public.hex(), keys.secret, "of type str"),
        "no secret": (keys.public, b"", "secret key has 0 bytes"),
    }[case]
    with pytest.raises(ConfigError, match=match) as caught:
        KeyPair(public, secret)
    assert_hidden(keys, str(caught.value))


def test_keys_when_shown_show_the_public_one_alone():
    keys = KeyPair.generate()
    for text in (repr(keys), str(keys), f"{keys}", f"{[keys]!r}"):
        assert keys.public.hex() in text
        assert_hidden(keys, text)


def assert_hidden(keys: KeyPair, text: str) -> None:
    for encoding in KeyEncoding:
        assert encode_key(keys.secret, encoding) not in text
    assert repr(keys.secret)[2:-1] not in text


def test_file_when_written_is_for_its_owner_alone_and_read_again(tmp_path):
    keys, path = KeyPair.generate(), tmp_path / "keys"
    before = os.umask(0)
    try:
        keys.write(path)
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert keys == KeyPair.read(path)
    z85 = [encode_key(key, KeyEncoding.Z85).encode() for key in (keys.public, keys.secret)]
    assert list(zmq.auth.load_certificate(path)) == z85
    with pytest.raises(ConfigError, match="exists"):
        KeyPair.generate().write(path)
    assert keys == KeyPair.read(path)


def test_file_when_the_disk_is_full_leaves_nothing_in_the_way(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    path = tmp_path / "keys"
    with monkeypatch.context() as patch:
        patch.setattr(os, "fchmod", full)
        with pytest.raises(ConfigError, match="No space left") as caught:
            KeyPair.generate().write(path)
    assert "make room" in str(caught.value.hint)
    assert not path.exists()
    KeyPair.generate().write(path)
    with pytest.raises(ConfigError, match="exists") as caught:
        KeyPair.generate().write(path)
    assert "name a new file" in str(caught.value.hint)


def test_file_when_written_by_zeromq_is_read(tmp_path):
    _, path = zmq.auth.create_certificates(tmp_path, "them", {"name": "a = b"})
    Path(path).chmod(0o640)
    with pytest.raises(ConfigError, match="mode 0640") as caught:
        KeyPair.read(tmp_path / "them.key_secret")
    assert "chmod 600" in (caught.value.hint or "")
    Path(path).chmod(0o600)
    keys = KeyPair.read(tmp_path / "them.key_secret")
    assert encode_key(keys.secret, KeyEncoding.Z85).encode() == zmq.auth.load_certificate(path)[1]


@pytest.mark.parametrize(
    "content", [b"", b"\xff\xfe\0" * 9, b"curve\n", b"x" * 5000, b'public-key = "%s"\n' % (b"0" * 40)]
)
def test_file_when_it_has_no_keys_is_refused(tmp_path, content):
    path = tmp_path / "keys"
    path.write_bytes(content)
    path.chmod(0o600)
    with pytest.raises(ConfigError, match="has no public and secret key") as caught:
        KeyPair.read(path)
    assert "keygen" in (caught.value.hint or "")


def test_file_when_its_keys_do_not_belong_together_is_refused_without_showing_them(tmp_path):
    keys, path = KeyPair.generate(), tmp_path / "keys"
    keys.write(path)
    other = encode_key(KeyPair.generate().public, KeyEncoding.Z85)
    path.write_text(path.read_text().replace(encode_key(keys.public, KeyEncoding.Z85), other))
    with pytest.raises(ConfigError, match="does not belong") as caught:
        KeyPair.read(path)
    assert_hidden(keys, "".join(traceback.format_exception(caught.value)))


def test_file_when_not_there_or_a_link_is_an_error_of_ours(tmp_path):
    with pytest.raises(ConfigError, match="No such file"):
        KeyPair.read(tmp_path / "none")
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="cannot write"):
        KeyPair.generate().write(tmp_path / "link")
    assert not (tmp_path / "elsewhere").exists()


def test_keys_when_copied_to_another_process_are_checked_again():
    keys = KeyPair.generate()
    assert keys == pickle.loads(pickle.dumps(keys))
