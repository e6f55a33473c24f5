#!/usr/bin/env bash
# cpu_turns.sh TREE [BENCHMARK]...: run benchmarks in TREE, a checkout of another commit with its own .venv, and in this
# tree, by turns. Without names: those that need no GPU. Run it on an idle machine.
set -euo pipefail
base=$(realpath "$1") here=$PWD
shift
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-2} PYTHONUNBUFFERED=1
[ $# -gt 0 ] || set -- planning front_end_cost streams aborts rejection decode_cpu serve_cpu
for name in "$@"; do
    for tree in "$base" "$here"; do
        echo "== $name in $tree, at $SECONDS s"
        # Benchmarks return 1 if they miss a target; that is a result too.
        (cd "$tree" && timeout 300 .venv/bin/python "benchmarks/$name.py") || echo "exit code $?"
    done
done
for tree in "$base" "$here" "$base" "$here"; do
    for arguments in --help plugins; do
        (cd "$tree" && TIMEFORMAT="llmcore $arguments in $tree: %R s" && time .venv/bin/llmcore $arguments >/dev/null)
    done
done
