"""Tasks: prompts with marked segments and candidate answers, and how they become token ids."""

from .encoding import Batch, Encoded, batches, encode, encode_texts
from .example import Example, Segment
from .key_value import key_value
from .mqar import Recall, mqar
from .scenes import small_world, tasks

__all__ = [
    "Batch",
    "Encoded",
    "Example",
    "Recall",
    "Segment",
    "batches",
    "encode",
    "encode_texts",
    "key_value",
    "mqar",
    "small_world",
    "tasks",
]
