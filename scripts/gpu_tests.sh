#!/usr/bin/env bash
# gpu_tests.sh [FOLDER] [PROCESSES]: after gpu_setup.sh, run the CPU tests of ops, kernels and quantized weights with the
# versions of Python, torch and transformers of a GPU machine. FOLDER (.test-wheels) holds wheels: those of the extra
# `test` that the machine lacks, and a numpy that constraints.txt allows. Triton's interpreter alone gets that one.
set -uo pipefail
wheels=${1:-.test-wheels}
processes=${2:-8}
older=$(mktemp -d)
pip="python3 -m pip install --quiet --no-index --no-deps --no-compile --disable-pip-version-check"
$pip --target "$older" "$wheels"/numpy-*.whl || exit
$pip --break-system-packages $(ls "$wheels"/*.whl | grep -v /numpy-) || exit
export CUDA_VISIBLE_DEVICES= OMP_NUM_THREADS=1
pytest="python3 -m pytest -q -p no:cacheprovider -n $processes"
failed=0
# test_accuracy.py needs a model
$pytest -m "not compiled" tests/triton tests/quantization tests/core/ops tests/core/sched \
    --ignore=tests/triton/interpreter --ignore=tests/quantization/test_accuracy.py || failed=1
PYTHONPATH=$older TRITON_INTERPRET=1 $pytest -W ignore::DeprecationWarning tests/triton/interpreter || failed=1
exit $failed
