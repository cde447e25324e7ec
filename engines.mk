# Tests against real vLLM, each version in an environment of its own, made once from a list of exact
# versions (vLLM's CPU builds ask for more than text models need, so the list is installed as it is).
VLLM_VERSIONS := 0.16.0 0.32.0
ENGINE_TESTS ?= tests/engines
# Every version that has a list of requirements; a further one needs its torch here too.
VLLM_ALL_VERSIONS := $(patsubst tests/engines/requirements-%.txt,%,$(wildcard tests/engines/requirements-*.txt))
TORCH_OF_0.16.0 := 2.10.0
TORCH_OF_0.22.1 := 2.11.0
TORCH_OF_0.32.0 := 2.13.0

.PHONY: test-engines test-engines-all
.SECONDARY: $(foreach v,$(VLLM_ALL_VERSIONS),.venv-vllm-$(v)/ready)

test-engines: $(addprefix test-vllm-,$(VLLM_VERSIONS))

test-engines-all: $(addprefix test-vllm-,$(VLLM_ALL_VERSIONS))

test-vllm-%: .venv-vllm-%/ready
	OMP_WAIT_POLICY=PASSIVE .venv-vllm-$*/bin/python -m pytest $(ENGINE_TESTS)

# torch brings its own companions where its build needs some (CUDA libraries, on x86 without a CPU build).
.venv-vllm-%/ready: tests/engines/requirements-%.txt
	test -x .venv-vllm-$*/bin/python || $(PYTHON) -m venv .venv-vllm-$*
	.venv-vllm-$*/bin/pip install -q --no-compile torch==$(TORCH_OF_$*)
	.venv-vllm-$*/bin/pip install -q --no-compile --no-deps -r $<
	.venv-vllm-$*/bin/pip install -q --no-deps -e .
	touch $@
