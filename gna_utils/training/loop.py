"""Train a tiny model: seeded, resumable, with held-out accuracies along the way."""

from __future__ import annotations

import hashlib
import json
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm.auto import tqdm

from ..errors import GnaError
from ..fast_scans import fast_scans
from ..models import load
from ..runs.project import atomic_write
from ..tasks import world
from ..tasks.encoding import whole
from .curriculum import LESSONS, Batch, Curriculum
from .distillation import answers, layer_loss, start_student
from .evaluation import held_out
from .recipes import Recipe, build, recipe
from .saving import save

EVERY = 250  # steps between two points of the curve
CLIP = 1.0
WEIGHT_DECAY = 0.01


@dataclass
class Progress:
    """What a run knows of itself: where it is, how long it took, all its losses, the points of its curve."""

    step: int = 0
    seconds: float = 0.0
    losses: list[float] = field(default_factory=list)
    curve: list[dict] = field(default_factory=list)


def train(
    name: str,
    *,
    seed: int = 0,
    rate: float | None = None,
    steps: int | None = None,
    out: str | Path | None = None,
    again: bool = False,
) -> Path:
    """Train one of the tiny models and save it as an ordinary model folder; returns the folder.

    >>> folder = train("tiny-mamba2", steps=50)
    >>> model = load(folder)

    Documents, their order and the first weights depend on ``seed`` alone. ``rate`` is the highest learning
    rate (default: that of the recipe). ``steps`` ends the run earlier than the recipe; the learning
    rate of a step stays what it is in the full run. A run that was stopped goes on from its last checkpoint
    (at most 250 steps back) and ends with the same weights as a run in one go, bit for bit on the same
    machine with the same number of threads; ``again`` starts anew.

    Raises :class:`~gna_utils.errors.GnaError` on an unknown name, on settings that cannot be, and on a
    checkpoint that is damaged, of other settings or further on.
    """
    made = recipe(name)
    rate = made.rate if rate is None else rate
    if not isinstance(rate, float) or not 0 < rate < 1:
        raise GnaError(f"a learning rate of {rate!r} is not possible: give a number between 0 and 1.")
    steps = made.steps if steps is None else whole("steps", steps, 1)
    if steps > made.steps:
        raise GnaError(f"{steps} steps of '{name}' were asked for: its recipe has {made.steps}.")
    out = Path(out) if out else Path("_build/training") / f"{name}-seed{seed}-rate{rate:g}"
    run = _RUNS[made.objective](name, made, whole("seed", seed, 0), rate, out)
    if not again:
        run.resume()
    if run.progress.step > steps:
        raise GnaError(
            f"'{out}' is at step {run.progress.step} already: ask for at least as many steps, or start anew "
            "with --again."
        )
    with fast_scans():
        run.go(steps)
    save(run.model, out, run.record())
    return out


