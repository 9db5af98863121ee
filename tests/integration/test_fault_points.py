"""Workers die at every named place of the protocol; afterwards nothing tells that they did."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from elastic.membership.messages import Mode
from tests import faults
from tests.faults import FAMILIES, Fault, happened, to_plain
from tests.kept_world import KeptWorld
from tests.programs import traced
from tests.traces import Traces, check_equal, read_traces

pytestmark = pytest.mark.integration

EPOCHS = 14  # of three steps, the last one a short one


def run(
    workers: int,
    wanted: list[Fault],
    *,
    segments: int = 16,
    mode: Mode = Mode.BOUNDARY,
    epochs: int = EPOCHS,
) -> tuple[dict[str, Any], Traces, list[str], list[dict[str, Any]]]:
    """Return value, traces, survivors and events of a run in which all these faults happened."""
    with TemporaryDirectory() as name:
        directory = Path(name)
        world = KeptWorld(
            directory,
            traced.train,
            kwargs={
                "traces": str(directory / "traces"),
                "faults": to_plain(wanted),
                "fired": str(directory / "fired"),
                "epochs": epochs,
                "full": workers,
            },
            nproc=workers,
            virtual_ranks=8,
            segments=segments,
            guard_every=2,
            save_every="5",
            balance=False,
            checkpoint=str(directory / "checkpoints"),
        )
        world.mode = mode
        try:
            world.start_with_spares(workers, len(wanted))
            value = world.keep()
            fired = happened(directory / "fired") if wanted else {}
            missed = {f.name(i) for i, f in enumerate(wanted)} - fired.keys()
            assert not missed, f"never reached: {sorted(missed)}; {world.describe()}"
            assert world.killed() == {where["worker"] for where in fired.values()}
            survivors = [w.worker_id for w in world.members() if w.worker_id not in world.killed()]
            return value, read_traces(directory / "traces"), survivors, world.events()
        finally:
            world.close()


@cache
def undisturbed(segments: int, epochs: int) -> tuple[dict[str, Any], Traces, list[dict[str, Any]]]:
    value, traces, _, events = run(1, [], segments=segments, epochs=epochs)
    return value, traces, events


def committed(events: list[dict[str, Any]]) -> dict[int, Any]:
    """Return step -> what was published of it, by whoever published it."""
    said: dict[int, Any] = {}
    for event in events:
        if event["event"] == "step.committed":
            what = [event[k] for k in ("epoch", "index", "log", "samples", "lr", "grad_norm")]
            assert said.setdefault(event["step"], what) == what, event
    return said


def check(workers: int, wanted: list[Fault], *, whole: bool = True, **options: Any) -> None:
    """Run with these faults and compare with the run that had none."""
    value, traces, survivors, events = run(workers, wanted, **options)
    expected, alone, said = undisturbed(options.get("segments", 16), options.get("epochs", EPOCHS))
    for of_epochs in ("curve", "saved"):  # the first rank may have come in later: the last ones
        told = value.pop(of_epochs)
        assert told == expected[of_epochs][len(expected[of_epochs]) - len(told) :]
    assert value == {key: expected[key] for key in value}
    check_equal(traces, alone, survivors, whole=whole)
    assert committed(events) == committed(said)


def one_after_the_other(names: list[str], workers: int, turn: int = 0) -> list[Fault]:
    """Return one fault per point, each in a World of full strength, ranks and indices in turn."""
    return [
        Fault(
            point=name,
            step=1 + 2 * i,
            rank=0 if faults.POINTS[name].first_rank else (turn + i) % workers,
            index=(turn // workers + i) % faults.POINTS[name].calls,
            size=workers,
            after=i,
        )
        for i, name in enumerate(names)
    ]


def portions(families: list[str], most: int = 7, turns: int = 1) -> list[Any]:
    """Return families' points in test-sized portions; all but the first turn are for `make soak`.

    Args:
        families: their names.
        most: points in one portion.
        turns: how often each portion is run, with other ranks; so many times for each of its calls.
    """
    found = []
    for family in families:
        names = list(FAMILIES[family])
        number = -(-len(names) // most)
        for k in range(number):
            portion = names[k::number]
            calls = max(faults.POINTS[name].calls for name in portion)
            found += [
                pytest.param(
                    portion, turn, id=f"{family}-{k}-{turn}", marks=[pytest.mark.soak] * bool(turn)
                )
                for turn in range(turns * calls)
            ]
    return found


STEADY = ["compute", "exchange", "agree", "apply", "gather", "save", "evaluate"]


@pytest.mark.parametrize(("names", "turn"), portions(STEADY, turns=4))
def test_a_death_at_every_place_of_a_step(names: list[str], turn: int) -> None:
    check(4, one_after_the_other(names, 4, turn))


def in_the_same_breath(names: list[str], size: int) -> list[Fault]:
    """Return deaths of any one worker in Worlds that follow on each other without a step."""
    return [
        Fault(point=name, rank=None, size=size - i if faults.POINTS[name].sized else 0, after=i)
        for i, name in enumerate(names)
    ]


@pytest.mark.parametrize(("names", "turn"), portions(["first"], 2))
def test_deaths_in_the_very_first_world(names: list[str], turn: int) -> None:
    assert turn == 0  # any rank may be the one
    check(4, in_the_same_breath(names, 4), epochs=2)


@pytest.mark.parametrize(("names", "turn"), portions(["end"], 2, turns=3))
def test_deaths_at_the_end(names: list[str], turn: int) -> None:
    wanted = [
        Fault(point=name, step=6, rank=(2 - i - turn) % 3, size=4 - i, after=i)
        for i, name in enumerate(names)
    ]
    check(4, wanted, epochs=2, whole=False)  # what heals after the last step leaves no trace


PRIMERS = (
    "after a leaf is folded",
    "before the commit",
    "after the optimizer",
    "before the rows are gathered",
)


def while_healing(names: list[str], size: int, turn: int) -> list[Fault]:
    """Return for each place a death in a step, and one at that place in the reshape it causes."""
    wanted: list[Fault] = []
    for i, name in enumerate(names):
        first = Fault(
            point=PRIMERS[(turn // size + i) % len(PRIMERS)],
            step=1 + 2 * i,
            rank=(turn + i) % size,
            size=size,
            after=len(wanted),
        )
        second = Fault(
            point=name,
            step=1 + 2 * i,
            rank=None,
            size=size - 1 if faults.POINTS[name].sized else 0,
            after=len(wanted) + 1,
        )
        wanted += [first, second]
    return wanted


@pytest.mark.parametrize(("names", "turn"), portions(["reform"], 5, turns=24))
def test_a_second_death_at_every_place_of_a_reshape(names: list[str], turn: int) -> None:
    check(6, while_healing(names, 6, turn), segments=4)


@pytest.mark.parametrize("name", ["before the inventory", "after rows are fetched"])
def test_a_third_death_while_the_second_is_healed(name: str) -> None:
    wanted = [
        Fault(point="before the commit", step=2, rank=5, size=7),
        Fault(point=name, step=2, rank=None, size=6, after=1),
        Fault(point="before a healing agreement", step=2, rank=None, size=5, after=2),
    ]
    check(7, wanted, segments=4)


@pytest.mark.parametrize("mode", [Mode.BOUNDARY, Mode.NOW])
@pytest.mark.parametrize(("names", "turn"), portions(["join"], 8, turns=4))
def test_a_joiner_or_its_donor_dies(names: list[str], turn: int, mode: Mode) -> None:
    wanted = [Fault(point=PRIMERS[turn], step=1, rank=(turn + 1) % 4, size=4)]
    wanted += [
        Fault(
            point=name,
            rank=None,
            size=4 if faults.POINTS[name].sized else 0,
            after=i + 1,
        )
        for i, name in enumerate(names)
    ]
    check(4, wanted, mode=mode)


def test_every_point_is_reached_by_some_test() -> None:
    tested = {*STEADY, "first", "end", "reform", "join"}
    assert tested == FAMILIES.keys()
    assert len(faults.POINTS) == sum(len(family) for family in FAMILIES.values()), (
        "names are unique"
    )
