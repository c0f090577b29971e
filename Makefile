export PYTHONSAFEPATH := 1
export OMP_NUM_THREADS := 1
BIN := .venv/bin

.PHONY: check format lint types imports unit full

check: lint types imports unit

format:
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

lint:
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types:
	$(BIN)/mypy

imports:
	$(BIN)/lint-imports

unit:
	$(BIN)/python -m pytest -q -n 2 -m "not walk and not ci and not full"

full:
	./test.sh --full
