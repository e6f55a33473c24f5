#!/usr/bin/env bash
# setup.sh PYTHON VENV STAMP PIP-ARGUMENTS...: create VENV and install into it, unless STAMP says it was done from
# the same files. The stamp holds a digest of what decides the result, so a fresh checkout does not install again.
set -euo pipefail
python=$1 venv=$2 stamp=$3
shift 3
digest=$({
    pwd
    echo "$@"
    "$python" --version
    cat pyproject.toml plugins/*/pyproject.toml contrib_models/pyproject.toml constraints.txt
} | sha256sum | cut -d' ' -f1)
if [[ ! -f $stamp || $(<"$stamp") != "$digest" ]]; then
    echo "Setting up $venv (some minutes the first time: torch is large)"
    "$python" -m venv "$venv"
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check "$@"
fi
echo "$digest" >"$stamp"
