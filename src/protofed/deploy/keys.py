"""Identities: an authority, the server's certificate, and one key pair for every site.

A folder of keys has one folder for each party, and each party needs nothing but its own:

    KEYS/authority.key           stays with whoever makes keys; needed to add a server address later
    KEYS/server/                 ca.pem, server.pem, server.key, and sites/NAME.pub for everyone who may take part
    KEYS/sites/NAME/             ca.pem, site.key, site.json (its name and the server's address), and members/NAME.pub
                                 of every site, by which sites know each other's keys without asking the server
"""

import ipaddress
import json
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from protofed.data.names import check_site_name, one_form
from protofed.deploy.flower import public_key_bytes
from protofed.errors import UserError
from protofed.system import make_private, write_atomically

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey, EllipticCurvePublicKey
    from cryptography.x509 import Certificate

_DAYS = 3650
_REVOKED = ".revoked"


@dataclass(frozen=True)
class SiteKeys:
    """What a site holds."""

    name: str
    server: str
    """Host and port."""
    authority: Path
    private: Path

    @property
    def members(self) -> Path:
        """The folder with the public keys of all sites, for secure sums."""
        return self.private.parent / "members"


@dataclass(frozen=True)
class ServerKeys:
    """What the server holds."""

    folder: Path
    authority: Path
    """The certificate that server and sites trust."""
    certificate: Path
    """The server's own."""
    private: Path
    """The key of the certificate."""
    state: Path
    """What the SuperLink remembers of nodes and messages between starts."""

    @classmethod
    def at(cls, folder: Path) -> "ServerKeys":
        """Those in a folder, whether they are there or not."""
        return cls(folder, folder / "ca.pem", folder / "server.pem", folder / "server.key", folder / "link")

    def sites(self) -> dict[str, Path]:
        """The public keys of all who may take part, by name."""
        return {path.stem: path for path in sorted((self.folder / "sites").glob("*.pub"))}


def make_keys(folder: Path, server: str, sites: Iterable[str]) -> list[Path]:
    """Make what is missing, and keep what is there; the folders of the sites that are new."""
    names = [one_form(name) for name in sites]
    for name in names:
        check_site_name(name, "site")
    host, port = host_and_port(server)
    if not (folder / "server" / "server.pem").exists():
        _make_server(folder, host)
    made = [
        _make_site(folder, name, f"{host}:{port}")
        for name in names
        if not (folder / "server" / "sites" / f"{name}.pub").exists()
    ]
    _introduce_members(folder)
    make_private(folder)
    return made


def _introduce_members(folder: Path) -> None:
    """Give every site whose folder is still here the public keys of all."""
    members = ServerKeys.at(folder / "server").sites()
    for own in sorted((folder / "sites").glob("*/site.json")):
        (own.parent / "members").mkdir(exist_ok=True)
        for path in members.values():
            write_atomically(own.parent / "members" / path.name, path.read_bytes())


def _make_site(folder: Path, name: str, server: str) -> Path:
    own, public = folder / "sites" / name, folder / "server" / "sites" / f"{name}.pub"
    if own.exists():
        raise UserError(f"{own} exists although {name} is no longer a member; remove it to create new keys for {name}")
    own.mkdir(parents=True, mode=0o700)
    key = _new_key()
    _write_secret(own / "site.key", _private(key, "OpenSSH"))
    write_atomically(own / "ca.pem", (folder / "server" / "ca.pem").read_bytes())
    write_atomically(own / "site.json", json.dumps({"name": name, "server": server}).encode())
    public.parent.mkdir(exist_ok=True)
    write_atomically(public, _public(key) + b"\n")
    return own


def revoke(folder: Path, site: str) -> None:
    """Take a site's public key from the server's list; a running server notices before its next round."""
    keys = folder if (folder / "server.pem").exists() else folder / "server"
    public = keys / "sites" / f"{site}.pub"
    if not public.exists():
        known = ", ".join(ServerKeys.at(keys).sites()) or "nobody"
        raise UserError(f"{site} is not a member of the federation in {folder}; members are {known}")
    public.replace(public.with_suffix(_REVOKED))


def server_keys(folder: Path) -> ServerKeys:
    """The server's keys, whether its own folder or that of all keys is given."""
    for place in (folder, folder / "server"):
        keys = ServerKeys.at(place)
        if keys.certificate.exists():
            for needed in (keys.authority, keys.private):
                if not needed.exists():
                    raise UserError(f"{place} lacks {needed.name}; copy the whole folder `server` of the keys")
            return keys
    raise UserError(f"{folder} holds no keys of a server; create them with protofed deploy keys")


