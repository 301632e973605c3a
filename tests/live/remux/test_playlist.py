"""The playlist of HLS: it slides, never repeats a number, and says when media does not belong together."""

from __future__ import annotations

import re

from hypothesis import given
from hypothesis import strategies as st

from flowctl.live.remux.playlist import HlsSegment, Playlist


def test_playlist_when_it_slides_counts_what_left():
    playlist = Playlist(100, 3, 4.0)
    for number in range(6):
        playlist.add(HlsSegment(f"s-{number}.ts", 4.0, discontinuity=number in (1, 4)))
    assert playlist.text() == (
        "#EXTM3U\n#EXT-X-VERSION:3\n#EXT-X-TARGETDURATION:4\n#EXT-X-MEDIA-SEQUENCE:103\n"
        "#EXT-X-DISCONTINUITY-SEQUENCE:1\n#EXTINF:4.000,\ns-3.ts\n#EXT-X-DISCONTINUITY\n#EXTINF:4.000,\ns-4.ts\n"
        "#EXTINF:4.000,\ns-5.ts\n"
    )


def test_playlist_when_initialisation_changes_names_each_once():
    playlist = Playlist(1, 5, 2.0)
    for number, init in enumerate(("a.mp4", "a.mp4", "b.mp4")):
        playlist.add(HlsSegment(f"{number}.m4s", 2.0, init, discontinuity=number == 2))
    lines = playlist.text().splitlines()
    assert [line for line in lines if "MAP" in line] == ['#EXT-X-MAP:URI="a.mp4"', '#EXT-X-MAP:URI="b.mp4"']
    assert "#EXT-X-VERSION:6" in lines
    assert lines.index("#EXT-X-DISCONTINUITY") + 1 == lines.index('#EXT-X-MAP:URI="b.mp4"')


def test_playlist_when_the_stream_comes_back_begins_anew_behind_the_old_numbers():
    playlist = Playlist(10, 4, 2.0)
    for number in range(3):
        playlist.add(HlsSegment(f"{number}.ts", 2.0))
    playlist.ended = True
    assert playlist.text().endswith("2.ts\n#EXT-X-ENDLIST\n")
    playlist.add(HlsSegment("3.ts", 2.0, discontinuity=True))
    assert "ENDLIST" not in playlist.text()
    assert playlist.text().endswith("#EXT-X-MEDIA-SEQUENCE:13\n#EXT-X-DISCONTINUITY\n#EXTINF:2.000,\n3.ts\n")


def test_playlist_when_others_have_shorter_targets_has_no_segment_that_is_longer():
    playlist = Playlist(1, 4, 2.0)
    playlist.continue_from(0, lambda *_: (2, 0.0))
    for number, duration_s in enumerate((1.0, 4.0, 2.0)):
        playlist.add(HlsSegment(f"{number}.ts", duration_s))
    assert playlist.text().endswith("#EXT-X-TARGETDURATION:2\n#EXT-X-MEDIA-SEQUENCE:3\n#EXTINF:2.000,\n2.ts\n")


@given(
    st.lists(st.tuples(st.floats(0.1, 70), st.booleans(), st.sampled_from(["", "a", "b"])), max_size=40),
    st.integers(3, 6),
)
def test_playlist_when_anything_is_added_stays_bounded_and_true(segments, listed):
    playlist = Playlist(7, listed, 4.0)
    there, announced = set(), 0
    for number, (duration_s, discontinuity, init) in enumerate(segments):
        assert playlist.next_number == 7 + number
        there |= {f"{number}.ts", *([init] if init else [])}
        there -= set(
            playlist.add(
                HlsSegment(f"{number}.ts", min(duration_s, playlist.most_s), init, discontinuity=discontinuity)
            )
        )
        text = playlist.text()
        names = [line for line in text.splitlines() if not line.startswith("#")]
        assert set(names) <= there
        assert set(re.findall(r'MAP:URI="(.*)"', text)) <= there
        listed_s = sum(map(float, re.findall(r"EXTINF:([\d.]+)", text)))
        longest_s = float(re.search(r"EXTINF:([\d.]+)", text)[1])
        target = int(re.search(r"TARGETDURATION:(\d+)", text)[1])
        assert len(names) <= listed or listed_s - longest_s < 3 * target
        first = int(re.search(r"MEDIA-SEQUENCE:(\d+)", text)[1])
        assert first == 7 + int(names[0].removesuffix(".ts"))
        assert not playlist.announced or announced in (0, target)
        announced = target if playlist.announced else 0
        assert not announced or all(int(float(item) + 0.5) <= target for item in re.findall(r"EXTINF:([\d.]+)", text))
