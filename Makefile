# Users need only two commands: `make demo` and `make test`.
PYTHON ?= python3
BIN := .venv/bin
# As root on Debian the tests run real Slurm and MPI, and must not skip them.
ON_DEBIAN_ROOT := $(shell [ "$$(id -u)" = 0 ] && [ -f /etc/debian_version ] && echo 1)
# Tests start hundreds of interpreters: each would compile the package again if the environment disables bytecode.
export PYTHONDONTWRITEBYTECODE =
# Tests wait for processes, ranks and Slurm more than they compute: two workers on two cores would leave half of each idle.
# Files are distributed in the order of folders: xdist's own order starts with files of many tests, and ends with slow files.
SPREAD := --dist loadfile --no-loadscope-reorder

.PHONY: demo test docs checked check bytecode unit cluster environment packages evidence parity gpu clean

demo:
	@$(PYTHON) scripts/setup_environment.py train,mpi,plot
	@$(BIN)/python scripts/demo.py

# apt and pip need nothing of each other, nor do mypy and the bytecode of the tests.
test:
	@$(MAKE) --no-print-directory -j 2 packages checked bytecode
	@$(MAKE) --no-print-directory unit cluster

checked: environment
	@$(MAKE) --no-print-directory check

check:
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# Otherwise each of pytest's workers compiles all tests, at the same time.
bytecode: environment
	@$(BIN)/pytest -qq --collect-only > .venv/collected.txt || { cat .venv/collected.txt; exit 1; }

unit:
	TOOLKIT_REQUIRE_CLUSTER=$(ON_DEBIAN_ROOT) OMP_NUM_THREADS=1 $(BIN)/pytest -q -n 4 $(SPREAD) -m "not cluster and not evidence"

# Each worker starts its own clusters. Their tests mostly wait for Slurm. Only the folders that have such tests are
# collected (tests/docs/test_makefile.py): the others import torch.
cluster:
	TOOLKIT_REQUIRE_CLUSTER=$(ON_DEBIAN_ROOT) OMP_NUM_THREADS=1 $(BIN)/pytest -q -n 4 $(SPREAD) -m "cluster and not evidence" tests/cluster tests/torture

# The documentation site, in build/docs/index.html; a warning, such as a link to a missing heading, fails the build.
docs: environment
	$(BIN)/python -m sphinx -q -W --keep-going -b html docs build/docs
	@echo "open build/docs/index.html"

environment:
	@$(PYTHON) scripts/setup_environment.py train,mpi,plot,docs,dev

packages:
ifeq ($(ON_DEBIAN_ROOT),1)
	@$(PYTHON) scripts/install_packages.py
	@$(PYTHON) scripts/install_apptainer.py
else
	@echo "[packages] not root on Debian: tests that need Slurm are skipped, each reports what is missing"
endif

# ONLY="fuzz torture_tests" runs only those checks.
evidence:
	@mkdir -p evidence
	OMP_NUM_THREADS=1 nohup $(BIN)/python scripts/evidence.py $(ONLY) > evidence/log.txt 2>&1 &
	@echo "running in the background; see evidence/log.txt"

# Every parallel strategy compared to one process, on 1 to 8 ranks; rewrites the table of docs/parity.md when all is done.
parity:
	@mkdir -p evidence
	OMP_NUM_THREADS=1 nohup sh -c '$(BIN)/pytest -q -m evidence tests/parallel/test_parity.py; $(BIN)/python scripts/parity_table.py' \
		> evidence/parity.txt 2>&1 &
	@echo "running in the background; see evidence/parity.txt"

# Checks on a machine with one NVIDIA GPU, torch and no network, within nine minutes; scripts/gpu_wheels.sh prepares its wheels.
gpu:
	@$(PYTHON) benchmarks/gpu_check.py

clean:
	rm -rf .venv build dist evidence *.egg-info
