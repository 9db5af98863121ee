"""Write docs/configuration.md from the table of configuration fields.

python scripts/write_config_docs.py           writes the page
python scripts/write_config_docs.py --check   says whether it is up to date, changes nothing
"""

from __future__ import annotations

import argparse
import sys
from itertools import groupby
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from elastic.config import default_of, field_docs, shown  # noqa: E402
from elastic.config_fields import FIELDS, Field  # noqa: E402
from elastic.errors import MEANINGS  # noqa: E402

PAGE = ROOT / "docs" / "configuration.md"

HEAD = """\
# Configuration

<!-- Written by scripts/write_config_docs.py from elastic/config.py; do not edit. -->

A field can be given as an argument of `elastic.run()`, as an environment name, or as an option of
`elastic run`. Arguments count least, then the environment, then the command line. The script's own
arguments are never read. An unknown argument, option or `EVERSTEP_*` name is an error; an empty
environment value counts as not given. `elastic run --dry-run script.py` prints each value and where
it came from.

Times are seconds, or a text with a unit (`500ms`, `30s`, `5min`, `2h`). In text, `none` stands for
Python's `None`, and a list is separated by commas.
"""


def page() -> str:
    """Return the page's text."""
    parts = [HEAD]
    for group, fields in groupby(FIELDS, key=lambda field: field.group):
        parts.append(f"## {group}\n")
        parts.extend(_entry(field) for field in fields)
    parts.append(_exit_codes())
    return "\n".join(parts)


def _entry(field: Field) -> str:
    default = shown(field.name, default_of(field.name))
    values = "yes, no" if field.is_switch else field.metavar.replace("|", ", ")
    flag = f"{field.flag}`, `--no-{field.flag[2:]}" if field.is_switch else field.flag
    if field.not_yet:
        values += f" (not in this version: {', '.join(field.not_yet)})"
    return (
        f"### `{field.name}`\n\n"
        f"{field_docs()[field.name]}\n\n"
        f"Values: {values}. Default: {default}. Environment: `{field.env}`. Option: `{flag}`.\n"
    )


def _exit_codes() -> str:
    rows = [f"| {int(code)} | {text} |" for code, text in MEANINGS.items()]
    rows.append("| 128 + n | ended by signal n after a clean drain |")
    return "\n".join(["## Exit codes\n", "| code | meaning |", "|---|---|", *rows]) + "\n"


def main(arguments: list[str] | None = None) -> int:
    """Write or check the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args(arguments)
    text = page()
    if not options.check:
        PAGE.write_text(text)
        return 0
    same = PAGE.exists() and PAGE.read_text() == text
    if not same:
        print(f"{PAGE.name} is not what {Path(__file__).name} writes; run it", file=sys.stderr)
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
