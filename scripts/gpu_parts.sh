#!/usr/bin/env bash
# gpu_parts.sh OUT "SECONDS COMMAND"...: run commands one after another, each for at most SECONDS. A part that hangs or
# fails does not keep the others from running. The output of each goes to OUT/part_N.log, and comes line by line.
out=$1
shift
mkdir -p "$out"
export PYTHONUNBUFFERED=1
number=0
for part in "$@"; do
    number=$((number + 1))
    read -r seconds command <<<"$part"
    started=$SECONDS
    echo "=== part $number, at most $seconds s: $command"
    timeout -k 10 "$seconds" bash -c "$command" 2>&1 | tee "$out/part_$number.log"
    echo "--- part $number: $((SECONDS - started)) s, exit code ${PIPESTATUS[0]}"
done
