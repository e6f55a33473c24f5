#!/usr/bin/env bash
# gpu_setup.sh [FOLDER]: install llmcore and its plugins from this tree into the python3 at hand, on a machine that
# reaches no registry. FOLDER (.whl) holds the wheels that the machine lacks; torch and triton are its own.
set -euo pipefail
wheels=${1:-.whl}
pip="python3 -m pip install --quiet --no-index --no-deps --no-compile --disable-pip-version-check --break-system-packages"
$pip "$wheels"/*.whl
$pip --no-build-isolation -e . $(printf -- '-e %s ' plugins/*/) -e contrib_models
