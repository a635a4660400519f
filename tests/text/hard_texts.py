"""Samples for the tests of this directory."""

from __future__ import annotations

# Text that is hard to cut: characters of one to four bytes, combining marks, joined emoji.
HARD_TEXTS = [
    "plain ascii, and a tab\tand newlines\n\n\r\n",
    "naïve café — 你好，世界！",
    "😀👩‍🚀👨‍👩‍👧‍👦🏳️‍🌈 नमस्ते",
    " leading space and trailing ",
    "",
    "�",
    "\x00\x7f\u2028",
    "<|im_start|>user\nhi<|im_end|>",
]
