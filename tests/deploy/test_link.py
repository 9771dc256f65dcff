"""The server's door, at a real SuperLink: who has neither secret nor token nor a member's key gets nothing."""

import re
import ssl
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr")

import httpx

from protofed.deploy import flower
from protofed.deploy.keys import make_keys, revoke, server_keys, site_keys
from protofed.deploy.link import SuperLink
from protofed.deploy.node import clock_problem
from protofed.deploy.programs import free_port
from protofed.deploy.superlink import SECRET_HEADER
from protofed.errors import UserError

REFUSED = (401, 403)


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a server and north; stranger has a good key of which the server knows nothing."""
    folder = tmp_path_factory.mktemp("link") / "keys"
    make_keys(folder, f"127.0.0.1:{free_port()}", ["north", "stranger"])
    (folder / "server/sites/stranger.pub").unlink()
    return folder


@pytest.fixture(scope="module")
def link(keys: Path) -> Iterator[SuperLink]:
    link = SuperLink(server_keys(keys), site_keys(keys / "sites/north").server)
    link.start()
    yield link
    link.end()


@pytest.fixture
def outside(keys: Path, link: SuperLink) -> Iterator[httpx.Client]:  # noqa: ARG001 - it must be running
    """Someone who reaches the port and trusts the server."""
    from flwr.supercore.version import package_version

    context = ssl.create_default_context(cafile=str(keys / "sites/north/ca.pem"))
    headers = {
        "content-type": "application/protobuf",
        "flwr-package-name": "flwr",
        "flwr-package-version": package_version,
        "flwr-component-name": "outsider",
    }
    address = site_keys(keys / "sites/north").server
    with httpx.Client(base_url=f"https://{address}", verify=context, headers=headers) as client:
        yield client


def test_nobody_gets_in_without_a_secret_a_key_or_a_token(outside: httpx.Client) -> None:
    from flwr.supercore.protobuf.translation import PROTOBUF_REQUEST_TYPES

    answers = {path: outside.post(path).status_code for _, path in PROTOBUF_REQUEST_TYPES}
    assert {path: status for path, status in answers.items() if status not in REFUSED} == {}
    assert {status for path, status in answers.items() if path.startswith("/v1/control/")} == {403}
    assert {outside.get(path).status_code for path in ("/docs", "/openapi.json", "/")} == {403}


def test_administration_takes_the_secret(keys: Path, outside: httpx.Client) -> None:
    secret = (keys / "server/link/secret").read_text()
    assert (keys / "server/link/secret").stat().st_mode & 0o077 == 0
    for given, status in (("", 403), (secret[:-1], 403), ("0" * len(secret), 403), (secret, 200)):
        assert outside.post("/v1/control/list-nodes", headers={SECRET_HEADER: given}).status_code == status


def test_what_flower_offers_beside_is_behind_the_door(keys: Path, outside: httpx.Client) -> None:
    """Also what comes with another version of it."""
    secret = (keys / "server/link/secret").read_text()
    pages = outside.get("/openapi.json", headers={SECRET_HEADER: secret}).json()["paths"]
    offered = {(verb, path) for path, verbs in pages.items() for verb in verbs if path != "/health"}
    assert len(offered) > 50
    answers = {place: outside.request(*place).status_code for place in offered}
    assert {place: status for place, status in answers.items() if status not in REFUSED} == {}


@pytest.mark.parametrize(("name", "status"), [("north", 200), ("stranger", 412)])
def test_a_node_needs_a_members_key(name: str, status: int, keys: Path, link: SuperLink) -> None:  # noqa: ARG001
    assert _activate(site_keys(keys / "sites" / name)) == status


def _activate(site: Any) -> int:
    """What a SuperNode does first; the answer's status."""
    from cryptography.hazmat.primitives.serialization import load_ssh_private_key
    from flwr.proto.fleet_pb2 import ActivateNodeRequest
    from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor
    from flwr.supercore.primitives.asymmetric import public_key_to_bytes
    from flwr.supernode.fleet_http_client import FleetHttpClient
    from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor

    private: Any = load_ssh_private_key(site.private.read_bytes(), None)
    proofs = [
        RuntimeVersionHttpInterceptor(component_name="SuperNode"),
        NodeAuthHttpInterceptor(private, private.public_key()),
    ]
    with FleetHttpClient.from_server_address(
        site.server, insecure=False, root_certificates=site.authority.read_bytes(), interceptors=proofs
    ) as client:
        request = ActivateNodeRequest(public_key=public_key_to_bytes(private.public_key()), heartbeat_interval=30)
        try:
            client.ActivateNode(request)
        except httpx.HTTPStatusError as refusal:
            return refusal.response.status_code
    return 200


def test_members_are_those_whose_keys_are_there(keys: Path, link: SuperLink) -> None:
    """Keys come and go while the server works."""
    assert set(link.admit_members()) == {"north"}
    make_keys(keys, site_keys(keys / "sites/north").server, ["late"])
    assert set(link.admit_members()) == {"north", "late"}
    assert _activate(site_keys(keys / "sites/late")) == 200
    assert {node.name: node.online for node in link.nodes()}["late"]
    revoke(keys, "late")
    assert set(link.admit_members()) == {"north"}
    assert _activate(site_keys(keys / "sites/late")) == 412


def test_a_key_that_was_revoked_stays_out_and_holds_nobody_up(
    keys: Path, link: SuperLink, caplog: pytest.LogCaptureFixture
) -> None:
    make_keys(keys, site_keys(keys / "sites/north").server, ["gone"])
    assert "gone" in link.admit_members()
    revoke(keys, "gone")
    assert "gone" not in link.admit_members()
    public = keys / "server/sites/gone.pub"
    public.with_suffix(".revoked").replace(public)
    for _ in range(2):
        assert set(link.admit_members()) == {"north"}
    assert caplog.text.count("a revoked key stays out") == 1
    public.unlink()


def test_nobody_else_reads_what_the_server_keeps(keys: Path, link: SuperLink) -> None:  # noqa: ARG001
    """Among it the token with which the server speaks for the federation."""
    assert (keys / "server/link/nodes.json").exists()
    for path in (keys, *keys.rglob("*")):
        assert path.stat().st_mode & 0o077 == 0, path


def test_a_second_server_does_not_take_the_first_ones_secret(keys: Path, link: SuperLink) -> None:
    secret = (keys / "server/link/secret").read_bytes()
    second = SuperLink(server_keys(keys), f"127.0.0.1:{free_port()}")
    with pytest.raises(UserError, match="another server is running with the keys in"):
        second.start()
    second.end()
    assert (keys / "server/link/secret").read_bytes() == secret
    assert "north" in {node.name for node in link.nodes()}


@pytest.mark.usefixtures("link")
@pytest.mark.parametrize(("ahead", "told"), [(0, None), (20, "20 s ahead of"), (-900, "900 s behind")])
def test_a_clock_that_is_off_is_named(
    ahead: int,
    told: str | None,
    keys: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = time.time
    monkeypatch.setattr(flower.time, "time", lambda: now() + ahead)
    problem = clock_problem(site_keys(keys / "sites/north"))
    if told is None:
        assert problem is None
    else:
        digits = told.split(" ", 1)[1]
        assert problem is not None
        assert digits in problem
        assert abs(int(re.findall(r"\d+", problem)[0]) - abs(ahead)) <= 3


def test_no_clock_is_told_where_nobody_answers(keys: Path) -> None:
    site = replace(site_keys(keys / "sites/north"), server=f"127.0.0.1:{free_port()}")
    assert clock_problem(site) is None
