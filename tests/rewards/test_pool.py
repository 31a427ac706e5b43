"""The reward pool against rewards that hang, crash, allocate, print and return nonsense."""

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from retrain.errors import ComponentError, UserCodeError
from retrain.registry import find
from retrain.rewards.entry import unique_names
from retrain.rewards.pool import RewardPool
from tests.waiting import alive, descendants, until

HERE = Path(__file__).parent
LIMIT_S = 4.0
"""For rewards that hang: what does not hang stays below it on a machine however busy."""
FAILURES = {
    "segfault": "crashed",
    "exit": "crashed",
    "kill": "crashed",
    "allocate": "error",
    "share": "error",
    "raise": "error",
    "sysexit": "error",
    "recursion": "error",
    "list": "invalid",
    "nan": "invalid",
    "inf": "invalid",
    "beyond float32": "invalid",
    "string": "invalid",
    "huge": "invalid",
    "none": "invalid",
}


def bound(name, **params):
    path = name if name in ("exact", "format", "overlong", "number") else f"misbehaving.{name}"
    return find("reward", path, [HERE]).bind(params)


def pool(*rewards, **settings):
    entries = [(reward, 1.0) if not isinstance(reward, tuple) else reward for reward in rewards]
    return RewardPool(
        entries, search_paths=[HERE], **{"timeout_s": 600.0, "memory_mb": 1024, "max_failed": 1.0} | settings
    )


def worker_of(scorer):
    """The process of the pool's only worker: the newest, for other tests of this process may have left some."""
    mine = [pid for pid in descendants(os.getpid()) if alive(pid)]
    found = [pid for pid in mine if b"retrain.rewards.worker" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    return max(found, key=lambda pid: int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]))


def items(*completions, answer="right"):
    return [{"completion": text, "answer": answer} for text in completions]


@pytest.mark.parametrize("workers", [1, 2])
def test_every_failure_costs_its_own_item_only(workers):
    completions = [text for failure in FAILURES for text in ("right", failure, "wrong")]
    with pool(bound("by_text"), workers=workers) as scorer:
        scores = scorer.score(items(*completions))
        again = scorer.score(items("right", "wrong"))
    for text, score in zip(completions, scores, strict=True):
        if text in FAILURES:
            assert (score.value, score.correct, score.status) == (None, None, FAILURES[text]), text
            assert score.parts == {"misbehaving.by_text": None}
        else:
            assert (score.value, score.status) == (float(text == "right"), "ok")
            assert score.correct == (text == "right")
    assert [score.value for score in again] == [1.0, 0.0]


@pytest.mark.slow
def test_details_name_the_function_and_what_happened():
    with pool(bound("by_text")) as scorer:
        detail = {t: s.detail for t, s in zip(FAILURES, scorer.score(items(*FAILURES)), strict=True)}
    assert detail["segfault"] == "misbehaving.by_text ended its process (killed by SIGSEGV)"
    assert detail["exit"] == "misbehaving.by_text ended its process (exit code 3)"
    assert detail["raise"] == "misbehaving.by_text raised ZeroDivisionError: division by zero"
    assert (
        detail["list"]
        == "misbehaving.by_text returned [1.0, 2.0] (list); expected a number from -1e15 to 1e15, or None"
    )
    assert detail["string"].startswith("misbehaving.by_text returned '1.0' (str); expected a number from")
    assert "MemoryError" in detail["allocate"]
    assert "Cannot allocate memory" in detail["share"]
    assert detail["none"] == "every reward (misbehaving.by_text) returned None"


def test_printing_ctrl_c_and_booleans_are_harmless(capfd):
    with pool(bound("by_text")) as scorer:
        assert [s.value for s in scorer.score(items("print", "interrupt", "bool", "right"))] == [1.0] * 4
    assert capfd.readouterr() == ("", "")


def test_what_a_reward_prints_is_in_a_log_of_limited_size(tmp_path):
    log = tmp_path / "rewards.log"
    with pool(bound("by_text"), log=str(log)) as scorer:
        scorer.score(items("print", "print"))
        assert log.stat().st_size < 2 * 1_000_000
        scorer.score(items("print a line", "die after a line"))
    assert log.read_text().endswith("a line\na last line\n")


