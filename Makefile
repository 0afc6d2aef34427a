# The commands a newcomer needs: make serve, make test, make check, make bench.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: install serving dev serve test test-e2e test-all test-chart test-k8s test-faults test-browser test-clients test-vllm check generate bench docs package sbom test-deep mutants gpu-check gpu-bundle format clean
.DEFAULT_GOAL := help

help:
	@grep -E '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

install: ## install all that is pinned in requirements/ into .venv, and fix what is broken there
	@$(PYTHON) tools/install.py dev --check

serving:
	@$(PYTHON) tools/install.py serve

dev:
	@$(PYTHON) tools/install.py dev

serve: serving ## one gateway, two workers and Redis on this machine: http://127.0.0.1:8000
	@$(BIN)/headstart serve $(ARGS)

# In the order of the folders: xdist would begin with the files of most tests, and end with the few long ones on one core.
# Three at once, as tests wait often. Sources are compiled once: the tests start hundreds of processes.
PYTEST := PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder
OTHERS := not deep and not gpu and not k8s and not faults and not browser and not clients and not vllm

test: dev ## the test suite (6 minutes on 2 cores)
	@$(PYTEST) -m "not e2e and $(OTHERS)" $(ARGS)

test-e2e: dev ## more tests with real processes, and those of benchmarks and tools (10 minutes)
	@$(PYTEST) -m "e2e and $(OTHERS)" $(ARGS)

test-all: dev ## every suite, and one table; goes on where it was stopped
	@$(BIN)/python -m tools.test_all $(ARGS)

test-chart: dev ## the part of test-k8s that needs no podman: helm, schemas, policies, alerts
	@$(BIN)/python tools/install_k8s_tools.py --chart
	@$(BIN)/python -m pytest -n 2 -m k8s tests/k8s --ignore tests/k8s/test_fleet.py $(ARGS)

test-k8s: dev ## chart, images, alerts: helm, podman and promtool, which it installs itself (as root, by apt-get)
	@$(BIN)/python tools/install_k8s_tools.py
	@$(BIN)/python -m pytest -m k8s tests/k8s $(ARGS)

test-faults: dev ## faults of every kind against real processes: make test-faults SEED=n (at most 30 minutes)
	@$(BIN)/python tools/install_k8s_tools.py --clients
	@$(BIN)/python -m pytest -m faults tests/faults --fault-seed $(or $(SEED),1) $(ARGS)

test-browser: dev ## dashboard and chat page in a real Chromium (apt-get install chromium)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -r requirements/browser.txt
	@$(BIN)/python -m pytest -m browser tests/browser $(ARGS)

CLIENTS := .venv-clients
CLIENTS_OPENAI2 := .venv-clients-openai2
LITELLM := .venv-litellm

test-clients: dev $(CLIENTS)/.installed $(CLIENTS_OPENAI2)/.installed $(LITELLM)/.installed ## other people's clients against a running server, in three environments (3.2 GB; its programs by apt-get)
	@$(BIN)/python tools/install_k8s_tools.py --clients
	@$(BIN)/python -m pytest -m clients tests/clients $(ARGS)

$(CLIENTS)/.installed: requirements/clients.txt tests/clients/package.json
	@test -x $(CLIENTS)/bin/python || $(PYTHON) -m venv $(CLIENTS)
	@$(CLIENTS)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -r requirements/clients.txt
	@cp tests/clients/package.json $(CLIENTS)/
	@npm install --prefix $(CLIENTS) --silent --no-package-lock --no-audit --no-fund
	@touch $@

$(CLIENTS_OPENAI2)/.installed: requirements/clients_openai2.txt
$(LITELLM)/.installed: requirements/litellm_proxy.txt
$(CLIENTS_OPENAI2)/.installed $(LITELLM)/.installed:
	@test -x $(@D)/bin/python || $(PYTHON) -m venv $(@D)
	@$(@D)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -r $<
	@touch $@

test-vllm: dev ## two real vLLM engines behind a gateway, in an environment of their own (.venv-vllm, 3 GB; about 20 minutes)
	@$(BIN)/python tools/install_vllm.py
	@$(BIN)/python -m pytest -m "vllm and not deep" -rP tests/vllm $(ARGS)

test-deep: dev ## long property runs, by hand
	@$(BIN)/python -m pytest -m "deep and not vllm" $(ARGS)

mutants: dev ## changes of the product that no test notices: make mutants SEED=n NUM=200 MODULES="server/http" (at most 40 minutes)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -r requirements/mutants.txt
	@$(BIN)/python -m tools.mutants --seed $(or $(SEED),1) --num $(or $(NUM),200) $(MODULES)

gpu-check: ## check a GPU in at most 8 minutes; the report is in gpu-report/: make gpu-check ARGS="--quick"
	@if test -d packages; then \
		PYTHONPATH=$(CURDIR)/packages/any:$(CURDIR)/packages/$$($(PYTHON) -c 'import sys; print("cp%d%d" % sys.version_info[:2])') \
		$(PYTHON) -m benchmarks.gpu $(ARGS); \
	else $(MAKE) --no-print-directory dev && $(BIN)/python -m benchmarks.gpu $(ARGS); fi

gpu-bundle: dev ## pack the sources and what gpu-check needs besides torch, for a host without a network (5 minutes)
	@$(BIN)/python -m tools.gpu_bundle headstart-gpu.tar.xz

generate: dev ## write all that is generated: pages of options, metrics and values, the chart's schema, the Grafana board
	@$(BIN)/python -m tools.generate

check: dev ## ruff, mypy, import rules, docs, and whether what is generated is stale
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports
	@$(BIN)/python tools/check_docs.py
	@$(BIN)/python tools/check_prose.py
	@$(BIN)/python tools/check_sizes.py
	@$(BIN)/python -m tools.generate --check
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --site-dir $(VENV)/site

bench: dev ## the measurements: make bench ARGS="cache --json"
	@$(BIN)/headstart bench $(ARGS)

docs: dev ## the pages as a site, in site/
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet

package: dev ## wheel, chart, bills of materials and digests of a release, in dist/ (needs helm, which `make test-chart` installs)
	@$(BIN)/python -m tools.package dist $(ARGS)

sbom: dev ## what the images install, as CycloneDX, in sbom/
	@$(BIN)/python -m tools.sbom sbom

format: dev ## rewrite the sources as `make check` wants them
	@$(BIN)/ruff check --fix-only .
	@$(BIN)/ruff format .

clean: ## remove .venv and caches
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .import_linter_cache *.egg-info build
