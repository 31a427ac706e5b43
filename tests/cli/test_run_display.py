"""The live screen keeps its height and width; the plain lines say the same; model text drives neither."""

import io
import json

import pytest
from rich.console import Console

from retrain.display.live_screen import Screen
from retrain.display.run_display import display
from retrain.display.run_lines import Lines
from retrain.system.terminal import clean


def step(number, **changes):
    row = {"step": number, "max_steps": 100, "reward/mean": 0.5, "reward/accuracy": 0.25, "groups/informative": 0.75}
    row |= {"skipped/all_correct": 1.0, "skipped/all_wrong": 3.0}
    return row | {"tokens/response": 12.0, "grad/norm": 0.1, "time/tokens_per_s": 1234.0, "time/step_s": 0.5} | changes


EVAL = {"step": 20, "accuracy": 0.625, "ci_low": 0.5, "ci_high": 0.75}


def picture(screen):
    screen.console.file = io.StringIO()
    screen.console.print(screen.render())
    return screen.console.file.getvalue()


def screen_of(width):
    return Screen(Console(width=width, height=24, force_terminal=True, color_system=None, file=io.StringIO()))


@pytest.mark.parametrize("width", [40, 80, 200])
def test_no_frame_is_wider_than_the_terminal_and_the_height_does_not_jump(width):
    screen = screen_of(width)
    screen("phase", {"name": "loading the model"})
    assert "loading the model" in picture(screen)
    screen("run", {"directory": "runs/a-long-name"})
    screen("warmup_waiting", {})
    screen("warmup", {"step": 5, "steps": 10, "loss": 1.5, "left_s": 65.0})
    assert "1:05 left" in picture(screen)
    screen("eval", EVAL)
    heights = set()
    for number in range(60):
        changes = {"grad/norm": float("nan") if number == 7 else 0.1, "memory_mb": 1234.5}
        screen("step", step(number, **changes))
        screen("sample", {"prompt": "質問 " * 50, "text": "word " * number * 5, "reward": None if number % 2 else 1.0})
        text = picture(screen)
        heights.add(text.count("\n"))
        assert max(map(screen.console.measure, text.splitlines()), key=lambda m: m.maximum).maximum <= width
    assert len(heights) == 1
    assert heights.pop() <= 21
    assert "runs/a-long-" in text
    assert "60/100" in text
    assert "62.5%" in text


def test_the_screen_says_where_the_run_is_what_it_takes_and_where_trackers_show_it():
    screen = screen_of(100)
    screen("run", {"directory": "runs/a"})
    screen("tracker", {"name": "wandb", "where": "https://example.org/runs/\x1b[31m1"})
    screen("step", step(0, memory_mb=1234.5))
    lines = {line.split()[0]: " ".join(line.split()[1:]) for line in picture(screen).splitlines() if line.strip()}
    assert lines["run"] == "runs/a, 1,234 MB of memory at most"
    assert lines["wandb"].startswith("https://example.org/runs/")
    assert "\x1b" not in lines["wandb"]


def test_the_picture_names_what_a_user_asks_for():
    screen = screen_of(100)
    for number in range(3):
        screen("step", step(number))
    screen("sample", {"prompt": "1+1=", "text": "2", "reward": 1.0, "answer": "two"})
    screen("eval", EVAL)
    text = picture(screen)
    for part in (
        "reward",
        "accuracy",
        "informative",
        "75%",
        "tokens/s",
        "1,234",
        "skipped (all correct)         1",
        "skipped (all wrong)           3",
        "grad norm",
        "1+1=",
        "reward 1.000, the answer is two",
        "3/100",
        "left",
    ):
        assert part in text
    assert "held-out accuracy 62.5% (95% interval 50.0% to 75.0%) after 20 steps" in text
    assert "entropy" not in text  # not reported, not shown
    screen("done", {"text": "Done: all well."})
    assert "left" not in picture(screen)
    assert screen.summary == "Done: all well."


