"""Getting to etcd: what is wrong with the address, the server, the user or the certificate."""

from __future__ import annotations

import asyncio
import shutil
import socket
import ssl
import subprocess
import time

import pytest

from elastic.errors import Misconfigured
from elastic.local_server import LOOPBACK, free_ports
from elastic.membership.coord import CoordMisconfigured
from elastic.membership.coord_etcd import EtcdCoord
from elastic.membership.etcd_channel import TlsOptions
from elastic.membership.etcd_server import EtcdCluster
from tests.coord_bench import JOB, Reader, member, on_loop, restartable_etcd, world
from tests.etcd_proxy import Answering, Proxy, call, text

__all__ = ["restartable_etcd"]
pytestmark = pytest.mark.integration


async def refusal(*endpoints, **options):
    """Return the error of a start with these endpoints, and the seconds until it came."""
    coord = EtcdCoord(endpoints, JOB, **options)
    started_s = time.monotonic()
    try:
        with pytest.raises(CoordMisconfigured) as refused:
            await coord.start(member("a"))
    finally:
        await coord.close()
    assert isinstance(refused.value, Misconfigured)
    return refused.value, time.monotonic() - started_s


# ------------------------------------------------------------------------- nobody, or another


@on_loop
async def test_an_etcd_that_cannot_be_reached_is_named_within_six_seconds():
    closed = f"{LOOPBACK}:{free_ports(1)[0]}"
    with socket.create_server((LOOPBACK, 0)) as mute:  # accepts, and never answers
        silent = f"{LOOPBACK}:{mute.getsockname()[1]}"
        results = await asyncio.gather(
            refusal(closed), refusal(silent), refusal(closed, silent), refusal("etcd.invalid:2379")
        )
    errors = [error for error, _ in results]
    assert [error.kind for error in errors] == ["unreachable"] * 4
    assert max(took_s for _, took_s in results) < 6.0
    assert f"{closed}: connect" in str(errors[0])
    assert f"{silent}: accepts connections but does not answer" in str(errors[1])
    assert closed in str(errors[2])
    assert silent in str(errors[2])
    assert "etcd.invalid:2379: " in str(errors[3])


@on_loop
async def test_an_etcd_that_comes_up_late_is_waited_for(etcd):
    etcd.kill()
    coord = EtcdCoord([etcd.endpoint], JOB)
    starting = asyncio.create_task(coord.start(member("a")))
    await asyncio.sleep(1.0)  # sleep: a span of time is what is tested
    assert not starting.done()
    await asyncio.to_thread(etcd.restart)
    await starting
    assert coord.server_version == etcd.binary.version
    await coord.close()


