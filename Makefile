# `make demo` and `make test` are all a newcomer needs; both set up their own environment in .venv.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.ready

.PHONY: demo test check fmt bench bench-peers eval lock clean

demo: $(STAMP)          ## two emulated backends, the gateway, one answer whole and one streamed (KEEP=1 stays up)
	@$(BIN)/headrace demo $(if $(KEEP),--keep) $(if $(REAL),--real)

test: $(STAMP) check    ## everything: lint, types, tests
	@$(BIN)/pytest -n $${JOBS:-2} --dist loadfile

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

eval: $(STAMP)          ## simulate the evaluation (hours; goes on where it was) into loadtests/results/
	@$(BIN)/python -m loadtests.report --jobs $${JOBS:-1}

lock:                   ## compile the hashed requirements anew (needs uv)
	uv pip compile pyproject.toml --universal --python-version 3.11 --generate-hashes --no-header --no-emit-index-url -q -o requirements.txt
	uv pip compile pyproject.toml --universal --python-version 3.11 --extra dev --generate-hashes --no-header --no-emit-index-url -q -o requirements-dev.txt

clean:
	rm -rf .venv

$(STAMP): requirements-dev.txt pyproject.toml
	@sh .ci/setup "$(PYTHON)"
	@touch $(STAMP)
