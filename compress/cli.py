"""The commands: thin layers over the API."""

from __future__ import annotations

import copy
import json
import os
import sys
import traceback
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from . import __version__, models
from .api import load as load_model
from .api import preview as preview_model
from .api import prune as prune_model
from .budget import BudgetError
from .data import FORMS, Loaders, loaders
from .deploy import deploy
from .display import VARIABLE, Display
from .errors import said
from .exporters.extra import need_onnx
from .plan import Plan
from .processes import leave, rank
from .quickstart import quickstart as run_quickstart
from .reading import packaged
from .recipe import Data, Export, Recipe, Timing
from .report import Report
from .task import Classification

app = typer.Typer(
    help="Make a PyTorch vision network smaller and faster, exactly.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
out = Console()
err = Console(stderr=True)
WHOLE = "--traceback"  # taken by main, wherever it stands
NAMES = {
    "example_inputs": "--input, as a shape such as 1,3,224,224",
    "train=LOADER": "--data",
}  # of what Python calls so

Model = Annotated[str, typer.Option("--model", help=models.FORMS)]
RecipeName = Annotated[str, typer.Option("--recipe", help="a packaged recipe's name or the path of a YAML file")]
Weights = Annotated[Path | None, typer.Option("--weights", help="state dict: .safetensors, or .pt loaded without code")]
Shape = Annotated[
    str | None,
    typer.Option(
        "--input",
        help="shape of the example input, of one image or a batch",
        show_default="1,3,224,224, or what a timm model says",
    ),
]
Source = Annotated[str | None, typer.Option("--data", help=f"what to train and evaluate on: {FORMS}")]
Detector = Annotated[
    str | None,
    typer.Option("--mmdet", help="instead of --model: an mmdet config, as a path, mmdet::FOLDER/NAME.py or by name"),
]
Checkpoint = Annotated[Path | None, typer.Option("--checkpoint", help="of the detector of --mmdet")]
Options = Annotated[
    list[str] | None, typer.Option("--cfg-options", metavar="KEY=VALUE ...", help="changes of the config of --mmdet")
]
Json = Annotated[bool, typer.Option("--json", help="print JSON instead of a table")]


def _sizes(text: str) -> list[int]:
    try:
        sizes = [int(size) for size in text.replace("x", ",").split(",")]
        if min(sizes) < 1:
            raise ValueError
    except ValueError:
        raise ValueError(f"--input {text}: expected a shape such as 1,3,224,224") from None
    return sizes


def _example(model: torch.nn.Module, shape: str | None) -> torch.Tensor:
    """An input of that shape, of which three numbers are one image; or of the model's own."""
    sizes = list(models.image_size(model)) if shape is None else _sizes(shape)
    sizes = [1] * (len(sizes) == 3) + sizes
    return torch.randn(sizes, generator=torch.Generator().manual_seed(0))


def _built(model: str, weights: Path | None) -> torch.nn.Module:
    built = models.build(model, weights)
    if weights is None and os.environ.get("RANK", "0") == "0":
        Display().say(models.untrained(model))
    return built


@app.command()
def preview(
    model: Model, recipe: RecipeName, weights: Weights = None, shape: Shape = None, as_json: Json = False
) -> None:
    """What a recipe would do: groups, widths, costs, and whether the budget can be met. Trains nothing.

    Example: compress preview --model torchvision:resnet50 --recipe magnitude_half

    Exit code 1 if the budget cannot be met.
    """
    built = _built(model, weights)
    with err.status("finding the groups and proving them on the example input"):
        found = preview_model(built, recipe, example_inputs=_example(built, shape))
    if as_json:
        print(found.to_json())
    else:
        found.show(out)
    raise typer.Exit(0 if found.reachable else 1)


@app.command()
def prune(
    recipe: RecipeName,
    workdir: Annotated[Path, typer.Option("--workdir", help="where plan, weights, report and checkpoints go")],
    model: Annotated[str | None, typer.Option("--model", help=models.FORMS)] = None,
    data: Source = None,
    weights: Weights = None,
    shape: Shape = None,
    detector: Detector = None,
    checkpoint: Checkpoint = None,
    cfg_options: Options = None,
    resume: Annotated[bool, typer.Option("--resume", help="go on with the run in the workdir")] = False,
    device: Annotated[
        str | None, typer.Option("--device", help="cpu, cuda, cuda:1", show_default="a GPU if any")
    ] = None,
    seed: Annotated[int | None, typer.Option("--seed", help="instead of the recipe's")] = None,
    as_json: Json = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="no progress")] = False,
    progress: Annotated[
        str | None, typer.Option("--progress", help="auto, plain, json (a line for each thing that happens) or off")
    ] = None,
) -> None:
    """Search, cut, fine-tune and report as a recipe says; everything is left in the workdir.

    Examples:

    compress prune --model torchvision:resnet50 --recipe magnitude_half --workdir out

    compress prune --model timm:resnet50 --weights r50.safetensors --recipe resnet50_imagenet_netslim
    --data folder:imagenet --workdir out

    compress prune --mmdet cascade-mask-rcnn_swin-t-p4-w7_fpn_3x_coco --checkpoint detector.pth
    --recipe swin_t_cascade_40 --workdir out --cfg-options train_dataloader.batch_size=4

    compress prune ... --workdir out --resume       (goes on after a stop)

    torchrun --nproc_per_node 4 -m compress prune ...    (or accelerate launch -m compress prune ...)

    Exit codes: 0 done, 1 the budget cannot be met, 2 something to mend, 130 interrupted.
    """
    if progress is not None:
        os.environ[VARIABLE] = progress
    Display(quiet)  # says what is wrong with it
    changed: dict[str, Any] = {"extends": recipe} | ({} if seed is None else {"seed": seed})
    loaded = Recipe.load(recipe if len(changed) == 1 and data is None else changed)
    if data is not None:
        loaded = loaded.model_copy(update={"data": loaded.data.model_copy(update={"source": data})})
    if (model is None) == (detector is None):
        raise ValueError("--model or --mmdet: expected one of the two")
    source: dict[str, Any] = {}
    if detector is not None:
        clashes = {"--data": data, "--weights": weights, "--input": shape}
        if given := [name for name, value in clashes.items() if value is not None]:
            raise ValueError(f"{given[0]}: not for --mmdet, whose config says it; see --checkpoint and --cfg-options")
        from .mmdet.launch import launched

        built, source["task"] = launched(detector, checkpoint, cfg_options or [], loaded.seed, quiet)
    elif checkpoint is not None or cfg_options:
        raise ValueError("--checkpoint, --cfg-options: for --mmdet; --model takes --weights")
    if data is not None:  # whatever task the recipe names
        source["train"], source["val"] = loaders(loaded.data)
    if model is not None:
        built = _built(model, weights)
        if shape is not None or (loaded.data.source is None and loaded.task is None):
            source["example_inputs"] = _example(built, shape)
    try:
        pruned = prune_model(built, loaded, workdir=workdir, resume=resume, device=device, quiet=quiet, **source)
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    if rank():
        return
    if as_json:
        print(pruned.report.to_json())
        return
    out.print(pruned.report)
    out.print(f"saved in {workdir}; look at {workdir / 'report.html'}", highlight=False, soft_wrap=True)
    again = f"compress.load(fresh_dense_model, {str(workdir)!r})"
    if detector is not None:
        again = f"mmdet.apis.init_detector({str(workdir / 'config.py')!r})"
    out.print(f"reload with {again}", highlight=False, soft_wrap=True)