@pytest.mark.parametrize(
    ("answer", "kind", "words"),
    [
        (b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n", "wrong-version", "404 Not Found"),
        (b'HTTP/1.1 200 OK\r\n\r\n{"etcdserver":"2.3.8"}', "wrong-version", "2.3.8"),
        (b'HTTP/1.1 200 OK\r\n\r\n{"etcdserver":"3.3.27"}', "wrong-version", "3.3.27"),
        (b"HTTP/1.1 200 OK\r\n\r\n<html>", "wrong-version", "200 OK"),
        (b"-ERR unknown command\r\n", "unreachable", "speaks no HTTP"),
        (b"\x15\x03\x01\x00\x02\x02\x46", "unreachable", "may want TLS"),
    ],
)
@on_loop
async def test_another_server_is_told_apart(answer, kind, words):
    async with Answering(answer) as server:
        error, took_s = await refusal(server.endpoint, connect_timeout_s=1.5)
    assert error.kind == kind
    assert words in str(error)
    assert server.endpoint in str(error)
    assert took_s < 2.5


@pytest.mark.parametrize("endpoint", ["", "localhost", "host:port", "::1:2379", "http://h:1/path"])
@on_loop
async def test_what_is_no_endpoint_is_refused(endpoint):
    with pytest.raises(CoordMisconfigured, match="endpoint"):
        EtcdCoord([endpoint], JOB)
    with pytest.raises(CoordMisconfigured, match="endpoint"):
        EtcdCoord([], JOB)


@pytest.mark.slow
@on_loop
async def test_an_etcd_without_a_quorum_is_told_apart(tmp_path):
    with EtcdCluster(tmp_path) as cluster:
        for node in cluster.nodes[1:]:
            node.kill()
        error, took_s = await refusal(cluster.endpoints[0])
    assert error.kind == "no-quorum"
    assert took_s < 6.0


# ---------------------------------------------------------------------------------- who we are


def turn_authentication_on(endpoint):
    """Make root, "agent" (may use /everstep/) and "guest" (may use /other/); passwords = names."""
    for user in ("root", "agent", "guest"):
        call(endpoint, "auth/user/add", name=user, password=user)
        call(endpoint, "auth/role/add", name=user)
        call(endpoint, "auth/user/grant", user=user, role=user)
    for role, prefix in (("agent", "/everstep/"), ("guest", "/other/")):
        end = prefix[:-1] + "0"
        permission = {"permType": "READWRITE", "key": text(prefix), "range_end": text(end)}
        call(endpoint, "auth/role/grant", name=role, perm=permission)
    call(endpoint, "auth/enable")


@on_loop
async def test_users_are_let_in_kept_out_and_logged_in_again(etcd):
    coord = EtcdCoord([etcd.endpoint], JOB, lease_ttl_s=5.0, username="agent", password="agent")
    await coord.start(member("a"))  # a user where none is needed does no harm
    reader = Reader(coord)
    await reader.until(lambda s: "a" in s.members)
    await asyncio.to_thread(turn_authentication_on, etcd.endpoint)

    nobody, wrong, guest = await asyncio.gather(
        refusal(etcd.endpoint),
        refusal(etcd.endpoint, username="agent", password="wrong"),
        refusal(etcd.endpoint, username="guest", password="guest"),
    )
    for (error, took_s), words in (
        (nobody, "give a user and a password"),
        (wrong, "check the user and the password"),
        (guest, "may read and write the prefix"),
    ):
        assert error.kind == "no-permission"
        assert words in str(error)
        assert took_s < 2.0

    await coord.put_member(member("a", slots=2))  # logs in now
    await reader.until(lambda s: s.members["a"].slots == 2)
    for generation in (1, 2):
        etcd.kill()  # it forgets all tokens
        await asyncio.to_thread(etcd.restart)
        state = await reader.until(lambda _: True)
        assert await coord.propose_world(world(generation), after_revision=state.world_revision)
        await reader.until(lambda s, g=generation: s.world and s.world.generation == g)
    assert coord.alive
    await coord.close()


# ---------------------------------------------------------------------------------------- TLS


@pytest.fixture(scope="module")
def certificates(tmp_path_factory):
    """Make a CA, a server's certificate for the name "etcd.test" and a client's."""
    if shutil.which("openssl") is None:
        pytest.skip("needs the openssl command")
    where = tmp_path_factory.mktemp("tls")

    def openssl(*arguments):
        subprocess.run(["openssl", *arguments], cwd=where, check=True, capture_output=True)

    key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    openssl("req", "-x509", *key, "-keyout", "ca.key", "-out", "ca.pem", "-subj", "/CN=ca")
    for name in ("server", "client"):
        openssl(
            "req", *key, "-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", f"/CN={name}"
        )
        (where / f"{name}.ext").write_text("subjectAltName=DNS:etcd.test\n")
        signing = ("-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-days", "2")
        files = ("-in", f"{name}.csr", "-out", f"{name}.pem", "-extfile", f"{name}.ext")
        openssl("x509", "-req", *files, *signing)
    return where


@on_loop
async def test_etcd_behind_mutual_tls(etcd, certificates):
    server = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    server.load_cert_chain(certificates / "server.pem", certificates / "server.key")
    server.load_verify_locations(certificates / "ca.pem")
    server.verify_mode = ssl.CERT_REQUIRED
    server.set_alpn_protocols(["h2"])
    ours = {
        "ca_file": str(certificates / "ca.pem"),
        "cert_file": str(certificates / "client.pem"),
        "key_file": str(certificates / "client.key"),
    }
    good = TlsOptions(server_name="etcd.test", **ours)
    async with Proxy(etcd.endpoint, tls=server) as proxy:
        coord = EtcdCoord([proxy.endpoint], JOB, tls=good)
        await coord.start(member("a"))
        reader = Reader(coord)
        await reader.until(lambda s: "a" in s.members)
        proxy.cut()
        await coord.put_member(member("a", slots=2))
        await reader.until(lambda s: s.members["a"].slots == 2)
        await coord.close()

        no_certificate = TlsOptions(ca_file=ours["ca_file"], server_name="etcd.test")
        plain, other_name, anonymous = await asyncio.gather(
            refusal(proxy.endpoint, connect_timeout_s=2.0),
            refusal(f"https://{proxy.endpoint}", tls=TlsOptions(**ours), connect_timeout_s=2.0),
            refusal(proxy.endpoint, tls=no_certificate, connect_timeout_s=2.0),
        )
    assert "may want TLS" in str(plain[0])
    for error, _ in (other_name, anonymous):
        assert "check the TLS certificates" in str(error)
    error, _ = await refusal(etcd.endpoint, tls=good, connect_timeout_s=2.0)
    assert "etcd without TLS" in str(error)
    error, _ = await refusal(etcd.endpoint, tls=TlsOptions(ca_file="/nowhere.pem"))
    assert "/nowhere.pem cannot be read" in str(error)
