# make demo and make test do all the set-up by themselves, in .venv; they need Python 3.11 to 3.13 and make.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test lint

.venv: setup.cfg pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --editable '.[test]'
	touch .venv

# Trains on the built-in phrasebook, then translates phrases that it never saw. Minutes.
demo: .venv
	$(BIN)/keras-transformer demo

test: .venv lint
	$(BIN)/python -m pytest

lint: .venv
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
