"""Certificates for tests: an authority, and what it signs for servers, written where a test wants them."""

from __future__ import annotations

import datetime as dt
import functools
import ipaddress
import ssl
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

DAY = dt.timedelta(days=1)


def _signed(name, key, issuer, issuer_key, extension, *, days=2):
    now = dt.datetime.now(dt.UTC)
    builder = x509.CertificateBuilder(
        subject_name=name,
        issuer_name=issuer,
        public_key=key.public_key(),
        serial_number=x509.random_serial_number(),
        not_valid_before=now - DAY,
        not_valid_after=now + days * DAY,
    )
    return builder.add_extension(extension, critical=False).sign(issuer_key, hashes.SHA256())


def _name(text):
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


@functools.cache
def authority():
    key = ec.generate_private_key(ec.SECP256R1())
    name = _name("flowctl tests")
    return _signed(name, key, name, key, x509.BasicConstraints(ca=True, path_length=0)), key


class Pair:
    def __init__(self, folder: Path, name: str = "server") -> None:
        self.certificate, self.key = folder / f"{name}.pem", folder / f"{name}.key"
        self.authority = folder / "authority.pem"
        self.authority.write_bytes(_pem(authority()[0]))
        self.renew()

    def renew(self, days: float = 2) -> int:
        """Write a new pair and return the serial number of its certificate."""
        issuer, issuer_key = authority()
        key = ec.generate_private_key(ec.SECP256R1())
        addresses = [x509.IPAddress(ipaddress.ip_address(text)) for text in ("127.0.0.1", "::1")]
        names = x509.SubjectAlternativeName([x509.DNSName("localhost"), *addresses])
        made = _signed(_name("localhost"), key, issuer.subject, issuer_key, names, days=days)
        self.certificate.write_bytes(_pem(made))
        self.key.touch(mode=0o600)
        self.key.write_bytes(key_pem(key))
        return made.serial_number

    def client(self) -> ssl.SSLContext:
        return ssl.create_default_context(cafile=self.authority)


def serial_of(sock: ssl.SSLSocket) -> int:
    return x509.load_der_x509_certificate(sock.getpeercert(binary_form=True)).serial_number


def _pem(certificate):
    return certificate.public_bytes(serialization.Encoding.PEM)


def key_pem(key, password=None):
    hiding = serialization.BestAvailableEncryption(password) if password else serialization.NoEncryption()
    return key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, hiding)
