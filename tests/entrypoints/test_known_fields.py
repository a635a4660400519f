"""Every field that clients of OpenAI's, vLLM's and FastDeploy's servers send is acted on, or refused by its name."""

from __future__ import annotations

from typing import Any

import pytest

from fastengine.entrypoints import score_routes
from fastengine.entrypoints.anthropic import messages
from fastengine.entrypoints.anthropic.message_types import CountTokensBody, MessagesBody
from fastengine.entrypoints.openai import embeddings, refused_fields, responses_endpoint
from fastengine.entrypoints.openai.embeddings_types import EmbeddingsBody
from fastengine.entrypoints.openai.request_types import ChatCompletionRequest, CommonFields, CompletionRequest
from fastengine.entrypoints.openai.responses_types import ResponsesBody
from fastengine.entrypoints.score_types import RerankBody, ScoreBody
from fastengine.entrypoints.sglang import generate
from fastengine.entrypoints.sglang.generate_types import GenerateBody

SHARED = """model frequency_penalty logit_bias logprobs max_tokens n presence_penalty seed stop stream stream_options temperature top_p user
top_k min_p repetition_penalty length_penalty min_tokens stop_token_ids include_stop_str_in_output ignore_eos bad_words skip_special_tokens
spaces_between_special_tokens truncate_prompt_tokens allowed_token_ids prompt_logprobs return_token_ids return_tokens_as_token_ids echo best_of
add_special_tokens use_beam_search guided_json guided_regex guided_choice guided_grammar structural_tag structured_outputs response_format
logits_processors kv_transfer_params vllm_xargs cache_salt priority request_id prompt_token_ids max_streaming_response_tokens timeout_s metadata
logits_processors_args include_draft_logprobs mm_processor_kwargs"""
CHAT = """messages audio function_call functions max_completion_tokens modalities moderation parallel_tool_calls prediction prompt_cache_key
prompt_cache_options prompt_cache_retention reasoning_effort safety_identifier service_tier store tool_choice tools top_logprobs verbosity
web_search_options documents chat_template chat_template_kwargs add_generation_prompt continue_final_message include_reasoning
enable_thinking reasoning_max_tokens response_max_tokens disable_chat_template"""
RESPONSES = """background context_management conversation include input instructions max_output_tokens max_tool_calls metadata model
parallel_tool_calls previous_response_id prompt prompt_cache_key prompt_cache_retention reasoning safety_identifier service_tier store stream
stream_options temperature text tool_choice tools top_logprobs top_p truncation user"""
MESSAGES = """max_tokens messages model cache_control container inference_geo metadata output_config service_tier stop_sequences stream system
temperature thinking tool_choice tools top_k top_p mcp_servers context_management"""


# Sent to any endpoint they are acted on or refused, but never unheard of.
EVERYWHERE = """top_k min_p repetition_penalty min_tokens stop_token_ids include_stop_str_in_output bad_words ignore_eos logit_bias seed n best_of echo
logprobs top_logprobs prompt_logprobs return_token_ids skip_special_tokens add_generation_prompt continue_final_message chat_template
chat_template_kwargs guided_json guided_regex guided_choice guided_grammar structural_tag response_format tools tool_choice parallel_tool_calls
reasoning_effort reasoning_max_tokens enable_thinking stream_options max_streaming_response_tokens prompt_token_ids"""
COMMON = set(CommonFields.__struct_fields__)


@pytest.mark.parametrize(
    ("body", "refused", "names"),
    [
        (ChatCompletionRequest, refused_fields.REFUSED_BY_CHAT, f"{SHARED} {CHAT}"),
        (CompletionRequest, refused_fields.REFUSED_BY_COMPLETIONS, f"{SHARED} prompt suffix"),
        (ResponsesBody, responses_endpoint.REFUSED, RESPONSES),
        (EmbeddingsBody, embeddings.REFUSED, "input model dimensions encoding_format user"),
        (MessagesBody, messages.REFUSED, MESSAGES),
        (CountTokensBody, messages.REFUSED_BY_COUNT, MESSAGES),
        (GenerateBody, generate.REFUSED, "text input_ids sampling_params rid return_logprob logprob_start_len top_logprobs_num extra_key"),
        (ScoreBody, score_routes.REFUSED_BY_SCORE, "text_1 text_2 truncate_prompt_tokens"),
        (RerankBody, score_routes.REFUSED_BY_RERANK, "query documents top_n return_documents max_tokens_per_doc"),
    ],
)
def test_no_field_is_unheard_of(body: Any, refused: Any, names: str) -> None:
    fields = set(body.__struct_fields__)
    assert set(f"{names} {EVERYWHERE}".split()) - fields - set(refused) == set()
    assert fields >= COMMON
    assert body is CountTokensBody or not COMMON & set(refused)


@pytest.mark.parametrize(
    ("field", "neutral", "asking"),
    [
        ("allowed_token_ids", None, [5]),
        ("length_penalty", 1, 0.5),
        ("return_tokens_as_token_ids", False, True),
        ("prompt_cache_retention", None, "24h"),
    ],
)
def test_refused_unless_it_asks_for_nothing(api: Any, field: str, neutral: Any, asking: Any) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
    accepted = api.http.post("/v1/chat/completions", json={**body, field: neutral})
    assert accepted.status_code == 200
    assert "x-fastengine-warning" not in accepted.headers
    error = api.http.post("/v1/chat/completions", json={**body, field: asking}).json()["error"]
    assert (error["param"], error["code"]) == (field, "unsupported_field")
