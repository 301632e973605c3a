"""TOML with lines: every key is found, however it is written, and one that is there twice is named with both lines."""

from __future__ import annotations

import tomllib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowctl.core.text.tomltext import MOST_BYTES, TomlText, dotted
from flowctl.errors import ConfigError

TEXT = '''# a comment
a = 1
"b c".d = [
    1,  # [not.a.header]
    "]",
]
e = """
f = 2
"""
[table]
g.h = { i = 1, j = [ { k = 2 } ] }
[table."x.y/*"]
  l = 'm'
[[rows]]
n = 1
[[rows]]
n = 2
'''


@pytest.mark.parametrize(
    ("path", "line"),
    [
        (("a",), 2),
        (("b c", "d"), 3),
        (("e",), 7),
        (("table",), 10),
        (("table", "g", "h"), 11),
        (("table", "x.y/*", "l"), 13),
        (("rows",), 14),
        (("table", "not there"), 10),
        (("f",), None),
    ],
)
def test_line_when_a_key_is_asked_for_is_where_it_is_written(path, line):
    toml = TomlText(TEXT, "x.toml")
    assert toml.line(*path) == line
    assert toml.place(*path) == ("x.toml" if line is None else f"x.toml, line {line}")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a = 1\nb = 2\na = 3", "x.toml, line 3: a is there twice, line 1 has it already"),
        ('[s."t/*"]\na = 1\n"a" = 2', 'x.toml, line 3: a of [s."t/*"] is there twice, line 2 has it already'),
        ("[s]\na = 1\n[t]\na = 1\n[s]\nb = 1", "x.toml, line 5: [s] is there twice, line 1 has it already"),
        ("[[r]]\na = 1\n[[r]]\na = 1\na = 2", "x.toml, line 5: a of [r] is there twice, line 4 has it already"),
        ("a = 1\na.b = 2", "x.toml: not valid TOML: Cannot overwrite a value (at line 2, the end)"),
        ("a = 1\nb = ", "x.toml: not valid TOML: Invalid value (at line 2, the end)"),
        ("a = " + "[" * 9999, "x.toml: not valid TOML: it is nested too deeply"),
        ("#" * (MOST_BYTES + 1), f"x.toml: it has more than {MOST_BYTES} bytes"),
    ],
)
def test_text_when_it_is_not_valid_names_line_and_key(text, said):
    with pytest.raises(ConfigError) as caught:
        TomlText(text, "x.toml")
    assert str(caught.value).startswith(said)


@given(st.lists(st.text(st.characters(codec="utf-8", exclude_categories=["C"])), min_size=1, max_size=4))
def test_dotted_when_read_as_a_key_is_the_same_place(path):
    value = tomllib.loads(f"{dotted(tuple(path))} = 0")
    for name in path:
        value = value[name]
    assert value == 0


@pytest.mark.parametrize("line", ["[x", "x = [1,", "a = [", "a = [[", 'a = """', "a = {b = [", '"a": {"b": ['])
def test_text_when_each_line_is_wrong_is_refused_without_reading_each_again_and_again(line, monkeypatch):
    """A file that is something else costs a few readings per line, and not as many as there are lines behind it."""
    count = 0

    def loads(text):
        nonlocal count
        count += 1
        return read(text)

    read = tomllib.loads
    monkeypatch.setattr(tomllib, "loads", loads)
    with pytest.raises(ConfigError):
        TomlText(f"{line}\n" * 300, "x.toml")
    assert count < 1000
