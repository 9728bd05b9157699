"""CONTRIBUTING.md: the files that its lists name exist, and following each list with a toy example works."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Literal, get_args
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import compress
from cases import CASES, Net, distance, groups_of, random_keep, run
from compress.budget import UNITS
from compress.exporters import Exporter, ExportJob, ExportReport, base, exporter_names, register_exporter
from compress.graph.atoms import Atoms, TracedTensor
from compress.graph.rules import registry
from compress.pipeline.export import export_network
from compress.recipe import Budget, Export, ExportFormat, SearchConfig, search_config
from compress.recipe.budget_section import BudgetUnit
from compress.report import charts, page
from compress.report.group_table import GroupColumn
from compress.report.svg import KEPT, chart_section, inline_svg, new_figure
from compress.search import base as search_base
from compress.storage.files import EXPORT_FILES
from helpers.documents import ROOT
from helpers.pages import Document, made_up

TITLES = [
    "Add an operator",
    "Add a compact form",
    "Add a search",
    "Add a budget unit",
    "Add an exporter",
    "Add a report column",
    "Add a chart",
]
EXAMPLES = {"Add a search": "netslim", "Add an exporter": "onnx"}  # in the place of NAME


def section(title: str) -> str:
    """Return the text of a section of CONTRIBUTING.md."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    (found,) = re.findall(rf"(?ms)^## {title}\n(.*?)(?=^## |\Z)", text)
    return str(found)


@pytest.mark.parametrize("title", TITLES)
def test_the_files_that_a_list_names_exist(title: str) -> None:
    text = section(title).replace("NAME", EXAMPLES.get(title, "NAME"))
    paths = re.findall(r"`((?:compress|exporters|tests)/[\w/]+\.py|CHANGELOG\.md)`", text)
    assert len(set(paths)) > 3, "it names the code, the test and the changelog"
    assert not [path for path in paths if not (ROOT / path).is_file()]


@pytest.mark.parametrize("title", TITLES)
def test_the_names_that_a_list_uses_are_in_the_files_that_it_names(title: str) -> None:
    text = section(title).replace("NAME", EXAMPLES.get(title, "NAME"))
    files = [ROOT / path for path in re.findall(r"`((?:compress|exporters)/[\w/]+\.py)`", text)]
    files += [path for file in files for path in file.parent.glob("*.py")]
    sources = "".join(path.read_text(encoding="utf-8") for path in set(files))
    sources += (ROOT / "compress/recipe/search_config.py").read_text() + (ROOT / "exporters/base.py").read_text()
    names = re.findall(r"`@?(?:register_\w+|rule|[A-Z]\w+|new_figure|inline_svg|chart_section)(?=[`(])", text)
    missing = [name for name in names if name.strip("`@") not in sources and name != "`ScoredConfig"]
    assert names and not missing


def test_an_operator_without_a_rule_is_refused_and_with_a_rule_it_is_cut() -> None:
    def squash(model: Any, x: Tensor) -> Tensor:
        return model.last(torch.special.i0e(model.first(x)))  # an operator that has no rule

    def network() -> nn.Module:
        torch.manual_seed(0)
        return Net(squash, first=nn.Linear(5, 8), last=nn.Linear(8, 3)).double().eval()

    x = torch.randn(4, 5, dtype=torch.float64)
    refused = compress.find_groups(network(), x)
    assert [g.name for g in refused] == [] and "special_i0e" in " ".join(r.reason for r in refused.refused)

    with mock.patch.dict(registry.RULES):

        @registry.rule("special_i0e")
        def scaled_bessel(atoms: Atoms, call: registry.OperatorCall) -> TracedTensor:
            return registry.broadcast(atoms, call.tensors(), call.shape)

        groups = compress.find_groups(network(), x)
    assert [g.name for g in groups] == ["first"]
    plan = compress.Plan.build(network(), groups, random_keep(groups, 0.5))
    assert distance(run(plan.zero_(network()), x), run(plan.apply_(network()), x)) < 1e-12


