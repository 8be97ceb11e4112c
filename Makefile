# Everything is in dev.py; these are its names for people whose fingers say make.
# Arguments go along: make test ARGS="tests/unit -k retry"

PYTHON ?= python3

.PHONY: demo test check lint docs bench chaos mutants matrix

demo test check lint docs bench chaos mutants matrix:
	@$(PYTHON) dev.py $@ $(ARGS)
