"""Two checkpoints are equal only if a run would go on from both in the same way.

The altered ones are valid, with good checksums: what is found is a difference of content.
"""

from __future__ import annotations

import copy

import numpy as np
import pytest
from click.testing import CliRunner

from ckpt import NotFound
from ckpt.slices import TensorInfo
from scripts.compare_checkpoints import compare, main
from tests.ckpt_support import make_state, write_checkpoint

SHAPES = {
    "model.layer.weight": ("float32", (16, 8)),
    "model.layer.bias": ("float32", (16,)),
    "model.norm.running_mean": ("float32", (16,)),
    "optimizer.layer.weight.exp_avg": ("float32", (16, 8)),
    "optimizer.layer.weight.step": ("float32", ()),
}
EXTRA = {
    "version": 1,
    "step": 7,
    "position": {"epoch": 0, "index": 7, "closed": False},
    "evaluations": [],
    "schedulers": [{"last_epoch": 7}],
    "objects": {},
    "hyper": [[{"lr": 0.1}]],
    "lineage": [[1, 0]],
    "skipped": 0,
    "job": {"virtual_ranks": 8, "accumulate": 1, "segments": 64, "seed": 0, "threads": 1},
    "aliases": [],
    "layout": "abc",
}


@pytest.fixture
def roots(tmp_path):
    return tmp_path / "a", tmp_path / "b"


def write(root, *, state=None, extra=None, num_workers=2, step=7, generation=1):
    write_checkpoint(
        root,
        make_state(SHAPES) if state is None else state,
        num_workers,
        step,
        generation,
        extra=EXTRA if extra is None else extra,
        lineage=[[generation, 0]],
    )


def verdict(roots):
    found = compare(str(roots[0]), str(roots[1]))
    parts = ("parameters", "optimizer", "rng", "cursor", "other")
    return found.equal, {part for part in parts if not getattr(found, part)}, found.differences


def test_equal_state_is_equal_whoever_wrote_it(roots):
    history = copy.deepcopy(EXTRA) | {"lineage": [[1, 0], [5, 3]], "evaluations": [{"loss": 1.0}]}
    write(roots[0])
    write(roots[1], num_workers=3, generation=5, extra=history)
    assert verdict(roots) == (True, set(), ())


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("model.layer.weight", "parameters"),
        ("model.norm.running_mean", "parameters"),
        ("optimizer.layer.weight.exp_avg", "optimizer"),
        ("optimizer.layer.weight.step", "optimizer"),
    ],
)
def test_one_altered_bit_is_found_and_named(roots, name, part):
    state = make_state(SHAPES)
    info, data = state[name]
    bits = np.unpackbits(np.frombuffer(data, np.uint8))
    bits[len(bits) // 2] ^= 1
    write(roots[0])
    write(roots[1], state={**state, name: (info, np.packbits(bits).tobytes())})
    equal, parts, differences = verdict(roots)
    assert not equal
    assert parts == {part}
    assert len(differences) == 1
    assert name in differences[0]


@pytest.mark.parametrize(
    ("path", "value", "parts"),
    [
        (("position", "index"), 8, {"cursor"}),  # the next sample is another one
        (("position", "epoch"), 1, {"cursor"}),
        (("position", "closed"), True, {"cursor"}),
        (("job", "seed"), 1, {"rng"}),
        (("job", "virtual_ranks"), 4, {"rng"}),
        (("step",), 8, {"rng", "cursor"}),
        (("skipped",), 1, {"other"}),
        (("schedulers",), [{"last_epoch": 8}], {"other"}),
        (("job", "threads"), 2, {"other"}),
    ],
)
def test_a_difference_in_what_is_not_a_tensor_is_found(roots, path, value, parts):
    extra = copy.deepcopy(EXTRA)
    place = extra
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    write(roots[0])
    write(roots[1], extra=extra)
    equal, found, differences = verdict(roots)
    assert not equal
    assert found == parts
    assert all(path[-1] in line for line in differences)


def test_the_same_bytes_in_another_type_are_another_state(roots):
    state = make_state(SHAPES)
    info, data = state["model.layer.bias"]
    write(roots[0], state=state)
    other = TensorInfo("int32", info.shape)
    write(roots[1], state={**state, "model.layer.bias": (other, data)})
    assert verdict(roots)[1] == {"parameters"}


def test_a_tensor_that_only_one_has_is_named(roots):
    state = make_state(SHAPES)
    write(roots[0], state=state)
    write(roots[1], state={k: v for k, v in state.items() if not k.endswith("bias")})
    equal, _, differences = verdict(roots)
    assert not equal
    assert differences == ("parameter model.layer.bias is only in the first",)


def test_two_checkpoints_without_parameters_are_not_equal(roots):
    state = {k: v for k, v in make_state(SHAPES).items() if k.startswith("optimizer")}
    for root in roots:
        write(root, state=state)
    assert not verdict(roots)[0]


def test_the_named_step_is_compared(roots):
    other = make_state(SHAPES, seed=1)
    for root, state in zip(roots, (make_state(SHAPES), other), strict=True):
        write(root)
        write(root, state=state, step=9, extra=EXTRA | {"step": 9})
    assert compare(str(roots[0]), str(roots[1]), step=7).equal
    assert not compare(str(roots[0]), str(roots[1]), step=9).equal
    assert not verdict(roots)[0]


def test_no_checkpoint_is_an_error_and_not_an_answer(roots):
    write(roots[0])
    with pytest.raises(NotFound):
        compare(str(roots[0]), str(roots[1]))


def test_the_command_answers_with_its_exit_code(roots):
    write(roots[0])
    write(roots[1], extra=EXTRA | {"skipped": 1})
    a, b = map(str, roots)
    same, differs = CliRunner().invoke(main, [a, a]), CliRunner().invoke(main, [a, b])
    assert (same.exit_code, same.output) == (0, "step 7: equal, bit for bit\n")
    assert differs.exit_code == 1
    assert differs.output.endswith("step 7: different\n")
