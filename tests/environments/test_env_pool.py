"""The pool of live episodes against environments that hang, die, allocate and say nonsense."""

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from retrain import Observation
from retrain.environments.contract import Limits, parse_returned, parse_yielded
from retrain.environments.env_pool import EnvPool, Launch
from retrain.environments.env_process import Hello
from retrain.errors import ComponentError, UserCodeError
from retrain.system import event_loop
from tests.waiting import alive, descendants, until

HERE = Path(__file__).parent
LIMIT_S = 4.0
"""For steps that hang: what does not hang stays below it on a machine however busy."""


def pool(name="faulty", timeout_s=600.0, in_processes=True, python=None, memory_mb=2048, threads=1, **params):
    target = f"misbehaving_worlds.{name}"
    hello = Hello(target, target, params, (str(HERE),), timeout_s, Limits(8, 16, 64, 64))
    launch = Launch({"": hello}, memory_mb, (), python, in_processes, threads)
    return EnvPool(launch).start()


def problem(answer, number=0):
    return {"id": str(number), "prompt": "p", "answer": answer, "extra": {"level": 3}}


async def go_on(turn):
    """Go on with a turn."""


def play(pool, answers, before_step=go_on):
    """Every episode to its end: what each was answered in turn, by number."""

    async def episode(key, answer):
        env = pool.env("", 0)
        log = [await env.reset(problem(answer, key), key)]
        while log[-1].kind == "observation":
            await before_step(len(log))
            log.append(await env.step(f"r{len(log)}", "stop", len(log) - 1, 9))
        await env.close()
        return log

    async def episodes():
        return await asyncio.gather(*(episode(key, answer) for key, answer in enumerate(answers)))

    return dict(enumerate(event_loop.run(episodes())))


@pytest.fixture(scope="module")
def quiet():
    envs = pool()
    log = play(envs, ["fine"] * 128)
    envs.close()
    return log


def test_an_episode_is_what_its_environment_yields_and_returns(quiet):
    first, *middle, last = quiet[5]
    assert (first.kind, first.reward, [role for role, _ in first.messages]) == ("observation", 0.0, ["user"])
    assert [(one.reward, dict(one.metrics)) for one in middle] == [(0.25, {"steps": 1.0})] * 4
    assert [one.messages[0][1].split()[0::2] for one in middle] == [[str(k), f"r{k + 1}"] for k in range(4)]
    assert (last.kind, last.parts) == ("end", {"found": 1.0, "neat": 0.5})
    assert quiet[5] != quiet[6]  # another seed


@pytest.mark.parametrize("in_processes", [False, True])
def test_what_is_said_does_not_depend_on_the_process(quiet, in_processes):
    envs = pool(in_processes=in_processes)
    assert play(envs, ["fine"] * 12) == {key: quiet[key] for key in range(12)}
    assert play(envs, ["fine"] * 3) == {key: quiet[key] for key in range(3)}
    envs.close()


@pytest.mark.slow(but=6)
@pytest.mark.parametrize(("at", "threads"), [("reset", 1), ("middle", 1), ("end", 1), ("middle", 8)])
@pytest.mark.parametrize("what", ["hang", "exit", "kill", "raise", "leave", "memory", "garbage", "fork", "program"])
def test_a_fault_costs_its_own_episode_only(quiet, what, at, threads):
    answers = ["fine"] * 128
    answers[77] = what
    envs = pool(timeout_s=LIMIT_S if what == "hang" else 600.0, threads=threads, at=at)
    log = play(envs, answers)
    envs.close()
    faulty = log.pop(77)
    assert log == {key: seen for key, seen in quiet.items() if key != 77}
    if what in ("fork", "program"):  # the original answers, and nobody else
        assert faulty == quiet[77]
        return
    assert faulty[-1].kind == ("timeout" if what == "hang" else "error"), faulty[-1]
    assert len(faulty) == {"reset": 1, "middle": 4, "end": 5}[at]
    named = {"raise": "no such move", "exit": "exit code 3", "memory": "MemoryError", "hang": "took longer"}
    assert named.get(what, "") in faulty[-1].detail


def test_threads_answer_several_episodes_at_once():
    """Each of four waits for the other three, at every step."""
    envs = pool("meeting", threads=4)
    log = play(envs, ["fine"] * 12)
    envs.close()
    assert [[answer.kind for answer in seen] for _, seen in sorted(log.items())] == [
        ["observation", "observation", "end"]
    ] * 12


def test_an_episode_that_answers_its_replay_differently_is_noticed(quiet):
    answers = ["fine"] * 128
    answers[3], answers[4] = "clock", "exit"
    envs = pool(at="end")
    log = play(envs, answers)
    metrics = envs.metrics()
    envs.close()
    assert "not deterministic" in log.pop(3)[-1].detail
    assert "exit code 3" in log.pop(4)[-1].detail
    assert log == {key: seen for key, seen in quiet.items() if key not in (3, 4)}
    assert metrics["env/replayed"] == 127
    assert metrics["time/env_step_ms"] > 0


