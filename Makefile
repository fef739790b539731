PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PEERS := .venv-peers
PEERS_STAMP := $(PEERS)/.installed
INFLUENCE := .venv-influence
INFLUENCE_STAMP := $(INFLUENCE)/.installed
RESULTS := build/benchmarks
# One torch thread per worker: the workers are the parallelism.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --maxprocesses 8 --dist worksteal
# What chooses by the kind of CPU, and what is computed by that choice.
BY_CPU := tests/kernels tests/factors tests/reductions tests/nn tests/benchmarks tests/test_grad.py src

.DEFAULT_GOAL := help
.PHONY: help demo fuzz test test-all test-torch lint docs dist clean
.PHONY: bench bench-compiled bench-docs bench-expanded bench-influence bench-launches bench-monitor bench-pages bench-parts bench-peers bench-private bench-scaling bench-sensitivity bench-several

help:
	@echo "make demo      why answers are wrong, wrong labels, private training, a check; writes build/demo.html (2 minutes)"
	@echo "make test      lint, types and tests (what CI runs)"
	@echo "make test-all  the same with the slow tests, and those of kernels as on CPUs of other kinds"
	@echo "make test-torch TORCH=2.15.0      the tests with a release of torch (default: the newest), installed beside"
	@echo "make fuzz      random programs against the definition, MINUTES=10 of them, from SEED= on"
	@echo "make bench     the benchmarks (8 minutes); make bench-expanded: against PyTorch's expanded weights"
	@echo "make bench-compiled               steps of ps.compile, and models that torch.compile compiled (20 minutes)"
	@echo "make bench-private                private training steps beside Opacus, part of make bench (5 minutes)"
	@echo "make bench-peers, bench-scaling   against Opacus, BackPACK, torch.func; how cost grows (10 minutes each)"
	@echo "make bench-parts                  what the time of ps.norms is made of (2 minutes)"
	@echo "make bench-docs                   these three, and the figures in docs/ made from them"
	@echo "make bench-launches               launches and waits of a step, as an accelerator would see them (1 minute)"
	@echo "make bench-sensitivity            how far one sample moves a private sum, over its bound (4 minutes)"
	@echo "make bench-influence              how well influence predicts retraining, beside others; costs; growth (15 minutes)"
	@echo "make bench-several                several losses per sample (1 minute)"
	@echo "make bench-monitor                what ps.Monitor adds to a training loop (5 minutes)"
	@echo "make docs      the site of docs/, into build/site"
	@echo "make dist      an sdist and a wheel"
	@echo "make lint      ruff and mypy only"
	@echo "make clean     remove .venv and all caches"

# The stamp is touched last, so an interrupted install is repeated and a finished one costs nothing.
$(STAMP): pyproject.toml constraints.txt
	@echo "installing into $(VENV) (a few minutes the first time)"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[test]'
	@touch $@

demo: $(STAMP)
	$(BIN)/python -m persample.demo --out build/demo.html

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: lint
	$(PYTEST) -m 'not slow'
	$(PYTEST) -m 'not slow' tests/device

# Compilers keep what they have compiled: a run of their own gives the memory back.
COMPILED := tests/compiled tests/graph/compiled tests/test_compile.py tests/test_compiled_programs.py tests/test_fused.py
test-all: lint
	$(PYTEST) $(addprefix --ignore=,$(COMPILED))
	$(PYTEST) $(COMPILED)
	$(PYTEST) tests/device
	for cpu in $$($(BIN)/python -m tests.capabilities); do \
		echo "as on a CPU with $$cpu" && ATEN_CPU_CAPABILITY=$$cpu $(PYTEST) $(BY_CPU) || exit 1; \
	done

# Exit code 1 if anything was found; what is printed can be pasted.
MINUTES ?= 10
fuzz: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.programs --minutes $(MINUTES) $(if $(SEED),--seed $(SEED))

bench: $(STAMP)
	$(BIN)/python -m benchmarks.run --json $(RESULTS)/bench.json
	$(MAKE) bench-compiled
	$(MAKE) bench-private

# The peers bring no torch with them: theirs is the one in constraints.txt.
$(PEERS_STAMP): pyproject.toml constraints.txt benchmarks/peers.txt
	@echo "installing into $(PEERS) (a few minutes the first time)"
	$(PYTHON) -m venv $(PEERS)
	$(PEERS)/bin/python -m pip install --quiet -c constraints.txt -e '.[bench,dp]'
	$(PEERS)/bin/python -m pip install --quiet --no-deps -r benchmarks/peers.txt
	@touch $@