def test_text_of_a_model_cannot_send_escape_codes():
    assert clean("a\x1b[2Jb\x07\u202ec\td\ne") == "a·[2Jb··c d\ne"
    screen = screen_of(80)
    screen("sample", {"prompt": "\x1b]0;title\x07", "text": "\x1b[2J\x9b[bold]x", "reward": 0.0})
    assert "\x1b" not in picture(screen)
    assert "\x9b" not in picture(screen)


def test_lines_are_few_and_complete(capsys):
    lines = Lines()
    lines("phase", {"name": "loading the model"})
    for number in range(700):
        lines("warmup", {"step": number + 1, "steps": 700, "loss": 1.0, "left_s": 65.0})
    lines("warmup_waiting", {})
    for number in range(1000):
        lines("step", step(number, max_steps=1000))
        lines("sample", {"prompt": "p", "text": "t", "reward": 1.0})
    lines("eval", EVAL)
    lines("message", {"text": "resumed", "level": "info"})
    lines("message", {"text": "\x1b[2Jlook out", "level": "warning"})
    lines("done", {"text": "Done."})
    out, err = capsys.readouterr()
    printed = out.splitlines()
    assert sum(line.startswith("step ") for line in printed) == 51
    assert sum(line.startswith("warm start ") for line in printed) == 10
    assert "warm start 70/700  loss 1.000  1:05 left" in printed
    assert printed[-3] == "held-out accuracy 62.5% (95% interval 50.0% to 75.0%) after 20 steps"
    assert printed[-2:] == ["resumed", "Done."]
    assert err == "warning: ·[2Jlook out\n"
    values = (
        "reward 0.500  accuracy 25.0%  informative 75%  skipped (all correct) 1  skipped (all wrong) 3  tokens 12.0"
    )
    assert f"step 1000/1000  {values}  grad norm 0.1  sampled tokens/s 1,234  0.50 s" in printed


@pytest.mark.parametrize("first", [0, 40])  # a resumed run begins at step 40: only the steps since then have a pace
def test_both_displays_show_the_time_left_at_the_pace_since_the_first_step(monkeypatch, capsys, first):
    lines = Lines()
    screen = screen_of(100)
    for number in (first, first + 1):
        monkeypatch.setattr("time.perf_counter", lambda now=1000.0 + 3 * number: now)
        for show in (lines, screen):
            show("step", step(number, **{"time/step_s": 2.0}))
    left = (3 + 2) / 2 * (98 - first)  # 2 s of the first step, and 3 s from its end to that of the second
    shown = f"{int(left // 60)}:{int(left % 60):02} left"
    lines("step", step(99))
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].endswith(f"2.00 s  {2 * (99 - first) // 60}:{2 * (99 - first) % 60:02} left")
    assert printed[-1].endswith("0.50 s")
    assert shown in picture(screen)
    assert shown not in printed[0]


def test_without_a_terminal_or_when_asked_there_are_lines(monkeypatch, capsys):
    with display(plain=False) as observe:
        assert isinstance(observe, Lines)
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    with display(plain=True) as observe:
        assert isinstance(observe, Lines)
    with display(plain=False) as observe:
        assert isinstance(observe, Screen)
        observe("step", step(0))
        observe("done", {"text": "Done: last words."})
    assert capsys.readouterr().out.rstrip().splitlines()[-1].strip("\x1b[0m1") == "Done: last words."
    monkeypatch.setenv("NO_COLOR", "1")
    with display(plain=False) as observe:
        assert isinstance(observe, Lines)


def test_events_are_json_and_what_others_print_goes_elsewhere(capsys):
    with display(plain=False, as_json=True) as observe:
        print("* a library says hello")
        observe("step", {"step": 0, "reward/mean": 0.5})
    out, err = capsys.readouterr()
    assert [json.loads(line) for line in out.splitlines()] == [{"event": "step", "step": 0, "reward/mean": 0.5}]
    assert err == "* a library says hello\n"
