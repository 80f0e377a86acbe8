# Two targets do everything on a bare machine: `make quickstart` and `make test`. `make check` is what to run
# between edits, `make test-all` what to run before a release; tests/README.md says what is where.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# A machine without a GPU takes the CPU build of torch; elsewhere plain torch brings CUDA's packages.
TORCH ?= $(if $(shell command -v nvidia-smi),torch>=2.11$(,)<2.16,torch==2.13.0)
, := ,

# the other DeepSpeed that is supported, tested in an environment of its own with the same torch; the two
# versions would build their extensions over each other
HOSTS ?= 0.18.9

# the newest megatron-core; from 0.17 on it needs Python 3.12
PYTHON312 ?= python3.12
MEGATRON := .venv-megatron-0.19.2

.PHONY: setup quickstart check types test test-all test-gpu docs test-hostile mutations test-hosts test-megatron \
	test-megatron-main lint format clean

setup: $(VENV)/.done

$(VENV)/.done: setup.py coat_ds/versions.py
	$(PYTHON) -m venv $(VENV)
	@echo "installing torch, DeepSpeed, megatron-core, transformers and test packages into $(VENV): some minutes"
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet "$(TORCH)" numpy wheel "setuptools>=77"
	DS_BUILD_OPS=0 $(BIN)/pip install --quiet --no-build-isolation -e ".[deepspeed,megatron,launch,test]"
	touch $@

quickstart: setup
	$(BIN)/python launch/pretrain_gpt.py --model-config configs/model_quickstart.json \
		--deepspeed-config configs/ds_zero1_coat.json --compare --output runs/quickstart

# one process a core; files stay whole, since tests of a file share runs, and start in the order of conftest.py
PYTEST := -m pytest -n auto --dist loadfile --no-loadscope-reorder
CHECKED := $(addprefix tests/,kernels/test_codecs.py kernels/test_fp8.py kernels/test_tensorwise.py \
	kernels/test_matmul.py kernels/test_linear.py kernels/test_adamw.py coat_ds/test_config.py \
	coat_ds/test_schema.py coat_ds/test_host_config.py coat_ds/test_contracts.py coat_ds/test_state.py \
	megatron_ext/test_options.py megatron_ext/test_contracts.py launch/test_configs.py benchmarks/test_report.py \
	benchmarks/test_front_page.py benchmarks/test_tables.py benchmarks/test_verify.py test_docs.py test_mistakes.py test_support.py)
# each with one thread: threads of several processes that wait for each other take a core each, five times as long
check test test-all test-gpu test-hostile test-hosts test-megatron: export OMP_NUM_THREADS := 1
# a hundred processes import the project: only the first compiles it
check test test-all test-gpu test-hostile test-hosts test-megatron: export PYTHONDONTWRITEBYTECODE :=

# type hints, references, configs and contracts with the frameworks: at most 90 seconds on two cores
check: lint types
	$(BIN)/python $(PYTEST) $(CHECKED)

# everything that protects: at most six minutes on two idle cores
test: lint
	$(BIN)/python $(PYTEST) --durations=30

# what is left out of `test` too, with the other versions of the frameworks: about two hours
test-all: export COAT_TEST_ALL := 1
test-all: lint
	$(BIN)/python $(PYTEST) --durations=30
	$(MAKE) test-hosts test-megatron test-hostile

# on one GPU, in ten minutes: the tests that need it, then random models; a failure of these ends with the command
# that repeats it
test-gpu: setup
	$(BIN)/python $(PYTEST) -m gpu
	$(BIN)/python -m tests.random_models --seconds 240

# the property-based tests with 100,000 inputs, about an hour on two cores
test-hostile: setup
	COAT_HOSTILE_EXAMPLES=100000 $(BIN)/python $(PYTEST) tests/hostile

# forty mistakes, each made in a copy of the tree, which the tests have to catch: three quarters of an hour
mutations: setup
	$(BIN)/python -m tests.mutations

test-hosts: $(HOSTS:%=.venv-deepspeed-%/.done)
	set -e; for host in $(HOSTS); do TORCH_EXTENSIONS_DIR=$(CURDIR)/.venv-deepspeed-$$host/extensions \
		.venv-deepspeed-$$host/bin/python $(PYTEST) tests/coat_ds; done

.venv-deepspeed-%/.done: setup.py coat_ds/versions.py | setup
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/pip install --quiet --upgrade pip
	$(@D)/bin/pip install --quiet "torch==$$($(BIN)/python -c 'import torch; print(torch.__version__.split("+")[0])')" \
		numpy wheel "setuptools>=77"
	DS_BUILD_OPS=0 $(@D)/bin/pip install --quiet --no-build-isolation "deepspeed==$*" -e ".[test,launch]"
	touch $@

test-megatron: $(MEGATRON)/.done
	TORCH_EXTENSIONS_DIR=$(CURDIR)/$(MEGATRON)/extensions $(MEGATRON)/bin/python $(PYTEST) tests/megatron_ext

test-megatron-main: $(MEGATRON)/.done
	@test -d "$(MEGATRON_PATH)/megatron/core" || \
		{ echo "MEGATRON_PATH: expected a checkout of Megatron-LM, found '$(MEGATRON_PATH)'"; exit 1; }
	PYTHONPATH="$(MEGATRON_PATH)" $(MEGATRON)/bin/python -m pytest tests/megatron_ext/test_contracts.py

.venv-megatron-%/.done: setup.py coat_ds/versions.py | setup
	$(PYTHON312) -m venv $(@D)
	$(@D)/bin/pip install --quiet --upgrade pip
	$(@D)/bin/pip install --quiet "torch==$$($(BIN)/python -c 'import torch; print(torch.__version__.split("+")[0])')" \
		numpy wheel "setuptools>=77"
	DS_BUILD_OPS=0 $(@D)/bin/pip install --quiet --no-build-isolation "megatron-core==$*" -e ".[deepspeed,test]"
	touch $@

# warnings are errors, a link that leads nowhere among them; with --quiet they would be neither
docs: setup
	$(BIN)/pip install --quiet --no-build-isolation -e ".[docs]"
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/shellcheck launch/*.sh launch/slurm.sbatch .ci/run
	$(BIN)/check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml

# type hints of what others import; the list is in pyproject.toml
types: setup
	$(BIN)/mypy

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) .venv-deepspeed-* .venv-megatron-* runs build *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis
