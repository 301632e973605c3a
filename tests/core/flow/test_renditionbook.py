"""What is told of the renditions that a viewer was in: which, since when, why, for how long, how often it switched."""

from __future__ import annotations

from flowctl.core.flow.renditionbook import RenditionBook

ORDER = ("360", "720", "1080")


def test_book_tells_the_present_rendition_when_a_set_is_followed():
    """The words name the rendition, of how many, for how long, and why."""
    book = RenditionBook()
    book.enter(10.0, "360", "the smallest first", lambda: ORDER)

    assert book.describe(51.0) == "rendition 360 of 3 for 41.0 s: the smallest first"
    assert book.seconds(51.0) == {"360": 41.0}


def test_book_counts_ways_and_times_when_switches_are_made():
    """Up or down follows from the rates; times are kept by rendition, the smallest first."""
    book = RenditionBook()
    book.enter(0.0, "720", "", lambda: ORDER)
    assert book.why_smaller(30.0) == ""

    assert book.switch(30.0, "1080", "the line carries more") == "rendition 720 to 1080: the line carries more"
    assert book.switch(40.0, "360", "too slow", failed=True) == "rendition 1080 to 360: too slow"
    assert (book.ups, book.downs, book.failed) == (1, 1, 1)
    assert (book.before, book.name, book.since) == ("1080", "360", 40.0)
    assert list(book.seconds(45.0).items()) == [("360", 5.0), ("720", 30.0), ("1080", 10.0)]
    assert book.smaller_s(45.0) == 35.0
    assert (book.why_smaller(45.0), book.why_smaller(75.0)) == ("", "too slow")


def test_book_goes_on_when_a_viewer_pauses():
    """Between two places in sets no time counts, and what was counted before stays."""
    book = RenditionBook()
    book.enter(0.0, "1080", "", lambda: ORDER)
    book.leave(10.0)

    assert (book.name, book.describe(50.0)) == ("", "")
    assert (book.seconds(50.0), book.smaller_s(50.0)) == ({"1080": 10.0}, 0.0)

    book.enter(50.0, "720", "", lambda: ORDER)

    assert (book.seconds(55.0), book.smaller_s(55.0)) == ({"720": 5.0, "1080": 10.0}, 5.0)


def test_a_rendition_that_has_gone_counts_when_its_time_is_told():
    """A member that leaves its set stays in the times, in front, and a switch from it is no switch up."""
    order = [*ORDER]
    book = RenditionBook()
    book.enter(0.0, "1080", "", lambda: tuple(order))
    order.remove("1080")
    book.switch(20.0, "720", "1080 has stopped")

    assert (book.ups, book.downs, book.count) == (0, 1, 2)
    assert list(book.seconds(21.0)) == ["1080", "720"]
    assert (book.smaller_s(21.0), book.why_smaller(21.0)) == (0.0, "")  # it was the largest, and 720 is now


def test_a_stay_in_a_smaller_rendition_counts_when_the_set_loses_it():
    order = [*ORDER]
    book = RenditionBook()
    book.enter(0.0, "720", "the line has carried 2 Mbit/s", lambda: tuple(order))
    order.remove("720")
    book.switch(20.0, "1080", "720 has stopped")

    assert (book.smaller_s(30.0), book.why_smaller(30.0)) == (20.0, "the line has carried 2 Mbit/s")
