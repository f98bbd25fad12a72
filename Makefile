# Every target sets itself up from a bare clone; it needs only python3, make and g++, and check-cuda
# also nvcc.
VENV := .venv
PYTHON := $(VENV)/bin/python
PIP := -m pip --disable-pip-version-check --quiet
# A second environment, with a CUDA torch and rota built against it: installed, not editable, since
# two builds cannot share python/rota/.
CUDA_VENV := .venv-cuda
CUDA_PYTHON := $(CUDA_VENV)/bin/python
# A third, with the Python, torch and kind of GPU of the machine that `make gpu-pack` builds for.
PACK_VENV := .venv-gpu-pack
PACK_PYTHON := python3.12
PACK_TORCH := 2.11.0
PACK_GPU := 9.0
# Two tests at a time: most spend their time in ranks that wait for each other.
TEST := -m pytest --numprocesses=2 --dist=worksteal --durations=20
# nvcc reads this from its environment, so warnings are errors here but never stop a user's build.
# ptxas warns of stack and spills only when asked.
NVCC_STRICT := -Werror=all-warnings -Xcompiler=-Werror -Xptxas=--warn-on-spills,--warn-on-local-memory-usage
# With an NVIDIA GPU the newest torch, which includes CUDA; otherwise one fixed version.
TORCH := $(if $(shell command -v nvidia-smi 2>/dev/null),torch,torch==2.13.0)

# Prints the dependencies in pyproject.toml and those of the extras that are named.
REQUIREMENTS := python3 -c 'import sys, tomllib; project = tomllib.load(open("pyproject.toml", "rb"))["project"]; print(*project["dependencies"], *(line for extra in sys.argv[1:] for line in project["optional-dependencies"][extra]), sep="\n")'

SOURCES := $(shell find csrc -type f)
MODULES := $(shell find python -name '*.py' -o -name '*.pyi')
CXX_FILES := $(shell find csrc tests -name '*.h' -o -name '*.cpp' -o -name '*.inl' -o -name '*.cu')

.PHONY: help venv test test-long chaos test-oldest trainers conformance check-cuda gpu gpu-pack gpu-dry lint format bench bench-fused demo demo-hosts clean

help:
	@echo "make demo        train a byte-level GPT data-parallel, rota beside Gloo or NCCL"
	@echo "make demo-hosts  the same over two simulated hosts, and with DiLoCo; needs network namespaces"
	@echo "make test        the whole test suite"
	@echo "make test-long   random cases: fused all-reduce, DDP beside torch, collectives, messages; 10 minutes"
	@echo "make chaos       random programs of everything, with kills: TRIALS=300 of them from SEED=1 on"
	@echo "make trainers    the recipes for trainers, with DeepSpeed and Transformers; 1 to 3 minutes"
	@echo "make conformance torch's own tests for backends on rota, against what Gloo passes"
	@echo "make check-cuda  build for CUDA without a GPU, check the machine code, test on a simulated GPU"
	@echo "make test-oldest the whole test suite on that build, whose torch is the oldest supported one"
	@echo "make bench       collectives (rota, Gloo, every MPI, memcpy), a DDP hook, news of failures"
	@echo "make bench-fused the fused hook beside torch's: time, accuracy, convergence, bucket sizes"
	@echo "make gpu         on a machine with an NVIDIA GPU: build, tests, memory checker, benchmarks"
	@echo "make gpu-pack    build for such a machine without a GPU, in a folder that travels with the tree"
	@echo "make gpu-dry     every line of that on a simulated GPU, on few bytes; measures nothing"
	@echo "make lint        formatters, linters and type checker"
	@echo "make format      let the formatters rewrite the files"
	@echo "make venv        only the set-up: $(VENV) with the extension built"
	@echo "make clean       remove what the other targets made"

$(VENV)/.packages: pyproject.toml
	@echo "rota: installing torch and the tools into $(VENV)"
	python3 -m venv $(VENV)
	$(PYTHON) $(PIP) install "setuptools>=64" wheel ninja $(TORCH)
	$(REQUIREMENTS) dev bench examples trainers > $(VENV)/requirements.txt
	$(PYTHON) $(PIP) install -r $(VENV)/requirements.txt
	touch $@

$(VENV)/.built: $(VENV)/.packages setup.py $(SOURCES)
	@echo "rota: compiling the extension, 2 minutes of one core if all is new"
	$(PYTHON) $(PIP) install --no-build-isolation --no-deps --editable .
	touch $@

venv: $(VENV)/.built

test: venv
	$(PYTHON) $(TEST)

# SEED=number repeats a run.
test-long: SEED := $(or $(SEED),$(shell date +%s))
test-long: TEST_LONG = -m pytest --hypothesis-seed=$(SEED)
test-long: venv
	@echo "SEED=$(SEED)"
	ROTA_PROPERTY_CASES=10000 $(PYTHON) $(TEST_LONG) tests/test_reduce_bucket_properties.py
	ROTA_PROPERTY_CASES=3000 $(PYTHON) $(TEST_LONG) tests/test_random_ddp.py
	ROTA_RANDOM_PROGRAMS=60 ROTA_RANDOM_SEED=$(SEED) $(PYTHON) $(TEST_LONG) tests/test_random_mismatches.py tests/test_random_messages.py

chaos: venv
	$(PYTHON) tests/chaos.py $(if $(TRIALS),--trials $(TRIALS)) $(if $(SEED),--seed $(SEED))

