.PHONY: help run test test-deep check bench bench-peers wheel clean

help:
	@echo 'make run        run examples/local_model.py: a real model, in the process'
	@echo 'make test       check, then the tests on every supported Python found here'
	@echo 'make test-deep  the same with full counts, then the mutants'
	@echo 'make check      lint, format, types, layers, lengths, public names'
	@echo 'make bench      run the benchmarks'
	@echo 'make bench-peers ARGS="--only floor,handrail"   the same work by other frameworks (bench/README.md)'
	@echo 'make wheel      build the package into dist, and try it in clean environments'
	@echo 'make clean      remove what the other targets made'

run:
	@scripts/venv .venv requirements/dev.txt
	@.venv/bin/python examples/local_model.py

test:
	@scripts/check
	@scripts/test

test-deep: export HANDRAIL_DEEP = 1
test-deep: test
	@.venv/bin/python scripts/mutants.py

check:
	@scripts/check

bench:
	@scripts/venv .venv requirements/dev.txt
	@.venv/bin/python bench/run.py
	@.venv/bin/python bench/directory.py
	@.venv/bin/python bench/journal.py
	@.venv/bin/python bench/parked.py

bench-peers:
	@scripts/venv .venv requirements/dev.txt
	@.venv/bin/python bench/peers/run.py $(ARGS)

wheel:
	@scripts/wheel

clean:
	rm -rf .venv .venv-* .components .pytest_cache .ruff_cache .hypothesis build dist bench/results
	find . -name .git -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +
