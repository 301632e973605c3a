"""The recordings of a folder: which are found, what is read of them, and that a part by time is what was recorded."""

from __future__ import annotations

import os
import random

import pytest
from playback_kit import BEGAN_S, FIRST, Recorder, frames, is_key, packets_of
from remux_kit import source, tags_of

from flowctl.flv import TAG_AUDIO, TAG_SCRIPT, FlvReader, FlvTag, header, tag
from flowctl.live.playback import flvfile, library
from flowctl.live.playback.flvfile import FlvFile
from flowctl.live.playback.library import GAP_S, Library
from flowctl.live.remux.container import Mp4Form
from flowctl.wire.rtmp.amf import amf0

LARGE = {"video_bit_rate": 1_500_000}


def read(shelf, from_s, to_s, stream="room"):
    """Return a part by time: its plan, and its tags."""
    span = shelf.span("live", stream, BEGAN_S + from_s, BEGAN_S + to_s)
    if span is None:
        return None, []
    data = b"".join(shelf.parts("live", stream, span))
    assert len(data) == span.size_bytes
    reader = FlvReader(check_back_pointers=True)
    tags = reader.feed(data)
    reader.finish()
    return span, tags


def wanted(files, from_ms, to_ms):
    """Return what is to be in a part, by looking at everything: `files` are frames by the start of each file, in ms."""
    found, begun = [], False
    for number, (start_ms, tags) in enumerate(files):
        last_ms = max(tag.timestamp for tag in tags)
        if not begun and from_ms > start_ms + last_ms:
            continue
        begin = 0
        if not begun:
            keys = [at for at, tag in enumerate(tags) if is_key(tag) and start_ms + tag.timestamp <= from_ms]
            begin = keys[-1] if keys else 0
        end = next((at for at, tag in enumerate(tags) if start_ms + tag.timestamp >= to_ms), len(tags))
        if end <= begin:
            return found
        found += [(number, tag.payload) for tag in tags[begin:end]]
        begun = True
    return found


@pytest.mark.parametrize("seed", range(3))
def test_part_when_cut_by_time_is_what_a_look_at_everything_finds(tmp_path, seed):
    made = Recorder(tmp_path, max_s=7).all(22, **LARGE)
    paths = sorted(made.folder.iterdir())
    assert min(path.stat().st_size for path in paths[:-1]) > 1 << 20  # so large that a time is found by halves
    starts = [round((library.start_of(path.name) - BEGAN_S) * 1000) for path in paths]
    files = [(start, frames(tags_of(path))) for start, path in zip(starts, paths, strict=True)]
    shelf, rng = Library(tmp_path), random.Random(seed)
    for _ in range(25):
        begin = rng.randrange(-2000, 24_000)
        end = begin + rng.randrange(1, 24_000)
        span, tags = read(shelf, begin / 1000, end / 1000)
        assert [tag.payload for tag in frames(tags)] == [payload for _, payload in wanted(files, begin, end)]
        if span is not None:
            times = [tag.timestamp for tag in frames(tags) if tag.type_id == 9]
            assert times == sorted(times)
            assert is_key(frames(tags)[0])
            assert frames(tags)[0].timestamp == 0
            assert max(tag.timestamp for tag in tags) == pytest.approx(span.length_s * 1000, abs=50)
            assert span.start_s <= max(BEGAN_S + begin / 1000, BEGAN_S) + 0.001


def test_part_when_it_begins_with_headers_says_how_long_it_is(tmp_path, monkeypatch):
    told = FlvTag(TAG_SCRIPT, 0, amf0.encode("onMetaData", {"duration": 900.0, "filesize": 5e9}))
    tags = [told, *(tag for tag in source(6) if tag.type_id != TAG_SCRIPT)]
    made = Recorder(tmp_path)
    made.feed([tag for tag in tags if tag.timestamp < 3000])
    made.feed([told._replace(timestamp=3000), *(tag for tag in tags if tag.timestamp >= 3000)])
    made.end()
    span, tags = read(Library(tmp_path), 1.5, 4.5)
    whole = b"".join(Library(tmp_path).parts("live", "room", span))
    for size in range(100, 200, 3):  # some of which end within the metadata
        monkeypatch.setattr(flvfile, "PART_BYTES", size)
        assert b"".join(Library(tmp_path).parts("live", "room", span)) == whole
    lengths = [amf0.decode(tag.payload)[1] for tag in tags if tag.type_id == TAG_SCRIPT]
    assert lengths == [{"duration": span.length_s, "filesize": span.size_bytes}] * 2
    assert span.length_s == pytest.approx(3.5, abs=0.1)


