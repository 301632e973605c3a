"""What a stream that comes over several connections is made of."""

from follow_kit import HEADERS, pictures

from flowctl.live.cluster.seam import MOST_REMEMBERED, Seam, SeamVerdict


def fed(seam, messages, now=0.0):
    """Return what is passed on of `messages`, and the joints that are neither next nor repeated nor held."""
    pieces, joints = [], []
    for message in messages:
        result = seam.join(*message, now)
        pieces += result.pieces
        if result.verdict in (SeamVerdict.GAP, SeamVerdict.RESTART):
            joints.append(result.verdict)
    return [tuple(piece) for piece in pieces], joints


def test_stream_when_over_one_connection_passes_untouched():
    messages = HEADERS + pictures(0, 25)
    assert fed(Seam(), messages) == (messages, [])


def test_stream_when_the_next_connection_begins_with_the_cache_goes_on_where_it_was():
    seam = Seam()
    fed(seam, HEADERS + pictures(0, 15))
    seam.reconnected()
    assert fed(seam, HEADERS + pictures(10, 30)) == (pictures(15, 30), [])
    assert seam.repeated_count == 10


def test_stream_when_the_cache_begins_later_tells_of_the_gap():
    seam = Seam()
    fed(seam, HEADERS + pictures(0, 15), now=0.0)
    seam.reconnected()
    assert fed(seam, HEADERS + pictures(30, 40), now=0.6) == (pictures(30, 40), [SeamVerdict.GAP])


def test_stream_when_part_of_what_came_is_not_repeated_tells_of_the_gap():
    """Where the source goes on before our last message was repeated, something may be missing."""
    seam = Seam()
    fed(seam, HEADERS + pictures(0, 15))
    seam.reconnected()
    assert fed(seam, pictures(10, 12) + pictures(20, 22)) == (pictures(20, 22), [SeamVerdict.GAP])


def test_stream_when_timestamps_begin_anew_is_another_timeline():
    seam = Seam()
    fed(seam, HEADERS + pictures(50, 65))
    seam.reconnected()
    assert fed(seam, HEADERS + pictures(0, 5), now=1.0) == (HEADERS + pictures(0, 5), [SeamVerdict.RESTART])


def test_stream_when_timestamps_are_far_ahead_is_another_timeline():
    seam = Seam()
    fed(seam, HEADERS + pictures(0, 5), now=0.0)
    seam.reconnected()
    assert fed(seam, pictures(1000, 1001), now=1.0)[1] == [SeamVerdict.RESTART]


def test_header_when_changed_meanwhile_is_passed_on_before_the_frames():
    seam = Seam()
    fed(seam, HEADERS + pictures(0, 15))
    seam.reconnected()
    changed = (HEADERS[1][0], 0, HEADERS[1][2] + b"\x01")
    assert fed(seam, [HEADERS[0], changed, HEADERS[2], *pictures(10, 17)]) == ([changed, *pictures(15, 17)], [])


def test_stream_when_forgotten_begins_anew():
    seam = Seam()
    fed(seam, HEADERS + pictures(0, 5))
    seam.forget()
    seam.reconnected()
    assert fed(seam, HEADERS + pictures(0, 5)) == (HEADERS + pictures(0, 5), [])


def test_memory_when_the_stream_is_long_is_bounded():
    seam = Seam()
    fed(seam, pictures(0, MOST_REMEMBERED))
    seam.reconnected()
    again = pictures(MOST_REMEMBERED // 2 - 1, MOST_REMEMBERED // 2 + 1)
    assert fed(seam, again)[0][:1] == again[:1]
