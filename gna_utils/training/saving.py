"""Write a trained model as an ordinary folder, and put trained models where ``load`` finds them by name."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from transformers import PreTrainedModel

from ..errors import GnaError
from ..models import load, quiet
from ..runs.project import atomic_write, write_json
from ..stats import Estimate
from ..tasks import world
from ..weights import data_dir, file_sha256
from .evaluation import SIZES, evaluate
from .recipes import recipe

RECORD = "training.json"
_KEPT = (
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
)


def save(model: PreTrainedModel, folder: Path, record: dict) -> None:
    """Save what ``load(folder)`` needs, and ``training.json``; a finished model is measured on all tasks."""
    model.eval()
    with quiet():
        model.save_pretrained(folder)
    world.tokenizer().save_pretrained(folder)
    if record["steps"] == record["planned_steps"]:
        record = {**record, "accuracies": _rows(evaluate(load(folder)))}
    write_json(folder / RECORD, record)


def ship(name: str, runs: Sequence[str | Path], *, seed: int = 0, home: Path | None = None) -> Path:
    """Put the run of one seed into ``data/models/NAME``, with the records of all runs beside it.

    >>> ship("tiny-mamba2", sorted(Path("_build/training").glob("tiny-mamba2-*")))

    The model that is shipped is that of ``seed`` at the recipe's rate; other seeds and rates are recorded, so
    that readers see how much a run differs from another. Renews the hashes in ``data/models/manifest.json``.
    Raises :class:`~gna_utils.errors.GnaError` when the run of that seed is missing or not finished.
    """
    made, home = recipe(name), home or data_dir() / "models"
    # a run that is still going on has no record yet
    found = [Path(run) / RECORD for run in runs]
    records = {file.parent: json.loads(file.read_text(encoding="utf-8")) for file in found if file.is_file()}
    wanted = (name, seed, made.rate)
    chosen = [run for run, r in records.items() if (r["name"], r["seed"], r["rate"]) == wanted]
    if not chosen or "accuracies" not in records[chosen[0]]:
        raise GnaError(
            f"no finished run of '{name}' with seed {seed} and rate {made.rate:g} is among those given."
        )
    folder = home / name
    folder.mkdir(parents=True, exist_ok=True)
    for file in _KEPT:
        shutil.copyfile(chosen[0] / file, folder / file)
    main = records[chosen[0]]
    others = [r for run, r in records.items() if run != chosen[0]]
    for other in others:
        other.pop("first_losses", None)
    others.sort(key=lambda r: (r["rate"] != made.rate, r["rate"], r["seed"]))
    write_json(folder / RECORD, {**main, "other_runs": others})
    card = {"what": made.what, "licence": "MIT", "chapters": "02-11"}
    write_json(folder / "card.json", card)
    with atomic_write(folder / "README.md") as path:
        path.write_text(_model_card(name, main, others), encoding="utf-8")
    _renew_hashes(home)
    return folder


def _renew_hashes(home: Path) -> None:
    files = sorted(path for path in home.glob("*/*") if path.is_file())
    write_json(home / "manifest.json", {str(f.relative_to(home).as_posix()): file_sha256(f) for f in files})


def _rows(found: dict[str, dict[int, Estimate]]) -> list[dict]:
    rows = []
    for task, sizes in found.items():
        for size, estimate in sorted(sizes.items()):
            usual = size == SIZES[task][0]
            rows.append({"task": task, "size": size, "usual": usual, **asdict(estimate)})
    return rows


def _model_card(name: str, main: dict, others: list[dict]) -> str:
    lines = [
        f"# {name}",
        "",
        f"{main['what'][0].upper()}{main['what'][1:]}. {main['parameters']:,} parameters, MIT licence.",
        "",
        "It knows the invented words and facts of the small world of this book and nothing else: a model to",
        f'take apart, not to use. Load it with `gna_utils.load("{name}")`.',
        "",
        f"Trained with `gna train {name} --seed {main['seed']}`: {main['steps']} steps, "
        f"{main['seconds'] / 60:.0f} minutes on one core, highest learning rate {main['rate']:g}.",
        "",
        "Accuracy on held-out examples (95 % interval):",
        "",
        "| task | size | accuracy | n | chance |",
        "|---|---|---|---|---|",
        *(_accuracy_line(row) for row in main["accuracies"]),
    ]
    if others:
        lines += [
            "",
            "The other runs that were made (`training.json` has their curves):",
            "",
            "| seed | rate | steps | key-value, 8 pairs | letter form | cloze |",
            "|---|---|---|---|---|---|",
            *(_run_line(run) for run in others),
        ]
    return "\n".join(lines) + "\n"


def _accuracy_line(row: dict) -> str:
    value = f"{row['value']:.3f} [{row['low']:.3f}, {row['high']:.3f}]"
    return f"| {row['task']} | {row['size']} | {value} | {row['n']} | {row['chance']:.3f} |"


def _run_line(run: dict) -> str:
    last = run["curve"][-1]["accuracy"]
    shown = " | ".join(f"{last[task]:.2f}" for task in ("key_value", "letter", "cloze"))
    return f"| {run['seed']} | {run['rate']:g} | {run['steps']} | {shown} |"
