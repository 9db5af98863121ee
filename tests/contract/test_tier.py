"""One suite for every tier: what its protocol promises, on a directory, on fsspec and on S3."""

from __future__ import annotations

import itertools
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import fsspec
import numpy as np
import pytest
import s3fs

from chaos.s3_server import S3Server
from ckpt.crc import crc32c
from ckpt.errors import Conflict, Corrupt, Misconfigured, NotFound, Retryable
from ckpt.tier import Created, open_tier
from ckpt.tier_local import LocalTier
from ckpt.tier_object import S3Tier
from ckpt.uploader import Journal
from ckpt.writer import FileSource
from tests.ckpt_support import Proxy, make_state, write_checkpoint

BUCKET = "tiers"
PART_BYTES = 5 << 20  # the smallest that S3 takes; the usual size makes the suite slow
BIG = 2 * PART_BYTES + 12_345
_places = itertools.count()


class Bytes:
    """A source of given bytes that may fail half-way."""

    def __init__(self, data, fail_at=None):
        self.data = np.frombuffer(data, np.uint8)
        self.fail_at = fail_at
        self.size = len(data)

    def chunks(self, max_bytes):
        for at in range(0, self.size, max_bytes):
            if self.fail_at is not None and at + max_bytes > self.fail_at:
                raise Corrupt("the source is not what it was", kind="test")
            yield self.data[at : at + max_bytes]


@pytest.fixture(autouse=True)
def small_parts(monkeypatch):
    monkeypatch.setattr("ckpt.uploader.PART_BYTES", PART_BYTES)


@pytest.fixture(scope="module")
def s3(tmp_path_factory):
    with S3Server(tmp_path_factory.mktemp("s3")) as server:
        server.create_bucket(BUCKET)
        yield server


@pytest.fixture(params=["local", "file", "memory", "s3"])
def place(request, tmp_path):
    """A fresh tier, and another client that looks at the same place past it."""
    name = f"place{next(_places)}"
    if request.param in ("local", "file"):
        prefix = "file://" if request.param == "file" else ""
        tier, look = open_tier(f"{prefix}{tmp_path / name}"), fsspec.filesystem("file")
        root = str(tmp_path / name)
    elif request.param == "memory":
        tier, look = open_tier(f"memory://{name}"), fsspec.filesystem("memory")
        root = f"/{name}"
    else:
        server = request.getfixturevalue("s3")
        options = server.storage_options()
        tier = open_tier(f"s3://{BUCKET}/{name}", options=options, journal=tmp_path / "journal")
        look = s3fs.S3FileSystem(**options, skip_instance_cache=True)
        root = f"{BUCKET}/{name}"
    yield tier, look, root
    tier.close()


@pytest.fixture
def tier(place):
    return place[0]


def files(look, root):
    """Everything that lies there; an object store may show directories that nobody made."""
    with suppress(FileNotFoundError):
        return sorted(p.removeprefix(root).strip("/") for p in look.find(root))
    return []


def test_a_put_object_is_there_whole(place):
    tier, look, root = place
    for size in (0, 1, 100_000):
        data = os.urandom(size)
        tier.put(f"a/b/{size}", Bytes(data))
        assert look.cat_file(f"{root}/a/b/{size}") == data
        assert tier.size(f"a/b/{size}") == size
        assert tier.get(f"a/b/{size}") == data
    assert files(look, root) == ["a/b/0", "a/b/1", "a/b/100000"]


def test_a_large_object_is_there_whole(place):
    tier, look, root = place
    data = np.random.default_rng(0).bytes(BIG)
    tier.put("big", Bytes(data))
    assert tier.size("big") == BIG
    assert crc32c(look.cat_file(f"{root}/big")) == crc32c(data)
    target = np.empty(1000, np.uint8)
    tier.read_into("big", PART_BYTES - 500, target)
    assert target.tobytes() == data[PART_BYTES - 500 : PART_BYTES + 500]


