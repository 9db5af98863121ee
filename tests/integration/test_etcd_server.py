"""A real etcd of our own: it is ready when it says so, survives a crash, and goes when we go."""

from __future__ import annotations

import asyncio
import base64
import http.client
import json
import subprocess
import sys
import time

import psutil
import pytest

from elastic.errors import Misconfigured
from elastic.local_server import LOOPBACK, ServerNotReady, free_ports
from elastic.membership.etcd_server import EtcdBinary, EtcdCluster, EtcdServer, find_etcd
from tests.support import alive, eventually

pytestmark = pytest.mark.integration


def needs_restart(binary):
    if not binary.restartable:
        pytest.skip(f"needs an etcd that may be restarted, this is {binary.version}")


def call(endpoint, path, *, timeout_s=5.0, **body):
    """Speak to etcd by HTTP and not by our own client, which other tests are about."""
    host, port = endpoint.split(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=timeout_s)
    try:
        connection.request("POST", path, json.dumps(body))
        return json.loads(connection.getresponse().read())
    finally:
        connection.close()


def put(endpoint, key, value, *, timeout_s=5.0):
    encoded = {"key": base64.b64encode(key).decode(), "value": base64.b64encode(value).decode()}
    return call(endpoint, "/v3/kv/put", timeout_s=timeout_s, **encoded)


def takes_a_put(endpoint, key, value):
    try:
        return "header" in put(endpoint, key, value, timeout_s=0.5)
    except OSError:
        return False  # no leader yet


def get(endpoint, key):
    answer = call(endpoint, "/v3/kv/range", key=base64.b64encode(key).decode())
    return [base64.b64decode(kv["value"]) for kv in answer.get("kvs", [])]


def listening_addresses(pid):
    sockets = psutil.Process(pid).net_connections(kind="inet")
    return {s.laddr.ip for s in sockets if s.status == psutil.CONN_LISTEN}


def script(tmp_path, text):
    path = tmp_path / "program"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return EtcdBinary(path=path, version="3.5.16", restartable=True)


def test_it_answers_as_soon_as_start_returns_on_loopback_alone(tmp_path):
    with EtcdServer(tmp_path / "etcd") as server:
        put(server.endpoint, b"k", b"v")
        assert get(server.endpoint, b"k") == [b"v"]
        assert listening_addresses(server.pid) == {LOOPBACK}
        assert server.running
        pid = server.pid
    assert not server.running
    assert not alive(pid)
    assert server.log_path.stat().st_size > 0
    assert (tmp_path / "etcd").stat().st_mode & 0o777 == 0o700


def test_a_killed_one_comes_back_with_its_data_and_address(tmp_path):
    needs_restart(find_etcd())
    with EtcdServer(tmp_path / "etcd") as server:
        endpoint, pid = server.endpoint, server.pid
        for i in range(20):
            put(endpoint, b"k%d" % i, b"v%d" % i)
        server.kill()
        assert not alive(pid)
        server.restart()
        assert server.endpoint == endpoint
        assert server.pid != pid
        assert [get(endpoint, b"k%d" % i) for i in range(20)] == [[b"v%d" % i] for i in range(20)]


def test_a_version_that_a_crash_breaks_is_not_restarted(tmp_path):
    binary = EtcdBinary(path=find_etcd().path, version="3.5.1", restartable=False)
    with EtcdServer(tmp_path / "etcd", binary=binary) as server:
        server.kill()
        with pytest.raises(Misconfigured, match=r"3\.5\.3 or newer"):
            server.restart()


def test_two_at_once_do_not_meet(tmp_path):
    with EtcdServer(tmp_path / "a") as a, EtcdServer(tmp_path / "b") as b:
        put(a.endpoint, b"k", b"a")
        assert get(b.endpoint, b"k") == []