@pytest.mark.slow
def test_a_hang_is_killed_and_costs_its_own_item_only():
    completions = ["right", "hang", "wrong", "power", "freeze", "right"]
    with pool(bound("second"), bound("by_text"), timeout_s=LIMIT_S, workers=2) as scorer:
        right, hang, wrong, power, freeze, last = scorer.score(items(*completions))
    for late in (hang, power, freeze):
        assert (late.value, late.correct, late.status) == (None, None, "timeout")
        assert late.detail == "misbehaving.by_text took longer than 4 s"
        assert late.parts == {"misbehaving.second": 2.0, "misbehaving.by_text": None}, "the other part is kept"
    assert [score.value for score in (right, wrong, last)] == [3.0, 2.0, 3.0]


def test_an_idle_worker_that_dies_is_replaced():
    with pool(bound("by_text")) as scorer:
        assert scorer.score(items("right"))[0].value == 1.0
        first = worker_of(scorer)
        os.kill(first, signal.SIGKILL)
        until(lambda: not alive(first))
        assert scorer.score(items("right"))[0].status == "ok"
        assert worker_of(scorer) != first


@pytest.mark.slow
def test_workers_die_with_a_killed_parent(tmp_path):
    script = (
        "import sys; from tests_pool import pool, bound, worker_of, items\n"
        "scorer = pool(bound('by_text'))\n"
        "scorer.score(items('right'))\n"
        "print(worker_of(scorer), flush=True)\n"
        "scorer.score(items('hang'))\n"
    )
    (tmp_path / "tests_pool.py").write_text(
        Path(__file__).read_text().replace("Path(__file__).parent", f"Path({str(HERE)!r})")
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", script],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (tmp_path, HERE.parent.parent)))},
    )
    worker = int(parent.stdout.readline())
    assert alive(worker)
    parent.kill()
    parent.wait()
    until(lambda: not alive(worker))


def test_workers_outlive_the_thread_that_first_asked():
    made = []
    asking = threading.Thread(target=lambda: made.append(pool(bound("by_text"))))
    asking.start()
    asking.join()
    with made[0] as scoring:
        first = worker_of(scoring)
        for _ in range(20):  # the system would tell them within a moment
            time.sleep(0.01)
            assert scoring.score(items("right"))[0].value == 1.0
        assert worker_of(scoring) == first


def test_workers_do_not_import_torch():
    with pool(bound("torch_loaded"), bound("exact")) as scorer:
        assert scorer.score(items("x"))[0].parts["misbehaving.torch_loaded"] == 0.0


def test_workers_see_the_environment_that_is_allowed(monkeypatch):
    names = ["WANDB_API_KEY", "DATABASE_URL", "GH_PAT", "SMTP_PASS", "PLAIN", "LC_CANARY", "ASKED_FOR"]
    for name in names:
        monkeypatch.setenv(name, "canary")
    with pool(bound("environment"), env=["ASKED_FOR"]) as scorer:
        assert [s.value for s in scorer.score(items(*names, answer="canary"))] == [0, 0, 0, 0, 0, 1, 1]


@pytest.mark.parametrize("workers", [0, 1])
def test_one_element_of_any_library_is_a_number(workers):
    values = {"np bool": 1.0, "np array": 0.5, "decimal": 0.75, "right": 1.0, "np pair": None}
    values |= {} if workers else {"tensor": 0.25}  # a worker imports torch for a second
    with pool(bound("by_text"), workers=workers) as scorer:
        assert [score.value for score in scorer.score(items(*values))] == list(values.values())


def test_weighted_sum_parts_and_correctness():
    with pool((bound("half_hearted"), 2.0), (bound("by_text"), 0.5)) as scorer:
        right, wrong = scorer.score(items("right", "wrong"))
    assert (right.value, wrong.value) == (1.0, 0.5)
    assert right.parts == {"misbehaving.half_hearted": 0.25, "misbehaving.by_text": 1.0}
    assert (right.correct, wrong.correct) == (True, False)


