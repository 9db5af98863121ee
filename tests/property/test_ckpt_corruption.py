"""Damage of every kind is found, named, and answered from the next good copy."""

from __future__ import annotations

import os
import random
import shutil

import numpy as np
import pytest

import ckpt
from ckpt.discover import load_manifest
from ckpt.errors import Corrupt, NotFound
from ckpt.tier_local import LocalTier
from ckpt.verify import verify_checkpoint
from tests.ckpt_support import assert_holds, make_state, write_checkpoint

STATE = make_state(
    {
        "w": ("float32", (4000, 90)),
        "b": ("bfloat16", (70,)),
        "s": ("int64", ()),
        "m": ("int8", (99, 9)),
    }
)
ROUNDS = 150


@pytest.fixture
def root(tmp_path):
    root = tmp_path / "ckpt"
    write_checkpoint(root, STATE, 3)
    return root


def packs(root):
    return sorted(root.rglob("*.pack"))


def flip(path, at, mask=1):
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ mask]))


def damages(root):
    tier = LocalTier(root)
    return verify_checkpoint(tier, load_manifest(tier, 1, 1))


def read_all(root):
    """Every tensor's bytes; None for one that could not be read."""
    found = {}
    with ckpt.open_checkpoint(str(root), 1) as checkpoint:
        for name in checkpoint.tensors:
            try:
                found[name] = checkpoint.read(name).tobytes()
            except Corrupt:
                found[name] = None
    return found


def right(found):
    return all(data is None or data == STATE[name][1] for name, data in found.items())


def test_every_flipped_bit_is_found_by_verify_and_never_returned(root):
    assert damages(root) == []
    rng = random.Random(7)
    lost_rows = 0
    for _ in range(ROUNDS):
        path = rng.choice(packs(root))
        at, mask = rng.randrange(path.stat().st_size), 1 << rng.randrange(8)
        flip(path, at, mask)
        found = damages(root)
        assert found, (path, at)
        assert all(d.object == f"packs/{path.name}" for d in found)
        seen = read_all(root)
        assert right(seen)
        named = {d.tensor for d in found} - {""}
        if named:
            assert {name for name, data in seen.items() if data is None} == named
            lost_rows += 1
        flip(path, at, mask)
    assert damages(root) == []
    assert lost_rows > ROUNDS // 2


def test_every_truncation_is_found(root):
    rng = random.Random(8)
    for _ in range(40):
        path = rng.choice(packs(root))
        whole = path.read_bytes()
        os.truncate(path, rng.randrange(len(whole)))
        assert damages(root)
        assert right(read_all(root))
        with pytest.raises(Corrupt, match="missing or cut"):
            ckpt.open_latest([str(root)])
        path.write_bytes(whole)
    path.write_bytes(whole + b"\0")
    assert damages(root)


def test_swapped_and_stale_packs_are_found(root, tmp_path):
    first, second, _ = packs(root)
    other = make_state({n: (i.dtype, i.shape) for n, (i, _) in STATE.items()}, seed=1)
    write_checkpoint(tmp_path / "other", other, 3)
    for stranger in (second, packs(tmp_path / "other")[0]):
        kept = first.read_bytes()
        shutil.copy(stranger, first)
        assert damages(root)
        assert right(read_all(root))
        first.write_bytes(kept)
    assert damages(root) == []


def test_the_pack_of_another_step_with_the_same_content_is_found(root):
    write_checkpoint(root, STATE, 3, step=2)
    ours, theirs = packs(root)[0], packs(root)[3]
    shutil.copy(theirs, ours)
    found = damages(root)
    assert any("is the pack of step 2" in d.problem for d in found)
    assert right(read_all(root))


def test_a_damaged_range_comes_from_the_next_root_and_is_reported(root, tmp_path):
    far = tmp_path / "far"
    shutil.copytree(root, far)
    path = packs(root)[1]
    flip(path, 9000)
    with ckpt.open_latest([str(root), str(far)]) as checkpoint:
        assert_holds(checkpoint, STATE)
        (line,) = checkpoint.report
        assert line.object == f"packs/{path.name}"
        assert line.start <= 9000 < line.stop
        assert (line.root, line.used) == (str(root), str(far))
        assert "w is damaged" in line.problem
        clean = sum(len(data) for _, data in STATE.values())
        assert checkpoint.bytes_read < 1.5 * clean  # that range alone was read again


@pytest.mark.parametrize("harm", ["missing", "cut", "footer"])
def test_a_pack_that_is_missing_or_cut_comes_from_the_next_root(root, tmp_path, harm):
    far = tmp_path / "far"
    shutil.copytree(root, far)
    path = packs(root)[1]
    if harm == "missing":
        path.unlink()
    elif harm == "cut":
        os.truncate(path, 5000)
    else:
        flip(path, path.stat().st_size - 100)
    with ckpt.open_latest([str(root), str(far)]) as checkpoint:
        assert_holds(checkpoint, STATE)
        assert {line.object for line in checkpoint.report} == {f"packs/{path.name}"}
        assert {line.used for line in checkpoint.report} == {str(far)}


