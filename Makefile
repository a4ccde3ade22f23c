# make demo     the main job on embedded defaults, offline after the install
# make test     the tests
# Each target sets up what it needs.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
OLD := .venv-oldest
UV := $(BIN)/uv pip install --quiet

.PHONY: setup demo test test-slow test-oldest quality style docs bench reproduce wheel clean

setup: $(VENV)/.ready

$(VENV)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt uv
	$(UV) --python $(BIN)/python -c constraints.txt -e ".[dev]"
	touch $@

demo: setup
	$(BIN)/dtem demo

test: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist loadfile -m "not slow and not gpu and not hub"

# Also examples/ray_predict.py on a Ray of its own.
test-slow: setup
	$(UV) --python $(BIN)/python -c constraints.txt -e ".[dev,ray]"
	$(BIN)/python -m pytest -m "slow"

# The contract suite with the oldest libraries that pyproject.toml declares.
test-oldest: setup
	$(PYTHON) -m venv $(OLD)
	$(UV) --python $(OLD)/bin/python -c constraints-oldest.txt -e ".[test]"
	OMP_NUM_THREADS=1 $(OLD)/bin/python -m pytest -n auto --dist loadfile -m contract -W default

quality: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

style: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# The documentation site, in site/; any warning is an error.
docs: setup
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# The speed benchmarks; their records go to benchmarks/results.
bench: setup
	$(BIN)/python -m benchmarks.run

# A study of the paper: make reproduce NAME=temperature ARGS="--updates 20". Without NAME: the list of studies.
reproduce: setup
	$(BIN)/python -m benchmarks.reproduce $(if $(NAME),$(NAME) $(ARGS),--list)

# The wheel, installed alone into a fresh environment, imports and answers.
wheel: setup
	rm -rf dist .venv-wheel
	$(BIN)/python -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir dist .
	$(PYTHON) -m venv .venv-wheel
	$(UV) --python .venv-wheel/bin/python -c constraints.txt dist/*.whl
	cd .venv-wheel && bin/python -c "import dtem; print(dtem.__version__, dtem.patch)" && bin/dtem flops --model deit_tiny_patch16_224 --r 0,16

clean:
	rm -rf $(VENV) $(OLD) .venv-wheel dist site .mypy_cache .pytest_cache .ruff_cache .hypothesis
