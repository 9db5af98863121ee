"""The example programs: what they compute, and that they run as a person would start them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch

from elastic.data import MicroBatches, evaluation_batches, num_evaluation_batches
from elastic.rng import seed_everything
from train import gpt
from train.corpus import Windows, read_text, split
from train.gpt import RECIPES, parse, rate
from train.model import GPT, SIZES, Size, weight_groups

ROOT = Path(__file__).parents[2]
TRAIN = ROOT / "train"
SMALL = Size(layers=1, channels=16, heads=2, context=12, dropout=0.0)


@pytest.fixture(autouse=True)
def _one_thread():
    """Two threads on a busy machine wait for each other more than they compute."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def run(*command, timeout=100):
    """Run a program as a person would, from outside the project; return what it printed."""
    done = subprocess.run(
        [sys.executable, *map(str, command)],
        capture_output=True,
        text=True,
        timeout=timeout,
        env={**os.environ, "OMP_NUM_THREADS": "1"},  # threads that wait for a busy core spin
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


# -- digits ------------------------------------------------------------------------------------


def accuracy(output):
    return float(re.search(r"test accuracy ([01]\.\d+)", output)[1])


def test_the_elastic_digits_differ_from_the_plain_ones_by_five_lines():
    command = ["diff", "-w", TRAIN / "digits_plain.py", TRAIN / "digits.py"]
    lines = subprocess.run(command, capture_output=True, text=True).stdout.splitlines()
    new = [line for line in lines if line.startswith(">")]
    old = [line for line in lines if line.startswith("<")]
    assert 0 < len(new) <= 5
    assert len(old) < len(new)  # nothing of the plain program is lost


def test_the_plain_digits_reach_their_accuracy():
    assert accuracy(run(TRAIN / "digits_plain.py")) >= 0.97


@pytest.mark.integration
def test_the_elastic_digits_reach_the_same_accuracy(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert accuracy(run(TRAIN / "digits.py")) >= 0.97


# -- the text ----------------------------------------------------------------------------------


def test_the_order_of_files_depends_on_their_names_alone(tmp_path):
    names = ["b/two.py", "a.txt", "c/d/three.md", "b/one.rst", "skipped.bin"]
    for folder, order in ((tmp_path / "x", names), (tmp_path / "y", reversed(names))):
        for name in order:
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"text of {name}")
    text = read_text(tmp_path / "x")
    assert text == read_text(tmp_path / "y")
    assert Counter(text.split(b"\n")) == Counter(
        [b""] + [f"text of {name}".encode() for name in names[:4]]
    )
    assert read_text(tmp_path / "x", bytes_max=20) == text[:20]
    assert read_text(tmp_path / "x" / "a.txt") == b"text of a.txt"


def test_pythons_own_text_is_there_without_what_was_installed():
    text = read_text(bytes_max=1_000_000)
    assert len(text) == 1_000_000
    assert b"def " in text
    assert text == read_text(bytes_max=1_000_000)


def test_too_little_text_is_refused(tmp_path):
    with pytest.raises(ValueError, match="has no text files"):
        read_text(tmp_path)
    with pytest.raises(ValueError, match="too few"):
        split(b"short", 64)


def test_windows_follow_each_other_and_the_validation_text_is_never_trained_on():
    windows = Windows(bytes(range(100)), 10)
    assert len(windows) == 9
    x, y = windows[8]
    assert x.tolist() == list(range(80, 90))
    assert y.tolist() == list(range(81, 91))
    assert len(Windows(bytes(91), 10)) == 9
    assert len(Windows(bytes(90), 10)) == 8
    text = bytes(range(250)) * 400
    seen, unseen = split(text, 10)
    assert bytes(seen.bytes.tolist()) + bytes(unseen.bytes.tolist()) == text
    assert 200 < len(unseen) <= 256
    assert all(len(y) == 10 for _, y in (unseen[0], unseen[len(unseen) - 1]))
    assert len(unseen) * unseen.stride > 0.95 * len(unseen.bytes)  # from all of it


# -- the model ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "low", "high"), [("tiny", 0.1e6, 0.2e6), ("demo", 1e6, 2e6), ("default", 9e6, 12e6)]
)
def test_sizes_are_what_they_say(name, low, high):
    with torch.device("meta"):
        model = GPT(SIZES[name])
    assert low <= sum(p.numel() for p in model.parameters()) <= high


def test_embedding_and_output_are_one_parameter_and_every_parameter_is_in_one_group():
    model = GPT(SMALL)
    assert model.head.weight is model.byte.weight
    decayed, plain = (group["params"] for group in weight_groups(model, 0.1))
    assert {id(p) for p in model.parameters()} == {id(p) for p in [*decayed, *plain]}
    assert len(decayed) + len(plain) == len(list(model.parameters()))
    assert all(p.dim() == 1 for p in plain)