@app.command()
def export(
    directory: Annotated[Path, typer.Argument(help="what compress prune or Pruned.save left")],
    onnx: Annotated[Path, typer.Option("--onnx", help="the file to write")],
    model: Annotated[str | None, typer.Option("--model", help=models.FORMS)] = None,
    data: Source = None,
    shape: Shape = None,
    detector: Detector = None,
    cfg_options: Options = None,
    part: Annotated[
        str | None,
        typer.Option("--part", help="of the detector of --mmdet: detector or features", show_default="detector"),
    ] = None,
    images: Annotated[
        Path | None,
        typer.Option(
            "--images", help="what --mmdet is compared on: a file or a folder", show_default="its validation data"
        ),
    ] = None,
    opset: Annotated[
        int | None, typer.Option("--opset", help="of ONNX's operators", show_default="torch's own")
    ] = None,
    static: Annotated[bool, typer.Option("--static", help="batches of the example's size only")] = False,
    any_size: Annotated[bool, typer.Option("--any-size", help="images of any height and width")] = False,
    slim: Annotated[bool, typer.Option(help="simplify the graph with onnxslim")] = True,
    half: Annotated[bool, typer.Option("--half", help="weights in half precision")] = False,
    int8: Annotated[Path | None, typer.Option("--int8", help="also this file, quantised; needs --data")] = None,
    as_json: Json = False,
) -> None:
    """Write a saved result as an ONNX file that was compared with it and timed against the dense model.

    Examples:

    compress export out --model torchvision:resnet50 --onnx r50.onnx

    compress export out --model timm:resnet50 --data folder:imagenet --onnx r50.onnx --int8 r50_int8.onnx

    compress export out --mmdet cascade-mask-rcnn_swin-t-p4-w7_fpn_3x_coco --onnx detector.onnx --images pictures
    """
    if (model is None) == (detector is None):
        raise ValueError("--model or --mmdet: expected one of the two")
    if detector is not None:
        clashes: dict[str, Any] = {"--data": data, "--input": shape, "--int8": int8, "--half": half or None}
        clashes |= {"--static": static or None, "--any-size": any_size or None}
        if wrong := [name for name, value in clashes.items() if value is not None]:
            raise ValueError(
                f"{wrong[0]}: not for --mmdet, whose files take pixels in any size; see --part and --images"
            )
        from .mmdet.launch import exported

        with err.status("exporting, comparing and timing"):
            found = exported(directory, detector, cfg_options or [], onnx, part or "detector", images, opset, slim)
        print(found.to_json()) if as_json else out.print(found)
        return
    assert model is not None
    if part is not None or images is not None or cfg_options:
        raise ValueError("--part, --images, --cfg-options: for --mmdet; --model takes --data")
    if int8 is not None and int8.resolve() == onnx.resolve():
        raise ValueError(f"--int8 {int8}: expected another file than --onnx, which it is made from; choose another")
    if int8 is not None and data is None:
        raise ValueError(f"--int8 {int8}: its ranges are measured on data; give --data, which takes {FORMS}")
    need_onnx()
    dense = models.build(model)
    compact = load_model(copy.deepcopy(dense), directory)
    known = Report.load(directory / "report.json").recipe if (directory / "report.json").exists() else {}
    task = Classification(*_loaders(known, data, shape))
    example: Any = None if task.val is None or shape is not None else task.inputs(next(iter(task.val)))
    example = _example(dense, shape) if example is None else example if data is not None else example[:1]
    asked = Export(
        dynamic_batch=not static, dynamic_size=any_size, opset=opset, slim=slim, half=half, int8=int8 is not None
    )
    about: dict[str, Any] = {"plan": Plan.load(directory / "plan.json"), "recipe": known}
    timing = Timing.model_validate(known.get("timing") or {})
    with err.status("exporting, comparing and timing"):
        report = deploy((dense, compact), asked, task, example, onnx, int8, timing=timing, **about)
    print(report.to_json()) if as_json else out.print(report)