bench-peers: $(PEERS_STAMP)
	$(PEERS)/bin/python -m benchmarks.run --peers --json $(RESULTS)/peers.json

# Compilers take most of the time. Nothing that was compiled before is found: it would be what is measured.
bench-compiled: $(STAMP)
	TORCHINDUCTOR_FORCE_DISABLE_CACHES=1 $(BIN)/python -m benchmarks.run --compiled --no-memory --json docs/benchmarks/compiled.json
	$(BIN)/python -m benchmarks.private --compiled --workloads mlp-deep gpt-thin --json docs/benchmarks/compiled-private.json
	$(BIN)/python -m benchmarks.tables docs/benchmarks.md

bench-private: $(PEERS_STAMP)
	$(PEERS)/bin/python -m benchmarks.private --json docs/benchmarks/private.json
	$(PEERS)/bin/python -m benchmarks.tables docs/benchmarks.md

bench-scaling: $(PEERS_STAMP)
	$(PEERS)/bin/python -m benchmarks.scaling --json $(RESULTS)/scaling.json

bench-parts: $(STAMP)
	$(BIN)/python -m benchmarks.run --parts --no-memory --json $(RESULTS)/parts.json

# What docs/ shows: new figures, then the tables and plots that are made from them.
bench-docs: bench-peers bench-scaling bench-parts
	cp $(RESULTS)/peers.json $(RESULTS)/scaling.json $(RESULTS)/parts.json docs/benchmarks/
	$(MAKE) bench-pages

bench-pages: $(PEERS_STAMP)
	$(PEERS)/bin/python -m benchmarks.tables docs/benchmarks.md README.md
	$(PEERS)/bin/python -m benchmarks.plots docs/benchmarks/peers.json docs/benchmarks/scaling.json --out docs/images

# Counted on a device of the tests, so that no accelerator is needed; its tables go into docs/benchmarks.md.
bench-launches: $(STAMP)
	$(BIN)/python -m benchmarks.launches --json docs/benchmarks/launches.json
	$(BIN)/python -m benchmarks.tables docs/benchmarks.md

$(INFLUENCE_STAMP): pyproject.toml constraints.txt benchmarks/influence-peers.txt
	@echo "installing into $(INFLUENCE) (a few minutes the first time)"
	$(PYTHON) -m venv $(INFLUENCE)
	$(INFLUENCE)/bin/python -m pip install --quiet -c constraints.txt -e '.[bench,influence]' scikit-learn
	$(INFLUENCE)/bin/python -m pip install --quiet --no-deps -r benchmarks/influence-peers.txt
	@touch $@

# Beside dattri, kronfluence and traker. PARTS="lds growth" measures some parts again and leaves the others as they are.
bench-influence: $(INFLUENCE_STAMP)
	OMP_NUM_THREADS=1 $(INFLUENCE)/bin/python -m benchmarks.influence $(if $(PARTS),--only $(PARTS)) \
		--json docs/benchmarks/influence.json --page docs/influence-benchmarks.md --images docs/images

bench-expanded: $(STAMP)
	$(BIN)/python -m benchmarks.expanded

# Several losses per sample; the table goes into their page.
bench-several: $(STAMP)
	$(BIN)/python -m benchmarks.several --json docs/benchmarks/several.json --page docs/several.md

bench-sensitivity: $(STAMP)
	$(BIN)/python -m benchmarks.sensitivity

# What ps.Monitor adds to a loop; the table goes into its page.
bench-monitor: $(STAMP)
	$(BIN)/python -m benchmarks.monitor --json docs/benchmarks/monitor.json --page docs/monitor.md

dist: $(STAMP)
	$(BIN)/python -m build

# Says what it ran, and how that went. TESTS="tests/graph -k names" runs a part.
test-torch:
	$(PYTHON) tests/packaging/torch_release.py --torch '$(or $(TORCH),newest)' --tests "$(TESTS)"

# The variable silences a notice about the successor of mkdocs, not a warning about these pages.
docs: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --site-dir build/site
	@echo "build/site/index.html"

clean:
	rm -rf $(VENV) $(PEERS) $(INFLUENCE) .venv-torch-* build dist .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
