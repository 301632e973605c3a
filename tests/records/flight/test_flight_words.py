"""Settings, limits and policies as a flight holds them: there and back without a change."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from test_properties import POLICIES, STEERED, limits

from flowctl.core.flow.policy import KeepAll, LivePolicy, Thin, refused_mask
from flowctl.core.flow.state import MessageClass, SendState
from flowctl.core.sending.settings import SenderSettings
from flowctl.errors import ConfigError
from flowctl.live.playing import Muted
from flowctl.records.flight.words import TablePolicy, limits_as_dict, limits_from, settings_as_dict, settings_from
from flowctl.testing import check_drop_policy


@given(limits())
@settings(max_examples=50)
def test_limits_when_written_and_read_are_the_same(limit):
    assert limits_from(json.loads(json.dumps(limits_as_dict(limit)))) == limit


@pytest.mark.parametrize("item", [SenderSettings(), *STEERED])
def test_settings_when_written_and_read_are_the_same(item):
    assert settings_from(json.loads(json.dumps(settings_as_dict(item)))) == item


@pytest.mark.parametrize("policy", [*POLICIES, Muted(LivePolicy(), audio=False, video=True)])
def test_policy_when_made_a_table_decides_the_same(policy):
    failures = []
    table = TablePolicy.of(policy, lambda *what: failures.append(what))
    again = TablePolicy.from_dict(json.loads(json.dumps(table.as_dict())))
    for state in SendState:
        assert refused_mask(again, state) == refused_mask(policy, state)
        assert again.thin(state) is policy.thin(state)
        for item in (MessageClass.KEY, MessageClass.AUDIO, MessageClass.DISPOSABLE):
            assert again.decide(state, item) is policy.decide(state, item)
    assert not failures
    assert again == table


def test_policy_when_a_table_holds_to_what_every_policy_must():
    check_drop_policy(TablePolicy.of(LivePolicy(), lambda *_: None))
    assert TablePolicy.of(None, lambda *_: None) == TablePolicy.of(KeepAll(), lambda *_: None)


def test_policy_when_of_another_number_of_states_is_refused():
    with pytest.raises(ConfigError):
        TablePolicy((0,), (Thin.NOTHING,))
