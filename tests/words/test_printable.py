"""Text of others on a terminal: shown, never acted upon."""

from __future__ import annotations

import json

import pytest

from flowctl.core.text.printable import printable

HOSTILE = [chr(code) for code in [*range(0x20), *range(0x7F, 0xA0), 0x200E, 0x200F, *range(0x2028, 0x202F)]] + [
    *(chr(code) for code in range(0x2066, 0x206A)),
    "\ud800",
    "\udc80",
    "\udfff",
]


@pytest.mark.parametrize("character", HOSTILE, ids=lambda character: f"{ord(character):04x}")
def test_text_when_a_terminal_would_act_on_it_is_written_as_an_escape(character):
    shown = printable(f"a{character}b")
    assert shown == f"a\\u{ord(character):04x}b"
    assert json.loads(f'"{shown}"') == f"a{character}b"
    shown.encode("utf-8")


@pytest.mark.parametrize(
    "text", ["plain", "Füße 東京 שלום", "👩‍👩‍👧 🇩🇪 🏴\U000e0067\U000e0062\U000e007f", "a\u00a0b\u3000c", ""]
)
def test_text_when_it_is_only_of_another_script_is_unchanged(text):
    assert printable(text) == text


def test_text_when_it_has_lines_of_ours_keeps_them():
    assert printable("a\n\tb\x1b[2J\r", lines=True) == "a\n\tb\\u001b[2J\\u000d"


def test_text_when_a_character_is_beyond_the_first_plane_is_an_escape_that_json_reads():
    shown = printable("a\U000e0001b")
    assert shown == "a\\udb40\\udc01b"
    assert json.loads(f'"{shown}"') == "a\U000e0001b"
