"""Speed of the chunk reader and of serialise(), on the traffic of one publisher.

    python bench chunk [--repeat 20] [--json]

The publisher sends H.264 at 30 frames a second (a key frame of 200 kB every 2 s, other frames of 30 kB) and AAC
(300 octets, 47 a second): about 8 Mbit/s. It is read in pieces of 64 KiB, as the Receiver reads it. Every figure is the
best of `--repeat` runs, because the machine does other things too, and stands beside what merely copying the same
pieces costs. "core at 10 Mbit/s" is what a publisher of that rate takes of one processor core; the target is below 2 %.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Callable
from typing import Any, Final

from flowctl.wire.rtmp.chunk.reader import ChunkReader
from flowctl.wire.rtmp.chunk.writer import ChunkWriter, serialise
from flowctl.wire.rtmp.wire import Message

CHUNK_SIZES: Final = (128, 4096, 60000)
PIECE_BYTES: Final = 64 * 1024
SECONDS: Final = 10
KEY_BYTES: Final = 200_000
INTER_BYTES: Final = 30_000
AUDIO_BYTES: Final = 300
TARGET_RATE: Final = 10_000_000 / 8


def publisher_messages(seconds: int = SECONDS) -> list[Message]:
    """Return `seconds` of the publisher's media, audio and video in the order of their timestamps."""
    noise = random.Random(1).randbytes(KEY_BYTES)
    video = [
        Message(6, frame * 1000 // 30, 9, 1, noise[: KEY_BYTES if frame % 60 == 0 else INTER_BYTES])
        for frame in range(30 * seconds)
    ]
    audio = [
        Message(4, frame * 1024 * 1000 // 48000, 8, 1, noise[:AUDIO_BYTES]) for frame in range(48000 * seconds // 1024)
    ]
    return sorted(video + audio, key=lambda message: message.timestamp)


def best(repeat: int, run: Callable[[], object]) -> float:
    """Return the seconds that the fastest of `repeat` calls of `run` took."""
    fastest = float("inf")
    for _ in range(repeat):
        start = time.perf_counter()
        run()
        fastest = min(fastest, time.perf_counter() - start)
    return fastest


def bench_reader(chunk_size: int, messages: list[Message], repeat: int) -> dict[str, float]:
    """Measure reading `messages` in chunks of `chunk_size`."""
    writer = ChunkWriter()
    data = writer.set_chunk_size(chunk_size) + b"".join(map(writer.write, messages))
    pieces = [data[at : at + PIECE_BYTES] for at in range(0, len(data), PIECE_BYTES)]

    def read() -> int:
        reader = ChunkReader()
        return sum(len(reader.feed(piece)) for piece in pieces)

    def copy() -> None:
        for piece in pieces:
            bytearray(piece)

    if read() != len(messages) + 1:
        raise SystemExit("the reader lost messages")
    taken, copied = best(repeat, read), best(repeat, copy)
    return {
        "chunk_size": chunk_size,
        "megabytes_per_s": len(data) / taken / 1e6,
        "core_percent_at_10_mbit_s": TARGET_RATE / (len(data) / taken) * 100,
        "us_per_message": taken / len(messages) * 1e6,
        "times_of_a_copy": taken / copied,
    }


def bench_serialise(chunk_size: int, messages: list[Message], repeat: int) -> dict[str, float]:
    octets = sum(len(message.payload) for message in messages)

    def write() -> None:
        for message in messages:
            serialise(message.type_id, message.msid, message.timestamp, message.payload, message.csid, chunk_size)

    def copy() -> None:
        for message in messages:
            bytearray(message.payload)

    taken, copied = best(repeat, write), best(repeat, copy)
    return {
        "chunk_size": chunk_size,
        "megabytes_per_s": octets / taken / 1e6,
        "core_percent_at_10_mbit_s": TARGET_RATE / (octets / taken) * 100,
        "us_per_message": taken / len(messages) * 1e6,
        "times_of_a_copy": taken / copied,
    }


QUICK: Final[dict[str, Any]] = {"repeat": 1}
"""Arguments of `run` for a look at whether it works, in a second or so."""


def run(repeat: int = 10) -> list[dict[str, float | str]]:
    """Measure reader and serialiser at each chunk size."""
    messages = publisher_messages()
    rows: list[dict[str, float | str]] = []
    for name, measure in (("ChunkReader.feed", bench_reader), ("serialise", bench_serialise)):
        for size in CHUNK_SIZES:
            figures = measure(size, messages, repeat)
            rows.append({"what": name, **{key: round(value, 3) for key, value in figures.items()}})
    return rows


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=20, help="runs of each measurement; the fastest counts")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    arguments = parser.parse_args()
    messages = publisher_messages()
    results = {
        "ChunkReader.feed": [bench_reader(size, messages, arguments.repeat) for size in CHUNK_SIZES],
        "serialise": [bench_serialise(size, messages, arguments.repeat) for size in CHUNK_SIZES],
    }
    if arguments.json:
        json.dump(results, sys.stdout, indent=1)
        return
    for name, rows in results.items():
        print(f"{name:16}  chunk size     MB/s   core at 10 Mbit/s   us/message   x copy")
        for row in rows:
            print(
                f"{row['chunk_size']:28.0f} {row['megabytes_per_s']:8.0f} {row['core_percent_at_10_mbit_s']:17.3f} %"
                f" {row['us_per_message']:12.1f} {row['times_of_a_copy']:8.1f}"
            )


if __name__ == "__main__":
    main()
