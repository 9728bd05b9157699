"""The reference page is that of the schema."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

from compress.recipe import search_config


def test_the_reference_in_the_documents_is_that_of_the_schema() -> None:
    from compress.recipe.reference import reference_page

    written = Path(__file__).parents[2] / "docs" / "recipe.md"
    assert written.read_text() == reference_page(), "python -m compress.recipe.reference > docs/recipe.md"


@mock.patch.dict(search_config._CONFIGS)
def test_the_reference_leaves_out_searches_of_users() -> None:
    from compress.recipe.reference import reference_page

    class UsersConfig(search_config.SearchConfig):
        """Settings of a user's own search."""

    before = reference_page()
    search_config.register_config("users_own", UsersConfig)
    assert reference_page() == before