@pytest.mark.parametrize("size", [100_000, BIG])
def test_a_source_that_fails_half_way_leaves_nothing(place, size):
    tier, look, root = place
    with pytest.raises(Corrupt, match="the source"):
        tier.put("x/bad", Bytes(bytes(size), fail_at=size - 1))
    assert files(look, root) == []
    with pytest.raises(NotFound):
        tier.size("x/bad")
    if isinstance(tier, S3Tier):
        assert tier.open_uploads() == []


def test_create_wins_once(place):
    tier, look, root = place
    assert tier.create("d/manifest.json", b"one") is Created.NEW
    assert tier.create("d/manifest.json", b"one") is Created.SAME
    assert tier.create("d/manifest.json", b"two") is Created.OTHER
    assert look.cat_file(f"{root}/d/manifest.json") == b"one"
    assert files(look, root) == ["d/manifest.json"]


def test_of_many_creators_at_once_one_content_wins(tier):
    if "memory" in tier.url:
        return  # one process, one writer: nothing to arbitrate
    for round_number in range(1 if "s3" in tier.url else 3):
        start = threading.Barrier(8)

        def create(i, path=f"r{round_number}/manifest.json", start=start):
            start.wait(10)
            return tier.create(path, b"%d" % (i % 4))

        with ThreadPoolExecutor(8) as pool:
            created = list(pool.map(create, range(8)))
        winner = int(tier.get(f"r{round_number}/manifest.json"))
        assert created.count(Created.NEW) == 1
        assert created[winner::4].count(Created.SAME) + created[winner::4].count(Created.NEW) == 2


def test_what_is_absent_is_said_to_be_absent(tier):
    tier.create("a/b", b"12345")
    for call in (tier.get, tier.size):
        with pytest.raises(NotFound, match="does not exist"):
            call("a/c")
    with pytest.raises(NotFound):
        tier.read_into("a/c", 0, np.empty(3, np.uint8))
    assert tier.list_dir("nothing/here") == []
    tier.delete("a/c")


def test_reading_past_the_end_is_damage(tier):
    tier.create("a/b", b"12345")
    target = np.empty(3, np.uint8)
    tier.read_into("a/b", 2, target)
    assert target.tobytes() == b"345"
    for offset in (3, 5, 99):
        with pytest.raises(Corrupt):
            tier.read_into("a/b", offset, target)


def test_listings_see_at_once_what_others_wrote(place):
    tier, look, root = place
    assert tier.list_dir("") == []
    tier.create("a/one", b"1")
    assert tier.list_dir("") == ["a"]
    assert tier.list_dir("a") == ["one"]
    look.pipe_file(f"{root}/a/two", b"2")
    look.makedirs(f"{root}/b", exist_ok=True)
    look.pipe_file(f"{root}/b/three", b"3")
    assert tier.list_dir("") == ["a", "b"]
    assert tier.list_dir("a") == ["one", "two"]
    tier.delete("a/one")
    assert tier.list_dir("a") == ["two"]
    with pytest.raises(NotFound):
        tier.get("a/one")


def test_a_probe_leaves_nothing(place):
    tier, look, root = place
    tier.probe()
    assert files(look, root) == []


def test_a_whole_checkpoint_goes_through(place):
    import ckpt
    from ckpt.reader import Checkpoint

    tier, _, _ = place
    state = make_state({"w": ("float32", (500, 300)), "s": ("int64", ())})
    manifest = write_checkpoint(tier, state, 3)
    checkpoint = Checkpoint(manifest, [tier])
    assert checkpoint.missing_packs() == []
    for name, (_, data) in state.items():
        assert checkpoint.read(name).tobytes() == data
    assert checkpoint.report == []
    assert isinstance(checkpoint, ckpt.Checkpoint)


# -- a directory ------------------------------------------------------------------------------


def test_a_directory_that_may_not_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(Misconfigured, match=str(tmp_path / "file")):
        LocalTier(tmp_path / "file" / "below").probe()


