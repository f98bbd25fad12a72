# Every target does its own set-up from a bare clone; python3, make and g++ are all it needs.
VENV := .venv
PYTHON := $(VENV)/bin/python
PIP := $(PYTHON) -m pip --disable-pip-version-check --quiet
# Where there is an NVIDIA GPU, the newest torch, which brings CUDA; elsewhere one fixed version.
TORCH := $(if $(shell command -v nvidia-smi 2>/dev/null),torch,torch==2.13.0)

SOURCES := $(shell find csrc -type f)
CXX_FILES := $(shell find csrc tests -name '*.h' -o -name '*.cpp' -o -name '*.inl' -o -name '*.cu')

.PHONY: help venv test test-long lint format bench bench-fused demo clean

help:
	@echo "make demo        train a byte-level GPT data-parallel, rota beside Gloo"
	@echo "make test        the whole test suite"
	@echo "make test-long   10,000 random cases of the fused all-reduce, 1 minute"
	@echo "make bench       collectives (rota, Gloo, every MPI, memcpy), a DDP hook, news of failures"
	@echo "make bench-fused the fused hook beside torch's: time, accuracy, convergence, bucket sizes"
	@echo "make lint        formatters, linters and type checker"
	@echo "make format      let the formatters rewrite the files"
	@echo "make venv        only the set-up: $(VENV) with the extension built"
	@echo "make clean       remove what the other targets made"

$(VENV)/.packages: pyproject.toml
	python3 -m venv $(VENV)
	$(PIP) install "setuptools>=77" wheel ninja $(TORCH)
	$(PYTHON) -c 'import tomllib; extras = tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]; print(*extras["dev"], *extras["bench"], sep="\n")' > $(VENV)/extras.txt
	$(PIP) install -r $(VENV)/extras.txt
	touch $@

$(VENV)/.built: $(VENV)/.packages setup.py $(SOURCES)
	$(PIP) install --no-build-isolation --no-deps --editable .
	touch $@

venv: $(VENV)/.built

test: venv
	$(PYTHON) -m pytest

test-long: venv
	ROTA_PROPERTY_CASES=10000 $(PYTHON) -m pytest tests/test_reduce_bucket_properties.py

# An MPI that cannot be installed is left out of the run, which says so.
bench: venv
	-$(PYTHON) benchmarks/mpi_env.py
	$(PYTHON) benchmarks/collectives.py --backends rota,gloo,mpi --ranks 2 -b 4 -e 64M -f 4 -c
	$(PYTHON) benchmarks/collectives.py --backends rota,gloo --ranks 2 --dtype float16 -b 16M -e 64M -c
	$(PYTHON) benchmarks/collectives.py --backends rota,gloo --ranks 4 -b 4 -e 64M -f 4 -c
	$(PYTHON) benchmarks/hooks.py --hook fp16_compress_hook --sizes 25M,64M -c
	$(PYTHON) benchmarks/failures.py

# About 15 minutes, of which convergence takes 9.
bench-fused: venv
	$(PYTHON) benchmarks/fused.py --sizes 25M,64M --ranks 2 -c
	$(PYTHON) benchmarks/accuracy.py
	$(PYTHON) benchmarks/bucket_cap.py
	$(PYTHON) benchmarks/convergence.py

demo: venv
	mkdir -p build/demo
	$(PYTHON) examples/compare.py --png build/demo/train_gpt.png --json build/demo/train_gpt.json

lint: $(VENV)/.packages
	$(VENV)/bin/clang-format --dry-run --Werror $(CXX_FILES)
	$(VENV)/bin/ruff check
	$(VENV)/bin/ruff format --check
	$(VENV)/bin/mypy

format: $(VENV)/.packages
	$(VENV)/bin/clang-format -i $(CXX_FILES)
	$(VENV)/bin/ruff check --fix
	$(VENV)/bin/ruff format

clean:
	rm -rf $(VENV) .venv-mpi build python/*.egg-info python/rota/*.so
