#!/usr/bin/env bash
# Trains SmolLM2-135M to use a calculator, on this machine's CPU. Arguments go to `palestra train`.
set -euo pipefail
cd "$(dirname "$0")"
. scripts/environment.sh

prepare train
prepare_model
export PYTHONSAFEPATH=1
exec .venv/bin/palestra train examples/calculator-smollm2.toml --run.name="quickstart-$(date +%Y%m%d-%H%M%S)" "$@"
