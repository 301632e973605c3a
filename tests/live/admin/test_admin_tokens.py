"""Tokens of the admin surface are those of the file as it is now."""

from __future__ import annotations

import pytest

from flowctl.control.operations import Permission
from flowctl.errors import ConfigError
from flowctl.live.admin.guard import Tokens

OLD, NEW = "old-token-0123456789", "new-token-0123456789"


def test_token_when_it_is_taken_out_of_the_file_opens_nothing_any_more(tmp_path):
    path = tmp_path / "tokens"
    path.write_text(f"{OLD}\n")
    tokens = Tokens(path)
    assert tokens.permission(OLD) is Permission.ADMIN
    path.write_text(f"{NEW} basic\n")
    assert [tokens.permission(item) for item in (OLD, NEW)] == [Permission.NONE, Permission.BASIC]


@pytest.mark.parametrize("data", [b"", b"short\n", b"\xff\n", b"x" * 70_000, None])
def test_tokens_when_the_file_becomes_invalid_stay(tmp_path, data):
    """Half a file locks nobody out, and lets nobody in."""
    path = tmp_path / "tokens"
    path.write_text(f"{OLD}\n")
    tokens = Tokens(path)
    path.unlink() if data is None else path.write_bytes(data)
    for _ in range(3):
        assert [tokens.permission(item) for item in (OLD, NEW)] == [Permission.ADMIN, Permission.NONE]
    path.write_text(f"{NEW}\n")
    assert [tokens.permission(item) for item in (OLD, NEW)] == [Permission.NONE, Permission.ADMIN]


@pytest.mark.parametrize("text", ["", "short\n", f"{OLD} root", f"{OLD} basic more", None])
def test_tokens_when_the_file_is_not_valid_at_the_start_are_an_error(tmp_path, text):
    path = tmp_path / "tokens"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        Tokens(path)
    assert OLD not in str(caught.value)
