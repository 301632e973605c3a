"""The RTMP chunk stream (Adobe RTMP 1.0 section 5.3): octets to messages and back; one import for both halves.

The reader is in `flowctl.rtmp.chunk.reader`, the writer in `flowctl.rtmp.chunk.writer`, the message that both speak of
in `flowctl.rtmp.wire`.
"""

from __future__ import annotations

from flowctl.rtmp.chunk.reader import ChunkReader
from flowctl.rtmp.chunk.writer import ChunkWriter, serialise
from flowctl.rtmp.wire import Message

__all__ = ["ChunkReader", "ChunkWriter", "Message", "serialise"]
