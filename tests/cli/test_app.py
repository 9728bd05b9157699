"""The command line as a whole: mistakes in one line with exit code 2, help with examples."""

import pytest

from helpers.commands import run


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--model", "resnet18"], "expected torchvision:NAME, timm:NAME or package.module:factory"),
        (["--model", "torchvision:resnet81"], "the nearest are resnet18"),
        (["--model", "timm:resnet_18"], "the nearest are resnet18"),
        (["--model", "no_such_module:factory"], "No module named"),
        (["--model", "compress.storage.files:write_whole_"], "has no attribute"),
        (["--model", "torchvision:resnet18", "--input", "1,3,big"], "expected a shape such as 1,3,224,224"),
        (["--model", "torchvision:resnet18", "--input", "1,4,64,64"], "it stops in conv1"),
        (["--model", "torchvision:resnet18", "--weights", "missing.pt"], "no such file"),
    ],
)
def test_mistakes_are_reported_in_a_line_with_exit_code_2(monkeypatch, capsys, words, text):
    code, _, err = run(monkeypatch, capsys, "preview", *words, "--recipe", "magnitude_half")
    assert code == 2
    assert text in err
    assert "Traceback" not in err


def test_help_has_examples(monkeypatch, capsys):
    for command in ("prune", "preview", "recipes"):
        code, out, _ = run(monkeypatch, capsys, command, "--help")
        assert code == 0
        assert f"compress {command}" in out
