# The one task runner of flowctl. Every target sets up what it needs: Python >= 3.11 and make are all, and no root.
# PYTHON=... names the interpreter, VENV=... the folder of the environment, ARGS=... goes to the command that is run.

VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# The oldest supported first: what works there works on the others.
PYTHONS := $(PYTHON) python3.11 python3.12 python3.13 python3 python

.PHONY: help setup lock setup-pipeline test ipv6 lint types demo demo-pipeline demo-cluster serve bench site pictures rivals browser checkers deb fuzz clean
.DEFAULT_GOAL := help

help:  ## show the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/make \1\t\2/p' Makefile | expand -t 22

setup: $(READY)  ## make .venv with flowctl, its tools and an FFmpeg binary, all from PyPI

# Everything in the versions, and with the hashes, of requirements-dev.txt. Redone only when that or pyproject.toml
# changed. A candidate that cannot make an environment (some distributions split venv off) is passed over for the next; a
# half-made environment is made again.
$(READY): pyproject.toml requirements-dev.txt
	@if ! $(BIN)/python -m pip --version >/dev/null 2>&1; then \
	  for name in $(PYTHONS); do \
	    "$$name" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || continue; \
	    rm -rf $(VENV); echo "making $(VENV) with $$name"; \
	    "$$name" -m venv $(VENV) && break; \
	  done; \
	fi; \
	if ! $(BIN)/python -m pip --version >/dev/null 2>&1; then \
	  echo "error: no Python >= 3.11 that can make a virtual environment among: $(PYTHONS)" >&2; \
	  echo "hint: install one (Debian, Ubuntu: python3 and python3-venv), or name it: make PYTHON=/path/to/python3" >&2; \
	  exit 1; \
	fi
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements-dev.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	@touch $@

# For Python 3.11 to 3.13: markers say what is for which.
lock:  ## make requirements-dev.txt anew from pyproject.toml, with the newest versions that it allows
	python3 -m venv $(VENV)-lock
	$(VENV)-lock/bin/python -m pip install --quiet --disable-pip-version-check uv
	$(VENV)-lock/bin/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --extra dev --upgrade \
	  --no-header --output-file requirements-dev.txt pyproject.toml
	rm -rf $(VENV)-lock

setup-pipeline: $(READY)  ## find the Java 17 or newer that Spark needs; install Debian's as root, or say what to do
	@$(BIN)/python -m flowctl.analyze.spark.setup

lint: $(READY)  ## check style and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY)  ## check types
	$(BIN)/mypy

# Without Java the tests of the pipeline are skipped, and the closing line counts them.
test: lint types  ## lint, types, all tests; the last line is the count of tests
	@$(BIN)/python -m flowctl.analyze.spark.setup || true
	$(BIN)/python tests/run_all.py $(ARGS)

# Without those on one loopback address after another, of which IPv6 has one.
ipv6: $(READY)  ## the tests of what speaks HTTP, and of RTMP with FFmpeg, once more: servers and clients on ::1
	TEST_LOOPBACK=::1 $(BIN)/python -m pytest -n 2 --dist loadfile tests/live/httpd tests/live/admin tests/websocket \
	  $(addprefix tests/e2e/server/test_e2e_,http.py media.py access.py keys.py) tests/e2e/test_e2e_ffmpeg.py \
	  tests/e2e/dashboard tests/e2e/players tests/e2e/relays/test_e2e_relay.py $(ARGS)

# Its page with plots stays in this folder, in .demo.
demo: $(READY)  ## about 30 s (the first time a minute): a live stream to viewers of all kinds, a dashboard, a report; ARGS=--stay stays
	FLOWCTL_CACHE='$(CURDIR)/.demo' $(BIN)/flowctl demo $(ARGS)

# Its records, reports and files stay in this folder, in .demo/demo-pipeline.
demo-pipeline: $(READY)  ## a minute on two cores, more when they are busy: load, records, analysis, new limits and bans for the running server, load again
	FLOWCTL_CACHE='$(CURDIR)/.demo' $(BIN)/flowctl demo --pipeline $(ARGS)

# Its page with pictures stays in this folder, in .demo.
demo-cluster: $(READY)  ## about 40 s: a stream through four origins, one killed, one lying, one slow, and two edges
	FLOWCTL_CACHE='$(CURDIR)/.demo' $(BIN)/flowctl demo --cluster $(ARGS)

serve: $(READY)  ## the live server on rtmp://127.0.0.1:1935 until Ctrl-C
	$(BIN)/flowctl serve live $(ARGS)

# Rivals from npm stay in this folder, unless FLOWCTL_CACHE names another one.
bench: $(READY)  ## measure for about an hour, and write the figures into docs/benchmarks.md; ARGS=--quick only looks
	$(BIN)/python bench/run.py $(ARGS)

# In folders by version, for a web server: make site ARGS='mike deploy VERSION latest' commits them to the branch gh-pages.
site: $(READY)  ## the documents as a site in build/site, with search and an API reference
	NO_MKDOCS_2_WARNING=1 PATH="$(CURDIR)/$(BIN):$$PATH" $(if $(ARGS),$(ARGS),mkdocs build --quiet && echo 'the site is here: $(CURDIR)/build/site/index.html')

pictures: $(READY)  ## take the pictures of the documents anew, with a browser (make browser) and Spark
	FLOWCTL_PICTURES='$(CURDIR)/docs/images' $(BIN)/python -m pytest -q -n0 tests/e2e/dashboard/test_e2e_pictures.py

rivals: $(READY)  ## install what benches and load tests compare with: Node-Media-Server, and nginx-rtmp as root on Debian
	$(BIN)/python bench/install_rivals.py

browser: $(READY)  ## install Chromium, its driver and players of HLS, for tests in a browser: as root on Debian
	$(BIN)/python tests/install_browser.py

# They stay in this folder, unless FLOWCTL_CACHE names another one.
checkers: $(READY)  ## fetch promtool, logrotate, kubectl, hadolint and the schemas of Kubernetes, for the tests of the packaging
	$(BIN)/python tests/install_checkers.py

# With what the extras admin and media need inside, for the release of Debian or Ubuntu that has this environment's Python.
deb: $(READY)  ## make a Debian package, dist/flowctl_VERSION_ARCHITECTURE.deb: apt install ./flowctl_*.deb
	$(BIN)/python -m build --wheel --no-isolation --outdir dist . >/dev/null
	PYTHON=$(BIN)/python packaging/debian/build "$$(ls -t dist/flowctl-*.whl | head -n 1)" dist

fuzz: $(READY)  ## at new seeds (or SEED=N): the fuzz target for 5 minutes, then random tests, with 50 times their examples
	$(BIN)/python tests/wire/rtmp/fuzz_rtmp.py --seconds 300 --seed $(or $(SEED),$$(date +%s))
	$(BIN)/python -m pytest -n auto --maxprocesses=8 -m fuzz --examples-factor=50 --seed=$(or $(SEED),new) --timeout=3600 $(ARGS)

clean:  ## remove everything that was made here, the environment too
	rm -rf $(VENV) .demo dist build bench/results bench/.cache .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
