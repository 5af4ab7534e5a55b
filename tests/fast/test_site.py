"""What the site changes in the pages of docs/."""

from __future__ import annotations

from tools.site import ROW, plain_pipes


def test_code_in_a_table_has_no_backslash_before_a_pipe() -> None:
    page = "| `Et*3\\|(t*4\\|)*6` | `a\\|b` or c\\|d |\n\n`outside\\|`\n"
    assert ROW.sub(plain_pipes, page) == "| `Et*3|(t*4|)*6` | `a|b` or c\\|d |\n\n`outside\\|`\n"