class Run:
    """One model in training; it learns the answers of the documents."""

    def __init__(self, name: str, made: Recipe, seed: int, rate: float, out: Path) -> None:
        self.name, self.made, self.seed, self.rate, self.out = name, made, seed, rate, out
        self.model = build(name, seed)
        self.curriculum, self.progress = Curriculum(), Progress()
        self.right: dict[str, list[bool]] = {}  # the answers of this step, by task
        matrices = [p for p in self.model.parameters() if p.ndim > 1]
        vectors = [p for p in self.model.parameters() if p.ndim <= 1]
        groups = [
            {"params": matrices, "weight_decay": WEIGHT_DECAY},
            {"params": vectors, "weight_decay": 0.0},  # norms, biases, decays and skips keep their scale
        ]
        self.optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.98))

    def loss(self, batch: Batch) -> Tensor:
        """What a step makes smaller: the mean over the documents of a part."""
        logits, wanted = answers(self.model, batch)
        for row, right in zip(batch.row.tolist(), (logits.argmax(-1) == wanted).tolist()):
            self.right.setdefault(batch.tasks[row], []).append(right)
        # a mean for each document first, or tasks with many questions to a document would drown the others
        each = F.cross_entropy(logits, wanted, reduction="none")
        return (each / batch.row.bincount()[batch.row]).sum() / len(batch.tasks)

    def go(self, steps: int) -> None:
        """Train up to ``steps``, a checkpoint and a point of the curve every 250 steps and at the end."""
        self.model.train()
        start = time.perf_counter() - self.progress.seconds
        with tqdm(
            total=steps, initial=self.progress.step, desc=self.name, mininterval=1, miniters=10, disable=None
        ) as bar:
            while self.progress.step < steps:
                self.progress.losses.append(round(self.step(), 5))
                self.progress.step += 1
                bar.update()
                if self.progress.step % EVERY == 0 or self.progress.step == steps:
                    self.progress.seconds = time.perf_counter() - start
                    self.point()
                    self.checkpoint()
                    bar.set_postfix_str(self.summary())

    def step(self) -> float:
        """One step: draw documents, compare the answers, follow the gradient; returns the loss."""
        step = self.progress.step
        for group in self.optimizer.param_groups:
            group["lr"] = self.rate * share_of_rate(step, self.made)
        self.optimizer.zero_grad(set_to_none=True)
        total, self.right = 0.0, {}
        for part in self.curriculum.draw(step, self.seed, self.made.batch, self.made.length):
            loss = self.loss(part) * (len(part.tasks) / self.made.batch)
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
        self.optimizer.step()
        self.curriculum.note(step, self.right)
        return total

    def point(self) -> None:
        """Add the held-out accuracies of this moment to the curve."""
        recent = self.progress.losses[-EVERY:]
        self.progress.curve.append(
            {
                "step": self.progress.step,
                "seconds": round(self.progress.seconds),
                "loss": round(sum(recent) / len(recent), 4),
                "sizes": dict(self.curriculum.sizes),
                "accuracy": held_out(self.model, n=100, seed=1_000_000, short=True),
            }
        )
        self.model.train()

    def summary(self) -> str:
        last = self.progress.curve[-1]
        return ", ".join([f"loss {last['loss']:.3f}", *(f"{k} {v:.2f}" for k, v in last["accuracy"].items())])

    def record(self) -> dict:
        """Everything that ``training.json`` says about this run."""
        p = self.progress
        return {
            "name": self.name,
            "what": self.made.what,
            "seed": self.seed,
            "rate": self.rate,
            "steps": p.step,
            "planned_steps": self.made.steps,
            "seconds": round(p.seconds),
            "parameters": sum(parameter.numel() for parameter in self.model.parameters()),
            "first_losses": p.losses[:50],
            "curve": p.curve,
        }

    @property
    def _file(self) -> Path:
        return self.out / "checkpoint.pt"

    def checkpoint(self) -> None:
        state = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "curriculum": self.curriculum.state(),
            "progress": asdict(self.progress),
            "settings": self._settings(),
        }
        with atomic_write(self._file) as path:
            torch.save(state, path)

    def resume(self) -> None:
        """Go on from the last checkpoint, if there is one; one of other settings is refused."""
        if not self._file.is_file():
            return
        try:
            state = torch.load(self._file, weights_only=True)
            before = state["settings"]
        except Exception as error:  # torch raises errors of many kinds for a file that is cut off
            raise GnaError(f"'{self._file}' is damaged: start anew with --again.") from error
        other = [key for key, value in self._settings().items() if before.get(key) != value]
        if other:
            raise GnaError(
                f"'{self.out}' holds a run with another {', '.join(other)}: give another folder, or start "
                "anew with --again."
            )
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.curriculum, self.progress = Curriculum(**state["curriculum"]), Progress(**state["progress"])
        # where the run was stopped lies a point that a run in one go does not have
        self.progress.curve = [p for p in self.progress.curve if p["step"] % EVERY == 0]

    def _settings(self) -> dict[str, object]:
        """What must be the same for a run to go on, as text and numbers."""
        words = json.dumps(world.vocabulary()).encode()
        return {
            "name": self.name,
            "seed": self.seed,
            "rate": self.rate,
            "recipe": repr(self.made),
            "curriculum": repr(LESSONS),
            "vocabulary": hashlib.sha256(words).hexdigest(),
        }


def share_of_rate(step: int, made: Recipe) -> float:
    """Rise over the warm-up, stay, and fall over the last quarter to a twentieth."""
    if step < made.warm_up:
        return (step + 1) / made.warm_up
    fall = made.steps // 4
    return max(0.05, min(1.0, (made.steps - step) / fall))


class LayerRun(Run):
    """A student whose layers learn, each on its own, what the teacher's layers do."""

    def __init__(self, *settings) -> None:
        super().__init__(*settings)
        self.teacher = load(self.made.teacher, device="cpu")._module
        start_student(self.model, self.teacher)
        self.curriculum = Curriculum.finished()

    def loss(self, batch: Batch) -> Tensor:
        return layer_loss(self.model, self.teacher, batch)


class LogitRun(Run):
    """A student that learns the teacher's answers, all layers together."""

    def __init__(self, *settings) -> None:
        super().__init__(*settings)
        self.teacher = load(self.made.teacher, device="cpu")._module
        self.model.load_state_dict(load(self.made.start, device="cpu")._module.state_dict())
        self.curriculum = Curriculum.finished()

    def loss(self, batch: Batch) -> Tensor:
        with torch.no_grad():
            taught, _ = answers(self.teacher, batch)
        return F.cross_entropy(answers(self.model, batch)[0], taught.softmax(-1))


_RUNS = {"answers": Run, "layers": LayerRun, "logits": LogitRun}