@pytest.mark.parametrize("seed", range(2))
def test_part_of_mp4_when_cut_by_time_is_whole_fragments_of_it(tmp_path, seed):
    made = Recorder(tmp_path, make_form=Mp4Form, max_s=7).all(22)
    paths = sorted(made.folder.iterdir())
    starts = [round((library.start_of(path.name) - BEGAN_S) * 1000) for path in paths]
    every = [
        (kind, start + time, data)
        for start, path in zip(starts, paths, strict=True)
        for kind, time, data in packets_of(path.read_bytes())
    ]
    shelf, rng = Library(tmp_path), random.Random(seed)
    for _ in range(12):
        begin = rng.randrange(0, 20_000)
        end = begin + rng.randrange(1500, 20_000)
        span = shelf.span("live", "room", BEGAN_S + begin / 1000, BEGAN_S + end / 1000, ".mp4")
        data = b"".join(shelf.parts("live", "room", span))
        assert len(data) == span.size_bytes
        found = packets_of(data)
        first = round((span.start_s - BEGAN_S) * 1000)
        assert first <= max(begin, starts[0])
        for kind in ("video", "audio"):
            got = [packet for packet in found if packet[0] == kind]
            payloads = [payload for _, _, payload in got]
            all_of = [packet for packet in every if packet[0] == kind]
            at = [payload for _, _, payload in all_of].index(payloads[0])
            assert payloads == [payload for _, _, payload in all_of[at : at + len(payloads)]]
            for (_, time, _), (_, real, _) in zip(got, all_of[at:], strict=False):
                assert time == pytest.approx(real - first, abs=60)  # names of files tell times to some frames
            assert all_of[at + len(got) - 1][1] >= min(end, all_of[-1][1]) - 1050
        assert found[0][1] in range(30)
        assert span.length_s == pytest.approx(max(time for _, time, _ in found) / 1000, abs=0.2)


@pytest.mark.parametrize("why", ["gap", "codec", "format"])
def test_part_when_what_follows_does_not_belong_to_it_ends(tmp_path, why):
    Recorder(tmp_path).all(3)
    options = {"codec": {"width": 320, "height": 180}}.get(why, {})
    form = {"make_form": Mp4Form} if why == "format" else {}
    behind_s = GAP_S + 1.1 if why == "gap" else 0.1
    Recorder(tmp_path, began_s=BEGAN_S + 3 + behind_s, **form).all(3, **options)
    assert read(Library(tmp_path), 1, 60)[0].length_s == pytest.approx(2.0, abs=0.1)
    later = read(Library(tmp_path), 4 + behind_s, 60)[0]
    assert (later is None) if why == "format" else later.length_s == pytest.approx(2.0, abs=0.1)


def test_part_when_a_file_began_just_then_begins_with_it_and_not_in_the_one_before(tmp_path):
    """Names tell when files were begun: what came in a burst seems to last until the next one has begun."""
    Recorder(tmp_path).all(3)
    Recorder(tmp_path, began_s=BEGAN_S + 2.5).all(3, width=320, height=180)
    span, _ = read(Library(tmp_path), 2.5, 60)
    assert (span.start_s, len(span.pieces)) == (BEGAN_S + 2.5, 1)
    assert span.length_s == pytest.approx(3.0, abs=0.1)
    assert len(Library(tmp_path).recordings("live", "room", BEGAN_S + 2.5, None, "", 10)[0]) == 2


def test_file_when_it_is_being_written_ends_with_its_last_whole_message(tmp_path):
    made = Recorder(tmp_path)
    made.feed(source(12, **LARGE))
    part = made.folder / f"{FIRST}.part"
    whole = part.read_bytes()
    tags = tags_of(part)
    shelf = Library(tmp_path)
    for cut in (0, 1, 3, 4, 5, 10, 11, 12, 200, 5000):
        kept = tags[:-1] if cut else tags
        part.write_bytes(whole[: len(whole) - cut])
        (found,), _ = shelf.recordings("live", "room", None, None, "", 10)
        assert found.being_written
        assert found.length_s == pytest.approx(12, abs=0.2)
        opened = shelf.open("live", "room", FIRST)
        reader = FlvReader(check_back_pointers=True)
        got = reader.feed(whole[: opened.whole_bytes])
        reader.finish()
        assert len(got) == len(kept) or (cut > 200 and len(got) < len(kept))
        assert frames(read(shelf, 5.5, 60)[1])[-1].payload == got[-1].payload


