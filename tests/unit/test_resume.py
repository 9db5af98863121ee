"""What a checkpoint fixes for the job that goes on from it."""

from __future__ import annotations

import pytest

from elastic.config import Origin, resolve
from elastic.errors import Misconfigured
from elastic.resume import FIXED, Found, adopt


def found(**fixed):
    values = {"virtual_ranks": 6, "accumulate": 1, "segments": 16, "seed": 0, "threads": 2}
    return Found(job="j", step=40, generation=3, fixed={**values, **fixed})


def test_the_number_of_threads_is_the_job_s_and_not_the_machine_s():
    resolved = adopt(resolve({"nproc": 2}, {}), found())
    assert resolved.config.threads == 2
    assert resolved.origins["threads"] is Origin.CHECKPOINT


@pytest.mark.parametrize(
    ("arguments", "environ", "origin"),
    [({"threads": 1}, {}, "argument"), ({}, {"EVERSTEP_THREADS": "1"}, "environment")],
)
def test_another_number_of_threads_is_refused_with_the_difference(arguments, environ, origin):
    with pytest.raises(Misconfigured) as refused:
        adopt(resolve({"nproc": 2, **arguments}, environ), found())
    assert "goes on from step 40 with other values" in str(refused.value)
    assert f"threads=1 ({origin}) but 2 in the checkpoint" in str(refused.value)


def test_the_same_values_may_be_given_again():
    given = {"nproc": 2, "threads": 2, "virtual_ranks": 6, "segments": 16, "seed": 0}
    resolved = adopt(resolve(given, {}), found())
    assert {name: getattr(resolved.config, name) for name in FIXED} == found().fixed


def test_more_workers_than_virtual_ranks_are_refused():
    with pytest.raises(Misconfigured, match="8 workers are more than that"):
        adopt(resolve({"nproc": 8}, {}), found())
