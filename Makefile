# make demo and make test work on a machine with Python 3.10 or newer, git and make; a second run installs nothing.
# A python that already has what a target needs is used as it is, with no environment and no installation.

PYTHON ?= python3
# installed first and by itself: this version has a build without CUDA where the index offers one, and the newest one
# would bring gigabytes of CUDA packages to a machine that has no GPU
TORCH ?= torch==2.13.0
# what the recorded spills in tests/spills.json belong to; put where torch has brought none, on what it has wheels for
TRITON ?= triton==3.6.0
OTHER_TRITONS := 3.7.1 3.8.0 3.9.0
# laid over the environment, on a CPU: the oldest torch that pyproject.toml allows, for the tests of its compiler, and
# one newer than TORCH with the Triton that it requires, for all. Of the CUDA packages of both one of 2 MB is installed,
# in the version that they ask for (.ci/without_cuda)
OLDEST_TORCH ?= 2.11.0
NEWER_TORCH ?= 2.14.1
NEWER_TRITON ?= 3.8.0
CUDART ?= nvidia-cuda-runtime==13.0.96
# 1.5 MB of Python; laid over the environment, for where Transformers finds it, it calls it, on a CPU in vain
FLA ?= flash-linear-attention==0.6.0 fla-core==0.6.0 einops==0.8.2
# read, not installed: 482 MB of wheels, of which the tests need the Python files
ENGINES ?= vllm==0.33.0 sglang==0.5.23 lmdeploy==0.18.0
# what builds the documentation, in an environment of its own, which needs no torch: docstrings are read, not imported
DOCS ?= mkdocs==1.6.1 mkdocs-material==9.8.2 "mkdocstrings[python]==1.0.8" ruff
# a checkout of FLA, for its tests, which no released archive holds
FLA_TESTS ?=
FLA_OPTIONS ?= --minutes 20
# tests at a time; on a machine with a GPU, where every test compiles kernels, as many as it has processors
ifeq ($(filter test-gpu,$(MAKECMDGOALS)),)
WORKERS ?= 2
else
# more than processors: some workers wait for a kernel that another one compiles, or for the GPU
WORKERS ?= $(shell expr $$(nproc) \* 5 / 4 + 1)
endif

VENV := .venv
DEMO_NEEDS := torch, jaxtyping, typer, rich, matplotlib, transformers
TEST_NEEDS := $(DEMO_NEEDS), accelerate, expecttest, hypothesis, numpy, pytest, xdist, ruff, mypy, starlette, uvicorn
# a GPU machine without network needs no linter, no type checker and no package of the demo
GPU_TEST_NEEDS := torch, triton, jaxtyping, expecttest, hypothesis, numpy, pytest, xdist
DOCS_NEEDS := mkdocs, material, mkdocstrings_handlers.python, ruff
can = $(shell $(PYTHON) -c "import $(1)" 2>/dev/null && echo yes)

# the package and its benchmarks, also for a python that has everything but them
export PYTHONPATH := $(CURDIR)/src:$(CURDIR)/benchmarks$(if $(PYTHONPATH),:$(PYTHONPATH))
# packages are installed without bytecode (--no-compile): where none may be written, each process compiles them anew,
# and each worker the tests
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo test test-cpu test-oldest test-newer test-kernels test-gpu lint types docs kernels interpret compile fla
.PHONY: engines matrix spills bench bench-gpu clean

help:
	@echo "make demo    train a small model, draw its loss, compare with Transformers (out/demo)"
	@echo "make test    lint, types, the whole test suite; with Triton its kernels interpreted, and compiled for five GPUs"
	@echo "make test-oldest   the tests that compile models with torch $(OLDEST_TORCH), on the CPU"
	@echo "make test-newer    all tests of the CPU with torch $(NEWER_TORCH) and triton $(NEWER_TRITON)"
	@echo "make test-gpu PART=1/3   a part of the tests that need a GPU (benchmarks/results/tests/gpu.jsonl)"
	@echo "make docs    the documentation in build/site/index.html; a broken link or another warning is an error"
	@echo "make engines the plug-ins on the own modules of vLLM, SGLang and lmdeploy, from their wheels (482 MB)"
	@echo "make fla     the tests of our side of FLA, on FLA itself; with a GPU and FLA_TESTS=checkout FLA's own tests"
	@echo "make kernels the tree that the package kernels loads, in build/kernels (docs/transformers.md)"
	@echo "make matrix  the kernels compiled and interpreted with other versions of Triton, and make test-newer"
	@echo "make spills  record anew what each kernel spills (tests/spills.json)"
	@echo "make bench   the CPU benchmark against Transformers (benchmarks/results/cpu.jsonl)"
	@echo "make bench-gpu PART=prefill   a part of the GPU benchmark; run again, it goes on where it stopped"
	@echo "make clean   remove the environment and what the tools left"

ifeq ($(filter demo bench bench-gpu,$(MAKECMDGOALS)),)
else ifeq ($(call can,$(DEMO_NEEDS)),yes)
DEMO_PYTHON := $(PYTHON)
else
DEMO_PYTHON := $(VENV)/bin/python
demo bench bench-gpu: $(VENV)/.demo
endif

