"""Write a trained model as an ordinary folder: weights, configuration, tokenizer, record."""

from __future__ import annotations

from pathlib import Path

from transformers import PreTrainedModel

from ..runs.project import write_json
from ..tasks import world


def save(model: PreTrainedModel, folder: Path, record: dict) -> None:
    """Save what ``load(folder)`` needs, and ``training.json``."""
    model.eval()
    model.save_pretrained(folder)
    world.tokenizer().save_pretrained(folder)
    write_json(folder / "training.json", record)
