"""The least that each route takes: what tests of all routes start from."""

from __future__ import annotations

from typing import Any

HI = [{"role": "user", "content": "hi"}]
# Those that run the model.
GENERATING: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": HI, "max_tokens": 4},
    "/v1/completions": {"prompt": "hi", "max_tokens": 4},
    "/v1/responses": {"input": "hi", "max_output_tokens": 4},
    "/v1/messages": {"messages": HI, "max_tokens": 4},
    "/generate": {"text": "hi", "sampling_params": {"max_new_tokens": 4}},
    "/v1/embeddings": {"input": "hi"},
    "/v1/score": {"text_1": "a", "text_2": "b"},
    "/v1/rerank": {"query": "a", "documents": ["b"]},
}
