"""The text side starts without Paddle and without the libraries it only sometimes needs."""

from __future__ import annotations

import subprocess
import sys


def test_what_is_imported() -> None:
    code = (
        "import sys, fastengine.text.load, fastengine.text.output_text, fastengine.text.chat_template;"
        "bad = {'paddle', 'transformers', 'torch', 'gguf', 'llguidance'} & {name.split('.')[0] for name in sys.modules}; sys.exit(str(bad) if bad else 0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_grammars_need_no_paddle() -> None:
    code = "import sys, fastengine.text.grammar; sys.exit('paddle' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