@mock.patch.dict(search_base._REGISTRY)
@mock.patch.dict(search_config._CONFIGS)
def test_a_registered_search_runs_by_its_name() -> None:
    class ToyConfig(SearchConfig):
        """Settings of the toy search."""

        method: Literal["toy"] = "toy"

    @compress.register_search("toy")
    class Toy(compress.Search):
        """The last dimensions of a group are the most important ones."""

        Config = ToyConfig

        def importance(self) -> dict[str, Tensor]:
            return {g.name: torch.arange(g.width, dtype=torch.float64) for g in self.job.groups}

    case = CASES["chain"]
    recipe = {"budget": {"dims": "50%"}, "search": {"method": "toy"}, "timing": {"repeats": 3}}
    pruned = compress.prune(case.make(), recipe, example_inputs=torch.randn(1, *case.shape), quiet=True)
    for group in groups_of("chain"):
        kept = [int(i) for i in pruned.plan.keep[group.name]]
        assert kept == list(range(group.width - len(kept), group.width))


@mock.patch.dict(base._EXPORTERS)
def test_a_registered_exporter_runs_by_its_name(tmp_path: Path) -> None:
    written: list[ExportJob] = []

    @register_exporter("toy")
    class ToyExporter(Exporter):
        """Writes the names of the tensors."""

        file_name, int8_file_name = "model.toy", "model.int8.toy"

        def check_installed(self) -> None:
            """Check nothing."""

        def try_export(self, model: nn.Module, settings: Export, example_inputs: Any) -> None:
            """Try nothing."""

        def export(self, job: ExportJob) -> ExportReport:
            job.path.write_text("\n".join(job.compact.state_dict()))
            written.append(job)
            return None  # type: ignore[return-value]

    settings = Export.model_construct(format="toy")
    task, timing = compress.Classification(), compress.Recipe.load({"budget": {"macs": 0.5}}).timing
    model, path = nn.Linear(2, 2), tmp_path / ToyExporter.file_name
    export_network(ExportJob(model, model, settings, task, torch.zeros(1, 2), compress.Plan({}, {}), {}, timing, path))
    assert path.read_text() == "weight\nbias" and len(written) == 1


def test_recipe_files_and_registry_know_the_same_exporters() -> None:
    assert exporter_names() == sorted(get_args(ExportFormat))
    files = [name for e in map(base.get_exporter, exporter_names()) for name in (e.file_name, e.int8_file_name)]
    assert sorted(files) == sorted(EXPORT_FILES)


def test_recipe_and_table_know_the_same_budget_units() -> None:
    assert set(UNITS) == set(get_args(BudgetUnit)) == set(Budget.model_fields)


def test_a_column_in_the_table_is_on_the_page(monkeypatch: pytest.MonkeyPatch) -> None:
    toy_column = GroupColumn("toy", lambda row: f"{row.width - row.kept} dropped")
    monkeypatch.setattr(page, "GROUP_COLUMNS", (*page.GROUP_COLUMNS, toy_column))
    report = made_up()
    cells = [text for _, text in Document(page.render_page(report)).all("td")]
    assert {f"{row.width - row.kept} dropped" for row in report.groups} <= set(cells)


def test_a_chart_in_the_table_is_on_the_page(monkeypatch: pytest.MonkeyPatch) -> None:
    def toy_chart(report: compress.Report) -> str:
        figure, ax = new_figure(200, 100, 20, 20)
        ax.bar([0, 1], [report.dense.macs, report.pruned.macs], color=KEPT)
        return chart_section("Toy", "MACs before and after.", [inline_svg(figure, "toy", "MACs of the toy chart")])

    monkeypatch.setattr(charts, "CHARTS", (*charts.CHARTS, toy_chart))
    document = Document(page.render_page(made_up()))
    assert "Toy" in [text for _, text in document.all("h2")]
    assert "MACs of the toy chart" in [attributes["aria-label"] for attributes, _ in document.all("svg")]