def test_taken_ports_are_left_to_whoever_has_them(tmp_path):
    with EtcdServer(tmp_path / "first") as first, EtcdServer(tmp_path / "second") as second:
        third = EtcdServer(tmp_path / "third")
        client_port = int(first.endpoint.split(":")[1])
        third.use_ports(client_port, *free_ports(1))  # an etcd answers there, but it is not ours
        with third:
            assert third.endpoint not in {first.endpoint, second.endpoint}
            put(third.endpoint, b"k", b"third")
            assert get(first.endpoint, b"k") == []


def test_another_etcd_in_the_environment_has_no_say(tmp_path, monkeypatch):
    for name, value in {
        "ETCD_NAME": "theirs",
        "ETCD_LISTEN_CLIENT_URLS": "http://0.0.0.0:23790",
        "ETCD_INITIAL_CLUSTER_STATE": "existing",
        "ETCD_UNKNOWN_SETTING": "1",
    }.items():
        monkeypatch.setenv(name, value)
    with EtcdServer(tmp_path / "etcd") as server:
        members = call(server.endpoint, "/v3/cluster/member/list")["members"]
        assert [member["name"] for member in members] == [server.name]
        assert listening_addresses(server.pid) == {LOOPBACK}


def test_what_ends_at_its_start_is_named_with_its_last_words(tmp_path):
    server = EtcdServer(tmp_path / "etcd", binary=script(tmp_path, "echo no disk left; exit 3"))
    with pytest.raises(ServerNotReady, match=r"ended with code 3.*no disk left"):
        server.start()


def test_what_never_answers_is_ended_in_time(tmp_path):
    binary = script(tmp_path, "echo thinking; exec sleep 100")
    server = EtcdServer(tmp_path / "etcd", binary=binary, ready_timeout_s=0.5)
    started_s = time.monotonic()
    with pytest.raises(ServerNotReady, match=r"did not answer within 0\.\d s.*thinking"):
        server.start()
    assert time.monotonic() - started_s < 5
    assert not alive(server.pid)


def test_starting_leaves_the_event_loop_free(tmp_path):
    async def count_while_starting():
        ticks = 0

        async def tick():
            nonlocal ticks
            while True:
                ticks += 1
                await asyncio.sleep(0.001)  # sleep: other work of the loop

        ticker = asyncio.create_task(tick())
        server = await EtcdServer(tmp_path / "etcd").start_async()
        ticker.cancel()
        return server, ticks

    server, ticks = asyncio.run(count_while_starting())
    try:
        assert get(server.endpoint, b"k") == []
        assert ticks >= 3
    finally:
        server.stop()


OWNER = """
import sys, time
from elastic.membership.etcd_server import EtcdServer
server = EtcdServer(sys.argv[1]).start()
print(server.pid, flush=True)
time.sleep(100)
"""


def test_it_goes_with_its_parent_even_when_that_is_killed(tmp_path):
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, tmp_path / "etcd"], stdout=subprocess.PIPE, text=True
    )
    with owner:
        pid = int(owner.stdout.readline())
        assert alive(pid)
        owner.kill()
    eventually(lambda: not alive(pid), within_s=2, what="etcd gone with its parent")


@pytest.mark.slow
def test_a_cluster_elects_another_leader_and_takes_the_old_one_back(tmp_path):
    needs_restart(find_etcd())
    with EtcdCluster(tmp_path) as cluster:
        status = [call(endpoint, "/v3/maintenance/status") for endpoint in cluster.endpoints]
        leader_id = status[0]["leader"]
        leader = next(i for i, s in enumerate(status) if s["header"]["member_id"] == leader_id)
        others = [endpoint for i, endpoint in enumerate(cluster.endpoints) if i != leader]
        put(others[0], b"k", b"before")
        cluster.nodes[leader].kill()
        eventually(lambda: takes_a_put(others[0], b"k", b"after"), what="a new leader")
        cluster.restart(leader)
        assert get(cluster.endpoints[leader], b"k") == [b"after"]