def test_list_when_there_are_thousands_opens_only_what_it_tells(tmp_path, monkeypatch):
    made = Recorder(tmp_path).all(1)
    data = made.folder / FIRST
    for number in range(3000):  # of each minute one
        stamp = library.stamp_of(BEGAN_S + 60 * (number + 1))
        os.link(data, made.folder / f"{stamp}.flv")
    opened = []
    really = library._open
    monkeypatch.setattr(library, "_open", lambda folder, name: (opened.append(name), really(folder, name))[1])
    shelf, found, before = Library(tmp_path), [], ""
    while True:
        rows, more = shelf.recordings("live", "room", BEGAN_S + 60_000.5, BEGAN_S + 66_000, before, 30)
        found += [row.name for row in rows]
        if not more:
            break
        before = rows[-1].name
    # All that began in the time; what began before it is a second long, and half of that is in it.
    assert found == [f"{library.stamp_of(BEGAN_S + 60 * number)}.flv" for number in range(1099, 999, -1)]
    assert len(opened) <= len(found) + 4


@pytest.mark.parametrize("seed", range(20))
def test_names_when_put_in_order_batch_by_batch_are_those_of_all_in_order(tmp_path, monkeypatch, seed):
    rng = random.Random(seed)
    monkeypatch.setattr(library, "_BATCH", rng.randrange(1, 5))
    stamps = [f"{library.stamp_of(BEGAN_S + rng.randrange(30))}.flv" for _ in range(rng.randrange(20))]
    every = sorted({f"{name}{rng.choice(['', '.part'])}" for name in stamps} | {"film.flv", "0"})
    monkeypatch.setattr(library.os, "listdir", lambda _: rng.sample(every, len(every)))
    begin, end = (rng.choice([None, BEGAN_S + rng.randrange(-2, 32)]) for _ in range(2))
    before = rng.choice(["", *stamps])
    low = "" if begin is None else library.stamp_of(begin)
    wanted = [name for name in every if end is None or name < library.stamp_of(end)]
    wanted = [name for name in wanted if not before or name < before]
    earlier = [name for name in wanted if name < low and library.is_recording(name.removesuffix(".part"))]
    wanted = [name.removesuffix(".part") for name in (*earlier[-1:], *(name for name in wanted if name >= low))]
    wanted = list(dict.fromkeys(wanted))
    assert list(library._names(0, begin, end, before, latest=False)) == wanted
    assert list(library._names(0, begin, end, before, latest=True)) == [
        *reversed(wanted[bool(earlier) :]),
        *wanted[: bool(earlier)],
    ]


def test_files_that_are_none_of_a_server_are_not_there(tmp_path):
    made = Recorder(tmp_path).all(1)
    outside = tmp_path / "outside.flv"
    outside.write_bytes((made.folder / FIRST).read_bytes())
    stamps = [library.stamp_of(BEGAN_S + number) for number in range(1, 6)]
    (made.folder / f"{stamps[0]}.flv").symlink_to(outside)
    (made.folder / f"{stamps[1]}.flv").mkdir()
    os.mkfifo(made.folder / f"{stamps[2]}.flv")
    (made.folder / f"{stamps[3]}.flv").write_bytes(b"no FLV")
    for name in ("film.flv", "20251399T996161.000Z.flv", f"{stamps[4]}.exe", f"{stamps[4]}.flv.part.part"):
        (made.folder / name).write_bytes(b"FLV")
    (tmp_path / "live" / "linked").symlink_to(made.folder)
    shelf = Library(tmp_path)
    rows, _ = shelf.recordings("live", "room", None, None, "", 100)
    assert [(row.name, row.length_s) for row in rows] == [(f"{stamps[3]}.flv", None), (FIRST, rows[-1].length_s)]
    assert shelf.recordings("live", "linked", None, None, "", 100) == ([], False)
    assert shelf.recordings("live", "../live/room", None, None, "", 100) == ([], False)
    for stamp in stamps[:3]:
        with pytest.raises(OSError, match=f"{stamp}|Too many"):
            shelf.open("live", "room", f"{stamp}.flv")
    assert frames(read(shelf, 0, 60)[1])[-1].payload == tags_of(outside)[-1].payload


