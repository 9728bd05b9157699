"""mmcv's compiled ops are replaced only where there are none."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path


def _run(code: str, folder: Path) -> str:
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_ops_that_mmcv_has_itself_are_left_as_they_are(tmp_path: Path) -> None:
    (tmp_path / "_ext.py").write_text("def __getattr__(name):\n    return lambda *args, **kwargs: f'compiled {name}'\n")
    code = """
        import mmcv
        mmcv.__path__.append(".")
        from compress.mmdet.install_ops import install_mmcv_ops
        from mmcv.ops.nms import ext_module
        print(install_mmcv_ops(), ext_module.nms())
    """
    assert _run(code, tmp_path) == "False compiled nms"


def test_missing_mmdet_names_the_extra_to_install(tmp_path: Path) -> None:
    code = """
        import sys
        from importlib.machinery import PathFinder
        class Without(PathFinder):
            @classmethod
            def find_spec(cls, name, *rest):
                return None if name.partition(".")[0] == "mmdet" else PathFinder.find_spec(name, *rest)
        sys.meta_path = [Without if f is PathFinder else f for f in sys.meta_path]
        try:
            import compress.mmdet.compact_forms
        except ImportError as error:
            print(error)
        import compress
    """
    assert 'mmdet is not installed; install the extra: pip install "compress[mmdet-lite]"' in _run(code, tmp_path)