ifeq ($(filter docs,$(MAKECMDGOALS)),)
else ifeq ($(call can,$(DOCS_NEEDS)),yes)
DOCS_PYTHON := $(PYTHON)
else
DOCS_PYTHON := build/docs/bin/python
docs: build/docs/.done
endif

TESTS := test test-cpu test-oldest test-newer test-kernels lint types interpret compile fla engines matrix spills
ifeq ($(filter $(TESTS),$(MAKECMDGOALS)),)
else ifeq ($(call can,$(TEST_NEEDS)),yes)
TEST_PYTHON := $(PYTHON)
else
TEST_PYTHON := $(VENV)/bin/python
$(TESTS): $(VENV)/.test
build/torch-$(OLDEST_TORCH)/.done build/torch-$(NEWER_TORCH)/.done: | $(VENV)/.torch
endif
ifeq ($(filter test-gpu,$(MAKECMDGOALS)),)
else ifeq ($(call can,$(GPU_TEST_NEEDS)),yes)
TEST_PYTHON := $(PYTHON)
else
TEST_PYTHON := $(VENV)/bin/python
test-gpu: $(VENV)/.test
endif
PYTEST = OMP_NUM_THREADS=1 $(TEST_PYTHON) -m pytest
HAS_TRITON = $(TEST_PYTHON) -c "import triton" 2>/dev/null
HAS_FLA = $(TEST_PYTHON) -c "import fla" 2>/dev/null
HAS_GPU = $(TEST_PYTHON) -c "import torch; assert torch.cuda.is_available()" 2>/dev/null
FLA_SUITE = $(if $(FLA_TESTS),PYTHONPATH=$(CURDIR)/build/fla:$(PYTHONPATH) $(TEST_PYTHON) tests/fla_suite.py \
	$(FLA_TESTS) $(FLA_OPTIONS),echo "FLA's own tests were not run: make fla FLA_TESTS=path of a checkout of FLA")
# a version laid over the environment: its folder comes first
over = PYTHONPATH=build/triton-$*:$(PYTHONPATH)
# pytest with the torch of a version, and with folders that end in a colon; nothing where it could not be installed
pytest_with_torch = if ! test -e build/torch-$(1)/.installed; then exit 0; fi; \
	export CUDA_VISIBLE_DEVICES= PYTHONPATH=$(CURDIR)/build/torch-$(1):$(2)$(PYTHONPATH) && \
	$(TEST_PYTHON) -c "import torch; assert torch.__version__.split('+')[0] == '$(1)', torch.__version__" && $(PYTEST)

demo:
	$(DEMO_PYTHON) examples/train_small.py

kernels:
	$(PYTHON) hub/build.py build/kernels

bench:
	$(DEMO_PYTHON) -m gdn_bench cpu

# parts of under 9 minutes each: prefill train decode step spec stages layer model host cold e2e accuracy
PART ?= prefill
WHAT = $(if $(filter accuracy,$(PART)),verify --set distributions --append --minutes 5,$(PART))
bench-gpu:
	$(DEMO_PYTHON) -m gdn_bench $(WHAT) --resume $(if $(COMMIT),--commit $(COMMIT))

# with -j 2 the stages that keep one processor busy run beside the others: the types, the beginning and the end of
# compile, fla
test: lint types test-cpu
	if $(HAS_TRITON); then $(MAKE) test-kernels $$($(HAS_FLA) || echo fla); fi

test-cpu:
	$(PYTEST) -n $(WORKERS) -m "not compile"

# Dynamo breaks graphs in other places from version to version: the tests that call torch.compile, and those of
# operators and exported programs beside them. C++ of Inductor and ranks take as long as all others together
test-oldest: build/torch-$(OLDEST_TORCH)/.done
	$(call pytest_with_torch,$(OLDEST_TORCH)) -m "not gpu and not compile" \
		-k "(compil or graph or export or operator) and not inductor and not distributed" \
		$$(grep -l "torch\.compile(" tests/test_*.py)

test-newer: build/torch-$(NEWER_TORCH)/.done build/triton-$(NEWER_TRITON)/.done
	$(call pytest_with_torch,$(NEWER_TORCH),$(CURDIR)/build/triton-$(NEWER_TRITON):) -n $(WORKERS) -m "not gpu and not compile"

test-kernels: compile interpret

# the tests marked gpu, or a part of them: PART=1/3, 2/3, 3/3 on machines that are lent by the minute. A part ends
# after TIMEOUT seconds, a test's process after TEST_TIMEOUT; the outcome is appended to RESULTS
TIMEOUT ?= 470
TEST_TIMEOUT ?= 400
RESULTS ?= benchmarks/results/tests/gpu.jsonl
test-gpu:
	GDN_TEST_SEEDS=30 GDN_TEST_PROBLEMS=50 TORCHINDUCTOR_COMPILE_THREADS=1 PYTHONPATH=tests:$(PYTHONPATH) \
		$(PYTEST) -p gpu_suite -m gpu -n $(WORKERS) --tb=short -rN --part $(if $(filter file,$(origin PART)),1/1,$(PART)) \
		--part-seconds $(TIMEOUT) --test-seconds $(TEST_TIMEOUT) --results $(RESULTS) $(if $(COMMIT),--commit $(COMMIT)) tests

