#!/usr/bin/env bash
# The operators' tests of AVX-512 and AVX-VNNI, emulated, for processors that lack these: bash scripts/test_emulated.sh [pytest arguments]
set -euo pipefail
# shellcheck source=scripts/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

ensure_environment cpu,dev
ensure_model
export FASTENGINE_TEST_MODEL=$MODEL_FILE
cd "$ROOT"
"$VENV_PYTHON" custom_ops/setup_ops.py --emulated --output build
export FASTENGINE_CPU_LIBRARY=$ROOT/build/libfastengine_cpu_emulated.so
# Of the default model also what asks for the best set: that is the emulated AVX-512. The library and the CUDA operators are as ever.
"$VENV_PYTHON" -m pytest tests/custom_ops --ignore=tests/custom_ops/cuda --ignore=tests/custom_ops/test_library.py \
  --timeout=600 -k "avx512 or avxvnni or test_default_model" "$@"
