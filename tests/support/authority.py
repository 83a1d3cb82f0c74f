"""The issuers of certificates and tokens in tests."""

import ipaddress
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import jwt
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
)
from cryptography.x509.oid import NameOID

DAY = timedelta(days=1)


@dataclass(frozen=True, slots=True)
class Files:
    """The files of a certificate and its key."""

    certificate: Path
    key: Path


class Authority:
    """A certificate authority; `file` has its own certificate."""

    def __init__(self, folder: Path, name: str = "authority") -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._name = _name(name)
        self._key = ec.generate_private_key(ec.SECP256R1())
        certificate = (
            _builder(self._name, self._name, self._key.public_key(), -DAY, DAY)
            .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
            .sign(self._key, SHA256())
        )
        self.file = folder / f"{name}.pem"
        self.file.write_bytes(certificate.public_bytes(Encoding.PEM))

    def issue(
        self,
        file: str,
        *,
        uris: Sequence[str] = (),
        hosts: Sequence[str] = (),
        cn: str = "somebody",
        begins: timedelta = -DAY,
        ends: timedelta = DAY,
    ) -> Files:
        """Issue a certificate with these names, valid between two offsets from now. Existing files
        are replaced atomically, as Kubernetes does."""
        key = ec.generate_private_key(ec.SECP256R1())
        names: list[x509.GeneralName] = [x509.UniformResourceIdentifier(uri) for uri in uris]
        names += [_host(host) for host in hosts]
        builder = _builder(_name(cn), self._name, key.public_key(), begins, ends)
        if names:
            builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
        certificate = builder.sign(self._key, SHA256())
        files = Files(self._folder / f"{file}.crt", self._folder / f"{file}.key")
        replace(files.certificate, certificate.public_bytes(Encoding.PEM))
        replace(
            files.key,
            key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()),
        )
        return files


class Issuer:
    """Issues tokens; `file` has its public keys."""

    NAME = "https://issuer.example"
    AUDIENCE = "seqgate"

    def __init__(self, file: Path, key_id: str = "k1") -> None:
        self.file = file
        self.key_id = key_id
        self.key = ec.generate_private_key(ec.SECP256R1())
        self.publish()

    @property
    def pem(self) -> bytes:
        """The public key."""
        return self.key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)

    @property
    def jwk(self) -> dict[str, Any]:
        """The public key, as a JSON Web Key."""
        made: dict[str, Any] = jwt.algorithms.ECAlgorithm.to_jwk(
            self.key.public_key(), as_dict=True
        )
        return {**made, "kid": self.key_id, "use": "sig", "alg": "ES256"}

    def publish(self, *others: "Issuer") -> None:
        """Write the public keys to `file`."""
        keys = [each.jwk for each in (self, *others)]
        replace(self.file, json.dumps({"keys": keys}).encode())

    def token(self, subject: str | None, *, ends: timedelta = DAY, **claims: Any) -> str:
        """A signed token; claims that are None are left out."""
        said = {
            "sub": subject,
            "aud": self.AUDIENCE,
            "iss": self.NAME,
            "exp": datetime.now(UTC) + ends,
            **claims,
        }
        said = {name: value for name, value in said.items() if value is not None}
        return jwt.encode(said, self.key, algorithm="ES256", headers={"kid": self.key_id})


def replace(file: Path, content: bytes) -> None:
    """Replace a file atomically."""
    scratch = file.with_name(f".{file.name}.{os.getpid()}")
    scratch.write_bytes(content)
    scratch.replace(file)


def _builder(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePublicKey,
    begins: timedelta,
    ends: timedelta,
) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now + begins)
        .not_valid_after(now + ends)
    )


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _host(text: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(text))
    except ValueError:
        return x509.DNSName(text)