# a file without the marker takes seconds to import in each worker, too
interpret:
	TRITON_INTERPRET=1 $(PYTEST) -n $(WORKERS) -m interpret $$(grep -l interpret tests/test_*.py)

compile:
	$(PYTEST) tests/test_compile.py

fla: build/fla/.done
	PYTHONPATH=build/fla:$(PYTHONPATH) $(PYTEST) tests/test_integrations_fla.py
	if $(HAS_GPU); then $(FLA_SUITE); fi

# each engine's own modules in a process of its own, since some of them can be imported only once
engines: build/engines/.done
	for engine in vllm vllm_kda sglang sglang_kda lmdeploy; do \
		GDN_ENGINE_SOURCES=$(CURDIR)/build/engines $(PYTEST) tests/test_engine_$$engine.py || exit 1; done

matrix: compile $(OTHER_TRITONS:%=matrix-%) test-newer

matrix-%: build/triton-%/.done
	$(over) $(TEST_PYTHON) -c "import triton; assert triton.__version__ == '$*', triton.__version__"
	$(over) TRITON_INTERPRET=1 $(PYTEST) tests/test_interpreter.py
	$(over) $(PYTEST) tests/test_launch.py
	$(over) $(PYTEST) tests/test_compile.py -k cuda:90

spills: $(OTHER_TRITONS:%=build/triton-%/.done)
	PYTHONPATH=.:tests:$(PYTHONPATH) $(TEST_PYTHON) -m kit.compiling --record
	for v in $(OTHER_TRITONS); do \
		PYTHONPATH=build/triton-$$v:.:tests:$(PYTHONPATH) $(TEST_PYTHON) -m kit.compiling --record --target cuda:90; done

# no --quiet: with it, warnings are not counted and --strict lets them pass
docs:
	NO_MKDOCS_2_WARNING=1 $(DOCS_PYTHON) -m mkdocs build --strict

lint:
	$(TEST_PYTHON) -m ruff check .
	$(TEST_PYTHON) -m ruff format --check .

types:
	$(TEST_PYTHON) -m mypy

clean:
	rm -rf $(VENV) out build .pytest_cache .ruff_cache .mypy_cache .hypothesis src/*.egg-info

# pip is not quiet: where no terminal is, minutes without a line look like a standstill
$(VENV)/.torch:
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --progress-bar off "$(TORCH)"
	touch $@

$(VENV)/.demo: pyproject.toml | $(VENV)/.torch
	$(VENV)/bin/python -m pip install --progress-bar off -e '.[bench]'
	touch $@

$(VENV)/.test: pyproject.toml | $(VENV)/.torch
	$(VENV)/bin/python -m pip install --progress-bar off --no-compile -e '.[dev]'
	if [ "$$(uname -sm)" = "Linux x86_64" ] && ! $(VENV)/bin/python -c "import triton" 2>/dev/null; then \
		$(VENV)/bin/python -m pip install --progress-bar off "$(TRITON)"; fi
	touch $@

build/docs/.done: Makefile
	$(PYTHON) -m venv build/docs
	build/docs/bin/python -m pip install --progress-bar off $(DOCS)
	touch $@

# unpacked, not compiled to bytecode: the tests import few of the 2,200 files. Left out where there is no such wheel or
# no C compiler
build/torch-%/.done: .ci/without_cuda
	rm -rf build/torch-$*
	if command -v cc && command -v nm && command -v readelf && \
		$(TEST_PYTHON) -m pip install --progress-bar off --no-deps --no-compile --target build/torch-$* torch==$* $(CUDART) && \
		.ci/without_cuda build/torch-$*; \
	then touch build/torch-$*/.installed; \
	else mkdir -p build/torch-$* && echo "torch $* cannot be installed here: its tests are left out"; fi
	touch $@

build/triton-%/.done:
	$(TEST_PYTHON) -m pip install --quiet --no-deps --target build/triton-$* triton==$*
	touch $@

build/engines/.done:
	for engine in $(ENGINES); do \
		$(TEST_PYTHON) -m pip download --quiet --no-deps --only-binary=:all: --python-version 3.12 \
			--platform manylinux_2_28_x86_64 --platform manylinux_2_34_x86_64 --dest build/engines/wheels $$engine && \
		$(TEST_PYTHON) -m zipfile -e build/engines/wheels/*.whl build/engines/$${engine%%==*} && \
		find build/engines/$${engine%%==*} -name "*.so*" -delete && rm -r build/engines/wheels || exit 1; done
	$(TEST_PYTHON) -m pip install --quiet --no-deps --target build/engines/deps msgspec==0.22.0 einops==0.8.2
	touch $@

build/fla/.done:
	$(TEST_PYTHON) -m pip install --quiet --no-deps --target build/fla $(FLA)
	touch $@
