"""Models name words of the records: each is one of those that servers write, and lists of them are whole."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import flowctl.analyze
from flowctl.core.flow.state import SendState
from flowctl.core.text.addresses import EMBEDDED
from flowctl.reasons import CloseReason
from flowctl.records.telemetry.schema import CLASS_NAMES, STATE_NAMES, EventName, FlightKind, RecordedRole

ROOT = Path(flowctl.analyze.__file__).parent
MODELS = {str(path.relative_to(ROOT)): path.read_text("utf-8") for path in sorted(ROOT.rglob("*.sql"))}
WORDS = {
    "reason": {item.value for item in CloseReason} | {"limits file", "limits"},  # the latter two of `config_changed`
    "role": {item.value for item in RecordedRole},
    "event": {item.value for item in EventName} | {"open"},  # which records.sql makes
    "state": {item.name for item in SendState},
    "kind": {item.value for item in FlightKind},
}
OF_KINDS = ("abuse/evidence.sql",)  # there `kind` is one of evidence
WORD = re.compile(r"\b(reason|role|event|state|kind)(?:, 'unknown'\))? (?:=|<>|IN) \(?('[^')]*'(?:,\s*'[^')]*')*)")


def words(name: str) -> set[tuple[str, str]]:
    found = WORD.findall(MODELS[name])
    return {(column, word) for column, texts in found for word in re.findall(r"'([^']*)'", texts)}


@pytest.mark.parametrize("name", MODELS)
def test_words_of_a_model_are_those_of_records(name):
    of = {(column, word) for column, word in words(name) if column != "kind" or name not in OF_KINDS}
    assert {(column, word) for column, word in of if word not in WORDS[column]} == set()


def test_words_of_models_are_found():
    assert ("reason", "handshake timeout") in words("abuse/kinds.sql")
    assert ("role", "publish") in words("viewers/ingest.sql")
    assert ("kind", "queued") in words("whatif/events.sql")
    assert ("state", "HARD_LIMIT") in words("viewers/sampled_minutes.sql")


@pytest.mark.parametrize("name", MODELS)
def test_sums_over_classes_and_states_leave_none_out(name):
    for what in (f"{verb}_{unit}" for verb in ("accepted", "dropped", "sent") for unit in ("messages", "bytes")):
        assert {*re.findall(rf"\b{what}_(\w+)", MODELS[name])} in ({*CLASS_NAMES}, set()), what
    assert {*re.findall(r"\btime_(\w+)_ms\b", MODELS[name])} - {*STATE_NAMES} == set()


def test_addresses_of_a_model_hold_those_of_ipv4_that_servers_take_for_them():
    prefixes = set(re.findall(r"startswith\(six, '([0-9a-f]+)'\)", MODELS["records/addresses.sql"]))
    assert prefixes == {prefix for prefix, *_ in EMBEDDED}