def site_keys(folder: Path, server: str | None = None) -> SiteKeys:
    """A site's keys, checked as far as that is possible without the server."""
    try:
        content: dict[str, Any] = json.loads((folder / "site.json").read_text())
        name, address = str(content["name"]), server or str(content["server"])
    except (OSError, ValueError, KeyError, TypeError):
        raise UserError(f"{folder} holds no keys of a site: there is no site.json with name and server") from None
    host_and_port(address)
    keys = SiteKeys(name, address, folder / "ca.pem", folder / "site.key")
    _check_key(keys.private)
    _check_certificate(keys.authority)
    return keys


def host_and_port(address: str) -> tuple[str, int]:
    """Both from HOST:PORT."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise UserError(f"{address!r} is not an address; give HOST:PORT, for example federation.example.org:9443")
    return host.strip("[]"), int(port)


def public_bytes(path: Path) -> bytes:
    """The public key in a file, as Flower registers it."""
    return public_key_bytes(public_key(path))


def public_key(path: Path) -> "EllipticCurvePublicKey":
    """The public key of a site in a file."""
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import load_ssh_public_key

    try:
        key = load_ssh_public_key(path.read_bytes())
    except ValueError:
        key = None
    if not isinstance(key, ec.EllipticCurvePublicKey):
        raise UserError(f"{path} is not the public key of a site")
    return key


def _make_server(folder: Path, host: str) -> None:
    from cryptography import x509
    from cryptography.hazmat.primitives.serialization import Encoding, load_pem_private_key
    from cryptography.x509.oid import NameOID

    server = folder / "server"
    server.mkdir(parents=True, exist_ok=True)
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "protofed federation")])
    authority = _new_key()
    if (folder / "authority.key").exists():
        loaded = load_pem_private_key((folder / "authority.key").read_bytes(), None)
        authority = loaded  # type: ignore[assignment]
    else:
        _write_secret(folder / "authority.key", _private(authority, "PKCS8"))
    root = _signed(name, name, authority, authority, [(x509.BasicConstraints(ca=True, path_length=0), True)])
    key = _new_key()
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, host[:64])])
    alternatives = x509.SubjectAlternativeName(_names_of(host))
    certificate = _signed(subject, name, key, authority, [(alternatives, False)])
    write_atomically(server / "ca.pem", root.public_bytes(Encoding.PEM))
    _write_secret(server / "server.key", _private(key, "PKCS8"))
    write_atomically(server / "server.pem", certificate.public_bytes(Encoding.PEM))


def _names_of(host: str) -> list[Any]:
    """Under which the server can be reached: the host, and this machine itself, where its own programs ask."""
    from cryptography import x509

    names: list[Any] = []
    for each in dict.fromkeys((host, "127.0.0.1", "localhost")):
        try:
            names.append(x509.IPAddress(ipaddress.ip_address(each)))
        except ValueError:
            names.append(x509.DNSName(each))
    return names


def _signed(subject: Any, issuer: Any, key: Any, authority: Any, extensions: list[tuple[Any, bool]]) -> "Certificate":
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes

    now = datetime.now(UTC)
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=_DAYS))
    )
    issuer_key = x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.public_key())
    own_key = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
    for extension, critical in [(issuer_key, False), (own_key, False), *extensions]:
        builder = builder.add_extension(extension, critical)
    return builder.sign(authority, hashes.SHA384())


def _new_key() -> "EllipticCurvePrivateKey":
    from cryptography.hazmat.primitives.asymmetric import ec

    return ec.generate_private_key(ec.SECP384R1())


def _private(key: "EllipticCurvePrivateKey", form: str) -> bytes:
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    return key.private_bytes(Encoding.PEM, getattr(PrivateFormat, form), NoEncryption())


def _public(key: "EllipticCurvePrivateKey") -> bytes:
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    return key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)


def _write_secret(path: Path, content: bytes) -> None:
    """Readable for its owner only, from the first byte on."""
    path.touch(mode=0o600)
    path.chmod(0o600)
    path.write_bytes(content)


def _read_own(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        raise UserError(f"there is no {path}; a site needs the folder that deploy keys created for it") from None


def _check_key(path: Path) -> None:
    from cryptography.hazmat.primitives.serialization import load_ssh_private_key

    content = _read_own(path)
    try:
        load_ssh_private_key(content, None)
    except ValueError as error:
        raise UserError(f"{path} is not a private key ({error})") from None
    if path.stat().st_mode & 0o077:
        raise UserError(f"{path} is readable by others; run chmod 600 {path}")


def _check_certificate(path: Path) -> None:
    from cryptography.x509 import load_pem_x509_certificate

    content = _read_own(path)
    try:
        certificate = load_pem_x509_certificate(content)
    except ValueError as error:
        raise UserError(f"{path} is not a certificate ({error})") from None
    if certificate.not_valid_after_utc < datetime.now(UTC):
        raise UserError(f"the certificate {path} expired on {certificate.not_valid_after_utc:%Y-%m-%d}")
