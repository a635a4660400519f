#!/usr/bin/env bash
# Set everything up, then check the style, the types and run the tests: bash scripts/test.sh [pytest arguments]
set -euo pipefail
# shellcheck source=scripts/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

failed=()
check() { # NAME COMMAND...: run it, remember a failure and go on
  local name=$1
  shift
  say "$name: $*"
  "$@" || failed+=("$name")
}

ensure_environment cpu,dev
ensure_model
export FASTENGINE_TEST_MODEL=$MODEL_FILE
cd "$ROOT"
check "style" "$VENV_PYTHON" -m ruff check
check "format" "$VENV_PYTHON" -m ruff format --check
check "types" "$VENV_PYTHON" -m mypy
check "tests" "$VENV_PYTHON" -m pytest "$@"
((${#failed[@]} == 0)) || fail "failed: ${failed[*]}"
