#!/usr/bin/env bash
# ./test.sh          everything that needs no root and nothing but PyPI: unit tests and the walk
# ./test.sh --ci     as root, what needs more: system services and mounts (installs and starts them)
# ./test.sh --unit   the unit tests alone (under a minute)
# ./test.sh --full   every seed and every kill point; long
set -euo pipefail
cd "$(dirname "$0")"
. scripts/environment.sh

tier=${1:-}
[ $# -eq 0 ] || shift
prepare train,dev
prepare_model
export PYTHONSAFEPATH=1 OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1
case $tier in
    --unit) selected="not walk and not ci and not full" ;;
    --ci)
        selected="ci and not full"
        system_packages node:nodejs npm:npm mount:mount bwrap:bubblewrap dockerd:docker.io ip:iproute2 openssl:openssl \
            /usr/include/linux/bpf.h:linux-libc-dev "/usr/lib/postgresql/*/bin/initdb:postgresql"
        export PALESTRA_ENGINE_ENV=${PALESTRA_ENGINE_ENV:-$PWD/.engine}
        .venv/bin/palestra engine install --cpu --smg --into "$PALESTRA_ENGINE_ENV"
        ;;
    --full)
        selected="full"
        prepare_data
        ;;
    "") selected="not ci and not full" ;;
    *) fail "unknown argument $tier; known: --unit, --ci, --full" ;;
esac
# Two workers: jobs wait for their processes more than they compute. A file stays with one worker, and so with its engine.
workers=(-n 2 --dist loadfile --no-loadscope-reorder)
[ "$tier" != --ci ] || workers=()
exec .venv/bin/python -m pytest "${workers[@]}" -m "$selected" "$@"
