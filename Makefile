# make demo: set up and do the main job on this machine.   make test: set up and pass all checks.
VENV ?= .venv
PYTHON ?= python3
BIN := $(VENV)/bin
READY := $(VENV)/.ready
JOBS ?= 2
# A bf16 product kills the process on some virtual CPUs unless this is set before torch is imported.
export ONEDNN_MAX_CPU_ISA ?= AVX512_CORE_BF16
export OMP_NUM_THREADS ?= 1

.PHONY: demo test packages check bench accuracy soak format clean

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[train,report,dev]'
	@touch $@

demo: $(READY)
	@PATH="$(abspath $(BIN)):$$PATH" sh examples/demo.sh

test: check packages
	$(BIN)/python -m pytest --numprocesses $(JOBS)
	@echo all checks passed

# What tests need beside Python: hosts of a virtual cluster, a browser for reports. Without the right to install, they say so.
packages:
	@for tool in ip tc chromium; do command -v $$tool > /dev/null || missing=$$tool; done; [ -z "$$missing" ] || \
		{ [ "$$(id -u)" = 0 ] && apt-get update -qq && apt-get install -qq -y iproute2 chromium > /dev/null; } || true

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check --quiet .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

bench: $(READY)
	$(BIN)/python benchmarks/startup.py
	$(BIN)/python benchmarks/schedules.py
	$(BIN)/python benchmarks/engine.py
	$(BIN)/python benchmarks/predict.py
	$(BIN)/python benchmarks/choose.py
	$(BIN)/python benchmarks/plan.py
	$(BIN)/python benchmarks/executor.py
	$(BIN)/python benchmarks/waves.py
	$(BIN)/python benchmarks/waking.py
	$(BIN)/python benchmarks/parallelize.py
	$(BIN)/python benchmarks/osdp_executed.py
	$(BIN)/python benchmarks/saving.py
	$(BIN)/python benchmarks/accuracy_real.py > docs/measured-real.md
	$(BIN)/python benchmarks/repeat_measure.py > docs/measured-twice.md
	$(BIN)/python benchmarks/accuracy_virtual.py > docs/measured-virtual.md

accuracy: $(READY)
	$(BIN)/wavetrain validate validation/published.csv --markdown docs/accuracy.md
	$(BIN)/python validation/fit.py validation/published.csv --leave-out --markdown docs/left-out.md
	$(BIN)/wavetrain study --validate-claims --markdown docs/claims.md > /dev/null

soak: $(READY)
	$(BIN)/python benchmarks/soak_schedules.py
	WAVETRAIN_SOAK=1 $(BIN)/python -m pytest tests/runtime/test_executor.py tests/runtime/test_faults.py \
		tests/runtime/test_composed.py tests/runtime/test_sharded.py tests/runtime/test_memory.py tests/runtime/test_saving.py \
		tests/runtime/test_killed.py tests/runtime/test_full_disk.py tests/runtime/test_neighbours.py tests/runtime/test_measure_network.py tests/test_elastic.py \
		tests/test_train.py tests/test_bad_input.py tests/schedule/test_derive.py

format: $(READY)
	$(BIN)/ruff check --fix --quiet .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist
