#!/usr/bin/env bash
# Checks the Triton kernels on this machine's GPU and measures a Llama-7B-shaped model: at most 8 minutes.
#
#   scripts/gpu_check.sh [--no-tables]     PYTHON=... chooses the Python that has torch, triton and numpy
#
# Builds and installs nothing. Exit status: 0 all passed, 1 a check failed, 3 no CUDA device, 124 out of time.
set -euo pipefail
cd "$(dirname "$0")/.."
export PYTHONPATH="libs/treecore/src:scripts${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
exec timeout 480 "${PYTHON:-python3}" -m gpu_check "$@"
