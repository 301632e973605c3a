"""Pictures and pages: ticks and scales, what is drawn of few and many values, and texts of others on a page."""

from __future__ import annotations

import itertools
import re
import xml.etree.ElementTree as ET

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowctl.charts.axes import RIGHT, Scale, linear_ticks, log_ticks, tick_texts
from flowctl.charts.network import Arrow, Box, Network, Span, Spans
from flowctl.charts.page import Figure, _environment, draw
from flowctl.charts.pictures import Dot, Dots, Lines, Series, highest, thin
from flowctl.charts.plots import Curve, Plot, joined

LABELS = {"name": "x", "title": "t", "description": "d", "x_label": "x", "y_label": "y"}


@given(st.floats(1e-3, 1e9))
@settings(max_examples=200, deadline=None)
def test_ticks_when_linear_are_few_and_reach_the_top(top):
    ticks = linear_ticks(top)
    assert ticks[0] == 0
    assert ticks[-1] >= top * 0.99
    assert ticks[-2] < top
    assert 2 <= len(ticks) <= 7


@given(st.floats(1e-2, 1e6), st.floats(1, 1e5))
@settings(max_examples=200, deadline=None)
def test_ticks_when_logarithmic_hold_all_values(low, factor):
    ticks = log_ticks(low, low * factor)
    assert ticks == sorted(set(ticks))
    assert ticks[0] <= low * 1.001
    assert ticks[-1] >= low * factor * 0.999
    assert len(ticks) <= 14


def test_points_when_too_many_are_thinned_by_the_worst():
    points = [(float(place), float(place == 777)) for place in range(5000)]
    kept = thin(points, highest, 100)
    assert len(kept) == 100
    assert (777.0, 1.0) in kept
    assert kept == sorted(kept)


@pytest.mark.parametrize("log", [True, False])
def test_chart_when_it_has_one_point_or_none_is_drawn_or_left_out(log):
    values = {"name": "x", "title": "t", "description": "d", "x_label": "x", "y_label": "y", "x_log": log}
    assert draw(Lines(series=[Series("a", [(1.0, 0.0)], 1)], **values)).count("<path class=") >= 2
    assert draw(Lines(series=[Series("a", [], 1)], **values)) == ""


def test_ticks_when_they_would_look_alike_have_more_digits():
    assert tick_texts(linear_ticks(2.2), lambda value: f"{value:.0f}") == ["0.0", "0.5", "1.0", "1.5", "2.0", "2.5"]
    assert tick_texts(linear_ticks(2000), lambda value: f"{value:,.0f}") == ["0", "500", "1,000", "1,500", "2,000"]
    assert tick_texts(linear_ticks(1.2), lambda value: f"{value:.0f} %")[1:3] == ["0.5 %", "1.0 %"]


@given(st.floats(1e-3, 1e6), st.floats(1.1, 1e6), st.floats(0, 1), st.booleans())
@settings(max_examples=200, deadline=None)
def test_scale_when_read_backwards_gives_the_value(low, factor, share, log):
    high = low * factor
    scale = Scale(low, high, 400.0, 20.0, log=log)
    value = low + share * (high - low)
    assert scale.value_at(scale(value)) == pytest.approx(value, rel=1e-6)
    assert (scale(low / 2), scale(high * 2)) == (pytest.approx(400.0), pytest.approx(20.0))


def test_lines_when_y_is_logarithmic_have_equal_steps_for_equal_factors():
    points = [(0.0, 1.0), (1.0, 10.0), (2.0, 100.0)]
    drawn = draw(Lines(series=[Series("a", points, 1)], y_log=True, **LABELS))
    path = re.search(r'class="line"[^>]* d="([^"]*)"', drawn)[1]
    ys = [float(y) for y in re.findall(r"[ML][\d.]+ ([\d.]+)", path)]
    assert ys[0] - ys[1] == pytest.approx(ys[1] - ys[2], abs=0.2)


def test_dots_when_hollow_have_an_edge_only():
    dots = [Dot(1.0, 1.0, 1.0, "full", "red"), Dot(2.0, 2.0, 1.0, "empty", "red", hollow=True)]
    drawn = draw(Dots(dots=dots, **LABELS))
    assert drawn.count("fill:none;stroke:red") == drawn.count("fill:red") == 1


@pytest.mark.parametrize(
    "picture",
    [
        Lines(series=[], **LABELS),
        Dots(dots=[], **LABELS),
    ],
)
def test_picture_when_there_is_nothing_to_draw_is_no_text(picture):
    assert picture.empty
    assert draw(picture) == ""


def test_text_when_it_is_of_others_is_escaped_once_everywhere():
    evil = "<b>&"
    words = {"name": "x", "title": evil, "description": evil, "x_label": evil, "y_label": evil}
    dots = Dots(**words, dots=[Dot(1.0, 1.0, 1.0, evil, label=evil)])
    figure = Figure(dots, ("a",), [[evil]], legend=[(evil, "red")], note=evil)
    parts = "{{ parts.tiles([(evil, evil)]) }}{{ parts.figures([figure]) }}"
    template = '{% import "charts/parts.html" as parts %}' + parts
    shown = _environment().from_string(template).render(evil=evil, figure=figure)
    assert "<b>&" not in shown
    assert "&amp;lt;" not in shown
    assert shown.count("&lt;b&gt;&amp;") == 12


