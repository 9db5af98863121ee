"""The cut of a job's state: known cases, and what no cut may do."""

from __future__ import annotations

import pytest

from elastic.step.segments import ParamSpec, Piece, cut


def spec(name, rows, row_bytes=4, splittable=True):
    return ParamSpec(name=name, rows=rows, row_bytes=row_bytes, splittable=splittable)


def shown(segments):
    return [[(p.param, p.start, p.stop) for p in s.pieces] for s in segments]


def test_segments_run_over_the_borders_of_parameters():
    params = [spec("a.weight", 3), spec("a.bias", 1), spec("b.weight", 4)]
    assert shown(cut(params, 4)) == [
        [(0, 0, 2)],
        [(0, 2, 3), (1, 0, 1)],
        [(2, 0, 2)],
        [(2, 2, 4)],
    ]


def test_one_segment_is_everything():
    assert shown(cut([spec("a", 2), spec("b", 3)], 1)) == [[(0, 0, 2), (1, 0, 3)]]


def test_there_are_never_more_segments_than_units():
    assert len(cut([spec("a", 2), spec("b", 3, splittable=False)], 64)) == 3
    assert len(cut([spec("a", 10)], 64)) == 10


def test_what_is_not_elementwise_stays_whole():
    params = [spec("a", 5, splittable=False), spec("b", 5, splittable=False)]
    assert shown(cut(params, 64)) == [[(0, 0, 5)], [(1, 0, 5)]]


def test_a_large_parameter_does_not_starve_what_follows():
    params = [
        spec("embedding", 100, 10, splittable=False),
        *(spec(f"layer{i}", 1, 10) for i in range(12)),
    ]
    sizes = [s.nbytes for s in cut(params, 5)]
    assert sizes == [1000, 30, 30, 30, 30]


def test_a_large_parameter_at_the_end_leaves_a_unit_for_every_segment():
    params = [*(spec(f"layer{i}", 1, 10) for i in range(4)), spec("head", 1, 1000)]
    assert [s.nbytes for s in cut(params, 5)] == [10, 10, 10, 10, 1000]


def test_empty_parameters_belong_to_the_segment_where_they_stand():
    params = [spec("none", 0), spec("a", 2), spec("flat", 7, 0), spec("b", 2), spec("last", 0)]
    assert shown(cut(params, 2)) == [
        [(0, 0, 0), (1, 0, 2)],
        [(2, 0, 7), (3, 0, 2), (4, 0, 0)],
    ]


def test_without_bytes_there_is_one_segment_and_without_parameters_none():
    assert shown(cut([spec("none", 0), spec("flat", 3, 0)], 8)) == [[(0, 0, 0), (1, 0, 3)]]
    assert cut([], 8) == ()


def test_millions_of_rows_cost_nothing():
    segments = cut([spec("embedding", 50_000_000, 4096), spec("head", 50_000_000, 4096)], 64)
    assert {s.nbytes for s in segments} == {50_000_000 * 4096 * 2 // 64}
    assert segments[31].pieces == (Piece(0, 48_437_500, 50_000_000),)


@pytest.mark.parametrize(
    ("params", "num_segments", "words"),
    [
        ([spec("a", 1)], 0, "at least 1"),
        ([spec("a", 1), spec("a", 2)], 2, "same name"),
    ],
)
def test_what_cannot_be_cut_is_refused(params, num_segments, words):
    with pytest.raises(ValueError, match=words):
        cut(params, num_segments)


def test_negative_sizes_are_refused():
    with pytest.raises(ValueError, match="must not be negative"):
        spec("a", -1)
