"""The error tree, and what a process leaves with because of an error."""

from __future__ import annotations

import pickle

import pytest

from elastic.errors import (
    MEANINGS,
    ElasticError,
    ExitCode,
    Fatal,
    Fenced,
    Misconfigured,
    Reform,
    Reshaped,
    Retryable,
    RunFailed,
    ended_by,
    exit_code_of,
    meaning,
)


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("DONE", 0),
        ("ANSWER_IS_NO", 1),
        ("MISCONFIGURED", 2),
        ("FENCED", 3),
        ("BELOW_MINIMUM", 4),
        ("USER_CODE", 5),
        ("STORAGE", 6),
        ("INFRASTRUCTURE", 7),
    ],
)
def test_exit_codes_are_those_that_schedulers_were_promised(name, code):
    assert ExitCode[name] == code
    assert MEANINGS[code] == meaning(code)


def test_no_exit_code_is_without_a_meaning_or_shares_one():
    assert set(MEANINGS) == set(ExitCode)
    assert len(set(MEANINGS.values())) == len(MEANINGS)


def test_a_signal_after_a_clean_drain_is_not_taken_for_success():
    assert [ended_by(n) for n in (1, 2, 15)] == [129, 130, 143]
    assert meaning(143) == "ended by signal 15 after a clean drain"
    assert meaning(99) == "exit code 99"


@pytest.mark.parametrize(
    ("error", "kind", "code"),
    [
        (Retryable("etcd is slow", after_s=1.0), "retryable", 7),
        (Fenced("others went on"), "fenced", 3),
        (Reform("over"), "reform", 7),
        (Reshaped("cut"), "reshaped", 7),
        (Misconfigured("nproc=0"), "misconfigured", 2),
        (Misconfigured("nproc=0", kind="bad-value"), "bad-value", 2),
        (Fatal("no"), "fatal", 7),
        (RunFailed(5, "train raised"), "run-failed", 5),
        (RunFailed(143, "drained"), "run-failed", 143),
        (KeyboardInterrupt(), None, 130),
        (OSError("disk"), None, 7),
    ],
)
def test_each_error_has_its_kind_and_its_exit_code(error, kind, code):
    assert exit_code_of(error) == code
    assert getattr(error, "kind", None) == kind


def test_handlers_catch_by_reaction():
    assert issubclass(Reshaped, Reform)
    assert issubclass(RunFailed, Fatal)
    for reaction in (Retryable, Fenced, Reform, Misconfigured, Fatal):
        assert issubclass(reaction, ElasticError)
        assert issubclass(reaction, Exception)
        assert [other for other in (Retryable, Fenced, Misconfigured) if other is not reaction]
        assert not any(
            issubclass(reaction, other)
            for other in (Retryable, Fenced, Reform, Misconfigured, Fatal)
            if other is not reaction
        )


def test_an_error_is_one_sentence_with_its_remedy():
    error = Misconfigured("nproc=0 is too few", hint="ask for at least 1", nproc=0)
    assert str(error) == "nproc=0 is too few; ask for at least 1"
    assert error.facts == {"nproc": 0}
    assert str(Fenced("the others went on")) == "the others went on"


def test_a_failed_run_survives_pickling():
    error = RunFailed(5, "train raised", traceback="Traceback ...", worker="n.0-a", run_dir="/r")
    copy = pickle.loads(pickle.dumps(error))
    assert vars(copy) == vars(error)
    assert str(copy) == "train raised"