def _loaders(recipe: dict[str, Any], data: str | None, shape: str | None) -> Loaders:
    """Those of --data; where nothing says what an input is like, those of the recipe that was run, if they are here."""
    given = Data.model_validate(recipe.get("data") or {})
    if data is not None:
        return loaders(given.model_copy(update={"source": data}))
    if shape is not None or given.source is None or recipe.get("task") is not None:
        return None, None
    try:
        return loaders(given)
    except (OSError, ValueError, ImportError):
        return None, None


@app.command()
def bench(
    files: Annotated[list[Path], typer.Argument(help="ONNX files with the same inputs; the first is compared with")],
    batch: Annotated[int, typer.Option("--batch", help="where the batch is free", min=1)] = 1,
    shape: Annotated[str | None, typer.Option("--input", help="shape of the input, where more is free")] = None,
    threads: Annotated[
        int | None, typer.Option("--threads", help="of onnxruntime", show_default="torch's", min=1)
    ] = None,
    repeats: Annotated[int, typer.Option("--repeats", help="runs of each file, in turn", min=1)] = 50,
    as_json: Json = False,
) -> None:
    """Compare the latency of ONNX files in onnxruntime, one run of each in turn.

    Example: compress bench dense.onnx compact.onnx --threads 1
    """
    from .exporters import onnx as exporter

    sizes = None if shape is None else _sizes(shape)
    with err.status("timing"):
        found = exporter.bench(files, batch_size=batch, repeats=repeats, threads=threads, shape=sizes)
    print(found.to_json()) if as_json else out.print(found)


