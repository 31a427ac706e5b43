"""One process and two ranks train alike: gradients, weights, tables and metrics of every way to update."""

import os
import subprocess

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.fsdp import FSDPModule
from transformers import Qwen3Config, Qwen3ForCausalLM

from retrain.errors import EngineError
from retrain.protocols import ALONE
from retrain.training.distributed.ranks import RENDEZVOUS, join
from retrain.training.model.builtin_model import build_tokenizer
from retrain.training.model.forward import deal, micro_batches
from retrain.training.model.loading import load_model
from tests.forks import PYTHON
from tests.training import rank_cases
from tests.training.rank_cases import TABLE, train
from tests.training.small_models import make_model

pytest_plugins = ["tests.training.rank_pair"]
FLOAT32 = [name for name in TABLE if "bf16" not in name]
SHORT = ("plain", "uneven rows", "fewer live rows than ranks", "LoRA", "prime")
"""What every run of the tests goes through on two ranks; `make test-ranks` goes through all."""
ALL = [pytest.param(name, marks=() if name in SHORT else pytest.mark.ranks) for name in FLOAT32]
MUON = {"weight": 3e-5, "metric": 1e-3}
"""Newton and Schulz's iteration multiplies in bfloat16: an update of 1e-4 differs by a few hundredths."""
BFLOAT16 = [name for name in TABLE if "bf16" in name]


