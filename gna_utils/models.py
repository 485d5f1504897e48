"""Load a model by name and wrap it for nnsight; say what was loaded."""

from __future__ import annotations

import hashlib
import logging
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from os import PathLike
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
import transformers
from huggingface_hub import HfApi, snapshot_download, try_to_load_from_cache
from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError
from nnsight.modeling.transformers import TransformersModel
from safetensors import SafetensorError
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from .catalogue import ModelCard, Source, find, registry
from .errors import GnaError
from .remote import check, ship_package
from .weights import file_sha256

__all__ = ["ModelCard", "ModelInfo", "info", "load", "loaded", "registry"]

log = logging.getLogger(__name__)

_DTYPES = ("float32", "bfloat16", "float16")
# Options that must reach the configuration and the tokenizer too, or these would come from elsewhere.
_SHARED = ("revision", "trust_remote_code", "token", "cache_dir", "local_files_only")
_FAILURES = (OSError, ValueError, TypeError, KeyError, ImportError, RuntimeError, SafetensorError)


@dataclass(frozen=True)
class ModelInfo:
    """What a model is: ``source`` is a folder or hub id, ``seconds`` what :func:`load` took, None without it.

    ``sha256`` is the hash of the weights file as downloaded; of several files, that of their list of hashes.
    """

    name: str
    source: str
    device: str
    dtype: str
    n_parameters: int
    sha256: str | None
    seconds: float | None


_loaded: WeakKeyDictionary[torch.nn.Module, tuple[Source, float]] = WeakKeyDictionary()
# Every load of this process, also of models that are gone: (facts without the hash, source, revision).
_history: list[tuple[ModelInfo, Source, str | None]] = []


def load(
    name: str | PathLike[str],
    *,
    device: str = "auto",
    dtype: str = "float32",
    tokenizer: Any = None,
    remote: bool | str = False,
    **options: Any,
) -> TransformersModel:
    """Load a causal language model by name, ready for every function of this package.

    >>> model = load("smollm2-135m")                            # a registered name, see registry()
    >>> model = load("org/name", dtype="bfloat16")              # a hub id
    >>> model = load("my/folder", attn_implementation="eager")  # a local folder, an option of transformers
    >>> with model.trace("Hello"):                              # it is an nnsight model
    ...     logits = model.output.logits.save()

    `device` "auto" takes cuda, then mps, then cpu. `dtype` is float32 unless you say "bfloat16" or "float16";
    "auto" times both on the device and logs its choice; the checkpoint's own type is never taken silently.
    `tokenizer` is a tokenizer, or a name to load one from; by default it comes with the model. With `remote`
    True or an address, only the structure is built here (on the device "meta"): the weights stay on the
    server, which knows the model by the same hub id or the same folder. `options` go to ``from_pretrained``
    (``revision``, ``attn_implementation``, ``quantization_config``, ``device_map``, ...). The model is in
    eval mode and no parameter requires a gradient.

    Raises :class:`GnaError` for an unknown name, device or dtype, a folder without a model, damaged or
    incomplete weights, and a hub that cannot be reached.
    """
    start = time.perf_counter()
    if dtype not in (*_DTYPES, "auto"):
        raise GnaError(f"unknown dtype '{dtype}': choose one of {', '.join(_DTYPES)}, or auto.")
    check(remote)
    away = remote not in (False, "local")
    where = torch.device("meta") if away else _device(device)
    source = find(name)
    shared = {key: options[key] for key in _SHARED if key in options}
    if not source.is_folder:
        shared |= _reach_hub(source.place, shared)
    with quiet(), _explained(source):
        config, _ = PretrainedConfig.get_config_dict(source.place, **shared)
        if not isinstance(config, dict):
            raise GnaError(
                f"the config.json of '{source.place}' is a {type(config).__name__}: "
                "it must hold names with values."
            )
        auto = _model_class(config)
        words = _tokenizer(tokenizer or source.tokenizer, source, shared)
        if away:
            ship_package()
            model = TransformersModel(
                source.place, task="text-generation", tokenizer=words, dtype="float32", **options
            )
            model._module.eval().requires_grad_(False)
        else:
            kind = faster_dtype(where) if dtype == "auto" else getattr(torch, dtype)
            module = _module(auto, source, where, kind, {**options, **shared})
            # Without a device, the pipeline inside would move the model to an accelerator it finds.
            placed = {} if hasattr(module, "hf_device_map") else {"device": module.device}
            model = TransformersModel(module, tokenizer=words, **placed)
    seconds = time.perf_counter() - start
    _loaded[model._module] = source, seconds
    _history.append((_facts(model._module, source, seconds), source, _revision(model._module)))
    log.info("loaded %s in %.1f s", name, seconds)
    return model


