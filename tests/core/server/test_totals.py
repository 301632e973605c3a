"""Sums of many connections' figures: adding is exact, and conservation holds for the sum."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from flowctl.core.flow.counts import Counts, total
from flowctl.core.flow.state import CLASS_COUNT
from flowctl.core.server.totals import NO_FLOW, FlowTotals
from flowctl.reasons import DropReason

counts = st.lists(st.integers(0, 9), min_size=CLASS_COUNT, max_size=CLASS_COUNT).map(
    lambda numbers: Counts(tuple(numbers), tuple(number * 7 for number in numbers))
)


@st.composite
def flows(draw):
    sent, queued = draw(counts), draw(counts)
    dropped = draw(st.dictionaries(st.sampled_from(DropReason), counts.filter(lambda item: item.total_messages)))
    return FlowTotals(
        connections=1,
        accepted=sent + queued + total(dropped.values()),
        sent=sent,
        queued=queued,
        dropped=dropped,
        time_in_states_s=tuple(float(draw(st.integers(0, 50))) for _ in range(4)),
        transitions=draw(st.integers(0, 9)),
        longest_stall_s=float(draw(st.integers(0, 9))),
        bytes_in=draw(st.integers(0, 9)),
        input_pauses=draw(st.dictionaries(st.sampled_from(["soft limit", "other"]), st.integers(1, 5))),
    )


@settings(max_examples=80, deadline=None)
@given(st.lists(flows(), max_size=5))
def test_sum_when_of_any_connections_is_conserved(items):
    whole = sum(items, NO_FLOW)
    assert whole.conserved
    assert whole.connections == len(items)
    assert whole.dropped_messages == sum(item.dropped_messages for item in items)
    assert whole.input_pauses.get("other", 0) == sum(item.input_pauses.get("other", 0) for item in items)
    assert whole.time_in_states_s == tuple(sum(item.time_in_states_s[at] for item in items) for at in range(4))
    assert whole.longest_stall_s == max((item.longest_stall_s for item in items), default=0)
