"""Write docs/states.md from the tables in elastic/membership/machine.py.

    python scripts/draw_states.py [--check]

The diagram is never edited by hand: a test compares it with the tables.
"""

from __future__ import annotations

import argparse
import inspect
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "states.md"

HEAD = """# States of the membership machine

Drawn by `scripts/draw_states.py` from `MOVES` in `elastic/membership/machine.py`; do not edit.

Each agent has one machine. The phase is derived from facts after every event (who is registered,
which World is in force, who lives), and a move that is not in the table raises `IllegalMove`.
What the machine waits for in a phase is its `reason`, shown by `elastic status`.
"""


def render() -> str:
    """Return the page as it should be."""
    sys.path.insert(0, str(ROOT))
    from elastic.membership.machine import MOVES, Phase

    meanings = _meanings(inspect.getsource(Phase))
    lines = [HEAD, "| phase | meaning | next |", "|---|---|---|"]
    for phase in Phase:
        following = ", ".join(str(each) for each in Phase if each in MOVES[phase]) or "none"
        lines.append(f"| {phase} | {meanings[phase.name]} | {following} |")
    lines += ["", "```mermaid", "stateDiagram-v2", f"    [*] --> {Phase.JOINING}"]
    lines += [
        f"    {phase} --> {each}" for phase in Phase for each in Phase if each in MOVES[phase]
    ]
    lines += [f"    {phase} --> [*]" for phase in Phase if not MOVES[phase]]
    lines += ["```", ""]
    return "\n".join(lines)


def _meanings(source: str) -> dict[str, str]:
    """Return the comment behind each member of an enumeration."""
    return dict(re.findall(r"^\s+([A-Z]+) = .*?#\s*(.+)$", source, flags=re.MULTILINE))


def main() -> int:
    """Write the page, or tell whether it is up to date."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="only compare; 1 = out of date")
    wanted = render()
    if parser.parse_args().check:
        return int(not PAGE.exists() or PAGE.read_text() != wanted)
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(wanted)
    return 0


if __name__ == "__main__":
    sys.exit(main())
