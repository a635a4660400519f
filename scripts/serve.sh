#!/usr/bin/env bash
# Set everything up and serve: bash scripts/serve.sh [flags of fastengine.entrypoints.api_server]
#
# Without --model (or FASTENGINE_MODEL_DIR, or a model in the --config file) the default model is fetched
# and served. The server prints a curl line when it is ready. scripts/lib.sh lists the other settings.
set -euo pipefail
# shellcheck source=scripts/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

needs_default_model() { # true unless the flags or the environment say what to serve, or only ask for help
  local previous="" argument
  [[ -z ${FASTENGINE_MODEL_DIR:-} ]] || return 1
  for argument in "$@"; do
    [[ $argument != --model && $argument != --model=* && $argument != --help && $argument != -h ]] || return 1
    [[ $previous != --config ]] || ! names_a_model "$argument" || return 1
    [[ $argument != --config=* ]] || ! names_a_model "${argument#--config=}" || return 1
    previous=$argument
  done
}

names_a_model() { grep -qsE '^model[[:space:]]*:' "$1"; }

ensure_environment cpu
if needs_default_model "$@"; then
  ensure_model
  # The variable is the weakest way to name a model: a flag or a configuration file still wins.
  export FASTENGINE_MODEL_DIR=$MODEL_FILE
fi
say "starting the server (stop it with Ctrl-C)"
exec "$VENV_PYTHON" -m fastengine.entrypoints.api_server "$@"
