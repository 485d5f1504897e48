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


def test_messages_on_the_troubleshooting_page_are_messages_of_the_package():
    """Readers look for the words they see; each quoted message must stand in the code, piece by piece."""
    sources = "".join(path.read_text() for path in (ROOT / "gna_utils").rglob("*.py"))
    sources = re.sub(
        r'"\s*\n\s*f?"', "", sources + (ROOT / "Makefile").read_text()
    )  # join literals over lines
    quoted = re.findall(r"^\*\*`([^`]*)`", (ROOT / "book" / "troubleshooting.md").read_text(), flags=re.M)
    assert len(quoted) >= 8
    for message in quoted:
        if message.startswith("output_attentions"):
            continue  # an argument of transformers, not a message of ours
        for piece in re.split(r"\.\.\.|'", message):
            piece = piece.strip(" .")
            assert piece in sources, f"'{piece}' of '{message}' is said nowhere"
