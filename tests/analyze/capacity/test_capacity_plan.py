"""How many nodes a crowd takes, computed by hand beside it."""

from __future__ import annotations

import pytest

pytest.importorskip("pyspark")

from flowctl.analyze.capacity.job import nodes_for


@pytest.mark.parametrize(
    ("viewers", "carries", "headroom", "nodes"),
    [
        (1, 100, 0.2, 2),  # one would do, and its death would be everybody's
        (100, 100, 0.2, 2),  # 100 / 80 is two; with one dead the other has 100
        (101, 100, 0.2, 3),  # two dead minus one would have 101 for 100
        (800, 100, 0.2, 10),  # headroom decides: 800 / 80, with one dead 800 / 9 is 89
        (800, 100, 0.0, 9),  # N-1 decides: 800 / 100, and one more
        (450, 100, 0.5, 9),
    ],
)
def test_nodes_for_when_asked_keeps_headroom_and_one_spare(viewers, carries, headroom, nodes):
    assert nodes_for(viewers, carries, headroom) == nodes


def test_nodes_for_when_one_dies_leaves_nobody_without_room():
    for viewers in (1, 7, 99, 100, 101, 1_234, 99_999):
        for carries in (1, 3, 100, 2_400):
            for headroom in (0.0, 0.2, 0.5, 0.9):
                nodes = nodes_for(viewers, carries, headroom)
                assert viewers <= (nodes - 1) * carries
                assert viewers <= nodes * carries * (1 - headroom) * 1.000001
