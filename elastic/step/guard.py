"""The cheap guard: now and then, what should be equal on all workers is compared.

Checksums ride in the agreement of a step. They are of the state before the step is applied: the
rows of one segment (every worker has them), its optimizer state (every holder has it), in turn
one segment after the other, and all global objects of the user's. A difference means a bit that
flipped, a kernel that is not deterministic, or global state that the loop body changes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import google_crc32c

from elastic.errors import ElasticError, Fatal, Misconfigured, UserError
from elastic.values import NotPlain, checksum

if TYPE_CHECKING:
    from elastic.step.driver import Driver

_OBJECT = "object "


def checksums(driver: Driver, step: int) -> dict[str, int]:
    """Return this worker's part of the guard in a step; empty in steps that have none."""
    every = driver.config.guard_every
    if not every or (driver.formed and step % every):
        return {}
    layout = driver.layout
    assert layout is not None
    found: dict[str, int] = {}
    segment = (step // every) % layout.num_segments
    flat, lo, hi = layout.rows_range(segment)
    found[f"rows {segment}"] = int(google_crc32c.value(flat[lo:hi].cpu().numpy()))
    if segment < layout.num_trainable and driver.held.get(segment) == driver.step:
        states = [
            [state for _, state in optimizer.export_state(segment)]
            for optimizer in driver.optimizers
        ]
        found[f"optimizer {segment}"] = checksum(states)
    for name, obj in driver.prepared.objects.items():
        try:
            found[_OBJECT + name] = checksum(obj.state_dict(), name)
        except NotPlain as error:
            raise Misconfigured(f"state cannot be saved: {error}") from error
    return found


def difference(unequal: str, step: int) -> ElasticError:
    """Return the error that tells of a difference which an agreement has shown."""
    if unequal.startswith(_OBJECT):
        return UserError(
            f"the global state {unequal.removeprefix(_OBJECT)!r} differs between workers in step "
            f"{step - 1}; change it only in ctx.on_step functions or from values that are equal on "
            "all workers, or register it with ctx.state(..., scope='virtual_rank')"
        )
    what, segment = unequal.split()
    part = "parameters" if what == "rows" else "optimizer state"
    return Fatal(
        f"the {part} of segment {segment} differ between workers in step {step - 1}: a memory "
        "error, or a kernel that is not deterministic",
        kind="state-differs",
        hint="check the machines, then resume from the newest checkpoint",
    )
