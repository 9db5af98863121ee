"""Which etcd is taken: the first that may be used, and never one that a crash would break."""

from __future__ import annotations

import pytest

from elastic.errors import Misconfigured
from elastic.membership import etcd_server
from elastic.membership.etcd_server import find_etcd, restartable, usable


@pytest.mark.parametrize(
    ("version", "may_be_used", "may_be_restarted"),
    [
        ("2.3.8", False, False),
        ("3.3.25", False, False),
        ("3.4.23", True, True),
        ("3.5.0", True, False),
        ("3.5.2", True, False),
        ("3.5.3", True, True),
        ("3.5.16", True, True),
        ("3.6.0-rc.1", True, True),
        ("nonsense", False, False),
    ],
)
def test_versions(version, may_be_used, may_be_restarted):
    assert usable(version) is may_be_used
    assert restartable(version) is may_be_restarted


@pytest.fixture
def install(tmp_path):
    """Make a program that states a version, as etcd would, in PATH or beside the environment."""

    def make(where, version):
        path = tmp_path / where
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"#!/bin/sh\necho 'etcd Version: {version}'\n")
        path.chmod(0o755)
        return path

    return make


UNPACKED = "env/share/everstep/etcd/bin/etcd"


def look(tmp_path):
    return find_etcd(search_path=str(tmp_path / "bin"), prefix=str(tmp_path / "env"))


def test_the_one_on_path_comes_first(tmp_path, install):
    on_path = install("bin/etcd", "3.6.1")
    install(UNPACKED, "3.5.16")
    found = look(tmp_path)
    assert (found.path, found.version, found.restartable) == (on_path, "3.6.1", True)


@pytest.mark.parametrize("version", ["3.5.1", "3.3.25", "something else"])
def test_one_on_path_that_a_crash_would_break_is_passed_over(tmp_path, install, version):
    install("bin/etcd", version)
    unpacked = install(UNPACKED, "3.5.16")
    assert look(tmp_path).path == unpacked


def test_one_that_does_not_run_is_passed_over(tmp_path, install):
    install("bin/etcd", "3.6.1").write_text("#!/nowhere\n")
    unpacked = install(UNPACKED, "3.5.16")
    assert look(tmp_path).path == unpacked


def test_one_that_is_replaced_is_asked_again(tmp_path, install):
    install("bin/etcd", "3.5.1")
    assert not look(tmp_path).restartable
    install("bin/etcd", "3.5.21")
    assert look(tmp_path).version == "3.5.21"


def test_the_package_is_the_last_resort(tmp_path):
    found = look(tmp_path)
    assert (found.version, found.restartable) == ("3.5.1", False)


def test_without_any_the_message_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setattr(etcd_server, "_packaged", lambda: None)
    with pytest.raises(Misconfigured, match="make setup"):
        look(tmp_path)
