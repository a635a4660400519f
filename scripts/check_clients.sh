#!/usr/bin/env bash
# Check a running server with the clients people use, those too heavy for CI among them.
#
#   scripts/check_clients.sh URL MODEL [CHECK...]
#
# MODEL is a directory with the model's tokenizer in Hugging Face layout, which sglang and lm-eval need (or set TOKENIZER);
# the other checks ask the server for its model's name.
# Checks (default: all): schemathesis sdks npm sglang evalscope lm-eval. Each client is installed into a virtual
# environment of its own under CLIENTS_DIR (default: ~/.cache/fastengine/clients); what can't be installed is
# skipped and named. Exit code 1 when a check failed.
set -uo pipefail
url=${1:?usage: scripts/check_clients.sh URL MODEL [CHECK...]}
model=${2:?usage: scripts/check_clients.sh URL MODEL [CHECK...]}
shift 2
checks=("$@")
[ ${#checks[@]} -gt 0 ] || checks=(schemathesis sdks npm sglang evalscope lm-eval)
root=$(cd "$(dirname "$0")/.." && pwd)
dir=${CLIENTS_DIR:-$HOME/.cache/fastengine/clients}
mkdir -p "$dir"
served=$(python3 -c 'import json, sys, urllib.request as u; print(json.load(u.urlopen(sys.argv[1] + "/v1/models"))["data"][0]["id"])' "$url") || exit 1
export OPENAI_API_KEY=none ANTHROPIC_API_KEY=none

# The Python of the virtual environment NAME, with PACKAGES in it; fails when they can't be installed.
python_with() {
    local name=$1
    shift
    [ -x "$dir/$name/bin/python" ] || python3 -m venv "$dir/$name" || return 1
    "$dir/$name/bin/python" -m pip install -q "$@" >&2 || return 1
    echo "$dir/$name/bin/python"
}

# Quickest against --load-format null --max-model-len 256: random requests rarely say how much to generate.
check_schemathesis() (
    local python
    python=$(python_with schemathesis schemathesis) || return 77
    # A deadline or a full queue of the caller's own making is answered with 503 or 504. Fields that exclude one
    # another, or depend on the model, are refused with 400, which a JSON schema can't say: no positive_data_acceptance.
    cat > "$dir/schemathesis.toml" <<-TOML
	[checks.not_a_server_error]
	expected-statuses = ["2xx", "4xx", 503, 504]
	TOML
    # Commands that stop the server's work are not for random calls.
    cd "$dir" || return 1 # it leaves a folder behind
    "$(dirname "$python")/schemathesis" --config-file "$dir/schemathesis.toml" run "$url/openapi.json" --max-examples "${MAX_EXAMPLES:-20}" \
        --exclude-checks positive_data_acceptance \
        --exclude-path-regex '^/(v1/)?(pause|sleep|wakeup|update|abort|release|resume|continue|profile|start_profile|stop_profile|log_level)'
)

check_sdks() {
    local python
    python=$(python_with sdks -e "$root" pytest pytest-timeout httpx openai anthropic langchain-openai litellm) || return 77
    (cd "$root" && FASTENGINE_CHECK_URL=$url "$python" -m pytest tests/entrypoints/test_clients.py)
}

check_npm() {
    command -v npm >/dev/null || return 77
    mkdir -p "$dir/npm" && (cd "$dir/npm" && npm install --silent --no-audit --no-fund openai) || return 77
    cat > "$dir/npm/check.mjs" <<-'JS'
	import OpenAI from "openai";
	const [url, model] = process.argv.slice(2);
	const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "none" });
	const body = { model, messages: [{ role: "user", content: "Count from 1 to 20." }], max_tokens: 12, temperature: 0 };
	const whole = (await client.chat.completions.create(body)).choices[0].message.content;
	let streamed = "";
	for await (const chunk of await client.chat.completions.create({ ...body, stream: true })) streamed += chunk.choices[0]?.delta?.content ?? "";
	if (!whole || streamed !== whole) throw new Error(`streamed ${JSON.stringify(streamed)}, whole ${JSON.stringify(whole)}`);
	const response = await client.responses.create({ model, input: "Count from 1 to 20.", max_output_tokens: 12, temperature: 0 });
	if (response.output_text !== whole) throw new Error(`response ${JSON.stringify(response.output_text)}`);
	console.log("npm openai:", JSON.stringify(whole));
	JS
    node "$dir/npm/check.mjs" "$url" "$served"
}

check_sglang() {
    local python
    # The last version whose benchmark is one file that needs no engine beside it (the others bring gigabytes).
    python=$(python_with sglang aiohttp numpy requests tqdm transformers datasets pillow pybase64 pydantic) || return 77
    "$python" -m pip install -q --no-deps sglang==0.4.10 >&2 || return 77
    local backend script
    script=$(find "$dir/sglang/lib" -path '*/sglang/bench_serving.py')
    # Without a range some requests would ask for no tokens at all, which chat completions refuse, here as in vLLM.
    for backend in sglang sglang-oai-chat; do
        HF_HUB_OFFLINE=1 "$python" "$script" --backend $backend --base-url "$url" --model "$served" --tokenizer "${TOKENIZER:-$model}" \
            --dataset-name random-ids --random-input-len 32 --random-output-len 16 --random-range-ratio 0.5 --num-prompts 16 \
            --output-file "$dir/sglang-$backend.jsonl" || return 1
    done
}

check_evalscope() {
    local python
    python=$(python_with evalscope 'evalscope[perf]') || return 77
    printf 'Count from %d to 20.\n' 1 2 3 4 5 6 7 8 > "$dir/prompts.txt"
    "$python" -m evalscope.cli.cli perf --url "$url/v1/chat/completions" --api openai --model "$served" --dataset line_by_line \
        --dataset-path "$dir/prompts.txt" --parallel 4 --number 8 --max-tokens 16 --outputs-dir "$dir/evalscope-out"
}

check_lm-eval() {
    local python
    python=$(python_with lm-eval 'lm-eval[api]' transformers) || return 77
    mkdir -p "$dir/tasks"
    cat > "$dir/tasks/questions.jsonl" <<-'JSON'
	{"q": "The capital of France is", "c": ["Paris", "London", "a banana"], "a": 0}
	{"q": "Two plus two is", "c": ["ten", "four", "blue"], "a": 1}
	{"q": "The opposite of hot is", "c": ["cold", "lamp", "running"], "a": 0}
	{"q": "A dog is an", "c": ["ocean", "engine", "animal"], "a": 2}
	JSON
    cat > "$dir/tasks/questions.yaml" <<-YAML
	task: questions
	dataset_path: json
	dataset_kwargs: {data_files: {test: $dir/tasks/questions.jsonl}}
	test_split: test
	output_type: multiple_choice
	doc_to_text: "{{q}}"
	doc_to_choice: "{{c}}"
	doc_to_target: "{{a}}"
	metric_list: [{metric: acc}]
	YAML
    "$python" -m lm_eval --model local-completions --include_path "$dir/tasks" --tasks "${TASKS:-questions}" \
        --model_args "model=$served,base_url=$url/v1/completions,tokenizer=${TOKENIZER:-$model},num_concurrent=4,tokenized_requests=True"
}

failed=0
for check in "${checks[@]}"; do
    echo "== $check"
    "check_$check"
    case $? in
        0) echo "== $check: passed" ;;
        77) echo "== $check: skipped, it can't be installed here" ;;
        *) echo "== $check: FAILED" && failed=1 ;;
    esac
done
exit $failed
