# Two commands do everything on a fresh machine: `make demo` and `make test`.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
DEMO := runs/demo
SIDE_BY_SIDE := --numprocesses 2 --dist worksteal

.PHONY: setup demo test test-all lint types bench mutants docs dist clean

# The stamp makes setup idempotent: it is repeated only when what is to be installed has changed.
setup: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

# Both worlds: one exchange of statistics on a network that has seen ImageNet, and networks that learn from scratch. On digits
# both times: the installed packages bring two photographs, which make no data set.
demo: setup
	rm -rf $(DEMO) $(DEMO)-one-pass
	$(BIN)/protofed run protoridge --data digits --model efficientnet_lite0 --image-size 64 --samples-per-client 800 --out $(DEMO)-one-pass
	$(BIN)/protofed compare fedavg i2pfl --data digits --samples-per-client 800 --rounds 10 --epochs 3 --out $(DEMO)
	$(BIN)/protofed report $(DEMO)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: setup
	$(BIN)/mypy

test: lint types
	$(BIN)/python -m pytest $(SIDE_BY_SIDE) -m "not slow"

test-all: lint types
	$(BIN)/python -m pytest $(SIDE_BY_SIDE)

bench: setup
	$(BIN)/python -m benchmarks.suite --write
	$(BIN)/python -m benchmarks.scaling --write
	$(BIN)/python -m benchmarks.method_cost --prototypes --alternations 9 --write

# The site in site/: the same markdown with search, and pages of a small comparison that is run for it.
docs: setup
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[docs]'
	$(BIN)/python docs/make_site.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet

# A wheel and a source archive, as docs/releasing.md wants them.
dist: setup
	rm -rf build dist
	$(BIN)/python -m pip install --quiet 'build>=1.2'
	$(BIN)/python -m build

# By hand, for it takes long. Every mistake of the list has to be noticed by the quick tests.
mutants: setup
	$(BIN)/python -m mutants --workers 2 --write

clean:
	rm -rf $(VENV) runs build dist site
