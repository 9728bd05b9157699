"""Package metadata. `exporters/` and `recipes/` lie at the top of the tree and install as parts of `compress`."""

from pathlib import Path

from setuptools import find_packages, setup

ONNX = ["onnx>=1.17", "onnxruntime>=1.20", "onnxscript>=0.3", "onnxslim>=0.1.48"]
# mmcv is the user's own: compiled, or the `mmdet-lite` extra's. mmengine needs pkg_resources, gone in setuptools 82.
MMDET = ["mmdet>=3.3", "mmengine>=0.10.7", "setuptools<82"]
MMDET_LITE = [*MMDET, "mmcv-lite>=2.0.0rc4,<2.2"]
DETECTION = ["pycocotools>=2.0.7"]  # average precision
HF = ["transformers>=5"]
# AGPL-3.0, or a licence of Ultralytics'.
YOLO = ["ultralytics>=8.4.190"]
# The fallback tracer of `target.one_path`, and the rival that benchmarks measure.
TORCH_PRUNING = ["torch-pruning>=1.6"]
DEV = [
    *DETECTION,
    *HF,
    *TORCH_PRUNING,
    "hypothesis>=6.100",
    "ipykernel>=6.29",
    "jsonschema>=4",
    "lightning>=2.5",
    "mypy>=1.13",
    "nbclient>=0.10",
    "pre-commit>=4",
    "pytest>=8",
    "pytest-xdist>=3.6",
    "ruff>=0.8",
    "segmentation-models-pytorch>=0.4",
    "tensorboard>=2.18",
    "types-PyYAML",
]

setup(
    name="compress",
    version="0.1.0",
    description="Structured pruning of PyTorch vision networks that is exact: score, search, slice, distil, export",
    long_description=Path(__file__).with_name("README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.10",
    packages=[*find_packages(include=["compress", "compress.*"]), "compress.exporters", "compress.recipes"],
    package_dir={"compress.exporters": "exporters", "compress.recipes": "recipes"},
    # `pip install -e .` adds this folder to the path. Type checkers and editors would not see an import hook.
    options={"editable_wheel": {"mode": "compat"}},
    package_data={"compress": ["py.typed"], "compress.recipes": ["*.yaml", "**/*.yaml", "mmdet/*.py"]},
    exclude_package_data={"compress": ["exporters.pyi"]},  # of the source tree
    install_requires=[
        "accelerate>=1.2",
        "matplotlib>=3.8",
        "numpy>=1.26",
        "pydantic>=2.11",
        "pyyaml>=6",
        "rich>=13",
        "safetensors>=0.4.5",
        "scikit-learn>=1.4",
        "timm>=1.0.15",
        "torch>=2.9",
        "torchvision>=0.24",
        "typer>=0.15",
    ],
    extras_require={
        "detection": DETECTION,
        "onnx": ONNX,
        "hf": HF,
        "mmdet": MMDET,
        "mmdet-lite": MMDET_LITE,
        "yolo": YOLO,
        "torch-pruning": TORCH_PRUNING,
        "dev": DEV,
        "all": [*DETECTION, *ONNX, *HF, *MMDET, *YOLO, *DEV],
    },
    entry_points={"console_scripts": ["compress = compress.cli.app:main"]},
    classifiers=["Typing :: Typed", "Operating System :: OS Independent"],
)
