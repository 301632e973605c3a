"""Spark's ``xxhash64`` of a text and a whole number, for DuckDB, which has none: XXH64 with seed 42, column by column.

Source: https://github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md; the hash of a column is the seed of the next.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import pyarrow as pa

_SEED: Final = 42
_P1, _P2, _P3, _P4, _P5 = (
    0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5
)  # fmt: skip
_ALL: Final = (1 << 64) - 1


def xxhash64(texts: pa.ChunkedArray, numbers: pa.ChunkedArray) -> pa.Array:
    """Return the hashes of rows, null for none of the two."""
    coded = texts.combine_chunks().dictionary_encode()
    seeds = np.array([_of_octets(text.encode()) for text in coded.dictionary.to_pylist()], np.uint64)
    found = _of_numbers(np.asarray(numbers).astype(np.int64).view(np.uint64), seeds[np.asarray(coded.indices)])
    return pa.array(found.view(np.int64))


def _rotated(value: Any, bits: int) -> Any:
    return ((value << bits) | (value >> (64 - bits))) & _ALL


def _of_octets(octets: bytes) -> Any:
    length, rest = len(octets), octets
    if length >= 32:
        lanes = [(_SEED + more) & _ALL for more in (_P1 + _P2, _P2, 0, -_P1)]
        while len(rest) >= 32:
            words = (int.from_bytes(rest[at : at + 8], "little") for at in range(0, 32, 8))
            lanes = [
                _rotated((lane + word * _P2) & _ALL, 31) * _P1 & _ALL for lane, word in zip(lanes, words, strict=True)
            ]
            rest = rest[32:]
        found = sum(_rotated(lane, bits) for lane, bits in zip(lanes, (1, 7, 12, 18), strict=True)) & _ALL
        for lane in lanes:
            found = ((found ^ (_rotated(lane * _P2 & _ALL, 31) * _P1 & _ALL)) * _P1 + _P4) & _ALL
    else:
        found = _SEED + _P5
    found = (found + length) & _ALL
    for size, step in ((8, _word), (4, _half), (1, _octet)):
        while len(rest) >= size:
            found, rest = step(found, int.from_bytes(rest[:size], "little")), rest[size:]
    return _mixed(found)


def _word(found: Any, word: Any) -> Any:
    return (_rotated(found ^ (_rotated(word * _P2 & _ALL, 31) * _P1 & _ALL), 27) * _P1 + _P4) & _ALL


def _half(found: Any, word: Any) -> Any:
    return (_rotated(found ^ (word * _P1 & _ALL), 23) * _P2 + _P3) & _ALL


def _octet(found: Any, octet: Any) -> Any:
    return _rotated(found ^ (octet * _P5 & _ALL), 11) * _P1 & _ALL


def _mixed(found: Any) -> Any:
    found = (found ^ (found >> 33)) * _P2 & _ALL
    found = (found ^ (found >> 29)) * _P3 & _ALL
    return found ^ (found >> 32)


def _of_numbers(numbers: Any, seeds: Any) -> Any:
    found = seeds + np.uint64((_P5 + 8) & _ALL)
    return _mixed(_word(found, numbers))