@pytest.fixture(scope="module")
def single(tmp_path_factory):
    """A group of one rank, in this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RANK", "0")
        patch.setenv("WORLD_SIZE", "1")
        patch.setenv(RENDEZVOUS, f"file://{tmp_path_factory.mktemp('single') / 'store'}")
        ranks = join("cpu", 60)
        yield ranks
        ranks.leave()


def compare(found, expected, gradient=1e-5, weight=1e-5, metric=1e-5):
    """Largest differences, each against its tolerance.

    Sums in another order differ by up to 4e-6 of the largest gradient, on a processor without AVX-512.
    """
    for step, (mine, theirs) in enumerate(zip(found["gradients"], expected["gradients"], strict=True)):
        scale = max(float(value.abs().max()) for value in theirs.values())
        assert mine.keys() == theirs.keys()
        slack = gradient * (1 if step == 0 else 100)  # by then the weights differ by rounding
        for name, value in theirs.items():
            assert float((mine[name] - value).abs().max()) <= slack * scale, (step, name)
    assert found["weights"].keys() == expected["weights"].keys()
    for name, value in expected["weights"].items():
        assert float((found["weights"][name] - value).abs().max()) <= weight, name
    for mine, theirs in zip(found["tables"], expected["tables"], strict=True):
        for name, value in theirs.items():
            torch.testing.assert_close(mine[name], value, rtol=metric, atol=metric, msg=name)
    for mine, theirs in zip(found["metrics"], expected["metrics"], strict=True):
        assert mine == pytest.approx(theirs, rel=metric, abs=metric)


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("name", ALL)
def test_two_ranks_are_one_process(pair, name):
    compare(pair.run("train", name), train(ALONE, name), **MUON if name == "muon" else {})


@pytest.mark.ranks
@pytest.mark.parametrize("name", FLOAT32)
def test_three_ranks_are_one_process(trio, name):
    compare(trio.run("train", name), train(ALONE, name), **MUON if name == "muon" else {})


@pytest.mark.ranks
@pytest.mark.parametrize("name", BFLOAT16)
def test_two_ranks_are_one_process_within_the_rounding_of_bfloat16(pair, single, name):
    found = pair.run("train", name)
    # Each rank rounds its rows with its own random numbers: a weight of 1 may be off by its last digit, 2^-7.
    gradient, weight = (1e-1, 1e-2) if name == "bf16 rounded once" else (2e-2, 5e-3)
    compare(found, train(single, name), gradient=gradient, weight=weight, metric=5e-2)
    assert found["metrics"][0] == {"packed": 1.0, "splits": 1.0}
    alone = train(ALONE, name)  # autocast rounds elsewhere
    for mine, theirs in zip(found["metrics"], alone["metrics"], strict=True):
        assert mine == pytest.approx(theirs, rel=0.05, abs=0.05)


@pytest.mark.parametrize("name", ALL)
def test_a_group_of_one_has_the_bits_of_a_process_alone(single, name):
    found, expected = train(single, name), train(ALONE, name)
    assert found["metrics"] == expected["metrics"]
    for name, value in expected["weights"].items():
        assert torch.equal(found["weights"][name], value), name


@pytest.mark.slow
@pytest.mark.parametrize("name", ["uneven rows", "bf16 rounded once"])
def test_the_same_ranks_give_the_same_bits_twice(pair, name):
    first, again = pair.run("train", name), pair.run("train", name)
    assert all(torch.equal(again["weights"][name], value) for name, value in first["weights"].items())


@pytest.mark.ranks
@pytest.mark.parametrize("name", ["plain", "muon", "LoRA"])
def test_state_that_one_world_saves_another_continues(pair, tmp_path, name):
    by_pair, by_one = str(tmp_path / "pair.pt"), str(tmp_path / "one.pt")
    first = pair.run("resumed", name, by_pair)
    results = [pair.run("resumed", name, by_pair), rank_cases.resumed(ALONE, name, by_pair)]
    assert all(torch.equal(results[0]["weights"][key], value) for key, value in first["weights"].items())
    rank_cases.resumed(ALONE, name, by_one)
    results.append(pair.run("resumed", name, by_one))
    for result in results:
        for key, value in first["weights"].items():
            torch.testing.assert_close(result["weights"][key], value, rtol=0, atol=2e-5 if name == "muon" else 1e-5)


@pytest.mark.skipif(not hasattr(FSDPModule, "reset_iter_state"), reason="torch 2.11 cannot reshard after a failure")
def test_the_optimizer_holds_what_is_trained_whatever_was_forwarded_before(pair):
    assert pair.run("trained_parameters")["same"] == [True] * 4


def test_every_rank_drops_other_units_and_leaves_the_global_generator_as_the_others_do(pair):
    found = pair.run("dropped")
    mine, theirs = found["kept"]
    assert len({tuple(one.tolist()) for one in (*mine, *theirs)}) == len(mine) + len(theirs) == 8
    assert torch.equal(*found["next"])
    again = pair.run("dropped")
    assert all(torch.equal(again["weights"][name], value) for name, value in found["weights"].items())


@pytest.mark.parametrize("size", ["pair", pytest.param("trio", marks=pytest.mark.ranks)])
def test_a_rank_holds_its_share_of_all_models_and_moments(request, size):
    ranks = request.getfixturevalue(size)
    shares = ranks.run("held")["shares"]
    assert set(shares[0]) == {"policy", "twin", "reference", "moments", "moments of the twin"}
    for name in shares[0]:
        assert sum(share[name] for share in shares) == pytest.approx(1)
        assert max(share[name] for share in shares) <= 1.1 / ranks.size, name


@pytest.mark.parametrize("lora", [False, True], ids=["full", "LoRA"])
@pytest.mark.parametrize("engine", ["torch", "transformers"])
def test_an_engine_gets_every_weight_by_one_gather(pair, engine, lora):
    found = pair.run("gathers", engine, lora)
    tied = 0 if engine == "torch" else found["head"]  # read apart from the embedding it is tied to
    assert found["times"] == pytest.approx(1 + tied)


def deep_model(place, width):
    """A model of 17 layers in files, with the builtin's tokenizer; 75 M parameters at a width of 512."""
    shape = {"num_hidden_layers": 17, "hidden_size": width, "intermediate_size": 4 * width, "vocab_size": 16 * width}
    shape |= {"num_attention_heads": width // 64, "num_key_value_heads": width // 64, "head_dim": 64}
    model = Qwen3ForCausalLM(Qwen3Config(eos_token_id=1, tie_word_embeddings=True, **shape))
    build_tokenizer(["1+1=", "2"]).save_pretrained(place)
    model.save_pretrained(place, max_shard_size="10MB")
    return str(place)


@pytest.mark.ranks
@pytest.mark.parametrize("lora", [False, True], ids=["full", "LoRA"])
def test_ranks_read_their_shards_of_a_model_and_never_hold_all_of_it(pair, tmp_path, lora):
    width = 256
    folder = deep_model(tmp_path, width)
    found, expected = pair.run("from_files", folder, lora), rank_cases.from_files(ALONE, folder, lora)
    assert found["empty"]
    for name, value in expected["weights"].items():
        torch.testing.assert_close(found["weights"][name], value, rtol=0, atol=1e-5)
    layer_and_embedding = 4 * (4 + 3 * 4 + 16) * width**2
    assert max(found["most"]) < found["size"] / 2 + layer_and_embedding + 1e6 < found["size"]


@pytest.mark.ranks
def test_a_rank_holds_its_share_and_adds_little_while_it_saves_and_hands_weights_over(pair, tmp_path):
    folder = deep_model(tmp_path / "model", 512)
    found = pair.run("memory", folder, str(tmp_path / "two"))
    alone = rank_cases.memory(ALONE, folder, str(tmp_path / "one"))
    assert max(found["held"]) == pytest.approx(alone["held"][0] / 2, rel=0.1)
    shard = found["held"][0] / 3  # two thirds are the optimizer's moments
    for added in found["added"]:
        assert max(added.values()) <= shard + found["largest"], added


def test_a_model_whose_files_have_other_names_is_loaded_whole(tmp_path):
    build_tokenizer(["1+1=", "2"]).save_pretrained(tmp_path)
    make_model("qwen3").model.save_pretrained(tmp_path)  # without the prefix, and without the head
    loaded = load_model(str(tmp_path), empty=True)
    assert loaded.source is None
    assert not any(p.is_meta for p in loaded.model.parameters())


@pytest.mark.ranks
@pytest.mark.parametrize("name", ["plain", "muon", "LoRA"])
def test_moments_that_wait_in_the_processors_memory_change_nothing(pair, name):
    for alone in (True, False):
        found, expected = (
            train(ALONE, name, offload) if alone else pair.run("train", name, offload)
            for offload in ("optimizer", "none")
        )
        assert all(torch.equal(found["weights"][key], value) for key, value in expected["weights"].items())


def test_verbs(pair):
    first, second = pair.run("talk")["ranks"]
    plain = {
        "broadcast": "of 0",
        "all_gather": [0, 1],
        "all_reduce": [3.0, 3.0],
        "on_rank0": 0,
        "on_each_rank": [0, 10],
    }
    problem = "invalid literal for int() with base 10: 'x'"
    for rank, found in enumerate((first, second)):
        assert {key: found[key] for key in plain} == plain
        assert found["beside"] == [0, 1]
        for verb, owner in (("on_rank0", 0), ("on_each_rank", 1)):
            kind, text, code = found[f"{verb} error"]
            assert (kind, code) == (("ValueError", None) if rank == owner else ("RetrainError", 1))
            assert text == problem


WAITS = """
import sys, threading
from retrain.cli.main import main
from retrain.errors import EngineError
from retrain.run import session
from retrain.training.distributed.ranks import join

def lost(*_, **__):
    ranks, event = join("cpu", 60), threading.Event()
    threading.Thread(target=event.wait).start()  # as one that waits for a rank that is gone
    try:
        with ranks.during("the credit of step 3"):
            raise RuntimeError("Timed out waiting")
    finally:
        if where == "closing":
            event.wait()

where = sys.argv.pop()
session.run = lost
main()
"""


@pytest.mark.slow
@pytest.mark.parametrize("where", ["closing", "exit"])
def test_a_rank_that_has_lost_another_ends_whatever_still_waits(tmp_path, where):
    (tmp_path / "waits.py").write_text(WAITS)
    (tmp_path / "run.toml").touch()
    environment = os.environ | {"RANK": "0", "WORLD_SIZE": "1", RENDEZVOUS: f"file://{tmp_path / 'store'}"}
    command = [PYTHON, "waits.py", "train", "run.toml", "--plain", where]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 5, done.stderr
    assert done.stderr.count("does not answer: rank 0 waited 0 s in the credit of step 3;") == 1


def test_ranks_whose_variables_are_missing_say_which(monkeypatch):
    for name, value in {"RANK": "0", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    for name in ("MASTER_ADDR", RENDEZVOUS):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(EngineError, match=r"rank 0 of 2 cannot find the others: .*MASTER_ADDR.*--ranks or torchrun"):
        join("cpu", 60)


@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=40),
    budget=st.integers(1, 200),
    ranks=st.integers(1, 9),
    data=st.data(),
)
def test_deal(lengths, budget, ranks, data):
    rows = data.draw(st.lists(st.sampled_from(range(len(lengths))), unique=True))
    parts = deal(lengths, rows, budget, ranks)
    assert len(parts) % ranks == 0
    counted = [part.tolist() for part, counts in parts if counts]
    assert sorted(row for part in counted for row in part) == sorted(rows)
    for part, _ in parts:
        assert len(part) == 1 or len(part) * max(lengths[row] for row in part.tolist()) <= budget
    assert len(parts) - len(counted) < ranks
    assert all(part.tolist() in counted for part, counts in parts if not counts)
    if len(counted) < len(parts):  # no part could have been cut for an idle rank
        assert all(len(part) == 1 for part in counted)
    if ranks == 1:
        assert counted == [part.tolist() for part in micro_batches(lengths, rows, budget)]
