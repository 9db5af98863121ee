"""The local S3 server keeps what the checkpoint code relies on, seen through an ordinary client."""

from __future__ import annotations

import concurrent.futures
import json
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import s3fs

from chaos.s3_server import S3Server, Traffic
from elastic.local_server import LOOPBACK
from tests.support import alive, eventually

pytestmark = pytest.mark.integration
BUCKET = "job-1"


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with S3Server(tmp_path_factory.mktemp("s3")) as running:
        running.create_bucket(BUCKET)
        yield running


def client(server, **other):
    return s3fs.S3FileSystem(**server.storage_options() | other, skip_instance_cache=True)


@pytest.fixture
def files(server):
    return client(server)


def sockets_of(server):
    ports = set(server._ports.values())
    return [p.name for p in Path("/tmp").glob("seaweedfs-*.sock") if int(p.stem[-5:]) in ports]


def test_it_listens_on_loopback_alone(server):
    sockets = psutil.Process(server.pid).net_connections(kind="inet")
    listening = {(s.laddr.ip, s.laddr.port) for s in sockets if s.status == psutil.CONN_LISTEN}
    assert listening == {(LOOPBACK, port) for port in server._ports.values()}


def test_its_counters_say_what_clients_read_and_wrote(server, files):
    before = server.traffic(BUCKET)
    content = bytes(range(256)) * 4096
    files.pipe_file(f"{BUCKET}/counted", content)
    assert files.cat_file(f"{BUCKET}/counted", start=1000, end=6000) == content[1000:6000]
    after = server.traffic(BUCKET)
    assert after.bytes_received - before.bytes_received == len(content)
    assert after.bytes_sent - before.bytes_sent == 5000
    assert after.requests - before.requests >= 2
    assert server.bytes_sent(BUCKET) == after.bytes_sent
    assert server.traffic("another") == Traffic(bytes_sent=0, bytes_received=0, requests=0)


def test_wrong_keys_are_refused(server):
    with pytest.raises(PermissionError):
        client(server, secret="wrong").ls(BUCKET)


def test_a_missing_bucket_is_an_error_and_is_not_made(server, files):
    with pytest.raises(FileNotFoundError):
        files.pipe_file("no-such-bucket/x", b"1")
    with pytest.raises(FileNotFoundError):
        files.ls("no-such-bucket")


def test_making_a_bucket_twice_is_fine(server, files):
    files.pipe_file(f"{BUCKET}/kept", b"1")
    server.create_bucket(BUCKET)
    assert files.cat_file(f"{BUCKET}/kept") == b"1"


def test_create_if_absent_has_one_winner(server):
    def create(i):
        try:
            client(server).pipe_file(f"{BUCKET}/raced", b"%d" % i, mode="create")
        except OSError:
            return None
        return b"%d" % i

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        winners = [w for w in pool.map(create, range(4)) if w is not None]
    assert len(winners) == 1
    assert client(server).cat_file(f"{BUCKET}/raced") == winners[0]


def test_environment_reaches_it_too(server, monkeypatch):
    for name, value in server.client_environment().items():
        monkeypatch.setenv(name, value)
    files = s3fs.S3FileSystem(skip_instance_cache=True)
    files.pipe_file(f"{BUCKET}/by-environment", b"1")
    assert files.cat_file(f"{BUCKET}/by-environment") == b"1"


def test_acknowledged_objects_survive_a_kill_and_nothing_is_left_behind(tmp_path):
    with S3Server(tmp_path / "s3") as server:
        server.create_bucket(BUCKET)
        files = client(server)
        for i in range(10):
            files.pipe_file(f"{BUCKET}/{i}", b"%d" % i * 1000)
        url = server.endpoint_url
        server.kill()
        assert sockets_of(server) == []
        server.start()
        assert server.endpoint_url == url
        again = client(server)
        found = [again.cat_file(f"{BUCKET}/{i}") for i in range(10)]
        assert found == [b"%d" % i * 1000 for i in range(10)]
    assert sockets_of(server) == []
    assert (tmp_path / "s3" / "keys.json").stat().st_mode & 0o777 == 0o600


def test_taken_ports_are_left_to_whoever_has_them(server, tmp_path):
    other = S3Server(tmp_path / "other")
    other._ports = dict(server._ports)
    with other:
        assert not set(other._ports.values()) & set(server._ports.values())
        other.create_bucket("mine")
        assert "mine" not in client(server).ls("")


def run_command(directory):
    command = [sys.executable, "-m", "chaos.s3_server", "--dir", directory, "--bucket", "abc"]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def test_the_command_prints_where_it_is_and_ends_on_sigterm(tmp_path):
    with run_command(tmp_path) as process:
        facts = json.loads(process.stdout.readline())
        files = s3fs.S3FileSystem(
            key=facts["access_key"],
            secret=facts["secret_key"],
            endpoint_url=facts["endpoint_url"],
            skip_instance_cache=True,
        )
        assert files.ls("") == facts["buckets"] == ["abc"]
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 0
    assert not alive(facts["pid"])


def test_it_goes_with_its_parent_even_when_that_is_killed(tmp_path):
    with run_command(tmp_path) as process:
        pid = json.loads(process.stdout.readline())["pid"]
        process.kill()
    eventually(lambda: not alive(pid), within_s=2, what="the S3 server gone with its parent")
