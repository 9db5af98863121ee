"""What a worker shows of where it is, beyond the phases that the step publishes itself.

Compiling: torch says when dynamo begins and ends, and the progress page says so meanwhile; it may
take minutes, and is no hang. Stacks: on a signal from the agent all threads' stacks are written to
the worker's own log, by a handler in C that needs no thread of Python to get anywhere, so that it
also works while one of them holds the interpreter's lock for ever.
"""

from __future__ import annotations

import faulthandler
import os
from typing import TYPE_CHECKING, Any

from torch._dynamo import callback

from elastic.agent.process import STACK_SIGNAL
from elastic.agent.progress import WorkerPhase

if TYPE_CHECKING:
    from elastic.agent.progress import ProgressPage


def show_stacks_on_signal() -> None:
    """Write all stacks to the present standard error whenever STACK_SIGNAL comes."""
    log_fd = os.dup(2)  # a script may put something else in the place of sys.stderr
    faulthandler.register(STACK_SIGNAL, file=log_fd, all_threads=True, chain=False)


def publish_compiling(page: ProgressPage) -> None:
    """Show on this page while torch compiles something."""
    before = [WorkerPhase.COMPUTE]

    def began(_args: Any) -> None:
        before[0] = page.last.phase
        page.write(phase=WorkerPhase.COMPILE)

    def ended(_args: Any) -> None:
        if page.last.phase is WorkerPhase.COMPILE:
            page.write(phase=before[0])

    callback.on_compile_start(began)
    callback.on_compile_end(ended)
