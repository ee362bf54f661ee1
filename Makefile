# make demo and make test do all the set-up by themselves, in .venv; they need Python 3.11 to 3.13 and make.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: .venv demo test lint

# The mark is made last, so that a set-up which failed half-way is done again.
.venv: .venv/ready
.venv/ready: setup.cfg pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --editable '.[test]'
	touch $@

# Trains on the built-in phrasebook, then translates phrases that it never saw. Minutes.
demo: .venv/ready
	$(BIN)/keras-transformer demo

test: lint
	$(BIN)/python -m pytest

lint: .venv/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