def test_text_when_it_is_long_is_cut_where_the_template_says():
    template = _environment().from_string("{{ text }} {{ text|cut }} {{ text|cut(9) }}")
    assert [len(part) for part in template.render(text="x" * 5000).split()] == [2000, 200, 9]


@pytest.mark.parametrize("bad", ["\x1b]0;x\x07", "\x00", "\ud800", "\u202e", "\ufffe", "<script>&\"'"])
def test_text_of_a_picture_when_hostile_leaves_a_file_that_can_be_read(bad):
    words = {"name": "x", "title": bad, "description": bad}
    axes = {"x_label": bad, "y_label": bad}
    for picture in (
        Dots(**words, **axes, dots=[Dot(1.0, 2.0, 3.0, f"{bad}\nsecond line", label=bad)]),
        Lines(**words, **axes, series=[Series(bad, [(0.0, 1.0), (1.0, 2.0)], 1)]),
    ):
        drawn = draw(picture)
        ET.fromstring(drawn.encode())
        assert bad not in drawn
    assert "first&#10;second line" in draw(Dots(**words, **axes, dots=[Dot(1.0, 2.0, 3.0, "first\nsecond line")]))


def test_network_when_drawn_has_a_box_each_and_arrows_between_known_ones():
    boxes = [Box("a<b>", 0, gone=True), Box("b", 1, "text"), Box("c", 1)]
    arrows = [Arrow("a<b>", "b", 4.0, "4 MB"), Arrow("a<b>", "c", 1.0, dashed=True), Arrow("a<b>", "nowhere", 9.0)]
    drawn = draw(Network(name="n", title="t", description="d", boxes=boxes, arrows=arrows))
    ET.fromstring(drawn)
    assert drawn.count("<rect") == 3
    assert drawn.count("C") >= 2
    assert "nowhere" not in drawn
    assert "a&lt;b&gt;" in drawn
    assert drawn.count("stroke-dasharray") == 2
    assert draw(Network(name="n", title="t", description="d", boxes=[], arrows=[])) == ""


def test_network_when_arrows_cross_keeps_their_texts_apart():
    boxes = [Box("a", 0), Box("b", 0), Box("c", 1), Box("d", 1)]
    arrows = [Arrow(one, two, 1.0, f"from {one} to {two}") for one in "ab" for two in "cd"]
    root = ET.fromstring(draw(Network(name="n", title="t", description="d", boxes=boxes, arrows=arrows)))
    texts = [item for item in root.iter() if item.tag == "text" and (item.text or "").startswith("from")]
    places = [(float(item.get("x")), float(item.get("y"))) for item in texts]
    assert len(places) == 4
    for (x, y), (other_x, other_y) in itertools.combinations(places, 2):
        assert abs(x - other_x) > 80 or abs(y - other_y) >= 13


def test_spans_when_drawn_stay_on_the_paper_and_mark_moments():
    spans = [Span(0, 1.0, 1.0, "a tick"), Span(1, 5.0, 99.0, "too long")]
    drawn = draw(
        Spans(name="s", title="t", description="d", rows=["one", "two"], spans=spans, x_end=10.0, x_label="s",
              moments=[(4.0, "killed")])
    )  # fmt: skip
    root = ET.fromstring(drawn)
    bars = [item for item in root.iter() if item.tag == "rect"]
    assert [float(bar.get("x")) + float(bar.get("width")) <= RIGHT for bar in bars] == [True, True]
    assert min(float(bar.get("width")) for bar in bars) == 2.0
    assert "killed" in drawn
    assert draw(Spans(name="s", title="t", description="d", rows=[], spans=[], x_end=1.0, x_label="s")) == ""


def test_curves_when_each_has_its_own_x_are_joined_with_gaps():
    xs, curves = joined({"a": [(1.0, 10.0), (3.0, 30.0)], "b": [(2.0, 20.0), (3.0, 33.0)]})
    assert xs == [1.0, 2.0, 3.0]
    assert curves == {"a": [10.0, None, 30.0], "b": [None, 20.0, 33.0]}


def test_plot_when_told_to_the_script_has_all_that_it_draws():
    curve = Curve(label="a", paint="s1", values=[1.0], unit="ms", draw="area")
    marks = [("x", 5.0, "target")]
    told = Plot(x_label="at", x_unit="time", xs=[5.0], curves=[curve], stacked=True, marks=marks).as_dict()
    assert told["x"] == {"label": "at", "unit": "time", "log": False, "values": [5.0]}
    assert [(item["as"], item["stacked"], item["unit"]) for item in told["series"]] == [("area", True, "ms")]
    assert told["marks"] == [{"scale": "x", "at": 5.0, "label": "target"}]
