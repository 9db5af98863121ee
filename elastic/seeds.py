"""Numbers that belong to names: the same in every process, on every machine.

Pure: no I/O, no clock.
"""

from __future__ import annotations

import hashlib


def derive_seed(*parts: int | str) -> int:
    """Return the 64-bit number that belongs to these parts; the same in every process."""
    text = "\x1f".join(str(part) for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")