def test_a_world_that_is_outside_is_not_replayed(quiet):
    envs = pool("outside")
    log = play(envs, ["fine", "exit", "fine"])
    envs.close()
    assert [seen[-1].detail.split(" (")[0] for _, seen in sorted(log.items())] == [
        "was lost with its process, and cannot be replayed",
        "ended its process",
        "was lost with its process, and cannot be replayed",
    ]


def test_a_worker_that_dies_between_two_steps_costs_nothing(quiet):
    envs = pool()

    waiting = []

    async def end_it(turn):
        """All four wait for the model as the worker ends."""
        if turn != 3:
            return
        mine = asyncio.get_running_loop().create_future()
        waiting.append(mine)
        if len(waiting) == 4:
            pid = (await envs.workers.worker(0)).pid
            ending = [pid, *descendants(pid)]  # a process in the sandbox holds the pipe until it has ended as well
            os.killpg(pid, signal.SIGKILL)
            until(lambda: not any(map(alive, ending)))
            for one in waiting:
                one.set_result(None)
        await mine

    assert play(envs, ["fine"] * 4, end_it) == {key: quiet[key] for key in range(4)}
    assert envs.metrics()["env/replayed"] == 4
    envs.close()


def test_a_class_is_built_once_and_reads_every_field():
    envs = pool("Built", greeting="good day")
    log = play(envs, ["fine"])[0]
    envs.close()
    assert [list(answer.messages) for answer in log] == [
        [("user", "good day")],
        [("user", "p {'level': 3} 0"), ("tool", "r1")],
        [("user", "8 0 0 9 stop")],
        [],
    ]
    assert (log[-1].kind, log[-1].parts) == ("end", None)


@pytest.mark.parametrize(
    ("answer", "message"),
    [("number", "yielded a int"), ("nan", "not a number from -1e15 to 1e15"), ("empty", "empty mapping")],
)
def test_what_is_no_observation_or_reward_is_an_error_of_the_episode(answer, message):
    envs = pool("odd", in_processes=False)
    assert message in play(envs, [answer])[0][-1].detail


def test_numbers_of_other_libraries_are_rewards():
    assert parse_returned({"a": np.bool_(True), "b": np.float32(0.5), "c": torch.tensor(2.0)}).parts == {
        "a": 1,
        "b": 0.5,
        "c": 2,
    }
    assert parse_yielded(Observation("x", metrics={"n": np.int64(3)}), first=False).metrics == {"n": 3.0}


def test_a_text_without_end_is_cut():
    envs = pool("odd")
    log = play(envs, ["long"])[0]
    envs.close()
    assert 60_000 < len(log[1].messages[0][1]) < 70_000


def test_nothing_is_earned_before_the_first_reply():
    assert "before the first action" in play(pool("early", in_processes=False), ["reward"])[0][-1].detail


@pytest.mark.parametrize(
    ("name", "params", "message"),
    [
        ("wants_more", {}, "reads teacher, which no episode has"),
        ("keyed", {}, "depth: missing or unknown"),
        ("act", {}, "not a generator"),
    ],
)
def test_an_environment_that_does_not_fit_is_refused(name, params, message):
    with pytest.raises(ComponentError, match=message):
        pool(name, **params)


def test_a_module_that_breaks_its_worker_is_an_error_of_the_user(tmp_path):
    (tmp_path / "breaks_at_once.py").write_text("import os\nos._exit(4)\n")
    hello = Hello("x", "breaks_at_once.game", {}, (str(tmp_path),), 600.0, Limits(1, 1, 1, 1))
    with pytest.raises(UserCodeError, match="ended the process that loaded it"):
        EnvPool(Launch({"": hello}, 0)).start()


def test_another_interpreter_needs_the_standard_library_only(quiet, tmp_path):
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "bare"], check=True)
    envs = pool(python=str(tmp_path / "bare/bin/python"), at="middle")
    assert play(envs, ["fine"] * 4) == {key: quiet[key] for key in range(4)}
    envs.close()
    hello = Hello("x", "retrain.registry.find", {}, (), 600.0, Limits(1, 1, 1, 1))
    with pytest.raises(UserCodeError, match="No module named 'pydantic'"):
        EnvPool(Launch({"": hello}, 0, (), str(tmp_path / "bare/bin/python"))).start()


def test_a_state_is_named_by_the_environment_or_by_what_it_says():
    text, again, other = (
        parse_yielded(one, first=False).state for one in ("left", Observation("left", reward=1.0), "right")
    )
    assert text == again != other
    named = [parse_yielded(Observation(text, state="door"), first=False).state for text in ("left", "right", None)]
    assert len({*named, text}) == 2
    assert parse_yielded([{"role": "tool", "content": "left"}], first=False).state not in ("", text)
    assert parse_yielded(None, first=True).state == parse_yielded("", first=True).state[:0] == ""
    assert all(len(one) <= 16 for one in (text, *named))
