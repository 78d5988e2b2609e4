.DEFAULT_GOAL := help
.PHONY: help install kernels test slow gpu docs lint format types bench peers clients ci clean

help:  ## this list
	@sed -n 's/^\([a-z]*\):.*## \(.*\)/\1	\2/p' Makefile

install:  ## editable install with everything needed to work on the project
	VERBATIM_NO_KERNELS=1 pip install -e '.[test]'
	$(MAKE) kernels

kernels:  ## build the kernels in place, for working without an install
	cmake -S . -B build/kernels -DCMAKE_BUILD_TYPE=Release >/dev/null
	cmake --build build/kernels --parallel 2
	# Moved into place and not overwritten: a process that runs on the old ones keeps them.
	for so in build/kernels/verbatim_*.so; do \
	  cp $$so $$so.new && mv $$so.new verbatim/kernels/$$(basename $$so); done

test:  ## the fast tests
	python -m pytest -n 2

slow:  ## the slow tests too
	python -m pytest -n 2 -m "not gpu"

gpu:  ## what needs a GPU: its tests, and its figures into benchmarks/results
	python -m pytest tests/gpu -m gpu -n 0
	python -m pytest tests/kernels/test_triton_kernels.py tests/kernels/test_triton_llm.py -m "not gpu" -n 0
	python benchmarks/gpu.py --json benchmarks/results/gpu.json

docs:  ## the documentation as a site in build/site; needs .[docs]
	mkdocs build --strict

lint:  ## ruff, without changing anything
	ruff check . && ruff format --check .

format:  ## ruff, fixing what it can
	ruff check --fix . && ruff format .

types:  ## mypy, strict, on the package
	mypy

bench:  ## decode speed and a mixed workload against transformers
	python benchmarks/decode.py
	python benchmarks/throughput.py --layers 4

peers:  ## beside transformers, llama.cpp and OpenVINO on the same weights; builds them once
	python -m benchmarks.peers.setup
	python -m benchmarks.peers

clients:  ## other people's clients against a server; makes their environment once
	python -m benchmarks.clients

ci:  ## the whole check, in fresh virtual environments
	.ci/run

clean:  ## remove what was built
	rm -rf build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis verbatim/kernels/*.so
