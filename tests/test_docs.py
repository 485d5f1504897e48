"""The code that readers copy from the pages must run as it stands."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGES = ("README.md", "book/api.md")


def blocks(page: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", (ROOT / page).read_text(), flags=re.M | re.S)


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES)
def test_python_blocks_run_in_order(page):
    # 8 prompts tell as much about whether the code runs as 100 do
    code = [re.sub(r"key_value\(100, 10", "key_value(8, 5", block) for block in blocks(page)]
    assert len(code) >= 2
    scope: dict = {}
    for number, block in enumerate(code):
        exec(compile(block, f"{page}, block {number}", "exec"), scope)


def test_every_command_of_the_readme_exists():
    makefile = (ROOT / "Makefile").read_text()
    for target in set(re.findall(r"make ([a-z-]+)", (ROOT / "README.md").read_text())):
        assert re.search(rf"^{target}:", makefile, flags=re.M), f"make {target}"
