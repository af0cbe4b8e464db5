.PHONY: help run serve docs test test-deep test-live peers check bench bench-compare bench-peers wheel clean

help:
	@echo 'make run        a real model in the process sorts an inbox (examples/inbox)'
	@echo 'make serve      the same inbox on a page, where you sort it'
	@echo 'make docs       build the documentation into site/, every link checked'
	@echo 'make test       the checks, the tests, what may differ on other Pythons, the wheel'
	@echo 'make test-deep  the same with full counts and the libraries compared with, then the mutants'
	@echo 'make test-live  the contract of a model on real providers, where their keys are set'
	@echo 'make check      lint, format, types, layers, lengths, public names'
	@echo 'make bench      run every benchmark, then say which limits were missed'
	@echo 'make bench-compare OLD=COMMIT   the gate at a commit and here, in one run'
	@echo 'make bench-peers ARGS="--only floor,handrail"   the same work by other frameworks (bench/README.md)'
	@echo 'make wheel      build the package into dist, and try it in clean environments'
	@echo 'make clean      remove what the other targets made'

run:
	@scripts/venv .venv requirements/dev.txt
	@.venv/bin/python examples/inbox

serve:
	@scripts/venv .venv requirements/dev.txt
	@scripts/page
	@.venv/bin/handrail serve examples/inbox/served.py

# Not with -q: a warning that is not logged is not counted, and strict mode passes.
docs:
	@scripts/venv .venv requirements/dev.txt
	@NO_MKDOCS_2_WARNING=1 .venv/bin/python -m mkdocs build --strict
	@echo 'open site/index.html'

test:
	@scripts/test

test-deep: export HANDRAIL_DEEP = 1
test-deep: peers test
	@.venv/bin/python scripts/mutants.py

test-live:
	@scripts/venv .venv requirements/dev.txt
	@.venv/bin/python tests/live_providers.py

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