def test_a_reward_without_opinion_is_left_out_and_weight_zero_only_records():
    with pool((bound("no_opinion"), 1.0), (bound("second"), 0.0), (bound("by_text"), 3.0)) as scorer:
        score = scorer.score(items("right"))[0]
    assert (score.value, score.correct) == (3.0, True)
    assert score.parts == {"misbehaving.no_opinion": None, "misbehaving.second": 2.0, "misbehaving.by_text": 1.0}


def test_a_completion_that_no_reward_judges_is_not_correct():
    """A format is right or wrong whatever the answer is."""
    with pool(bound("no_opinion"), bound("format", pattern="right")) as scorer:
        score = scorer.score(items("right"))[0]
    assert (score.value, score.correct) == (1.0, False)


def test_all_fields_parameters_and_classes():
    item = {
        "completion": "c",
        "answer": "a",
        "prompt": "q?",
        "problem": {"id": "p", "prompt": "q?", "answer": "a", "extra": {"level": 3}},
        "length": 30,
        "max_tokens": 40,
        "finish_reason": "stop",
    }
    rewards = [bound("everything"), bound("half_hearted", value=0.5), bound("with_default"), bound("Counting", start=6)]
    with pool(*rewards) as scorer:
        assert list(scorer.score([item])[0].parts.values()) == [0.75, 0.5, 3.0, 7.0]
        assert scorer.score([item])[0].parts["misbehaving.Counting"] == 8.0


def test_no_workers_means_right_here():
    with pool(bound("by_text"), workers=0) as scorer:
        scores = scorer.score(items("right", "raise", "list"))
        assert [s.status for s in scores] == ["ok", "error", "invalid"]
        assert scorer.score(items("pid"))[0].value == os.getpid()
        assert scorer.score([]) == []


def test_no_workers_leave_no_event_loop_open():
    with pool(bound("in_a_loop"), workers=0) as scorer:
        assert scorer.score(items("right"))[0].value == 1.0
        loops = sys.modules["misbehaving"].LOOPS
        scorer.score(items("right"))
        assert loops[-1] is loops[-2]
    assert loops[-1].is_closed()
    assert scorer.score(items("right"))[0].value == 1.0
    scorer.close()
    assert loops[-1].is_closed()


def test_a_weighted_sum_that_is_too_large_is_invalid():
    with RewardPool([(bound("exact"), 6e14), (bound("exact"), 6e14)], workers=0, max_failed=1.0) as scorer:
        right, wrong = scorer.score(items("so right", "so wrong"))
    assert (right.status, right.value, wrong.value) == ("invalid", None, 0.0)
    assert right.detail == "the weighted sum of the rewards, 1.2e+15, is too large"


def test_too_many_failures_stop_the_run_with_a_sample():
    refused = pytest.raises(UserCodeError, match="1 of 1 completions could not be scored")
    with pool(bound("always_raises"), max_failed=0.5) as scorer, refused as caught:
        scorer.score(items("some text"))
    message = str(caught.value)
    assert caught.value.exit_code == 1
    assert "misbehaving.always_raises raised ValueError: cannot score some text" in message
    assert "completion 'some text', answer 'right'" in message
    assert 'misbehaving.py", line' in message
    assert "/rewards/worker.py" not in message, "frames of this package are not the user's"


def test_failures_below_the_ceiling_are_told_once_with_the_traceback(caplog):
    with pool(bound("by_text"), max_failed=0.5) as scorer, caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert scorer.score(items("raise", "right"))[0].status == "error"
    assert len(caplog.records) == 1
    assert "ZeroDivisionError" in caplog.text
    assert 'misbehaving.py", line' in caplog.text


@pytest.mark.parametrize(
    ("name", "complaint"),
    [("wants_more", "reads teacher, which no completion has"), ("positional_only", "positional-only")],
)
def test_signatures_that_cannot_be_called(name, complaint):
    with pytest.raises(ComponentError, match=complaint):
        pool(bound(name))