def test_the_sweeper_takes_what_the_dead_left_and_nothing_else(tmp_path):
    tier = LocalTier(tmp_path)
    state = make_state({"w": ("int8", (40,))})
    write_checkpoint(tier, state, 2, step=1)
    for step in (2, 3):
        write_checkpoint(tier, state, 2, step=step)
        (tmp_path / f"step-00000000{step}/g0001/manifest.json").unlink()
    held = tier.hold("step-000000003/g0001/packs")  # a living service is about to commit it
    (tmp_path / "step-000000001/g0001/packs/.x.pack.0123.tmp").write_bytes(b"torn")
    (tmp_path / "step-000000001-hf").mkdir()
    (tmp_path / "step-000000002/g0001/packs/notes.txt").write_text("mine")
    removed = LocalTier(tmp_path).sweep()
    assert removed == [
        "step-000000001/g0001/packs/.x.pack.0123.tmp",
        "step-000000002/g0001/packs/n.0-aa.pack",
        "step-000000002/g0001/packs/n.1-aa.pack",
    ]
    assert (tmp_path / "step-000000002/g0001/packs/notes.txt").exists()
    assert len(list((tmp_path / "step-000000003").rglob("*.pack"))) == 2
    os.close(held)
    LocalTier(tmp_path).sweep()
    assert not (tmp_path / "step-000000003").exists()
    assert (tmp_path / "step-000000001-hf").exists()
    assert len(list(tmp_path.rglob("*.pack"))) == 2


def test_a_local_file_that_changed_is_not_uploaded(tmp_path, s3):
    path = tmp_path / "pack"
    data = np.random.default_rng(1).bytes(BIG)
    path.write_bytes(data[:-1] + b"?")
    tier = S3Tier(f"s3://{BUCKET}/changed", options=s3.storage_options())
    for content, size in ((data[:-1] + b"?", BIG), (data[:-1], BIG), (data + b"x", BIG)):
        path.write_bytes(content)
        with pytest.raises(Corrupt):
            tier.put("pack", FileSource(path, size, crc32c(data)))
    assert tier.list_dir("") == []
    assert tier.open_uploads() == []
    path.write_bytes(data)
    tier.put("pack", FileSource(path, BIG, crc32c(data)))
    assert tier.size("pack") == BIG
    tier.close()


# -- S3 ---------------------------------------------------------------------------------------


def test_uploads_of_the_dead_are_given_back(tmp_path, s3):
    url = f"s3://{BUCKET}/orphans"
    options = s3.storage_options()
    dead = S3Tier(url, options=options, journal=tmp_path / "j")
    for key in ("orphans/a", "orphans/b"):  # begun, journalled, and never ended
        dead._journal.begin(key)
        dead._s3.run(dead._s3.call("create_multipart_upload", Key=key))
    alive = S3Tier(url, options=options, journal=tmp_path / "j")
    alive._journal.begin("orphans/c")
    alive._s3.run(alive._s3.call("create_multipart_upload", Key="orphans/c"))
    third = S3Tier(url, options=options, journal=tmp_path / "j")
    assert third.sweep() == []  # their owners live: the journals are locked
    dead.close()
    assert sorted(third.sweep()) == ["orphans/a", "orphans/b"]
    assert third.open_uploads() == ["orphans/c"]
    assert third.sweep() == []
    alive.close()
    assert third.sweep() == ["orphans/c"]
    assert third.open_uploads() == []
    third.close()


def test_a_journal_without_open_uploads_does_not_stay(tmp_path, s3):
    tier = S3Tier(f"s3://{BUCKET}/j", options=s3.storage_options(), journal=tmp_path / "j")
    tier.put("big", Bytes(bytes(BIG)))
    tier.close()
    assert not (tmp_path / "j").exists()


