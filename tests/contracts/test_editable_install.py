"""After `pip install -e .` type checkers see the types, and `compress.exporters` is found beside the package."""

from __future__ import annotations

import os
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

pytest.importorskip("mypy")
pytest.importorskip("setuptools", minversion="77")
ROOT = Path(__file__).resolve().parents[2]
BUILD = "import sys, setuptools.build_meta as b; print(b.build_editable(sys.argv[1]))"
USER_CODE = """
import compress
from compress.exporters import onnx

reveal_type(compress.Recipe.load("magnitude_half").seed)
reveal_type(onnx.export)
"""


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a new environment, in which a copy of the tree's links is installed as editable."""
    folder = tmp_path_factory.mktemp("installed")
    tree = folder / "tree"  # a build writes to its tree
    tree.mkdir()
    for name in ("compress", "exporters", "recipes", "setup.py", "pyproject.toml", "README.md", "LICENSE"):
        (tree / name).symlink_to(ROOT / name)
    subprocess.run([sys.executable, "-c", BUILD, str(folder)], cwd=tree, check=True, capture_output=True)
    venv.create(folder / "venv", with_pip=False)
    site_packages = next((folder / "venv").glob("lib/python*/site-packages"))
    with zipfile.ZipFile(next(folder.glob("*.whl"))) as wheel:
        wheel.extractall(site_packages)
    return folder


def test_mypy_sees_the_types(environment: Path) -> None:
    (environment / "user.py").write_text(USER_CODE)
    python = str(environment / "venv" / "bin" / "python")
    command = [sys.executable, "-m", "mypy", "--config-file=", "--no-incremental", "--python-executable", python]
    result = subprocess.run([*command, "user.py"], cwd=environment, capture_output=True, text=True)
    first, second, *_ = [line for line in result.stdout.splitlines() if "Revealed type" in line]
    assert "import-not-found" not in result.stdout
    assert '"int"' in first
    assert "example_inputs" in second


def test_packages_beside_the_package_are_found(environment: Path) -> None:
    program = (
        "import sys\n"
        "sys.meta_path[:] = [f for f in sys.meta_path if 'editable' not in f'{f}']\n"  # of this environment
        "import compress.exporters, compress.recipes\n"
        "print(compress.exporters.__file__, compress.recipes.__file__, len(compress.recipe.packaged_recipes()))"
    )
    site_packages = next((environment / "venv").glob("lib/python*/site-packages"))
    tree = next(site_packages.glob("*.pth")).read_text().strip()
    variables = {**os.environ, "PYTHONPATH": tree}
    command = [sys.executable, "-c", program]
    result = subprocess.run(command, cwd=environment, env=variables, capture_output=True, text=True, check=True)
    exporters, recipes, count = result.stdout.split()
    assert (Path(exporters).parent, Path(recipes).parent) == (Path(tree) / "exporters", Path(tree) / "recipes")
    assert int(count) > 10