def test_file_when_a_publisher_has_filled_it_with_what_looks_like_tags_costs_little(tmp_path, monkeypatch):
    """Each sixth octet of its pictures begins what may be a tag, until the size behind it is looked at."""
    made = Recorder(tmp_path)
    large = [tag._replace(payload=tag.payload[:5] + b"\x08\0\0\0\0\0" * 300_000) for tag in frames(source(1))[:4]]
    made.feed([*source(3), *(tag._replace(timestamp=tag.timestamp + 3000) for tag in large)])
    made.end()
    looked = []
    really = FlvFile.tag_at
    monkeypatch.setattr(FlvFile, "tag_at", lambda self, at: (looked.append(at), really(self, at))[1])
    shelf = Library(tmp_path)
    assert shelf.recordings("live", "room", None, None, "", 10)[0][0].length_s > 3
    read(shelf, 1, 3.05)
    path = made.folder / FIRST
    path.rename(path.with_name(f"{FIRST}.part"))
    with path.with_name(f"{FIRST}.part").open("ab") as file:
        file.write(b"\x09\x1f\xff\xff" + bytes(7) + b"\x08\0\0\0\0\0" * 300_000)
    assert len(shelf.recordings("live", "room", None, None, "", 10)[0]) == 1
    assert len(looked) < 150_000


def test_file_when_what_is_found_by_halves_is_in_the_frames_of_a_publisher_costs_little(tmp_path, monkeypatch):
    """Tags in its frames, of a time that comes later, lie wherever halves are looked at; between are tiny ones."""
    tiny, size = tag(TAG_AUDIO, 1, b"\xaf\1x"), 8 << 20
    data = bytearray(header(True, False) + tag(TAG_AUDIO, 0, b"\xaf\0\x12\x10"))
    for place in sorted(size >> half for half in range(1, 6)):
        data += tiny * ((place - 30_000 - len(data)) // len(tiny))
        data += tag(TAG_AUDIO, 1, b"\xaf\1" + tag(TAG_AUDIO, 9000, b"\xaf\1x") * 4000)
    data += tiny * ((size - len(data)) // len(tiny)) + tag(TAG_AUDIO, 8000, b"\xaf\1x")
    (tmp_path / FIRST).write_bytes(data)
    looked = []
    really = FlvFile.tag_at
    monkeypatch.setattr(FlvFile, "tag_at", lambda self, at: (looked.append(at), really(self, at))[1])
    with (tmp_path / FIRST).open("rb") as file:
        assert FlvFile(file.fileno()).place_of(5000) == len(data)
    assert len(looked) < 150_000


def test_part_when_much_has_to_be_looked_at_for_it_is_of_the_first_files(tmp_path, monkeypatch):
    Recorder(tmp_path, max_s=1).all(4)
    shelf = Library(tmp_path)
    assert len(read(shelf, 0, 60)[0].pieces) == 4
    times = iter((0.0, 0.5, 0.9, 1.1))
    monkeypatch.setattr(library.time, "thread_time", lambda: next(times))
    assert len(read(shelf, 0, 60)[0].pieces) == 2


@pytest.mark.parametrize("seed", range(4))
def test_file_when_it_is_damaged_is_read_within_its_end(tmp_path, seed):
    made = Recorder(tmp_path).all(4, **LARGE)
    path, rng = made.folder / FIRST, random.Random(seed)
    whole = path.read_bytes()
    for _ in range(12):
        data = bytearray(whole[: rng.randrange(13, len(whole))])
        for _ in range(rng.randrange(6)):
            at = rng.randrange(13, len(data)) if len(data) > 13 else 0
            data[at] = rng.randrange(256)
        path.write_bytes(data)
        with path.open("rb") as file:
            try:
                found = FlvFile(file.fileno())
            except ValueError:
                continue
            assert found.end <= len(data)
            assert found.length_ms >= 0
            for time_ms in (0, 1500, 3999, 10**9):
                assert found.place_of(time_ms) <= found.end
                cut = found.cut_before(time_ms)
                assert cut is None or cut.end <= found.end
        read(Library(tmp_path), 1, 3)


def test_file_of_mp4_when_a_box_in_it_says_that_it_is_huge_costs_nothing(tmp_path):
    made = Recorder(tmp_path, make_form=Mp4Form).all(6)
    (path,) = made.folder.iterdir()
    whole = path.read_bytes()
    boxes = (b"traf", b"tfhd", b"tfdt", b"trun", b"mfhd", b"moof", b"mdat", b"moov", b"trak", b"mdhd", b"tkhd")
    shelf = Library(tmp_path)
    for kind in boxes:
        for at in (whole.find(kind), whole.rfind(kind)):
            for size in (0, 7, 8, 0xFFFFFFFF):
                path.write_bytes(whole[: at - 4] + size.to_bytes(4, "big") + whole[at:])
                assert len(shelf.recordings("live", "room", None, None, "", 10)[0]) == 1
                span = shelf.span("live", "room", BEGAN_S + 2, BEGAN_S + 5, ".mp4")
                if span is not None:
                    assert sum(map(len, shelf.parts("live", "room", span))) <= 2 * len(whole)
