"""Each row in exactly one piece, near equal sizes, whatever the model."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from elastic.step.segments import ParamSpec, cut

SHAPES = st.lists(
    st.tuples(st.integers(0, 40), st.sampled_from([0, 1, 4, 8, 12, 400]), st.booleans()),
    max_size=9,
)


def params_of(shapes):
    return [
        ParamSpec(name=f"p{i}", rows=rows, row_bytes=row_bytes, splittable=splittable)
        for i, (rows, row_bytes, splittable) in enumerate(shapes)
    ]


def unit_bytes(param):
    return param.row_bytes if param.splittable else param.rows * param.row_bytes


@given(SHAPES, st.integers(1, 80))
def test_each_row_is_in_exactly_one_piece_in_order(shapes, num_segments):
    params = params_of(shapes)
    segments = cut(params, num_segments)
    assert [s.index for s in segments] == list(range(len(segments)))
    pieces = [piece for segment in segments for piece in segment.pieces]
    assert pieces == sorted(pieces)
    for index, param in enumerate(params):
        mine = [piece for piece in pieces if piece.param == index]
        assert [p.start for p in mine] + [param.rows] == [0] + [p.stop for p in mine]
        assert param.splittable or len(mine) == 1


@given(SHAPES, st.integers(1, 80))
def test_as_many_segments_as_there_are_units_and_none_without_bytes(shapes, num_segments):
    params = params_of(shapes)
    segments = cut(params, num_segments)
    units = sum(p.rows if p.splittable else 1 for p in params if p.rows * p.row_bytes > 0)
    if units:
        assert len(segments) == min(num_segments, units)
        assert all(s.nbytes > 0 for s in segments)
    else:
        assert len(segments) == min(1, len(params))
    for segment in segments:
        piece_bytes = [(p.stop - p.start) * params[p.param].row_bytes for p in segment.pieces]
        assert segment.nbytes == sum(piece_bytes)


@given(SHAPES, st.integers(1, 80))
def test_sizes_are_within_one_unit_of_a_fair_share(shapes, num_segments):
    params = params_of(shapes)
    segments = cut(params, num_segments)
    total = sum(s.nbytes for s in segments)
    largest = max((unit_bytes(p) for p in params), default=0)
    if segments and largest * len(segments) <= total:
        fair = total / len(segments)
        assert all(abs(s.nbytes - fair) <= largest for s in segments)


@given(SHAPES, st.integers(1, 80))
def test_nothing_but_shapes_counts(shapes, num_segments):
    params = params_of(shapes)
    renamed = [replace(p, name=f"other.{p.name}") for p in params]
    assert cut(params, num_segments) == cut(renamed, num_segments)
