"""The reference page is that of the schema."""

from __future__ import annotations

from pathlib import Path


def test_the_reference_in_the_documents_is_that_of_the_schema() -> None:
    from compress.recipe.reference import reference_page

    written = Path(__file__).parents[2] / "docs" / "recipe.md"
    assert written.read_text() == reference_page(), "python -m compress.recipe.reference > docs/recipe.md"
