"""Build and package fastengine. The folders on disk map to import names (see ARCHITECTURE.md).

``pip install .`` and ``pip install -e .`` compile the CPU operators; ``FASTENGINE_SKIP_OPS=1`` leaves
them out (the plain-Paddle reference operators are used instead, with a warning). Where nvcc is, they compile
the CUDA operators as well; ``FASTENGINE_CUDA=never`` leaves these out, ``always`` fails without nvcc.
"""

from __future__ import annotations

import importlib.util
import os
import pathlib
import re
from types import ModuleType

from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import ExecError

ROOT = pathlib.Path(__file__).resolve().parent
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
    "llguidance>=1.0,<2",
]
OTEL = ["opentelemetry-sdk>=1.27,<2", "opentelemetry-exporter-otlp-proto-http>=1.27,<2"]
EXTRAS = {
    "cpu": ["paddlepaddle>=3.3,<3.4"],
    "gpu": ["paddlepaddle-gpu>=3.3,<3.4"],
    "transformers": ["transformers>=4.50"],
    "otel": OTEL,
    "paddlenlp": ["paddleformers>=1.2"],
    "dev": [
        *OTEL,
        "pytest>=8",
        "pytest-timeout>=2.3",
        "hypothesis>=6.100",
        "httpx>=0.27",
        "openai>=1.60",
        "anthropic>=0.40",
        "ruff>=0.17,<0.18",
        "mypy>=1.13",
    ],
}


CPU_EXTENSION, CUDA_EXTENSION = (f"fastengine.custom_ops.libfastengine_{device}" for device in ("cpu", "cuda"))


def packages() -> list[str]:
    names = find_packages(str(ROOT), include=["fastengine", "fastengine.*"])
    for name, folder in FOLDERS.items():
        names += [name, *(f"{name}.{sub}" for sub in find_packages(str(ROOT / folder)))]
    return names


def load_setup_ops() -> ModuleType:
    """custom_ops/setup_ops.py, by its path: the folder is no package before it is installed."""
    spec = importlib.util.spec_from_file_location("setup_ops", ROOT / "custom_ops" / "setup_ops.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class BuildOperators(build_ext):
    """Compiles the operators to where the package's files go: the build folder, or the source tree (editable)."""

    def finalize_options(self) -> None:
        super().finalize_options()
        setup_ops = load_setup_ops()
        try:
            architectures = setup_ops.cuda_architectures(os.environ.get("FASTENGINE_CUDA", "auto")) if self.extensions else ()
        except setup_ops.BuildError as error:
            raise ExecError(f"fastengine: {error}") from None
        if not architectures:
            self.extensions = [ext for ext in self.extensions or () if ext.name != CUDA_EXTENSION]

    def get_ext_filename(self, fullname: str) -> str:
        # A plain shared library that Paddle loads, not a Python module: no interpreter tag.
        return str(pathlib.Path(*fullname.split("."))) + ".so"

    def build_extension(self, ext: Extension) -> None:
        setup_ops = load_setup_ops()
        folder = pathlib.Path(self.get_ext_fullpath(ext.name)).parent
        try:
            if ext.name == CUDA_EXTENSION:
                setup_ops.build_cuda(folder, "always")
            else:
                setup_ops.build(folder)
        except setup_ops.BuildError as error:
            raise ExecError(f"fastengine: {error}") from None


def extensions() -> list[Extension]:
    if os.environ.get("FASTENGINE_SKIP_OPS") == "1":
        return []
    setup_ops = load_setup_ops()

    def relative(paths: list[pathlib.Path]) -> list[str]:
        return [str(path.relative_to(ROOT)) for path in paths]

    return [
        Extension(CPU_EXTENSION, sources=relative(setup_ops.sources()), depends=relative(setup_ops.headers())),
        Extension(CUDA_EXTENSION, sources=[], depends=relative(setup_ops.cuda_files())),
    ]


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
    ext_modules=extensions(),
    cmdclass={"build_ext": BuildOperators},
    entry_points={"console_scripts": ["fastengine=fastengine.entrypoints.cli:main"]},
)
