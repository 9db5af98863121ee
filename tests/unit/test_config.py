"""Configuration: where values come from, what is allowed, what a person is told."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pathlib
import shlex
import signal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.config import (
    ElasticConfig,
    Origin,
    default_of,
    field_docs,
    process_environ,
    resolve,
    shown,
)
from elastic.config_fields import BY_ENV, BY_NAME, FIELDS, NotAllowed
from elastic.errors import Misconfigured
from scripts import write_config_docs

PINNED = {  # names and defaults that programs rely on
    "job": None,
    "nproc": None,
    "nodes": "1:1",
    "etcd": (),
    "virtual_ranks": None,
    "accumulate": 1,
    "segments": 64,
    "replicas": 2,
    "spares": 0,
    "threads": 1,
    "reduction": "exact",
    "checkpoint": None,
    "remote": None,
    "save_every": None,
    "on_save_error": "warn",
    "stage": "primary",
    "when_busy": "skip",
    "keep": None,
    "resume": "auto",
    "lease_ttl_s": 5.0,
    "hang_timeout_s": "auto",
    "min_wait_s": 1.0,
    "grace_s": 25.0,
    "notice_signals": ("SIGTERM",),
    "max_failures": 100,
    "max_reshapes": 1000,
    "seed": 0,
    "backend": "gloo",
    "bind": "127.0.0.1",
    "advertise": None,
    "log_dir": None,
    "metrics_port": None,
}


def refusal(arguments=(), environ=(), command_line=()):
    with pytest.raises(Misconfigured) as caught:
        resolve(dict(arguments), dict(environ), dict(command_line))
    return str(caught.value)


# -- the table ------------------------------------------------------------------------------------


def test_the_table_has_a_row_for_every_field_and_no_other():
    assert {f.name for f in FIELDS} == {f.name for f in dataclasses.fields(ElasticConfig)}
    assert len(BY_ENV) == len(BY_NAME) == len(FIELDS)


def test_names_and_defaults_are_the_pinned_ones():
    config = resolve({}, {}).config
    assert {name: getattr(config, name) for name in PINNED} == PINNED


def test_every_field_says_what_it_means_under_its_line():
    assert {name for name, text in field_docs().items() if len(text) > 30} == set(BY_NAME)


def test_a_field_is_one_name_in_three_forms():
    field = BY_NAME["lease_ttl_s"]
    assert (field.env, field.flag) == ("EVERSTEP_LEASE_TTL_S", "--lease-ttl-s")


@pytest.mark.parametrize("field", FIELDS, ids=lambda field: field.name)
def test_a_default_can_be_written_as_text_and_is_taken_back(field):
    if not field.is_not_yet(default_of(field.name)):
        text = shown(field.name, default_of(field.name))
        default = default_of(field.name)
        if default == ():
            return  # an empty list has no text: the environment's empty value means "not given"
        assert field.read(text) == default


def test_the_configuration_page_is_the_one_that_the_table_gives():
    assert write_config_docs.main(["--check"]) == 0


def test_the_check_of_the_page_can_fail(tmp_path, monkeypatch, capsys):
    stale = tmp_path / "configuration.md"
    stale.write_text(write_config_docs.page().replace("nproc", "nprco", 1))
    monkeypatch.setattr(write_config_docs, "PAGE", stale)
    assert write_config_docs.main(["--check"]) == 1
    assert "run it" in capsys.readouterr().err


# -- reading --------------------------------------------------------------------------------------

GOOD = [
    # field, given, kept
    ("nproc", 4, 4),
    ("nproc", "4", 4),
    ("nproc", "auto", None),
    ("nodes", 2, "2:2"),
    ("nodes", "2", "2:2"),
    ("nodes", "2:4", "2:4"),
    ("etcd", "a:1,b:2", ("a:1", "b:2")),
    ("etcd", ["http://a:1/", "[::1]:2379"], ("http://a:1", "[::1]:2379")),
    ("segments", "parameter", "parameter"),
    ("segments", "16", 16),
    ("save_every", 100, 100),
    ("save_every", "100", 100),
    ("save_every", "5min", "300s"),
    ("save_every", "1.5h", "5400s"),
    ("save_every", "none", None),
    ("resume", 120, 120),
    ("resume", "120", 120),
    ("resume", "fresh", "fresh"),
    ("resume", "s3://bucket/other", "s3://bucket/other"),
    ("lease_ttl_s", 2, 2.0),
    ("lease_ttl_s", "2500ms", 2.5),
    ("hang_timeout_s", "auto", "auto"),
    ("hang_timeout_s", "1min", 60.0),
    ("grace_s", "10 s", 10.0),
    ("notice_signals", "usr1,SIGTERM", ("SIGUSR1", "SIGTERM")),
    ("notice_signals", [signal.SIGUSR1, 15], ("SIGUSR1", "SIGTERM")),
    ("checkpoint", pathlib.Path("a/b"), "a/b"),
    ("remote", "s3://bucket/job", "s3://bucket/job"),
    ("remote", "/mnt/shared", "/mnt/shared"),
    ("debug", "on", True),
    ("debug", "0", False),
    ("respawn", False, False),
    ("bind", "[::1]", "::1"),
    ("metrics_port", 0, 0),
]


@pytest.mark.parametrize(("name", "value", "kept"), GOOD)
def test_a_value_is_kept_in_its_one_form(name, value, kept):
    rest = {"nodes": {"etcd": "a:1", "job": "j"}, "etcd": {"job": "j"}}.get(name, {})
    needs_place = name in ("save_every", "resume")
    rest = {**rest, **({"checkpoint": "c"} if needs_place else {})}
    found = getattr(resolve({name: value, **rest}, {}).config, name)
    assert found == kept
    assert type(found) is type(kept)


BAD = [
    # field, given, what the sentence must say
    ("nproc", 0, "nproc=0 must be a whole number from 1"),
    ("nproc", -1, "nproc=-1"),
    ("nproc", 2.5, "nproc=2.5"),
    ("nproc", True, "nproc=True"),
    ("nproc", "four", "nproc='four'"),
    ("virtual_ranks", 0, "virtual_ranks=0"),
    ("nodes", "3:2", "1 <= min <= max"),
    ("nodes", "0:2", '"2:4"'),
    ("etcd", "localhost", "host:port"),
    ("etcd", 3, "host:port"),
    ("segments", "many", 'or "parameter"'),
    ("save_every", 0, '"auto"'),
    ("save_every", 0.5, "number of steps"),
    ("save_every", "soon", "5min"),
    ("resume", "yesterday", '"auto", "fresh"'),
    ("lease_ttl_s", 1, "at least 2"),
    ("lease_ttl_s", float("nan"), "lease_ttl_s=nan"),
    ("grace_s", "10 parsecs", '"5min"'),
    ("grace_s", -1, "at least 0"),
    ("reduction", "quick", '"exact" or "fast"'),
    ("on_save_error", "panic", '"warn" or "fail"'),
    ("backend", "mpi", '"gloo" or "nccl"'),
    ("notice_signals", "SIGKILL", "no process can catch"),
    ("notice_signals", "SIGFOO", "there is no SIGFOO"),
    ("checkpoint", "s3://bucket/x", "goes to remote"),
    ("checkpoint", "", "path of a directory"),
    ("remote", "s3://", "after its scheme"),
    ("job", "my job", "63 letters"),
    ("job", "../other", "63 letters"),
    ("debug", "maybe", "true or false"),
    ("metrics_port", 70000, "65535"),
    ("bind", "0.0.0.0:80x/", "without a port"),
    ("seed", -1, "seed=-1"),
]


@pytest.mark.parametrize(("name", "value", "says"), BAD)
def test_a_bad_value_is_named_with_what_would_be_right(name, value, says):
    sentence = refusal({name: value})
    assert sentence.startswith(f"{name}={value!r} ")
    assert says in sentence
    assert "\n" not in sentence


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"nproc": 4, "virtual_ranks": 3}, ["virtual_ranks=3", "nproc=4", "at least 4"]),
        (
            {"nproc": 2, "nodes": "1:3", "virtual_ranks": 4, "etcd": "a:1", "job": "j"},
            ["virtual_ranks=4", "6 workers", "nodes=1:3"],
        ),
        ({"nodes": "1:2"}, ["nodes=1:2", "etcd is empty"]),
        ({"etcd": "a:1"}, ["etcd", "job=NAME"]),
        ({"save_every": 10}, ["save_every=10", "checkpoint=DIR or remote=URL"]),
        ({"on_save_error": "fail"}, ["on_save_error", "checkpoint=DIR"]),
        ({"resume": 7}, ["resume=7", "checkpoint=DIR"]),
        ({"reduction": "fast"}, ["reduction=fast is not available", "leave it at exact"]),
        ({"keep": 3, "checkpoint": "c"}, ["keep=3 is not available", "leave it at none"]),
        ({"save_every": "auto", "checkpoint": "c"}, ["save_every=auto is not available"]),
    ],
)
def test_fields_that_contradict_each_other_are_both_named(given, says):
    sentence = refusal(given)
    assert [part for part in says if part not in sentence] == []


# -- where values come from -----------------------------------------------------------------------


def test_the_command_line_wins_over_the_environment_and_that_over_arguments():
    resolved = resolve(
        {"nproc": 1, "seed": 1, "threads": 1, "virtual_ranks": 8},
        {"EVERSTEP_NPROC": "2", "EVERSTEP_SEED": "2", "PATH": "/bin"},
        {"nproc": "3"},
    )
    assert (resolved.config.nproc, resolved.config.seed, resolved.config.threads) == (3, 2, 1)
    assert resolved.origins["nproc"] is Origin.COMMAND_LINE
    assert resolved.origins["seed"] is Origin.ENVIRONMENT
    assert resolved.origins["threads"] is Origin.ARGUMENT
    assert resolved.origins["grace_s"] is Origin.DEFAULT
    assert [resolved.is_explicit(n) for n in ("nproc", "seed", "threads", "grace_s")] == [
        True,
        True,
        True,
        False,
    ]


def test_the_name_in_the_sentence_is_the_one_that_the_person_wrote():
    assert refusal({}, {"EVERSTEP_NPROC": "0"}).startswith("EVERSTEP_NPROC='0' ")
    assert refusal({}, {}, {"nproc": "0"}).startswith("--nproc='0' ")


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("EVERSTEP_LEASE_TTL", "EVERSTEP_LEASE_TTL_S"),
        ("EVERSTEP_NPROCS", "EVERSTEP_NPROC"),
        ("EVERSTEP_CHECKPOINTS", "EVERSTEP_CHECKPOINT"),
        ("EVERSTEP_virtual_ranks", "EVERSTEP_VIRTUAL_RANKS"),
        ("EVERSTEP_ZZZ", "see docs/configuration.md"),
    ],
)
def test_an_unknown_environment_name_is_an_error_that_knows_the_nearest(name, near):
    sentence = refusal({}, {name: "1"})
    assert sentence.startswith(f"unknown environment name {name}; ")
    assert near in sentence


def test_an_unknown_argument_is_an_error_that_knows_the_nearest():
    assert refusal({"nprocs": 2}) == "unknown argument nprocs; did you mean nproc?"


def test_an_empty_environment_value_is_not_given():
    resolved = resolve({"seed": 5}, {"EVERSTEP_SEED": ""})
    assert resolved.config.seed == 5


def test_other_programs_environment_is_none_of_ours():
    assert resolve({}, {"MY_EVERSTEP_X": "1", "EVERST": "2"}).config == ElasticConfig()


def test_the_environment_that_is_read_is_a_copy(monkeypatch):
    monkeypatch.setenv("EVERSTEP_SEED", "9")
    environ = process_environ()
    environ["EVERSTEP_SEED"] = "10"
    assert os.environ["EVERSTEP_SEED"] == "9"


def test_a_replaced_value_carries_its_origin_and_is_checked():
    resolved = resolve({"nproc": 4}, {})
    filled = resolved.replace(Origin.CHECKPOINT, virtual_ranks=8)
    assert filled.config.virtual_ranks == 8
    assert filled.origins["virtual_ranks"] is Origin.CHECKPOINT
    with pytest.raises(Misconfigured, match="virtual_ranks=2"):
        resolved.replace(Origin.CHECKPOINT, virtual_ranks=2)


# -- carrying it on -------------------------------------------------------------------------------


def test_a_configuration_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        resolve({}, {}).config.nproc = 3


@given(
    nproc=st.none() | st.integers(1, 64),
    low=st.integers(1, 4),
    more=st.integers(0, 4),
    seed=st.integers(0, 2**63 - 1),
    save=st.none() | st.integers(1, 10**6) | st.sampled_from(["5min", "90s", "1h"]),
    hang=st.just("auto") | st.floats(0.1, 1e6),
)
def test_plain_values_give_the_same_configuration_back(nproc, low, more, seed, save, hang):
    config = resolve(
        {
            "nproc": nproc,
            "nodes": f"{low}:{low + more}",
            "etcd": ["h:1"],
            "job": "j",
            "seed": seed,
            "save_every": save,
            "checkpoint": "c",
            "hang_timeout_s": hang,
        },
        {},
    ).config
    assert ElasticConfig.from_dict(config.to_dict()) == config


def test_intervals_are_read_as_steps_or_as_seconds():
    def steps_and_s(value):
        config = resolve({"save_every": value, "checkpoint": "c"}, {}).config
        return config.save_every_steps, config.save_every_s

    assert [steps_and_s(v) for v in (None, 50, "5min")] == [(None, None), (50, None), (None, 300.0)]


@given(st.text(max_size=30))
def test_a_text_is_read_or_refused_and_never_breaks_a_reader(text):
    for field in FIELDS:
        with contextlib.suppress(NotAllowed):
            assert field.read(text) is not None or text == field.unset


def test_what_a_person_reads_can_be_typed_again():
    assert shlex.split(shown("notice_signals", ("SIGTERM", "SIGUSR1"))) == ["SIGTERM,SIGUSR1"]
    assert [shown("seed", 3), shown("debug", True), shown("nproc", None)] == ["3", "yes", "auto"]