def info(model: TransformersModel) -> ModelInfo:
    """Say what a model is: name, source, device, dtype, parameters, hash of the weights, time to load.

    >>> info(load("smollm2-135m")).n_parameters
    134515008

    Works for any nnsight ``TransformersModel``; what cannot be known of a model that was not loaded by
    :func:`load` is None. Tied parameters count once.
    """
    module = model._module
    place = getattr(model, "repo_id", None) or type(module).__name__
    source, seconds = _loaded.get(module, (None, None))
    if source is None:
        source = Source(place, place, is_folder=Path(place).is_dir())
    return _hashed(_facts(module, source, seconds), source, _revision(module))


def name_of(model: TransformersModel) -> str:
    """The name in :func:`info`, without the hash of the weights, which takes a while."""
    module = model._module
    source, _ = _loaded.get(module, (None, None))
    return source.name if source else getattr(model, "repo_id", None) or type(module).__name__


def loaded() -> list[ModelInfo]:
    """Every model that :func:`load` made in this process, oldest first; for the record of a run."""
    return [_hashed(*entry) for entry in _history]


def _facts(module: torch.nn.Module, source: Source, seconds: float | None) -> ModelInfo:
    parameters = list(module.parameters())
    floating = [p.dtype for p in parameters if p.is_floating_point()]
    return ModelInfo(
        name=source.name,
        source=source.place,
        device=", ".join(sorted({str(p.device) for p in parameters})),
        dtype=str(floating[0] if floating else parameters[0].dtype).removeprefix("torch."),
        n_parameters=sum(p.numel() for p in parameters),
        sha256=source.sha256,
        seconds=seconds,
    )


def _hashed(facts: ModelInfo, source: Source, revision: str | None) -> ModelInfo:
    """With the hash of the weights, which is only read when asked for: large files take a while."""
    return replace(facts, sha256=facts.sha256 or _weights_sha256(source, revision))


def _revision(module: torch.nn.Module) -> str | None:
    return getattr(module.config, "_commit_hash", None)


def _module(
    auto: type, source: Source, device: torch.device, dtype: torch.dtype, options: dict
) -> PreTrainedModel:
    if "quantization_config" in options:
        options.setdefault("device_map", {"": device})
    module, found = auto.from_pretrained(source.place, dtype=dtype, output_loading_info=True, **options)
    missing = sorted(found["missing_keys"])
    if missing:
        # transformers fills them with random numbers and only warns.
        raise GnaError(
            f"the weights in '{source.place}' are incomplete: {len(missing)} tensors of the model are "
            f"missing, the first is {missing[0]}."
        )
    if "device_map" not in options:
        module.to(device)
    return module.eval().requires_grad_(False)


def _model_class(config: dict) -> type:
    # Official Llamba checkpoints may lack the model type; their layout gives them away.
    if config.get("model_type") == "llamba" or ("model_type" not in config and "ssm_cfg" in config):
        from .llamba import LlambaForCausalLM

        return LlambaForCausalLM
    return AutoModelForCausalLM


def _tokenizer(given: Any, source: Source, shared: dict) -> Any:
    """The tokenizer itself; it always has a padding token if any ordinary one can serve."""
    if given is None or isinstance(given, str | PathLike):
        place = given or source.place
        try:
            given = AutoTokenizer.from_pretrained(place, **shared)
        except (ValueError, OSError, KeyError) as error:
            _raise_if_gated(error, place)
            where = "" if place == source.name else f" from '{place}'"
            raise GnaError(
                f"no tokenizer for '{source.name}' could be loaded{where}: "
                "pass tokenizer=..., a tokenizer or the name of one."
            ) from error
    if not isinstance(given, PreTrainedTokenizerBase):
        raise GnaError(f"tokenizer={given!r} is no tokenizer: give one of transformers, or the name of one.")
    if given.pad_token is None:
        # An existing token: a new one would have an id that the model has no row for.
        given.pad_token = given.eos_token or given.unk_token or given.bos_token
    return given


def _device(asked: str) -> torch.device:
    possible = [kind for kind in ("cuda", "mps") if getattr(torch.backends, kind).is_built()]
    possible = [kind for kind in possible if getattr(torch, kind).is_available()]
    if asked == "auto":
        return torch.device((possible or ["cpu"])[0])
    try:
        device = torch.device(asked)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError):
        device = None
    if device is None or device.type == "meta":
        raise GnaError(
            f"device '{asked}' is not available here: choose one of {', '.join(['auto', 'cpu', *possible])}."
        )
    return device


