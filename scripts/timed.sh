#!/usr/bin/env bash
# timed.sh NAME COMMAND...: run COMMAND, then say how long it took.
name=$1
shift
start=$SECONDS
"$@"
code=$?
echo "--- $name: $((SECONDS - start)) s, exit code $code"
exit $code
