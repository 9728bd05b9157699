"""The packages ("rooms") of the library are layered, small, entered by what they export, and documented."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# Bottom to top. A room may import from the rooms before it.
LAYERS = [
    "source_tree",
    "startup",
    "version",
    "errors",
    "formatting",
    "progress",
    "distributed",
    "storage",
    "recipe",
    "modules",
    "cells",
    "graph",
    "surgery",
    "budget",
    "data",
    "training",
    "search",
    "exporters",
    "report",
    "mmdet",
    "hf",
    "yolo",
    "pipeline",
    "api",
    "diagnostics",
    "tradeoffs",
    "session",
    "__init__",
    "cli",
    "__main__",
]
# Rooms that need packages which not everybody has: others import them inside functions, when they are asked for.
OPTIONAL_ROOMS = {"exporters", "hf", "mmdet", "yolo"}
# Libraries that may be imported inside a function: optional extras, those of one platform, and those that are slow to
# import and rarely needed.
OPTIONAL_LIBRARIES = {
    *("mmcv", "mmdet", "mmengine", "onnx", "onnxruntime", "onnxscript", "onnxslim", "pycocotools", "tensorboard"),
    *("torch_pruning",),
    *("fcntl", "msvcrt"),
    *("accelerate", "deepspeed", "matplotlib", "PIL", "sklearn", "timm", "torchvision", "transformers", "ultralytics"),
}
SLOW_MODULES = {  # of a library that is loaded anyway
    *("torch.utils.flop_counter", "torch.distributed.device_mesh", "torch.distributed.fsdp"),
    "torch.distributed.tensor",
}

MOST_FILES = 18  # in a room, apart from its __init__
# Words that a docstring's first line must not start with: it describes what the object does, for an API index.
RIDDLES = ("What", "That", "How", "Whether", "Which", "Where", "Who")


def sources() -> dict[str, Path]:
    """Return the files of the library by module name: `compress.graph.costs`."""
    found = {}
    for package, folder in (("compress", ROOT / "compress"), ("compress.exporters", ROOT / "exporters")):
        for path in sorted(folder.rglob("*.py")):
            parts = path.relative_to(folder).with_suffix("").parts
            found[".".join([package, *(part for part in parts if part != "__init__")])] = path
    return found


SOURCES = sources()


def room(module: str) -> str:
    """Return the room of a module; the package itself is `__init__`."""
    return module.split(".")[1] if "." in module else "__init__"


def imports(module: str) -> Iterator[tuple[str, ast.stmt, bool]]:
    """Yield (imported module, statement, whether it stands inside a function) for each import of ours or others'."""
    path = SOURCES[module]
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    tree = ast.parse(path.read_text(encoding="utf-8"))
    inside = {
        id(node)
        for function in ast.walk(tree)
        if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        for node in ast.walk(function)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node, id(node) in inside
        elif isinstance(node, ast.ImportFrom):
            base = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            name = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:  # `from compress.graph import trace` may name a module
                full = f"{name}.{alias.name}"
                yield full if full in SOURCES else name, node, id(node) in inside


def ours(name: str) -> bool:
    return name.partition(".")[0] == "compress"


@pytest.mark.parametrize("module", SOURCES)
def test_imports_point_down(module: str) -> None:
    level = LAYERS.index(room(module))
    up = [
        f"line {node.lineno}: {name}"
        for name, node, _ in imports(module)
        if ours(name) and room(name) != room(module) and LAYERS.index(room(name)) > level
    ]
    assert not up, f"{module} imports from rooms above its own: {up}"


def test_no_module_is_in_a_circle_of_imports() -> None:
    arrows = {
        module: {name for name, _, _ in imports(module) if ours(name) and name != module and name in SOURCES}
        for module in SOURCES
        if SOURCES[module].name != "__init__.py"
    }
    try:
        TopologicalSorter(arrows).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


@pytest.mark.parametrize("module", SOURCES)
def test_rooms_are_entered_by_their_door(module: str) -> None:
    """Other rooms import what a room's `__init__` exports and do not reach into its files."""
    reaching = [
        f"line {node.lineno}: {name}"
        for name, node, _ in imports(module)
        if ours(name) and room(name) not in (room(module), "__init__") and name.count(".") > 1
        if room(name) not in OPTIONAL_ROOMS
    ]
    assert not reaching, f"{module} reaches into other rooms: {reaching}"


def is_optional(name: str) -> bool:
    """Return whether a module is of an optional library or room, or imports an optional library at its top."""
    if not ours(name):
        return name.partition(".")[0] in OPTIONAL_LIBRARIES or name in SLOW_MODULES
    if room(name) in OPTIONAL_ROOMS:
        return True
    return any(not ours(used) and is_optional(used) and not inside for used, _, inside in imports(name))


@pytest.mark.parametrize("module", SOURCES)
def test_imports_inside_functions_are_of_what_is_optional(module: str) -> None:
    hidden = [
        f"line {node.lineno}: {name}" for name, node, inside in imports(module) if inside and not is_optional(name)
    ]
    assert not hidden, f"{module} imports inside functions: {hidden}"


@pytest.mark.parametrize("module", SOURCES)
def test_no_string_names_a_module_of_ours(module: str) -> None:
    tree = ast.parse(SOURCES[module].read_text(encoding="utf-8"))
    called = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.lstrip(".") in INTERNAL
    ]
    assert not called, [f"line {node.lineno}: {node.value}" for node in called]


