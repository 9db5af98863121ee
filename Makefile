# Everstep. `make demo` and `make test` do all the set-up they need; nothing else has to be installed.
#
# Time of `.ci/run` (make check test) on 2 cores: at most 45 minutes, shared out as
#   unit, property, transcripts, tidy    8 min   one second for most files; no process, no torch where it can be
#   contract                             4 min   each Coord and each tier, the real servers among them
#   integration                         15 min   real agents, workers, etcd and gloo on loopback
#   demo smoke                           4 min   `make demo` at its smallest
#   chaos                                6 min   three seeds of a minute, judged
#   reserve                              8 min   set-up of .venv, format, lint, types, a busy machine
# The suite prints what each folder took beside its part (tests/conftest.py).

PYTHON ?= python3
NAME ?= recovery
BIN := .venv/bin
READY := .venv/.ready
SOURCES = $(wildcard elastic ckpt chaos scripts train)

.PHONY: setup check test test-unit demo bench soak sim clean
.NOTPARALLEL:

setup: $(READY)

$(READY): requirements.lock pyproject.toml scripts/setup.py scripts/fetch_etcd.py
	$(PYTHON) scripts/setup.py

check: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy $(SOURCES)
	$(BIN)/lint-imports
	$(BIN)/codespell

test: $(READY)
	$(BIN)/python -m pytest

test-unit: $(READY)
	$(BIN)/python -m pytest -m "not integration and not slow and not soak"

demo: $(READY)
	$(BIN)/python scripts/demo.py

bench: $(READY)
	$(BIN)/python scripts/bench.py $(NAME)

soak: $(READY)
	$(BIN)/python -m pytest -m soak

sim: $(READY)
	$(BIN)/python -m pytest tests/sim

clean:
	rm -rf build dist *.egg-info .everstep .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
