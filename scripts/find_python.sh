#!/usr/bin/env bash
# find_python.sh [PYTHON]: print the Python to set up with: PYTHON, or the newest on PATH that pyproject.toml admits,
# which are those that torch has wheels for. One sentence on standard error, and exit code 1, where there is none.
set -euo pipefail
root=$(dirname "${BASH_SOURCE[0]}")/..
admitted=$(sed -n 's/^requires-python = "\(.*\)"$/\1/p' "$root/pyproject.toml")
[[ $admitted =~ ^'>=3.'([0-9]+)',<3.'([0-9]+)$ ]]
first=${BASH_REMATCH[1]} end=${BASH_REMATCH[2]}

# What is wrong with a Python, in words, or "nothing".
fault() {
    "$1" - "$first" "$end" 2>/dev/null <<'CHECK' || true
import sys
first, end = (3, int(sys.argv[1])), (3, int(sys.argv[2]))
here = ".".join(map(str, sys.version_info[:2]))
if not first <= sys.version_info[:2] < end:
    print(f"{sys.executable} is {here}")
elif sys.implementation.name != "cpython" or not getattr(sys, "_is_gil_enabled", lambda: True)():
    print(f"{sys.executable} is not the usual CPython")
else:
    try:
        import ensurepip, venv
    except ImportError:
        print(f"{sys.executable} lacks venv, which is a package of its own on Debian: apt-get install python{here}-venv")
    else:
        print("nothing")
CHECK
}

faults=()
names=("${1:-}")
if [[ -z ${1:-} ]]; then
    names=()
    for ((minor = end - 1; minor >= first; minor--)); do names+=("python3.$minor"); done
    names+=(python3 python)
fi
for name in "${names[@]}"; do
    path=$(command -v "$name") || continue
    wrong=$(fault "$path")
    if [[ $wrong == nothing ]]; then
        echo "$path"
        exit
    fi
    faults+=("${wrong:-$path does not run}")
done
found=$(printf '; %s' "${faults[@]:-${1:+there is no $1}}")
echo "Python $admitted is needed, which torch has wheels for${found%; }: install one (apt-get install python3.$first" \
    "python3.$first-venv), or name one: make serve PYTHON=/path/to/python" >&2
exit 1