@pytest.mark.slow
def test_a_module_that_breaks_only_in_the_worker(tmp_path, monkeypatch):
    module = tmp_path / "breaks_later.py"
    module.write_text("def score(completion, answer):\n    return 1.0\n")
    reward = find("reward", "breaks_later.score", [tmp_path]).bind({})
    module.write_text("raise RuntimeError('no license')\n")
    with pytest.raises(ComponentError, match="no license"):
        RewardPool([(reward, 1.0)], search_paths=[tmp_path])
    module.write_text("import os\nos._exit(9)\n")
    with pytest.raises(UserCodeError, match=r"ended the process that loaded it \(exit code 9\)"):
        RewardPool([(reward, 1.0)], search_paths=[tmp_path])
    module.write_text("import os\nos.kill(os.getpid(), 9)\n")
    with pytest.raises(UserCodeError, match="killed by SIGKILL"):
        RewardPool([(reward, 1.0)], search_paths=[tmp_path])
    module.write_text(
        "class score:\n    def __init__(self): raise OSError('no model')\n    def __call__(self, completion): ...\n"
    )
    with pytest.raises(UserCodeError, match="OSError: no model"):
        RewardPool([(reward, 1.0)], search_paths=[tmp_path])
    module.write_text("import time\ntime.sleep(60)\n")
    monkeypatch.setattr("retrain.system.worker_pool._START_TIMEOUT_S", 1.0)
    with pytest.raises(UserCodeError, match="longer than 1 s"):
        RewardPool([(reward, 1.0)], search_paths=[tmp_path])


def test_variables_that_parameters_name_are_passed(monkeypatch):
    monkeypatch.setenv("NAMED", "canary")
    with pool(bound("by_name", secret_env="NAMED")) as scorer:
        assert scorer.score(items("x", answer="canary"))[0].value == 1.0


def test_an_interrupted_score_leaves_nothing_behind_not_even_what_a_reward_has_started(tmp_path, monkeypatch):
    file = tmp_path / "pid"
    monkeypatch.setenv("PID_FILE", str(file))

    def interrupt():
        until(file.exists)
        os.kill(os.getpid(), signal.SIGINT)

    scorer = pool(bound("by_text"), env=["PID_FILE"])
    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        scorer.score(items("grandchild", "right"))
    until(lambda: not alive(int(file.read_text())))
    assert [s.value for s in scorer.score(items("wrong", "right"))] == [0.0, 1.0]
    scorer.close()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has subreapers")
def test_a_program_in_a_session_of_its_own_ends_with_the_pool(tmp_path, monkeypatch):
    file = tmp_path / "pid"
    monkeypatch.setenv("PID_FILE", str(file))
    scorer = pool(bound("by_text"), env=["PID_FILE"])
    assert [score.value for score in scorer.score(items("daemon"))] == [1.0]
    daemon = int(file.read_text())
    assert alive(daemon)
    scorer.close()
    until(lambda: not alive(daemon))


def test_the_weight_of_an_entry_is_not_a_parameter_of_its_function():
    reward = bound("half_hearted", value=0.5)
    with pool((replace(reward, params={**reward.params, "weight": 2.0}), 2.0)) as scorer:
        assert scorer.score(items("x"))[0].value == 1.0


def test_a_window_bounds_the_failures_of_a_step_whose_groups_are_scored_one_by_one():
    with pool(bound("by_text"), workers=0, window=4, max_failed=0.5) as scorer:
        assert scorer.score(items("raise"))[0].status == "error"
        scorer.score(items("right", "wrong", "right"))
        scorer.score(items("raise", "wrong"))
        with pytest.raises(UserCodeError, match="3 of 4 completions could not be scored"):
            scorer.score(items("raise", "raise"))


def test_a_completion_without_a_weighted_opinion_has_no_score():
    with pool((bound("no_opinion"), 1.0), (bound("by_text"), 0.0), workers=0) as scorer:
        [score] = scorer.score(items("right"))
    assert (score.value, score.correct, score.status) == (None, None, "invalid")
    assert score.parts == {"misbehaving.no_opinion": None, "misbehaving.by_text": 1.0}
    with pool((bound("by_text"), 0.0), workers=0) as scorer:
        assert scorer.score(items("right"))[0].value == 0.0, "rewards that are recorded only"


@pytest.mark.parametrize(
    ("names", "unique"), [("a a a", "a a_2 a_3"), ("a a a_2", "a a_2 a_2_3"), ("a_2 a a", "a_2 a a_2_3")]
)
def test_every_reward_has_a_name_of_its_own(names, unique):
    assert unique_names(names.split()) == unique.split()
