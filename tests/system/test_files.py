"""Files that appear whole, and who may read them."""

import os
import stat
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from retrain.errors import StorageError
from retrain.system.files import SUMS, check_sums, open_plain, published, staged


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture(params=[0o022, 0o027, 0o077])
def umask(request):
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def test_files_have_the_permissions_of_the_umask_whoever_writes_them(tmp_path, umask):
    tensors = {"w": torch.zeros(2)}
    with staged(tmp_path / "model.safetensors", durable=False) as stage:
        save_file(tensors, stage)
    with published(tmp_path / "model") as stage:
        (stage / "inner").mkdir()
        save_file(tensors, stage / "inner" / "model.safetensors")
        (stage / "config.json").write_text("{}")
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {path.name: mode(path) for path in files} == {path.name: 0o666 & ~umask for path in files}
    assert len(files) == 4


def test_more_permissions_stay_as_they_were_written(tmp_path):
    with staged(tmp_path / "tool", durable=False) as stage:
        stage.write_text("#!/bin/sh")
        stage.chmod(0o755)
    assert mode(tmp_path / "tool") == 0o755


@pytest.mark.parametrize("name", ["/dev/zero", "../outside", "pipe", "gone", ""])
def test_hashes_are_those_of_files_in_the_folder(tmp_path, name):
    folder = tmp_path / "model"
    folder.mkdir()
    (tmp_path / "outside").write_text("x")
    os.mkfifo(folder / "pipe")
    (folder / SUMS).write_text(f"{0:064x}  {name}\n")
    with pytest.raises(StorageError, match="is not a file in this folder"):
        check_sums(folder, "download it again")


def test_a_file_beside_a_replaced_one_stays_whatever_its_name(tmp_path):
    (tmp_path / "results.csv.old").write_text("mine")
    with staged(tmp_path / "results.csv") as stage:
        stage.write_text("new")
    assert (tmp_path / "results.csv.old").read_text() == "mine"


@pytest.mark.parametrize("name", ["notes.md", "adapter/notes.txt", "other/weights"])
def test_publishing_again_keeps_what_others_put_there(tmp_path, name):
    folder = tmp_path / "model"
    for version in ("first", "second"):
        with published(folder) as stage:
            (stage / "adapter").mkdir()
            (stage / "adapter" / "weights").write_text(version)
            (stage / "README.md").write_text(version)
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("mine")
    assert {path.name: path.read_text() for path in (folder / name, folder / "README.md")} == {
        Path(name).name: "mine",
        "README.md": "second",
    }
    assert (folder / "adapter" / "weights").read_text() == "second"
    check_sums(folder, "publish it again")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_opening_a_folder_leaves_no_descriptor_open(tmp_path):
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError, match="not a regular file"):
        open_plain(tmp_path)
    assert len(os.listdir("/proc/self/fd")) == before
