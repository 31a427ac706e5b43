import multiprocessing

import pytest
import torch

from retrain.functional.seeds import digest_of
from retrain.system.files import SUMS
from retrain.training.tensor_cache import cache_root, cached
from tests.waiting import until

FACTS = {"model": "tiny", "steps": 3}
TENSORS = {"b": torch.arange(6.0).view(2, 3), "a": torch.tensor([1.5], dtype=torch.bfloat16)}


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("RETRAIN_CACHE", str(tmp_path / "cache"))


def entry():
    return cache_root() / "warmup" / digest_of(FACTS)[:32]


def refuse():
    raise AssertionError("the entry should have come from the cache")


def same(left, right):
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def test_second_call_reads_what_the_first_built():
    built, hit = cached("warmup", FACTS, lambda: TENSORS)
    assert not hit
    assert same(built, TENSORS)
    found, hit = cached("warmup", dict(reversed(FACTS.items())), refuse)
    assert hit
    assert same(found, TENSORS)
    assert found["a"].dtype is torch.bfloat16


def test_other_facts_are_another_entry():
    cached("warmup", FACTS, lambda: TENSORS)
    assert not cached("warmup", FACTS | {"steps": 4}, lambda: TENSORS)[1]


def flip(path):
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(bytes(data))


@pytest.mark.parametrize(
    "damage",
    [
        lambda e: flip(e / "tensors.safetensors"),
        lambda e: (e / "tensors.safetensors").write_bytes(b""),
        lambda e: (e / "tensors.safetensors").unlink(),
        lambda e: (e / "facts.json").write_text("[]"),
        lambda e: (e / SUMS).write_text("{"),
        lambda e: (e / SUMS).unlink(),
    ],
)
def test_damaged_entry_is_built_again(damage):
    cached("warmup", FACTS, lambda: TENSORS)
    damage(entry())
    again, hit = cached("warmup", FACTS, lambda: TENSORS)
    assert not hit
    assert same(again, TENSORS)
    assert cached("warmup", FACTS, refuse)[1]


def test_failed_build_leaves_no_entry():
    with pytest.raises(ZeroDivisionError, match="division by zero"):
        cached("warmup", FACTS, lambda: 1 / 0)
    assert not entry().exists()
    assert not cached("warmup", FACTS, lambda: TENSORS)[1]


def test_unwritable_cache_still_gives_the_tensors(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("RETRAIN_CACHE", str(tmp_path / "file"))
    built, hit = cached("warmup", FACTS, lambda: TENSORS)
    assert not hit
    assert same(built, TENSORS)


def build_until_another_waits(log):
    waiting = log.with_suffix(".waiting")

    def build():
        with log.open("a") as file:
            file.write("built\n")
        until(waiting.exists)
        return TENSORS

    cached("warmup", FACTS, build, waiting=lambda: waiting.write_text(""))


def test_concurrent_processes_build_once(tmp_path):
    log = tmp_path / "log"
    context = multiprocessing.get_context("fork")
    workers = [context.Process(target=build_until_another_waits, args=(log,)) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert [worker.exitcode for worker in workers] == [0] * 4
    assert log.read_text() == "built\n"
    assert log.with_suffix(".waiting").exists()