def test_no_place_sees_what_follows_it():
    torch.manual_seed(0)
    model = GPT(SMALL).eval()
    text = torch.randint(0, 256, (1, 12))
    changed = text.clone()
    changed[0, 7] += 1
    same = torch.isclose(model(text), model(changed), atol=1e-6).all(dim=-1)[0]
    assert same.tolist() == [True] * 7 + [False] * 5


def test_a_sample_depends_on_the_weights_alone():
    torch.manual_seed(0)
    model = GPT(SMALL)
    state = torch.get_rng_state()
    first = model.continuation(b"def ", 30)
    assert torch.equal(torch.get_rng_state(), state)
    torch.rand(3)
    assert model.continuation(b"def ", 30) == first
    assert first.startswith("def ")
    assert model.training
    with torch.no_grad():
        model.byte.weight.mul_(-1.0)
    assert model.continuation(b"def ", 30) != first


def test_the_rate_rises_falls_and_stays():
    rates = [rate(step, 100) for step in range(150)]
    assert rates[:10] == pytest.approx([0.1 * (i + 1) for i in range(10)])
    assert rates[10:100] == sorted(rates[10:100], reverse=True)
    assert rates[100:] == [0.1] * 50
    assert max(rates) == 1.0


def test_what_is_not_given_follows_the_recipe(tmp_path):
    given = parse(["--size", "tiny", "--steps", "7", "--etcd", "a:1,b:2"])
    assert (given.steps, given.lr) == (7, RECIPES["tiny"].lr)
    assert given.decay_steps == RECIPES["tiny"].steps  # going on later changes nothing before
    assert given.etcd == ["a:1", "b:2"]
    with pytest.raises(SystemExit):
        parse(["--text", str(tmp_path / "missing")])


# -- the GPT program -----------------------------------------------------------------------------


class Recorded:
    """An optimizer or scheduler in the body of a step: called per micro-batch, run at its end."""

    def step(self):
        pass

    def zero_grad(self):
        pass


class OneProcess:
    """The context of a job with one worker, without the job: all leaves, one after the other."""

    is_main = True

    def __init__(self, virtual_ranks):
        self.virtual_ranks = virtual_ranks
        self.step = 0
        self.logged = []

    def prepare(self, model, optimizer, scheduler, loader):
        self.model, self.loader = model, loader
        self.source = MicroBatches(loader, seed=0, num_leaves=self.virtual_ranks)
        self.optimizer, self.scheduler = optimizer, scheduler
        return model, Recorded(), Recorded(), self

    def steps(self, total):
        while self.step < total:
            losses = []
            for leaf in range(self.virtual_ranks):
                self.leaf = leaf
                seed_everything(0, self.step, leaf)
                yield self.step
                losses.append(self.logged.pop()["loss"].item())
            self.logged.append(sum(losses) / len(losses))
            for parameter in self.model.parameters():
                parameter.grad /= self.virtual_ranks
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.max_norm)
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()
            self.step += 1

    def __next__(self):
        return self.source.fetch(0, self.step, self.leaf)

    def log(self, **values):
        self.logged.append(values)

    def clip_grad_norm_(self, max_norm):
        self.max_norm = max_norm

    def evaluate(self, fn, loader):
        self.model.eval()
        with torch.no_grad():
            batches = evaluation_batches(loader, 0, num_evaluation_batches(loader))
            pairs = [fn(batch)["loss"] for batch in batches]
        self.model.train()
        return {"loss": sum(total for total, _ in pairs) / sum(count for _, count in pairs)}


def test_the_tiny_gpt_learns_in_seconds(capsys):
    ctx = OneProcess(virtual_ranks=8)
    value = gpt.train(ctx, vars(parse(["--size", "tiny", "--steps", "40"])))
    assert ctx.logged[0] > 5.0
    assert sum(ctx.logged[-5:]) / 5 < 2.7
    assert value["val_loss"] < 2.7
    assert value["steps"] == 40
    assert value["sample"] in capsys.readouterr().out


@pytest.mark.integration
def test_the_gpt_program_trains_under_elastic_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = tmp_path / "result.json"
    run(
        *(TRAIN / "gpt.py", "--size", "tiny", "--steps", 40, "--nproc", 2),
        *("--checkpoint", tmp_path / "ckpt", "--result", result),
    )
    outcome = json.loads(result.read_text())
    assert outcome["step"] == outcome["value"]["steps"] == 40
    assert outcome["value"]["val_loss"] < 2.7
    assert outcome["value"]["sample"].startswith("def ")
