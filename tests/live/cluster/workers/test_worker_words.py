"""The last words of a worker, and how its end is put."""

from __future__ import annotations

import json
import os

import pytest

from flowctl.live.cluster.workers.child import end_in_words, words_in


@pytest.fixture
def spoken():
    """Return a function that returns the last words of a worker that has said something."""
    descriptor = os.memfd_create("words")

    def words(text):
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, text.encode(), 0)
        return words_in(descriptor)

    yield words
    os.close(descriptor)


def test_words_when_it_ended_with_an_error_are_the_error(spoken):
    said = {"error": "no such module", "hint": "is it installed?", "config": True}
    assert spoken(json.dumps(said)) == said


def test_words_when_the_interpreter_has_failed_are_its_first_line_and_where_its_threads_were(spoken):
    text = (
        'Fatal Python error: Segmentation fault\n\nThread 0x1 (most recent call first):\n  File "x.py", line 1 in f\n'
    )
    found = spoken(text)
    assert found["error"] == "Fatal Python error: Segmentation fault"
    assert found["stack"].endswith('File "x.py", line 1 in f')


def test_words_when_it_was_killed_are_none(spoken):
    assert spoken("") == {}
    assert spoken("{") == {"error": "{", "stack": ""}


def test_end_of_a_process_when_told_names_the_signal():
    assert [end_in_words(code) for code in (0, -9, -11, -63)] == ["exit status 0", "SIGKILL", "SIGSEGV", "signal 63"]
