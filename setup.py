"""Build and package fastengine. The folders on disk map to import names (see ARCHITECTURE.md).

``pip install .`` and ``pip install -e .`` compile the CPU operators; ``FASTENGINE_SKIP_OPS=1`` leaves
them out (the plain-Paddle reference operators are used instead, with a warning).
"""

from __future__ import annotations

import pathlib
import re

from setuptools import find_packages, setup

ROOT = pathlib.Path(__file__).parent
VERSION = re.search(r'__version__ = "(.+)"', (ROOT / "fastengine" / "version.py").read_text()).group(1)

# Import name -> folder. The two that stand beside fastengine/ are sub-packages of it.
FOLDERS = {"fastengine.worker": "worker", "fastengine.custom_ops": "custom_ops"}

REQUIRED = [
    "numpy>=1.26",
    "pyzmq>=26",
    "msgspec>=0.19",
    "fastapi>=0.115,<1",
    "uvicorn[standard]>=0.30",
    "tqdm>=4.66",
    "prometheus-client>=0.20",
    "pyyaml>=6",
    "jinja2>=3.1.4",
    "tokenizers>=0.20,<0.24",
    "gguf>=0.17,<0.20",
]
EXTRAS = {
    "cpu": ["paddlepaddle>=3.3,<3.4"],
    "gpu": ["paddlepaddle-gpu>=3.3,<3.4"],
    "transformers": ["transformers>=4.50"],
    "paddlenlp": ["paddleformers>=1.2"],
    "dev": ["pytest>=8", "pytest-timeout>=2.3", "hypothesis>=6.100", "httpx>=0.27", "openai>=1.60", "ruff>=0.9,<0.16", "mypy>=1.13"],
}


def packages() -> list[str]:
    names = find_packages(str(ROOT), include=["fastengine", "fastengine.*"])
    for name, folder in FOLDERS.items():
        names += [name, *(f"{name}.{sub}" for sub in find_packages(str(ROOT / folder)))]
    return names


setup(
    name="fastengine",
    version=VERSION,
    description="A PaddlePaddle-native engine that serves large language models",
    long_description=(ROOT / "README.md").read_text() if (ROOT / "README.md").exists() else "",
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.10,<3.13",
    packages=packages(),
    package_dir={"fastengine": "fastengine", **FOLDERS},
    install_requires=REQUIRED,
    extras_require=EXTRAS,
    entry_points={"console_scripts": ["fastengine=fastengine.entrypoints.cli:main"]},
)