INTERNAL = {module for module in SOURCES if module.count(".") > 0} - {f"compress.{name}" for name in OPTIONAL_ROOMS}


def test_rooms_are_small() -> None:
    """At most 400 lines a file; about a dozen files a room."""
    long = {module: n for module, path in SOURCES.items() if (n := len(path.read_text().splitlines())) > 400}
    assert not long
    crowded = {
        folder: n
        for folder in {path.parent for path in SOURCES.values()}
        if (n := len(list(folder.glob("*.py"))) - 1) > MOST_FILES
    }
    assert not crowded


ROOMS = {module: path for module, path in SOURCES.items() if path.name == "__init__.py"}


@pytest.mark.parametrize("module", ROOMS)
def test_a_room_says_what_it_is_for(module: str) -> None:
    assert ast.get_docstring(ast.parse(ROOMS[module].read_text(encoding="utf-8")))


@pytest.mark.parametrize("module", [module for module in ROOMS if module != "compress"])
def test_a_room_exports_no_name_of_one_of_its_files(module: str) -> None:
    """`from room import name` would give the function or the file, depending on what was imported before."""
    path = ROOMS[module]
    files = {file.stem for file in path.parent.glob("*.py")} | {file.parent.name for file in path.parent.glob("*/*.py")}
    exported = {
        alias.asname or alias.name
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom) and (node.module or node.level != 1)
        for alias in node.names
    }
    assert not exported & files


def documented(module: str) -> Iterator[tuple[str, str | None]]:
    """Yield (name, docstring) of the module and of its public functions and classes."""
    tree = ast.parse(SOURCES[module].read_text(encoding="utf-8"))
    yield module, ast.get_docstring(tree)
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) and not node.name.startswith("_"):
            if any(ast.unparse(decorator) == "overload" for decorator in node.decorator_list):
                continue  # the implementation has the docstring
            yield f"{module}.{node.name}", ast.get_docstring(node)


@pytest.mark.parametrize("module", SOURCES)
def test_public_names_have_a_docstring_that_could_stand_in_an_index(module: str) -> None:
    missing = [name for name, text in documented(module) if not text]
    riddles = [
        f"{name}: {text.splitlines()[0]}" for name, text in documented(module) if text and text.startswith(RIDDLES)
    ]
    assert not missing + riddles