def test_rows_damaged_in_one_pack_come_from_a_twin_that_holds_them_too(tmp_path):
    from ckpt.commit import assemble
    from ckpt.manifest import encode
    from tests.ckpt_support import Worker, cut, write_pack

    tier = LocalTier(tmp_path)
    whole = cut(STATE, 1)[0]
    workers = [Worker(f"n.{w}-aa", whole, [0], 1) for w in range(2)]
    entries = [write_pack(tier, worker, STATE, 1) for worker in workers]
    manifest = assemble(entries, step=1, generation=1, extra={"step": 1})
    tier.create(f"{manifest.dir}/manifest.json", encode(manifest))
    flip(packs(tmp_path)[0], 9000)
    with ckpt.open_latest([str(tmp_path)]) as checkpoint:
        assert_holds(checkpoint, STATE)
        assert len(checkpoint.report) == 1
        assert checkpoint.report[0].used == "another copy of the rows"
    flip(packs(tmp_path)[1], 9000)
    with ckpt.open_latest([str(tmp_path)]) as checkpoint:
        with pytest.raises(Corrupt, match="w is damaged"):
            checkpoint.read("w")
        assert checkpoint.read("m").tobytes() == STATE["m"][1]


def test_the_older_checkpoint_is_used_when_the_newest_has_lost_a_pack(root):
    write_checkpoint(root, STATE, 2, step=2)
    packs(root)[-1].unlink()
    with ckpt.open_latest([str(root)]) as checkpoint:
        assert checkpoint.step == 1
        assert any("missing or cut" in line.problem for line in checkpoint.report)
        assert_holds(checkpoint, STATE)
    packs(root)[0].unlink()
    with pytest.raises(Corrupt, match="no usable checkpoint"):
        ckpt.open_latest([str(root)])


def test_a_damaged_manifest_is_replaced_by_another_root_s_or_an_older_step(root, tmp_path):
    write_checkpoint(root, STATE, 2, step=2)
    far = tmp_path / "far"
    shutil.copytree(root, far)
    flip(root / "step-000000002/g0001/manifest.json", 30)
    with ckpt.open_latest([str(root), str(far)]) as checkpoint:
        assert checkpoint.step == 2
        assert "checksum" in str(checkpoint.report[0])
    with ckpt.open_latest([str(root)]) as checkpoint:
        assert checkpoint.step == 1
    (root / "step-000000001/g0001/manifest.json").write_bytes(b"")
    with pytest.raises(Corrupt, match="damaged"):
        ckpt.open_latest([str(root)])


def test_discovery_goes_by_numbers_and_by_manifests(tmp_path):
    for step in (9, 10, 99, 100):
        write_checkpoint(tmp_path, STATE, 1, step=step)
    for name in ("step-000000100-hf", "latest-old", "step-000000101", "step-000000102/g0001/packs"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "latest").write_text("step-000000009")
    (tmp_path / "step-000000100/g0001/packs/n.7-zz.pack").write_bytes(b"a stranger")
    with ckpt.open_latest([str(tmp_path)]) as checkpoint:
        assert checkpoint.step == 100
        assert_holds(checkpoint, STATE)
    with ckpt.open_latest([str(tmp_path)], before=100) as checkpoint:
        assert checkpoint.step == 99
    with ckpt.open_checkpoint(str(tmp_path), 9) as checkpoint:
        assert checkpoint.step == 9
    assert ckpt.open_latest([str(tmp_path)], step=11) is None
    with pytest.raises(NotFound, match="step 11"):
        ckpt.open_checkpoint(str(tmp_path), 11)
    assert ckpt.open_latest([str(tmp_path / "nothing")]) is None


def test_what_a_later_generation_left_behind_is_not_chosen(tmp_path):
    small = make_state({"w": ("int8", (4,))})
    write_checkpoint(tmp_path, small, 1, step=100, generation=3, lineage=[[1, 0], [3, 50]])
    write_checkpoint(tmp_path, small, 1, step=200, generation=3, lineage=[[1, 0], [3, 50]])
    with ckpt.open_latest([str(tmp_path)]) as checkpoint:
        assert checkpoint.step == 200
    went_back = [[1, 0], [3, 50], [4, 100]]
    write_checkpoint(tmp_path, small, 1, step=150, generation=4, lineage=went_back)
    with ckpt.open_latest([str(tmp_path)]) as checkpoint:
        assert (checkpoint.step, checkpoint.generation) == (150, 4)
    with ckpt.open_latest([str(tmp_path)], before=150) as checkpoint:
        assert (checkpoint.step, checkpoint.generation) == (100, 3)
    with ckpt.open_checkpoint(str(tmp_path), 200) as checkpoint:  # asked for by name
        assert checkpoint.generation == 3


def test_buffers_that_do_not_fit_are_refused(root):
    with ckpt.open_latest([str(root)]) as checkpoint:
        with pytest.raises(KeyError):
            checkpoint.read("nothing")
        with pytest.raises(ValueError, match="do not exist"):
            checkpoint.read("w", 0, 4001)
        with pytest.raises(ValueError, match="360 bytes"):
            checkpoint.read_into([("w", 0, 1, bytearray(3))])
        with pytest.raises(ValueError, match="read-only"):
            checkpoint.read_into([("w", 0, 1, bytes(360))])
        assert len(checkpoint.read("w", 5, 5)) == 0
        assert checkpoint.read("w", 5, 6).dtype == np.uint8
