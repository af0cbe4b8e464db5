.PHONY: help run serve docs test test-deep machine test-live soak peers check bench bench-compare bench-peers wheel clean

help:
	@echo 'make run        sort an inbox with a real model in the process (examples/inbox)'
	@echo 'make serve      open the same inbox on a web page, where you sort it'
	@echo 'make docs       build the documentation into site/ and check every link'
	@echo 'make test       run the checks and the tests, on other Pythons too, and test the wheel'
	@echo 'make test-deep  run the tests with full counts and the compared libraries, then the mutants and the fuzzer'
	@echo 'make machine    follow docs/production.md on an empty machine, and build and start the image (root)'
	@echo 'make test-live  test real model providers whose keys are set'
	@echo 'make soak       run servers and workers for ten minutes with faults in everything (SECONDS=60: for one)'
	@echo 'make check      check lint, format, types, layers, lengths and public names'
	@echo 'make bench      run the benchmarks and list the missed limits'
	@echo 'make bench-compare OLD=COMMIT   compare the gate at a commit with the working tree'
	@echo 'make bench-peers ARGS="--only floor,handrail"   compare with other frameworks (bench/README.md)'
	@echo 'make wheel      build the package into dist and test it in clean environments'
	@echo 'make clean      remove the files that the other targets made'

run:
	@scripts/venv .venv requirements/dev.txt
	@.venv/bin/python examples/inbox

serve:
	@scripts/venv .venv requirements/dev.txt
	@scripts/page
	@.venv/bin/handrail serve examples/inbox/served.py --journal .handrail/inbox-on-a-page.db

# -q is not used here, because strict mode does not count warnings that are not logged.
docs:
	@scripts/venv .venv requirements/dev.txt
	@NO_MKDOCS_2_WARNING=1 .venv/bin/python -m mkdocs build --strict
	@echo 'open site/index.html'

test:
	@scripts/test

test-deep: export HANDRAIL_DEEP = 1
test-deep: peers test
	@.venv/bin/python scripts/mutants.py
	@scripts/venv .venv-fuzz requirements/fuzz/atheris.txt
	@.venv-fuzz/bin/python scripts/fuzz.py
	@[ "$$(id -u)" != 0 ] || $(MAKE) machine

# As root, with debootstrap, systemd-container and buildah from Debian.
machine:
	@mkdir -p .components/machine
	@.venv/bin/python tests/deploy/machine.py .components/machine
	@scripts/image .components/machine

test-live:
	@scripts/venv .venv requirements/dev.txt
	@.venv/bin/python tests/live_providers.py

soak: SECONDS = 600
soak:
	@scripts/venv .venv requirements/dev.txt
	@.venv/bin/python tests/fleet/soak.py --seconds $(SECONDS)

peers:
	@scripts/peers

check:
	@scripts/check

bench:
	@scripts/venv .venv requirements/dev.txt
	@.venv/bin/python bench/all.py

bench-compare:
	@scripts/venv .venv requirements/dev.txt
	@.venv/bin/python bench/compare.py $(OLD)

bench-peers:
	@scripts/venv .venv requirements/dev.txt
	@.venv/bin/python bench/peers/run.py $(ARGS)

wheel:
	@scripts/wheel

clean:
	rm -rf .venv .venv-* .components .pytest_cache .ruff_cache .hypothesis build dist site bench/results .handrail/inbox*
	find . -name .git -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +
