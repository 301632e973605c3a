"""Weights of evidence: defaults, what a file may say, and what is refused."""

from __future__ import annotations

import pytest

from flowctl.analyze.abuse.weights import DEFAULT_WEIGHTS, Weights, parse_weights
from flowctl.errors import ConfigError
from flowctl.wire.rtmp.limits import WireLimits


def test_weights_when_rendered_and_parsed_are_the_same():
    weights = Weights(threshold=7.5, half_life_s=600)
    assert parse_weights(weights.render(), "w.toml") == weights


def test_weights_when_a_file_names_few_keep_the_other_defaults():
    weights = parse_weights('ban_s = 60\n[points]\n"limit_hit.amf_depth" = 1.5\n', "w.toml")
    assert (weights.ban_s, weights.of("limit_hit.amf_depth")) == (60, 1.5)
    assert weights.of("handshake_timeout") == DEFAULT_WEIGHTS["handshake_timeout"]


def test_weights_when_a_kind_is_not_named_are_those_of_its_group():
    weights = Weights()
    assert weights.of("limit_hit.of_the_future") == DEFAULT_WEIGHTS["limit_hit.*"]
    assert weights.of("something else") == 0.0


def test_weights_when_compared_with_the_limits_name_every_one_that_counts():
    """Every size and count of the wire limits has a weight of its own, so that none is judged by chance."""
    named = {name.partition(".")[2] for name in DEFAULT_WEIGHTS if name.startswith("limit_hit.")}
    fields = set(WireLimits.__dataclass_fields__)
    assert fields - named == {"trusted", "ping_after_s", "ping_timeout_s", "amf"}


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("threshold = ", "TOML"),
        ("threshold = 0", "threshold"),
        ("threshold = true", "threshold"),
        ("half_life = 5", "half_life"),
        ("points = 3", "points"),
        ('[points]\n"limit_hit.amf_depth" = -1', "amf_depth"),
        ('[points]\n"limit_hit.amf_depth" = "much"', "amf_depth"),
        ("[points]\nhandshake = 1", "handshake"),
        ('[points]\n"handshakes.x" = 1', "handshakes"),
        ("subnet_share = 0.1", "subnet_share"),
        ("ban_s = nan", "ban_s"),
    ],
)
def test_weights_when_wrong_are_refused_by_name(text, word):
    with pytest.raises(ConfigError, match=word) as caught:
        parse_weights(text, "w.toml")
    assert str(caught.value).startswith("w.toml: ")