# DeepSpeed is built on installation, and compiles an operator of its own at its first use.
trainers: venv
	$(REQUIREMENTS) more-trainers > $(VENV)/more-trainers.txt
	DS_BUILD_OPS=0 $(PYTHON) $(PIP) install --no-build-isolation -r $(VENV)/more-trainers.txt
	$(PYTHON) -m pytest --durations=0 tests/test_trainers.py

# TESTS=regex selects tests by name.
conformance: venv
	$(PYTHON) tests/conformance/run.py $(if $(TESTS),-k "$(TESTS)")
	$(PYTHON) tests/conformance/run.py -w 4 --ranks-per-host 2 $(if $(TESTS),-k "$(TESTS)")

# The oldest supported torch, whose headers have the least. It takes 5 GB, so this checks for nvcc
# first.
$(CUDA_VENV)/.packages: pyproject.toml
	@PATH="$$CUDA_HOME/bin:$$PATH" command -v nvcc > /dev/null || { echo "rota: there is no nvcc on PATH or in CUDA_HOME; install the CUDA toolkit 13.0, of which nvcc and the runtime suffice" >&2; exit 1; }
	python3 -m venv $(CUDA_VENV)
	$(REQUIREMENTS) dev bench check-cuda examples > $(CUDA_VENV)/requirements.txt
	$(CUDA_PYTHON) $(PIP) install "setuptools>=64" wheel ninja torch==2.11.0 -r $(CUDA_VENV)/requirements.txt
	touch $@

$(CUDA_VENV)/.built: $(CUDA_VENV)/.packages setup.py $(SOURCES) $(MODULES)
	ROTA_CUDA=1 NVCC_APPEND_FLAGS="$(NVCC_STRICT)" $(CUDA_PYTHON) $(PIP) install --no-build-isolation --no-deps .
	touch $@

# Tests that need a build for CUDA, or that ask most of what torch has changed between versions.
CUDA_TESTS := cuda_fallbacks cuda_teardown demo_devices doctor gpu_run gpu_self_test simulated_gpu \
  simulated_rota simulated_streams symmetric_memory \
  amp autoload backend backend_methods compile errors fsdp functional_collectives fused_hook hooks \
  init profiler reduce_gradients

# About 30 minutes on two cores: the packages 2, the build 10, the tests on the GPU 6, the others 10.
check-cuda: $(CUDA_VENV)/.built
	$(CUDA_PYTHON) -m rota doctor
	$(CUDA_PYTHON) tests/machine_code.py
	$(CUDA_PYTHON) tests/simulated_gpu.py --gpus 2 --torch-operators $(CUDA_PYTHON) -m pytest tests/gpu
	$(MAKE) gpu-dry
	$(CUDA_PYTHON) $(TEST) $(CUDA_TESTS:%=tests/test_%.py)

test-oldest: $(CUDA_VENV)/.built
	$(CUDA_PYTHON) $(TEST) -m "not no_extension and not same_in_every_build"

# Needs nvcc and no GPU; the packages take 5 GB.
$(PACK_VENV)/.packages:
	$(PACK_PYTHON) -m venv $(PACK_VENV)
	$(PACK_VENV)/bin/python $(PIP) install "setuptools>=64" wheel ninja numpy torch==$(PACK_TORCH)
	touch $@

# build/gpu-pack, which travels with the working tree: `make gpu` builds nothing where it fits.
gpu-pack: $(PACK_VENV)/.packages
	PYTHONPATH=benchmarks $(PACK_VENV)/bin/python -m gpu.extension --archs shipped:$(PACK_GPU) --pack

# Uses the python3 on PATH with its torch and pytest, and no network. STAGES="build first" selects
# stages or steps, OUTPUT=folder collects all output, COMMIT=name is for a copy without git.
gpu:
	PYTHONPATH=benchmarks$${PYTHONPATH:+:$$PYTHONPATH} python3 -m gpu.run $(if $(STAGES),--stages "$(STAGES)") $(if $(OUTPUT),--output "$(OUTPUT)") $(if $(COMMIT),--commit "$(COMMIT)")

gpu-dry: $(CUDA_VENV)/.built
	PYTHONPATH=benchmarks $(CUDA_PYTHON) tests/simulated_gpu.py --gpus 2 --torch-operators $(CUDA_PYTHON) -m gpu.run --small

# The run skips an MPI that cannot be installed, with a message.
bench: venv
	-$(PYTHON) benchmarks/mpi_env.py
	$(PYTHON) benchmarks/collectives.py --backends rota,gloo,mpi --ranks 2 -b 4 -e 64M -f 4 -c
	$(PYTHON) benchmarks/collectives.py --backends rota,gloo --ranks 2 --dtype float16 -b 16M -e 64M -c
	$(PYTHON) benchmarks/collectives.py --backends rota,gloo --ranks 4 -b 4 -e 64M -f 4 -c
	$(PYTHON) benchmarks/fused.py --hook fp16_compress_hook --sizes 25M,64M -c
	$(PYTHON) benchmarks/failures.py

# About 15 minutes, 9 of them for convergence.
bench-fused: venv
	$(PYTHON) benchmarks/fused.py --sizes 25M,64M --ranks 2 -c
	$(PYTHON) benchmarks/accuracy.py
	$(PYTHON) benchmarks/bucket_cap.py
	$(PYTHON) benchmarks/convergence.py

demo: venv
	$(PYTHON) benchmarks/demo.py

# About 12 minutes. It needs root, or the permission to make network namespaces.
demo-hosts: venv
	$(PYTHON) benchmarks/demo_hosts.py

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
	rm -rf $(VENV) $(CUDA_VENV) $(PACK_VENV) .venv-mpi build python/*.egg-info python/rota/*.so
