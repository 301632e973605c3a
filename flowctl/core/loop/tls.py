"""A socket with TLS that never blocks: to its connection it is like any other, and the handshake happens as it is read.

Four things set TLS apart from a plain socket, and all of them end here:

- What OpenSSL has encrypted and the kernel did not take has to be offered again, the same bytes, before anything else.
  A Sender cannot promise that: what it offers next is what its peer is to have *then*. So what was encrypted for one
  write, of `WRITE_BYTES` at most, counts as taken and is kept here (`kept_bytes`); `push` offers it again when the
  socket is writable. It is like a little more of the kernel's buffer, and is counted with it.
- Reading may have to write and the other way round. `read_wants_write` tells the connection, which watches the socket.
  Writing never reads: it waits for the handshake, and renegotiation, which peers could ask for all day, is refused.
- Input may lie in the TLS object although the descriptor is not readable: `pending_input` says so.
- OpenSSL, where it has the descriptor, reads on for as long as records come that hold no data: a peer that sends new
  keys without end would keep the thread. So it is given what came in pieces, and never reads by itself. What it
  encrypts it leaves in memory too, which all connections of a thread share: where each has memory of its own for it,
  a thousand of them have more than a processor's cache holds.

All errors of TLS are the peer's: a `RemoteProtocolError`, of reading; an OSError, of writing. Either way EAGAIN is a
`BlockingIOError`, as of a plain socket.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import ssl
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final, Self

from flowctl.core.loop.locks import OwnedLock
from flowctl.errors import RemoteProtocolError

if TYPE_CHECKING:
    from typing_extensions import Buffer

LEAST_VERSION: Final = ssl.TLSVersion.TLSv1_2
"""Oldest version that is spoken, as a server and as a client: those before it must not be used (RFC 8996)."""
RECORD_BYTES: Final = 16 * 1024
"""Most bytes in one record (RFC 8446, 5.1)."""
WRITE_BYTES: Final = 4 * RECORD_BYTES
"""Most bytes that are encrypted for one call of the kernel's, and may be left over. A key frame of 60 kB costs 37 us a
viewer in this way and 53 us record by record; eight records are no better."""
HANDSHAKE_S: Final = 10.0
"""Longest time for the handshake of TLS. A phone on a bad line takes 2 s; the session's own limit, which goes on
meanwhile, may end it sooner."""
_PIECE_BYTES: Final = RECORD_BYTES + 256
"""Bytes read from the kernel at a time: a whole record, or 600 of the smallest, which take 7 ms."""
_MOST_ANSWERS_BYTES: Final = 2 * WRITE_BYTES
"""Most output kept for a peer that takes nothing; beyond it no more of its records are read: some want an answer."""
_HANDSHAKE_RECORD: Final = 0x16
_SSL2_HELLO: Final = 0x80
_RTMP_VERSION: Final = 0x03
_send: Final = socket.socket.send
_AGAIN: Final = "the socket is not ready"


class _Records:
    """What OpenSSL has just encrypted, in memory that connections share: empty whenever `lock` is free."""

    def __init__(self) -> None:
        self.lock: Final = OwnedLock()
        self.bio: Final = ssl.MemoryBIO()  # guarded by lock
        self.owner: TlsSocket | None = None  # the connection that they are of; guarded by lock


class _OfThread(threading.local):
    def __init__(self) -> None:
        self.records: Final = _Records()


_of_thread: Final = _OfThread()


class TlsSocket(socket.socket):
    """One end of a connection with TLS; made by `with_tls`. Reading and ending on one thread, writing on any."""

    __slots__ = (
        *("_came", "_closing", "_context", "_fault", "_kept", "_looked", "_more", "_raw", "_records", "_said", "_tls"),
        *("established", "handshake_by", "on_kept", "read_wants_write", "server_side", "write_waits"),
    )
    _tls: ssl.SSLObject  # there is one where there are `_records`

    def __init__(self, sock: socket.socket, context: ssl.SSLContext, host: str | None) -> None:
        self.server_side: Final = host is None
        self._came: Final = ssl.MemoryBIO()  # encrypted, from the peer
        self._records: _Records | None = None  # encrypted, for the peer; a server's from the first read on
        self._context: Final = context
        if host is not None:  # one that is no host's name is found now
            self._begin(_Records(), host)
        self.established = False  # the handshake is done; the reading thread
        self.read_wants_write = False  # reading goes on when the socket is writable; the reading thread
        self.write_waits = False  # for the connection: its Sender wants to write as soon as that goes
        self.handshake_by = float("inf")  # for the connection: when the handshake has to be done
        # Called when something was kept that `push` has to offer again. Any thread, no lock of this is held.
        self.on_kept: Callable[[], object] | None = None
        self._looked = False  # at the first octet
        self._more = False  # there is more in TLS than was read
        self._fault: ssl.SSLError | None = None  # met behind what was read
        self._kept = b""  # encrypted and not taken by the kernel; written under the lock of `_records`
        self._closing = False  # our end of the stream is to be said; written under the lock of `_records`
        self._said = False  # it is among what is kept
        self._raw = False  # what comes is not decrypted any more: it is thrown away
        super().__init__(sock.family, sock.type, sock.proto, fileno=sock.detach())

    @classmethod
    def of(cls, sock: socket.socket) -> Self | None:
        return sock if isinstance(sock, cls) else None

    def _begin(self, records: _Records, host: str | None) -> _Records:
        self._tls = self._context.wrap_bio(self._came, records.bio, server_side=host is None, server_hostname=host)
        self._records = records
        return records

    def _claim_locked(self, records: _Records) -> None:
        """Have `records` for this connection. What another has there, which this broke in on, is kept for that one."""
        records.lock.assert_owned()
        owner = records.owner
        if owner is not None and owner is not self:  # an error broke in on it, or a finalizer, which runs anywhere
            owner._kept += records.bio.read()  # noqa: SLF001 - of the same class
        records.owner = self

    @property
    def kept_bytes(self) -> int:
        """How much is kept here that counts as taken. Any thread."""
        return len(self._kept) + self._closing

    # -- reading

    def recv_into(self, buffer: Buffer, nbytes: int | None = None, flags: int = 0) -> int:
        """Read, after the handshake where that is not done yet; 0 at the end of the stream."""
        del flags
        if self._raw:  # thrown away
            if socket.socket.recv_into(self, buffer, nbytes or 0):
                raise BlockingIOError(_AGAIN)
            return 0
        self.read_wants_write = False
        records = self._records or self._begin(_of_thread.records, None)
        try:
            with records.lock:
                count = self._read_locked(records, buffer, nbytes or len(memoryview(buffer)))
                kept = bool(self._kept)
        except ssl.SSLWantReadError:
            raise BlockingIOError(_AGAIN) from None
        except ssl.SSLEOFError as error:
            if self.established:
                return 0
            raise RemoteProtocolError("the peer left within the TLS handshake", code="tls") from error
        except ssl.SSLCertVerificationError as error:
            raise RemoteProtocolError(
                f"its certificate is not to be trusted: {error.verify_message}",
                code="tls-certificate",
                hint="name the file of the authority that signed it, or connect without verifying",
            ) from error
        except ssl.SSLError as error:
            if said := alert_of(error):
                raise RemoteProtocolError(f"the peer refused TLS: {said}", code="tls-alert") from error
            what = (error.reason or str(error)).lower().replace("_", " ")
            raise RemoteProtocolError(f"TLS: {what}", code="tls") from error
        if kept and self.on_kept is not None:  # an answer to what TLS was told
            self.on_kept()
        return count

    def _read_locked(self, records: _Records, buffer: Buffer, size: int) -> int:
        """Decrypt what is there, after one read of the kernel's where there is nothing."""
        self._claim_locked(records)
        fed = False
        while True:
            try:
                self._flush_locked(records)
            except OSError:  # what the peer has sent counts all the same, once there can be any
                if not self.established:
                    raise
            if self._kept and (not self.established or len(self._kept) > _MOST_ANSWERS_BYTES):
                self.read_wants_write = True
                raise BlockingIOError(_AGAIN)
            self._claim_locked(records)  # for what TLS answers
            try:
                if self._fault is not None:
                    raise self._fault
                if not self.established:
                    if not self._looked and self.server_side and not self._check_first_octet():
                        return 0
                    self._tls.do_handshake()
                    self.established = True
                if not size:  # the handshake alone was asked for
                    return self._rest_locked(memoryview(buffer))
                count: int = self._tls.read(size, buffer)  # type: ignore[assignment]  # a number where there is a buffer
            except ssl.SSLWantReadError:
                self._more = False
                if fed:
                    raise
            else:
                return count + self._rest_locked(memoryview(buffer)[count:size]) if count else 0
            finally:
                with contextlib.suppress(OSError):  # told by the next write; what was read counts
                    self._flush_locked(records)
            data = socket.socket.recv(self, _PIECE_BYTES)
            if data:
                self._came.write(data)
            else:
                self._came.write_eof()
            fed = True

    def _rest_locked(self, room: memoryview) -> int:
        """Decrypt what else is there, as far as there is room; an end or an error is for the next read."""
        count = 0
        self._more = False
        while self._tls.pending() or self._came.pending:
            if count == len(room):
                self._more = True
                break
            try:
                part: int = self._tls.read(len(room) - count, room[count:])  # type: ignore[assignment]  # as above
            except ssl.SSLWantReadError:
                break
            except ssl.SSLError as error:
                self._fault, part = error, 0
            if not part:
                self._more = True
                break
            count += part
        return count

    def _check_first_octet(self) -> bool:
        """See by the first octet whether the peer speaks TLS at all; return False where it has ended its stream."""
        first = socket.socket.recv(self, 1, socket.MSG_PEEK)
        self._looked = True
        if not first:
            return False
        if first[0] not in {_HANDSHAKE_RECORD, _SSL2_HELLO}:
            what = "plain RTMP" if first[0] == _RTMP_VERSION else f"first byte 0x{first[0]:02x}"
            what = "plain HTTP" if first.isalpha() else what
            raise RemoteProtocolError(f"this port speaks TLS, the peer does not: {what}", code="not-tls")
        return True

    def pending_input(self) -> bool:
        """Return whether there is input that the descriptor does not tell of."""
        return self.established and not self._raw and self._more

    def getpeercert(self, binary_form: bool = False) -> Any:  # noqa: FBT001, FBT002 - as the module has it
        return self._tls.getpeercert(binary_form)

    def version(self) -> str | None:
        return self._tls.version()

    # -- writing

    def send(self, data: Buffer, flags: int = 0) -> int:
        """Write as much as goes; what is kept here counts as written."""
        del flags
        records = self._records
        if records is None or not self.established:
            raise BlockingIOError(_AGAIN)
        with records.lock:
            if self._raw:
                raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))
            if self._kept and not self._ready_locked(records):
                raise BlockingIOError(_AGAIN)
            written = len(data)  # type: ignore[arg-type]  # of bytes
            if 0 < written <= RECORD_BYTES and records.owner is None:
                # What a viewer is mostly sent. As below without its calls, which are 3 % of what it costs.
                records.owner = self
                self._tls.write(data)
                sealed = records.bio.read()
                records.owner = None
                try:
                    sealed = sealed[_send(self, sealed) :]  # nothing is left, or the socket is full
                except BlockingIOError:
                    pass
                finally:
                    self._kept = sealed  # also where the connection is found to be broken
            else:
                written = self._write_locked(records, data)
            kept = bool(self._kept)
        if kept and self.on_kept is not None:
            self.on_kept()
        return written

    def _write_locked(self, records: _Records, data: Buffer) -> int:
        """Write until the kernel takes no more; what it did not take of that is kept."""
        total = len(data)  # type: ignore[arg-type]  # of bytes
        rest = memoryview(data)
        written = 0
        while written < total and not self._kept:
            stop = min(written + WRITE_BYTES, total)
            while written < stop:
                self._claim_locked(records)
                written += self._tls.write(rest[written:stop])  # a record
            self._flush_locked(records)
        return written

    def _flush_locked(self, records: _Records) -> None:
        """Offer the kernel what is encrypted, and keep what it does not take."""
        data = self._kept + records.bio.read() if self._kept else records.bio.read()
        records.owner = None
        try:
            while data:
                data = data[_send(self, data) :]
        except BlockingIOError:
            pass
        finally:
            self._kept = data  # also where the connection is found to be broken

    def sendmsg(self, buffers: Sequence[Buffer], *_: Any) -> int:  # type: ignore[override]  # what a transport is asked for
        """Write as much of `buffers` as goes, `WRITE_BYTES` at most: small messages share a record."""
        first = memoryview(buffers[0])
        if len(buffers) == 1 or len(first) >= WRITE_BYTES:
            return self.send(first)
        joined, room = [], WRITE_BYTES
        for buffer in buffers:
            part = memoryview(buffer)[:room]
            joined.append(part)
            room -= len(part)
            if not room:
                break
        return self.send(b"".join(joined))

    def push(self) -> bool:
        """Offer what is kept again; return whether nothing is kept any more."""
        records = self._records
        if records is None or not self.established:
            return False
        with records.lock:
            return self._ready_locked(records)

    def _ready_locked(self, records: _Records) -> bool:
        """Return whether something new may be written: nothing is kept, or the kernel takes it now."""
        self._claim_locked(records)
        self._flush_locked(records)
        if self._kept:
            return False
        if self._closing:
            self._say_end_locked(records)
        return not self._closing

    # -- the end

    def shutdown(self, how: int) -> None:
        """End our stream: say so to the peer's TLS and to its kernel, or as soon as what is kept has gone (`push`).

        What comes from now on is not decrypted; it is for throwing away.
        """
        records = self._records
        if self._raw:
            if not self._closing:
                socket.socket.shutdown(self, how)
            return
        if records is not None and self.established:
            with records.lock, contextlib.suppress(OSError):
                self._raw = self._closing = True
                self._ready_locked(records)
                return
        self._raw, self._closing, self._kept = True, False, b""
        socket.socket.shutdown(self, how)

    def _say_end_locked(self, records: _Records) -> None:
        """Send close_notify and end the stream; `_closing` stays where the kernel does not take it."""
        if not self._said:
            self._said = True
            self._claim_locked(records)
            with contextlib.suppress(
                OSError, ValueError
            ):  # what this waits for, or has met, is of no interest any more
                self._tls.unwrap()
            with contextlib.suppress(ConnectionError):
                self._flush_locked(records)
        if self._kept:
            return
        self._closing = False
        socket.socket.shutdown(self, socket.SHUT_WR)

    def recv(self, buflen: int = 1024, flags: int = 0) -> bytes:
        """Read as `recv_into`; with flags, or after `shutdown`, what is there for looking at or throwing away."""
        if self._raw or flags:
            return socket.socket.recv(self, buflen, flags)
        data = bytearray(buflen)
        return bytes(data[: self.recv_into(data)])


def alert_of(error: BaseException | None) -> str:
    """Return what the peer said in an alert, ``unknown ca``; empty: the error is none of an alert."""
    return (getattr(error, "reason", None) or "").lower().partition("alert")[2].strip("_ ").replace("_", " ")


def with_tls(sock: socket.socket, context: ssl.SSLContext, *, host: str | None = None) -> TlsSocket:
    """Return the socket with TLS that takes the place of `sock`; nothing is sent or read yet."""
    sock.setblocking(False)
    try:
        sock.getpeername()
        made = TlsSocket(sock, context, host)
    except (OSError, ValueError) as error:
        sock.close()
        raise error if isinstance(error, OSError) else OSError(str(error)) from error
    made.setblocking(False)
    return made
