"""Each transcript is a script with what the membership machines decided after each of its lines.

They are reviewed as documentation: `pytest tests/unit --update-transcripts` writes them anew, and
the difference shows what a change of a rule does.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.membership_cluster import Cluster

TRANSCRIPTS = sorted((Path(__file__).parent.parent / "transcripts").glob("*.txt"))


@pytest.mark.parametrize("path", TRANSCRIPTS, ids=lambda path: path.stem)
def test_machines_decide_as_recorded(path: Path, request: pytest.FixtureRequest):
    recorded = path.read_text()
    script = "\n".join(line for line in recorded.splitlines() if not line.strip().startswith("->"))
    played = "\n".join(Cluster().run(script)) + "\n"
    if request.config.getoption("--update-transcripts", default=False):
        path.write_text(played)
    assert played == path.read_text()


def test_there_are_transcripts_of_all_that_matters():
    told = {path.stem for path in TRANSCRIPTS}
    wanted = "start death two_deaths death_in_boundary_world joiner all_dead late_node finish stop"
    assert set(wanted.split()) <= told
