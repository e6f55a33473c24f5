#!/usr/bin/env bash
# setup.sh PYTHON VENV STAMP PIP-ARGUMENTS...: create VENV and install into it, unless STAMP says it was done from
# the same files. The stamp holds a digest of what decides the result, so a fresh checkout does not install again.
# An empty PYTHON is the one of VENV, where that is there and will do, or the one that find_python.sh finds.
set -euo pipefail
asked=$1 venv=$2 stamp=$3
shift 3
here=$(dirname "${BASH_SOURCE[0]}")
python=
if [[ -z $asked && -x $venv/bin/python ]]; then
    python=$("$here/find_python.sh" "$venv/bin/python" 2>/dev/null) || true
fi
[[ $python ]] || python=$("$here/find_python.sh" "$asked")
version=$("$python" --version)
digest=$({
    pwd
    echo "$@"
    echo "$version"
    cat pyproject.toml plugins/*/pyproject.toml contrib_models/pyproject.toml constraints.txt
} | sha256sum | cut -d' ' -f1)
if [[ ! -f $stamp || $(<"$stamp") != "$digest" ]]; then
    echo "Setting up $venv with $version (some minutes the first time: torch is large)"
    # An environment of another Python, or half of one, is made anew.
    if [[ $("$venv/bin/python" --version 2>/dev/null) != "$version" ]] || ! "$venv/bin/python" -c 'import pip'; then
        "$python" -m venv --clear "$venv"
    fi
    # What builds the distributions is installed once: pip would make an environment with it for each of them.
    backend=$(sed -n 's/^requires = \["\(.*\)"\]$/\1/p' pyproject.toml)
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check "$backend"
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-build-isolation "$@"
fi
echo "$digest" >"$stamp"
