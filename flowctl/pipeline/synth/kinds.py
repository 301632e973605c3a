"""The kinds of synthetic clients: ordinary ones, honest ones who look bad, and abusers who look innocent (pure)."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from flowctl.pipeline.synth.steps import (
    LATE,
    LEFT,
    LIES,
    MILD,
    NONSENSE,
    PUBLISH,
    REFUSED,
    SAW,
    SLOTS,
    SLOW,
    STALL,
    Kind,
    Step,
    Variant,
    deaf,
    hit,
    play,
)
from flowctl.reasons import CloseReason


def _brief(steps: tuple[Step, ...], connections: int, **given: float) -> Variant:
    """Return a variant of connections that never play and last seconds."""
    settings = {"least_s": 1.1, "most_s": 3.0, "gap_s": 1.0, "link": 0.0} | given
    return Variant(steps=steps, connections=connections, role="unknown", slots=SLOTS, **settings)


def _slots(variant: Variant, slots: int) -> Variant:
    return replace(variant, slots=slots)


_HEALTHY: Final = (
    Variant(steps=play(), slots=12),
    Variant(steps=play(MILD, 1), slots=2),
    Variant(steps=play(), connections=4, least_s=1.5, most_s=20.0, slots=1),  # looks around
    _slots(_brief(LEFT, 1), 1),
)
KINDS: Final = (
    Kind(name="healthy", abuser=False, share=0.9, variants=_HEALTHY),
    Kind(
        name="publisher",
        abuser=False,
        share=0.004,
        variants=(Variant(steps=PUBLISH, least_s=600.0, most_s=7200.0, role="publish"),),
    ),
    Kind(
        name="phones_behind_one_address",
        abuser=False,
        share=0.096,
        many=True,
        variants=(
            Variant(
                steps=play(STALL, 1, CloseReason.PEER_RESET),
                connections=5,
                least_s=20.0,
                most_s=300.0,
                link=0.8,
                slots=8,
            ),
            Variant(steps=play(), connections=3, least_s=20.0, most_s=600.0, slots=4),
            Variant(steps=play(end=CloseReason.PEER_RESET), connections=6, least_s=1.2, most_s=5.0, slots=1),
            _slots(_brief(LATE, 1, least_s=5.0, most_s=5.1), 1),
            _slots(_brief(REFUSED, 10), 1),
            Variant(steps=play(STALL, 1, CloseReason.STUCK, cut=True), least_s=30.0, most_s=300.0, link=0.5, slots=1),
        ),
    ),
    Kind(
        name="slow_link",
        abuser=False,
        share=0.35,
        variants=(
            Variant(steps=play(SLOW, 3), link=0.6, slots=10),
            Variant(
                steps=play(SLOW, 3, CloseReason.HARD_LIMIT, cut=True), connections=2, most_s=900.0, link=0.4, slots=4
            ),
            Variant(
                steps=play(SLOW, 2, CloseReason.SOFT_TOO_LONG, cut=True), connections=3, most_s=300.0, link=0.2, slots=2
            ),
        ),
    ),
    Kind(
        name="sawtooth",
        abuser=False,
        share=0.25,
        variants=(
            Variant(steps=play(SAW, 6), link=0.8, slots=12),
            Variant(steps=play(SAW, 3, CloseReason.HARD_LIMIT, cut=True), most_s=1200.0, link=0.7, slots=4),
        ),
    ),
    Kind(
        name="stalls",
        abuser=False,
        share=0.2,
        variants=(
            Variant(steps=play(STALL, 3), link=0.8, slots=12),
            Variant(steps=play(STALL, 2, CloseReason.STUCK, cut=True), most_s=1200.0, link=0.7, slots=3),
            Variant(steps=play(STALL, 1, CloseReason.PEER_RESET), link=0.8, slots=1),
        ),
    ),
    Kind(
        name="cut_often",  # hard limits that are too tight for its link, and a player that comes back at once
        abuser=False,
        share=0.1,
        variants=(
            Variant(
                steps=play(SLOW, 1, CloseReason.HARD_LIMIT, cut=True),
                connections=8,
                least_s=15.0,
                most_s=60.0,
                link=0.5,
            ),
        ),
    ),
    Kind(
        name="clumsy",  # an odd client that goes over a limit now and then, and is no attack
        abuser=False,
        share=0.1,
        variants=(
            Variant(steps=play(SAW, 1), link=0.9, slots=14),
            _slots(_brief(hit("data_message_bytes", 1200000.0, 1048576.0), 1), 1),
            _slots(_brief(LATE, 1, least_s=5.0, most_s=5.1), 1),
        ),
    ),
    Kind(name="slowloris", abuser=True, share=0.2, variants=(_brief(LATE, 20, least_s=5.0, most_s=5.1),)),
    Kind(
        name="control_flood",
        abuser=True,
        share=0.2,
        variants=(_brief(hit("control_messages_per_second", 201.0, 200.0), 10),),
    ),
    Kind(
        name="limit_liar",
        abuser=True,
        share=0.2,
        variants=(
            *(_slots(_brief(hit(*lie), 8), 1) for lie in LIES),
            _slots(_brief(hit("commands_per_second", 51.0, 50.0), 8), 4),
            _slots(_brief(NONSENSE, 12), 4),
        ),
    ),
    Kind(name="reconnect_storm", abuser=True, share=0.2, variants=(_brief(LEFT, 120, gap_s=0.5),)),
    Kind(
        name="deaf",
        abuser=True,
        share=0.2,
        variants=(
            Variant(steps=deaf(CloseReason.HARD_LIMIT), connections=24, least_s=10.0, most_s=30.0, link=0.0, slots=8),
            Variant(steps=deaf(CloseReason.STUCK), connections=24, least_s=16.0, most_s=30.0, link=0.0, slots=8),
        ),
    ),
)
"""Ordinary ones first, then slow ones, then abusers; `group_of` goes by that order."""
FIRST_SLOW: Final = 3
FIRST_ABUSER: Final = next(number for number, kind in enumerate(KINDS) if kind.abuser)