def test_uploads_that_begin_at_once_share_one_journal(tmp_path):
    for number in range(50):
        directory = tmp_path / str(number)
        journal = Journal(directory, "s3://one")
        sweeper = Journal(directory, "s3://one")
        start = threading.Barrier(5)

        def begin(key: str, start=start, journal=journal) -> None:
            start.wait(10)
            journal.begin(key)

        def sweep(start=start, sweeper=sweeper) -> list[list[str]]:
            start.wait(10)
            found = []
            for path, keys in sweeper.orphans():
                path.unlink()
                found.append(keys)
            return found

        with ThreadPoolExecutor(5) as pool:
            swept = pool.submit(sweep)
            for future in [pool.submit(begin, key) for key in "abcd"]:
                future.result(10)
            assert [keys for keys in swept.result(10) if keys] == []
        journal.close()
        assert [sorted(keys) for _, keys in sweeper.orphans()] == [["a", "b", "c", "d"]]


def test_a_journal_of_another_store_is_left_to_its_own_sweeper(tmp_path):
    journal = Journal(tmp_path, "s3://one")
    journal.begin("k")
    journal.close()
    assert list(Journal(tmp_path, "s3://two").orphans()) == []
    assert [keys for _, keys in Journal(tmp_path, "s3://one").orphans()] == [["k"]]


@pytest.mark.parametrize(
    ("bucket", "change", "kind", "words"),
    [
        ("missing-bucket", {}, "bucket-missing", "missing-bucket"),
        (BUCKET, {"secret": "wrong"}, "credentials-refused", "AWS_SECRET_ACCESS_KEY"),
        (BUCKET, {"key": "nobody"}, "credentials-refused", "AWS_ACCESS_KEY_ID"),
        ("A_b", {}, None, "A_b"),
    ],
)
def test_what_a_person_must_change_is_said_in_one_sentence(s3, bucket, change, kind, words):
    tier = S3Tier(f"s3://{bucket}/x", options=s3.storage_options() | change)
    with pytest.raises(Misconfigured, match=words) as error:
        tier.probe()
    assert "\n" not in str(error.value)
    assert kind in (None, error.value.kind)
    tier.close()


def test_a_server_that_is_away_is_said_to_be_away(monkeypatch):
    monkeypatch.setattr("ckpt.tier_object.PROBE_S", 3.0)
    options = {"key": "k", "secret": "s", "endpoint_url": "http://127.0.0.1:9"}
    tier = S3Tier("s3://b/x", options=options)
    with pytest.raises(Misconfigured, match="cannot be reached"):
        tier.probe()
    with pytest.raises(Retryable):
        tier._s3.run(tier._s3.call("head_object", Key="x", deadline_s=0.3))
    tier.close()


@pytest.fixture
def proxied(s3):
    with Proxy(s3.endpoint_url) as proxy:
        options = s3.storage_options() | {"endpoint_url": proxy.url}
        tier = S3Tier(f"s3://{BUCKET}/lost{next(_places)}", options=options)
        yield tier, proxy
        tier.close()


def test_a_create_whose_answer_is_lost_has_won(proxied):
    tier, proxy = proxied
    proxy.cut = b"PUT"
    assert tier.create("manifest.json", b"mine") is Created.SAME
    assert proxy.dropped == 1
    assert tier.get("manifest.json") == b"mine"


def test_a_completed_upload_whose_answer_is_lost_is_complete(proxied):
    tier, proxy = proxied
    proxy.cut = b"POST /" + BUCKET.encode() + b"/" + tier._prefix.encode() + b"/big?uploadId"
    data = np.random.default_rng(2).bytes(BIG)
    tier.put("big", Bytes(data))
    assert proxy.dropped == 1
    assert crc32c(tier.get("big")) == crc32c(data)
    assert tier.open_uploads() == []


def test_a_refused_condition_is_a_conflict_and_no_failure(proxied):
    tier, _ = proxied
    tier.create("x", b"1")
    with pytest.raises(Conflict):
        tier._s3.run(tier._s3.call("put_object", Key=tier._key("x"), Body=b"2", IfNoneMatch="*"))
