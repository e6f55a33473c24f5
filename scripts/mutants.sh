#!/usr/bin/env bash
# mutants.sh VENV [FILE|NUMBER]: let mutmut change core/llmcore/kv and core/llmcore/sched, and run their tests on each
# change. FILE, such as kv/slots.py, is the only one to change. NUMBER: try only so many changes, drawn at random. The
# list of changes, the draw and the tests' examples are the same in every run. Prints the counts and the survivors;
# `mutmut show NAME` in build/mutants shows a change.
set -euo pipefail
venv=$1 only=${2:-}
mutmut=build/mutmut work=build/mutants

# mutmut and pytest have an environment of their own, which sees the packages of VENV.
if [ ! -x "$mutmut/bin/mutmut" ]; then
    "$venv/bin/python" -m venv "$mutmut"
    "$mutmut/bin/python" -m pip install --quiet --disable-pip-version-check mutmut==3.8.1 pytest-timeout==2.4.0
    packages=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    own=$("$mutmut/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    echo "import site; site.addsitedir('$packages')" >"$own/venv.pth"
fi

# mutmut finds code in src/. The tests read core/, plugins/ and the examples as they are.
rm -rf "$work"
mkdir -p "$work/src" "$work/docs"
cp -r core/llmcore "$work/src/"
cp -r core plugins contrib_models tests pyproject.toml constraints.txt "$work/"
cp -r docs/examples "$work/docs/"
cd "$work"

# A change may loop and fill memory. Then it fails for want of memory, or its time is over.
ulimit -v 4000000
export OMP_NUM_THREADS=1 PYTHONHASHSEED=0
PYTHONPATH=$(printf '%s:' "$PWD"/plugins/*)
export PYTHONPATH
run() { ../../"$mutmut"/bin/mutmut run "$@" 2>&1 | tr '\r' '\n' | tail -1; }
names=()
if [[ $only =~ ^[0-9]+$ ]]; then
    run none >/dev/null || true # lists all changes, and tries none
    mapfile -t names < <("../../$mutmut/bin/python" -c '
import json, pathlib, random, sys
lists = [json.loads(file.read_text())["exit_code_by_key"] for file in pathlib.Path("mutants").rglob("*.meta")]
names = sorted(name for names in lists for name in names)
print("\n".join(random.Random(0).sample(names, int(sys.argv[1]))))
print(len(names), "changes in all", file=sys.stderr)' "$only")
elif [ -n "$only" ]; then
    names=("llmcore.$(echo "${only%.py}" | tr / .).*")
fi
run "${names[@]}"
../../"$mutmut"/bin/mutmut results | grep -v "not checked"