@cache
def faster_dtype(device: torch.device) -> torch.dtype:
    """bfloat16 where it is clearly faster than float32 for a matrix product of a small model's size."""
    seconds = {kind: _matmul_seconds(kind, device) for kind in (torch.float32, torch.bfloat16)}
    ratio = seconds[torch.float32] / seconds[torch.bfloat16]
    chosen = torch.bfloat16 if ratio > 1.25 else torch.float32
    log.warning("dtype auto: %s on %s (bfloat16 is %.2g times as fast as float32)", chosen, device, ratio)
    return chosen


def _matmul_seconds(dtype: torch.dtype, device: torch.device) -> float:
    # Some processors need a hundred times longer in bfloat16, so the product is small where it may be slow.
    rows, width = (64, 512) if device.type == "cpu" else (2048, 2048)
    a, b = (torch.ones(n, width, dtype=dtype, device=device) for n in (rows, width))
    times = []
    for _ in range(4):
        start = time.perf_counter()
        (a @ b)[0, 0].item()  # reading a number waits for the device
        times.append(time.perf_counter() - start)
    return min(times[1:])


def _reach_hub(hub_id: str, shared: dict) -> dict:
    """Ask the hub once whether the model exists: loading would retry for half a minute without a network."""
    if shared.get("local_files_only"):
        return {}
    try:
        HfApi().model_info(hub_id, revision=shared.get("revision"), token=shared.get("token"), timeout=10)
        return {}
    except RepositoryNotFoundError:
        raise GnaError(
            f"the hub has no model '{hub_id}', or it is private: check the spelling, or log in with "
            "'hf auth login'."
        ) from None
    except Exception as error:  # the hub's client lets the errors of several network libraries through
        reason = _first_line(error)
    if isinstance(try_to_load_from_cache(hub_id, "config.json", revision=shared.get("revision")), str):
        log.info("the hub cannot be reached (%s); '%s' is taken from its local cache", reason, hub_id)
        return {"local_files_only": True}
    raise GnaError(
        f"the hub model '{hub_id}' is not on this machine and the hub cannot be reached ({reason}): "
        "connect to the internet, or give a local folder."
    )


@contextmanager
def _explained(source: Source) -> Iterator[None]:
    """Turn the long reports of transformers into one sentence; the report stays attached as the cause."""
    try:
        yield
    except GnaError:
        raise
    except _FAILURES as error:
        _raise_if_gated(error, source.place)
        if isinstance(error, SafetensorError):
            message = f"the weights in '{source.place}' are damaged ({_first_line(error)}): get them again."
        elif "ignore_mismatched_sizes" in str(error):
            message = f"the weights in '{source.place}' do not fit its config.json: their shapes differ."
        else:
            name = "the model" if source.name == source.place else f"'{source.name}'"
            message = f"{name} cannot be loaded from '{source.place}': {_first_line(error)}"
        raise GnaError(message) from error


def _raise_if_gated(error: BaseException | None, place: str) -> None:
    while error is not None:
        if isinstance(error, GatedRepoError):
            raise GnaError(
                f"'{place}' is gated on the hub: accept its licence on https://huggingface.co/{place} "
                "and log in with 'hf auth login'."
            ) from None
        error = error.__cause__ or error.__context__


@contextmanager
def quiet() -> Iterator[None]:
    """Progress bars of transformers only on a terminal: in a log each step would be a line."""
    bars = transformers.utils.logging
    hide = bars.is_progress_bar_enabled() and not sys.stderr.isatty()
    if hide:
        bars.disable_progress_bar()
    try:
        yield
    finally:
        if hide:
            bars.enable_progress_bar()


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _weights_sha256(source: Source, revision: str | None) -> str | None:
    if source.is_folder:
        folder = Path(source.place)
    else:
        try:
            folder = Path(snapshot_download(source.place, revision=revision, local_files_only=True))
        except Exception:  # not in the hub's cache, or not a hub id at all
            return None
    files = sorted([*folder.glob("*.safetensors")] or [*folder.glob("pytorch_model*.bin")])
    if not files:
        return None
    hashes = [_hash_of(file, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    if len(files) == 1:
        return hashes[0]
    listing = "".join(f"{sha}  {file.name}\n" for sha, file in zip(hashes, files))
    return hashlib.sha256(listing.encode()).hexdigest()


@cache
def _hash_of(file: Path, size: int, time_ns: int) -> str:
    """sha256 of a weights file; the hub's cache names large files by it, so that those need not be read."""
    target = file.resolve()
    if target.parent.name == "blobs" and len(target.name) == 64:
        return target.name
    return file_sha256(file)
