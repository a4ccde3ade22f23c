# make demo     the main job on embedded defaults, offline after the install
# make test     the tests
# Each target sets up what it needs.

PYTHON ?= python3
VENV ?= .venv
SCRIPTS := $(if $(filter Windows_NT,$(OS)),Scripts,bin)
BIN := $(VENV)/$(SCRIPTS)
UV := $(BIN)/uv pip install --quiet
UVX := $(BIN)/uvx --quiet
MAIN := git+https://github.com/huggingface/pytorch-image-models git+https://github.com/huggingface/transformers
TEST := -m pytest -n auto --dist loadfile -m "not slow and not gpu and not hub"

.PHONY: setup demo test test-slow test-oldest test-newest test-main quality style docs bench reproduce wheel packages \
	sbom licences api-changes clean

setup: $(VENV)/.ready

$(VENV)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt uv
	$(UV) --python $(BIN)/python -c constraints.txt -e ".[dev]"
	touch $@

demo: setup
	$(BIN)/dtem demo

test: setup
	OMP_NUM_THREADS=1 $(BIN)/python $(TEST)

# Also with Ray on this machine, the serving examples and the notebooks.
test-slow: setup
	$(UV) --python $(BIN)/python -c constraints.txt -e ".[dev,ray,serve,notebooks]"
	$(BIN)/python -m pytest -m "slow"

# The contract suite with the oldest libraries that pyproject.toml declares.
test-oldest: setup
	$(PYTHON) -m venv .venv-oldest
	$(UV) --python .venv-oldest/$(SCRIPTS)/python -c constraints-oldest.txt -e ".[test]"
	OMP_NUM_THREADS=1 .venv-oldest/$(SCRIPTS)/python -m pytest -n auto --dist loadfile -m contract -W default

# All tests with the newest releases.
test-newest: setup
	$(PYTHON) -m venv .venv-newest
	$(UV) --upgrade --python .venv-newest/$(SCRIPTS)/python -e ".[dev]"
	OMP_NUM_THREADS=1 .venv-newest/$(SCRIPTS)/python $(TEST) -W default

# All tests with the main branches of timm and transformers, and the newest torch, pre-releases included.
test-main: setup
	$(PYTHON) -m venv .venv-main
	$(UV) --python .venv-main/$(SCRIPTS)/python -e ".[dev]"
	$(UV) --upgrade --prerelease allow --python .venv-main/$(SCRIPTS)/python torch torchvision
	$(UV) --upgrade --python .venv-main/$(SCRIPTS)/python $(MAIN)
	OMP_NUM_THREADS=1 .venv-main/$(SCRIPTS)/python $(TEST) -W default

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
	$(UV) --python .venv-wheel/$(SCRIPTS)/python -c constraints.txt dist/*.whl
	cd .venv-wheel && $(SCRIPTS)/python -c "import dtem; print(dtem.__version__, dtem.patch)" && \
		$(SCRIPTS)/dtem flops --model deit_tiny_patch16_224 --r 0,16

# Wheel and source distribution, built, and installed alone with each extra: what it is for is used once. Slow.
# make packages EXTRAS="export predict" for some of them; PYTHON=python3.13 for another Python.
packages: setup
	rm -rf dist
	$(BIN)/uv build --quiet --python $(PYTHON)
	$(BIN)/python .ci/packages.py --python $(PYTHON) $(EXTRAS)

# A software bill of materials of what users install.
sbom: wheel
	$(UVX) --from cyclonedx-bom cyclonedx-py environment .venv-wheel --output-file dist/dtem.cdx.json
	@echo dist/dtem.cdx.json

# The licences of the same.
licences: wheel
	$(UVX) pip-licenses --python .venv-wheel/$(SCRIPTS)/python --order license --format markdown --output-file dist/licences.md
	@cat dist/licences.md

# What changed in the public API since the last tag; breaking changes are an error.
api-changes: setup
	@tag=$$(git describe --tags --abbrev=0 2>/dev/null); \
	if [ -z "$$tag" ]; then echo "there is no tag yet, so there is nothing to compare the API with"; \
	else $(UVX) griffe check dtem --search src --against "$$tag"; fi

clean:
	rm -rf $(VENV) .venv-* dist site .mypy_cache .pytest_cache .ruff_cache .hypothesis
