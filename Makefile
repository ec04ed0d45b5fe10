# make install | demo | image-demo | test | acceptance | lint | audit | clean. The first target that needs .venv creates it.

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
EXTRAS := cpu,export,report,rtx,serve,sorted,test
# One worker more than there are cores, since many tests wait for a server, a signal or the network.
WORKERS := $(shell echo $$(($$(nproc 2>/dev/null || echo 2) + 1)))

.PHONY: help install demo image-demo test acceptance lint audit clean

help:
	@echo "make install     create $(VENV) with everything that a machine without a GPU can use"
	@echo "make demo        export, build, package and serve the bundled demo model, and query it"
	@echo "make image-demo  the same in a container: package, image, run, query, stop (needs root or docker)"
	@echo "make test        the tests to run on every change"
	@echo "make acceptance  the slow and rare ones: containers, snippets, a browser, attacks, all capabilities"
	@echo "make lint        formatting, ruff and mypy"
	@echo "make audit       known vulnerabilities in what requirements.lock names (needs a network)"
	@echo "make clean       remove $(VENV), tool caches and build output"

install: $(STAMP)

$(STAMP): pyproject.toml setup.cfg constraints.txt requirements.lock .ci/find-python .ci/install-torch
	@test -x $(BIN)/python || { python=$$(.ci/find-python) && $$python -m venv $(VENV); }
	$(BIN)/python -m pip install -qq --upgrade pip
	@# With trl, of which tests read one file, the model's own chat template, and not what it would bring along.
	$(BIN)/python -m pip install -qq --require-hashes --no-deps -r requirements.lock
	@# Not by hash: torch's build depends on the machine. All else is there already.
	.ci/install-torch $(BIN)/python
	$(BIN)/python -m pip install -qq --no-build-isolation -c constraints.txt -e '.[$(EXTRAS)]'
	@touch $@
	@echo "installed: try $(BIN)/canvasrt doctor, or make demo"

demo: $(STAMP)
	$(BIN)/canvasrt demo

image-demo: $(STAMP)
	.ci/container-tools
	$(BIN)/python -m bench image-demo

# One thread per worker: the workers fill the machine, and more threads would only wait for each other.
TESTS = PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS)

test: $(STAMP)
	@$(TESTS) -m "not acceptance" $(PYTEST_ARGS)

acceptance: $(STAMP)
	@$(TESTS) -m acceptance $(PYTEST_ARGS)

# mypy cannot follow the stages' import names in an editable install, so it reads a regular one.
lint: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	@rm -rf .setuptools
	$(BIN)/python -m pip install -qq --no-deps --target .setuptools/lint .
	MYPYPATH=.setuptools/lint $(BIN)/mypy --config-file pyproject.toml -p canvasrt

audit: $(STAMP)
	.ci/audit $(BIN)/python

clean:
	rm -rf $(VENV) .setuptools .mypy_cache .pytest_cache .ruff_cache *.egg-info dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
