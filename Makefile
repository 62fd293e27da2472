# Two commands: `make verdict` and `make test`. Everything else is a detail of these.
PYTHON ?= python3
CORES ?= 8
VENV := .venv
BIN := $(VENV)/bin
VERDICT := results/verdicts/smollm2_135m.json

# Units side by side; then what starts engines, one after the other.
TESTS = $(BIN)/pytest tests/unit tests/contract --numprocesses 2 && \
	$(BIN)/pytest tests/browser tests/container tests/slurm tests/e2e

# Where the environment forbids bytecode, every start of a process would compile all that it imports again: torch and
# transformers take 12 CPU seconds then instead of 5.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: verdict test slurm fault-matrix check format lint types workflow-lint clean FORCE

## Serve a real model, judge it, and say what came out.
verdict: $(VENV)/run
	$(BIN)/snakemake --cores $(CORES) $(VERDICT)
	$(BIN)/assay explain --brief $(VERDICT)

## All tests: units, contracts and end to end on real engines.
test: $(VENV)/dev
	$(TESTS)

## What a commit must pass.
check: format lint workflow-lint types
	$(TESTS)

format: $(VENV)/dev
	$(BIN)/ruff format --check workflow tests benchmarks
	$(BIN)/snakefmt --check Snakefile workflow/rules

lint: $(VENV)/dev
	$(BIN)/ruff check workflow tests benchmarks

workflow-lint: $(VENV)/dev
	$(BIN)/snakemake --lint

types: $(VENV)/dev
	$(BIN)/mypy

## Any result: `make results/verdicts/smollm2_135m_vllm.json`.
results/%: $(VENV)/run FORCE
	$(BIN)/snakemake --cores $(CORES) $@

## Snakemake's plugin for SLURM, for those who run on a cluster (docs/sites.md).
slurm: $(VENV)/run
	$(BIN)/python -m pip install --quiet --no-compile --constraint constraints.txt --editable '.[slurm]'

## The fault matrix: every plantable fault by the gates that catch it, written to docs/faults/.
fault-matrix: $(VENV)/run
	$(BIN)/snakemake --cores $(CORES) docs/faults/faults_32.md docs/faults/faults_32_bf16.md \
		docs/faults/faults_100.md docs/faults/faults_sampled.md docs/faults/faults_asr.md docs/faults/faults_tts.md \
		--keep-going

$(VENV)/run: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --no-compile --constraint constraints.txt --editable .
	@touch $@

$(VENV)/dev: $(VENV)/run
	$(BIN)/python -m pip install --quiet --no-compile --constraint constraints.txt --editable '.[dev]'
	@touch $@

clean:
	rm -rf results logs .snakemake

FORCE:
