"""A server of DNS on loopback: real packets over UDP and TCP, of what a test says."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections import Counter

import dns.flags
import dns.message
import dns.rcode
import dns.rrset

UDP_BYTES = 512


class DnsServer:
    """Answers with `records`; of a name in `failing` with that code or those octets, or, for None, not at all."""

    def __init__(self, port=0):
        self.records = {}  # (name, kind): list of texts
        self.failing = {}
        self.ttl_s = 0
        self.asked = Counter()  # by transport and kind
        while True:
            self._tcp = socket.create_server(("127.0.0.1", port))
            self.port = self._tcp.getsockname()[1]
            self._udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
            try:
                self._udp.bind(("127.0.0.1", self.port))
                break
            except OSError:  # something else has this one
                self.close()
        self.where = f"127.0.0.1:{self.port}"
        self._threads = [threading.Thread(target=item, daemon=True) for item in (self._serve_udp, self._serve_tcp)]
        for thread in self._threads:
            thread.start()

    def put(self, name, kind, *texts):
        self.records[name, kind] = list(texts)

    def close(self):
        for item in (self._udp, self._tcp):
            with contextlib.suppress(OSError):  # one that is not bound
                item.shutdown(socket.SHUT_RDWR)
            item.close()

    def _answer(self, wire, transport):
        query = dns.message.from_wire(wire)
        question = query.question[0]
        name, kind = str(question.name).rstrip("."), question.rdtype.name
        self.asked[transport, kind] += 1
        reply = dns.message.make_response(query)
        reply.flags |= dns.flags.RA
        if name in self.failing:
            if self.failing[name] is None or isinstance(self.failing[name], bytes):
                return self.failing[name]
            reply.set_rcode(self.failing[name])
        elif texts := self.records.get((name, kind)):
            reply.answer.append(dns.rrset.from_text_list(question.name, self.ttl_s, "IN", kind, texts))
        elif not any(known == name for known, _ in self.records):
            reply.set_rcode(dns.rcode.NXDOMAIN)
        return reply

    def _serve_udp(self):
        with contextlib.suppress(OSError):
            while (received := self._udp.recvfrom(4096))[0]:  # until it is shut down
                wire, client = received
                reply = self._answer(wire, "udp")
                if reply is None:
                    continue
                packet = reply if isinstance(reply, bytes) else reply.to_wire(max_size=65_535)
                if len(packet) > UDP_BYTES:
                    reply.answer.clear()
                    reply.flags |= dns.flags.TC
                    packet = reply.to_wire()
                self._udp.sendto(packet, client)

    def _serve_tcp(self):
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._tcp.accept()
                with client, contextlib.suppress(OSError, ValueError):
                    size = int.from_bytes(client.recv(2, socket.MSG_WAITALL), "big")
                    reply = self._answer(client.recv(size, socket.MSG_WAITALL), "tcp")
                    if reply is not None:
                        packet = reply.to_wire(max_size=65_535)
                        client.sendall(len(packet).to_bytes(2, "big") + packet)