@app.command()
def recipes(
    name: Annotated[str | None, typer.Argument(help="print this recipe")] = None,
    schema: Annotated[bool, typer.Option("--schema", help="print the JSON schema, for editors")] = False,
    as_json: Json = False,
) -> None:
    """The recipes that come with the library, a line each; with a name, that recipe's file.

    Examples: compress recipes, compress recipes quickstart > mine.yaml, compress recipes --schema > schema.json
    """
    lines = {n: path.read_text().splitlines()[0].removeprefix("# ") for n, path in packaged().items()}
    if schema:
        print(json.dumps(Recipe.schema_for_editors(), indent=1))
    elif name is not None:
        Recipe.load(name)
        print(packaged()[name].read_text() if name in packaged() else Path(name).read_text(), end="")
    elif as_json:
        print(json.dumps(lines, indent=1))
    else:
        table = Table("name", "what it does")
        for known, line in lines.items():
            table.add_row(known, line)
        out.print(table)


@app.command()
def quickstart(
    workdir: Annotated[
        Path | None, typer.Option("--workdir", help="where the result goes", show_default="a new folder")
    ] = None,
) -> None:
    """Train a small residual network on real digits, search, cut to half the MACs, distil, and show the result."""
    run_quickstart(out, workdir)


@app.callback(invoke_without_command=True)
def _version(
    version: Annotated[bool, typer.Option("--version", help="print the version")] = False,
    whole: Annotated[bool, typer.Option(WHOLE, help="with any command: show where an error comes from")] = False,
) -> None:
    if version:
        print(__version__)
        raise typer.Exit


def _repeated(words: list[str]) -> list[str]:
    """`--cfg-options a=1 b=2`, as mmdet's tools take it, with the option before each value.

    >>> _repeated(["prune", "--cfg-options", "a=1", "b=[1,2]", "--quiet"])
    ['prune', '--cfg-options', 'a=1', '--cfg-options', 'b=[1,2]', '--quiet']
    """
    found: list[str] = []
    inside = False
    for word in words:
        if inside and not word.startswith("-") and found[-1] != "--cfg-options":
            found.append("--cfg-options")
        inside = word == "--cfg-options" or (inside and not word.startswith("-"))
        found.append(word)
    return found


def main() -> None:
    """Run a command; what is wrong is said in red and, unless it is asked for, without a traceback.

    Exit codes: 1 the budget cannot be met, 2 something to mend, 130 interrupted.
    """
    sys.path.insert(0, "")  # package.module:factory is looked for from here, as with python -m
    words = [word for word in sys.argv[1:] if word != WHOLE]
    try:
        app(_repeated(words))
    except Exception as error:
        text = said(error)
        hint = [f"On the command line {name} is {option}" for name, option in NAMES.items() if name in text]
        if WHOLE in sys.argv:
            traceback.print_exception(error)
        elif text != str(error):
            hint.append(f"{WHOLE} shows all of it")
        text = "\n".join([text, *getattr(error, "__notes__", []), *hint]).encode("utf-8", "backslashreplace").decode()
        err.print(text, style="red", markup=False, highlight=False)
        raise SystemExit(1 if isinstance(error, BudgetError) else 2) from None
    finally:
        leave()
