#!/usr/bin/env bash
# gpu_turns.sh BASE.tar.gz OUT STEP...: compare this tree with the one in BASE.tar.gz (git archive COMMIT | gzip) on one
# GPU, by turns. OUT is a folder for the results, and .whl has the wheels that gpu_setup.sh needs. Steps:
#   rows:ROWS[:MODEL]  the rows of benchmarks/gpu.py, separated by commas
#   serve:RATES        llmcore bench serve at these requests/s, with the lengths of real conversations
# Prints one table for each step.
set -euo pipefail
archive=$1 out=$2
shift 2
turns=/tmp/turns
here=$PWD base=$turns/tree
export PYTHONUNBUFFERED=1

set_up() { # NAME TREE: an environment with the tree's packages
    [ -d "$turns/$1" ] && return
    python3 -m venv "$turns/$1"
    # The python3 at hand may be an environment itself, whose packages a new one does not see.
    python3 -c 'import sys; print("\n".join(p for p in sys.path if p.endswith("-packages")))' \
        >"$(echo "$turns/$1"/lib/python3*/site-packages)/machine.pth"
    (cd "$2" && PATH=$turns/$1/bin:$PATH scripts/gpu_setup.sh "$here/.whl")
}

rows() { # ROWS MODEL
    rm -f "$out"/rows_*.json # a run that fails must not show the figures of an earlier one
    for turn in base here; do
        (cd "${!turn}" && "$turns/$turn/bin/python" benchmarks/gpu.py --model "$2" --rows ${1//,/ } --repeats 2 \
            --json "$out/rows_$turn.json") >"$out/rows_$turn.log" 2>&1 || tail -40 "$out/rows_$turn.log"
    done
    python3 scripts/beside.py "$out/rows_base.json" "$out/rows_here.json" --below rows --only median ||
        echo "no figures"
}

serve() { # RATES
    local model=$turns/qwen3-8b turn rate
    [ -d "$model" ] || (mkdir "$model" && cd benchmarks && "$turns/here/bin/python" -c \
        "import pathlib, guided; guided.with_tokenizer('qwen3-8b', pathlib.Path('$model'))")
    for turn in base here; do
        (cd "${!turn}" && exec "$turns/$turn/bin/llmcore" serve --model_dir "$model" --load_format dummy \
            --max_req_total_len 8192 --port 8765 >"$out/serve_$turn.log" 2>&1) &
        local server=$!
        for _ in $(seq 240); do
            curl -sf http://127.0.0.1:8765/health >/dev/null && break
            sleep 1
        done
        for rate in 48 ${1//,/ }; do # the first one warms up
            "$turns/here/bin/llmcore" bench serve --url http://127.0.0.1:8765 --lengths "$here/benchmarks/lengths/sharegpt_qwen3.csv" \
                --num_requests $((rate * 30)) --request_rate "$rate" --json "$out/serve_${turn}_$rate.json" \
                >"$out/bench_${turn}_$rate.log" 2>&1 || tail -20 "$out/bench_${turn}_$rate.log" "$out/serve_$turn.log"
        done
        kill "$server" || true
        wait "$server" || true
    done
    for rate in ${1//,/ }; do
        echo "$rate requests/s"
        python3 scripts/beside.py "$out/serve_base_$rate.json" "$out/serve_here_$rate.json" --only p50 p99 output_tokens_per_s ||
            echo "no figures"
    done
}

mkdir -p "$turns" "$out"
[ -d "$base" ] || (mkdir "$base" && tar -xzf "$archive" -C "$base")
set_up base "$base"
set_up here "$here"
echo "set up after $SECONDS s"
for step in "$@"; do
    IFS=: read -r name values model <<<"$step"
    "$name" "$values" "${model:-llama-3.1-8b}"
    echo "$step: until $SECONDS s"
done
