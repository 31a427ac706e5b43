"""The built-in environments and their problems."""

import asyncio
import inspect
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
import tomli

from retrain.data.games import Numbers, Sums, Walks
from retrain.environments.calculator import calculator
from retrain.environments.contract import Limits
from retrain.environments.env_pool import EnvPool, Launch
from retrain.environments.env_process import Hello
from retrain.environments.grid import grid
from retrain.environments.guess import guess
from retrain.environments.tools import PARSERS, called, python_block, schema, tools
from retrain.system import event_loop
from retrain.system.bubblewrap import missing


def play(game, replies):
    """(what was said, turn rewards, what it returned)."""
    said, rewards = [next(game)], []
    try:
        for reply in replies:
            say = game.send(reply)
            said.append(say.text)
            rewards.append(say.reward)
    except StopIteration as end:
        return said[1:], rewards, end.value
    return said[1:], rewards, "open"


@pytest.mark.parametrize(
    ("replies", "said", "reward"),
    [
        (["=12+34", "so 46"], ["46\n"], 1.0),
        (["so 45"], [], 0.0),
        (["=1+2+3", "hm", "=12+34", "so 46"], ["?\n", "?\n", "46\n"], 1.0),
        (["=1+2"] * 4, ["3\n"] * 3, 0.0),
    ],
)
def test_calculator(replies, said, reward):
    assert play(calculator("46"), replies) == (said, [0.0] * len(said), reward)


def test_guess_rewards_what_a_hint_leaves():
    said, rewards, end = play(guess("3", top=7, guesses=4, shaping=3.0), ["5", "5", "what", "3"])
    assert (said, end) == (["-\n", "-\n", "?\n"], {"found": 1.0})
    assert rewards == pytest.approx([3 * (3 - 2.3219) / 3, 0.0, 0.0], abs=1e-4)  # log2 of 8 / 5, and nothing new
    assert play(guess("3", guesses=1), ["4"]) == ([], [], {"found": 0.0})


def test_guess_counts_what_the_hints_had_excluded():
    game: Any = guess("3", top=7)
    next(game)
    assert [game.send(reply).metrics["forgot"] for reply in ("5", "6", "what", "1", "0")] == [0, 1, 1, 0, 1]


def test_all_guesses_that_find_the_number_earn_the_whole_shaping():
    _, rewards, _ = play(guess("0", top=7, guesses=9, shaping=1.0), ["4", "2", "1", "0"])
    assert sum(rewards) == pytest.approx(1.0)


def test_grid_rewards_every_step_that_brings_nearer():
    said, rewards, end = play(grid("2 -1"), ["e", "n", "what", "s", "s", "e"])
    assert said == ["1 -1:", "1 -2:", "1 -2:", "1 -1:", "1 0:"]
    assert rewards == pytest.approx([1 / 3, -1 / 3, 0, 1 / 3, 1 / 3])
    assert end == {"reached": 1.0, "nearer": pytest.approx(1 / 3)}
    assert sum(rewards) == pytest.approx(2 / 3)
    assert play(grid("-3 0", steps=2, shaping=0.0), ["w", "w"]) == (["-2 0:"], [0.0], {"reached": 0.0, "nearer": 0.0})


@pytest.mark.parametrize("make", [Sums, Numbers, Walks])
def test_problems_are_apart_repeatable_and_shown_with_mistakes(make):
    first, again, other = make(0), make(0), make(1)
    train = [first.problem(index) for index in range(200)]
    assert train == [again.problem(index) for index in range(200)]
    assert train != [other.problem(index) for index in range(200)]
    held = first.heldout(64 if make is Sums else 5)
    assert held == other.heldout(len(held))
    assert make is Numbers or not {one.id for one in train} & {one.id for one in held}
    assert make(0).fingerprint() == make(1).fingerprint()
    game = {Sums: calculator, Numbers: guess, Walks: grid}[make]
    found = [play(game(one.answer), one.replies)[2] for one in train]
    right = sum((next(iter(one.values())) if isinstance(one, dict) else one) == 1 for one in found) / len(found)
    assert 0.1 < right < 0.9
    assert "open" not in found


def area(width: int, height: float = 1.0) -> float:
    """Width times height.

    More that the model is not told.
    """
    return width * height


CALLS = {
    "hermes": '<tool_call>{"name": "area", "arguments": %s}</tool_call>',
    "json": 'so\n```json\n{"name": "area", "arguments": %s}\n```',
}


@pytest.mark.parametrize("parser", ["hermes", "json", "python"])
def test_tools_are_called_and_mistakes_are_observations(parser):
    arguments = '{"width": 3, "height": 2.5}'
    right = CALLS[parser] % arguments if parser != "python" else "```python\narea(width=3, height=2.5)\n```"
    replies = [right, right.replace("area", "volume"), right.replace("width", "depth"), right.replace("3", "("), "7.5"]
    game: Any = tools(functions=[f"{__name__}.area"], parser=parser)
    first = next(game)
    assert [tool["name"] for tool in first.tools] == ["area"]
    assert '"width": {"type": "integer"}' in first.tools_text
    assert '"description": "Width times height."' in first.tools_text
    assert '"required": ["width"]' in first.tools_text
    answers = [game.send(reply) for reply in replies[:-1]]
    assert [one.role for one in answers] == ["tool"] * 4
    assert answers[0].text == "7.5"
    assert "there is no tool 'volume'; there are area" in answers[1].text
    assert "TypeError" in answers[2].text
    assert answers[3].text.startswith("error: this is not a call")
    assert [one.metrics["tool_errors"] for one in answers] == [0, 1, 1, 1]
    with pytest.raises(StopIteration) as end:
        game.send(replies[-1])
    assert end.value.value is None


@pytest.mark.parametrize(
    ("parser", "text"),
    [
        ("hermes", "<tool_call>" + "[" * 100_000),
        ("hermes", '<tool_call>{"name": "area", "arguments": "[]"}</tool_call>'),
        ("hermes", '<tool_call>{"name": "area", "arguments": {}, "input": {"width": 3}}</tool_call>'),
        ("json", '```json\n["area"]\n```'),
        ("python", "```python\narea(width={[]: 1})\n```"),
        ("python", f"```python\narea(width={'-' * 5000}1)\n```"),
        ("python", "```python\narea(**{'width': 1})\n```"),
    ],
)
def test_no_text_of_a_model_breaks_an_episode(parser, text):
    game: Any = tools(functions=[f"{__name__}.area"], parser=parser)
    next(game)
    answer = game.send(text)
    assert answer.text.startswith("error: ")
    assert "not a call" in answer.text
    assert answer.metrics == {"tool_calls": 1, "tool_errors": 1}


@pytest.mark.parametrize(
    "call",
    [
        '{"name": "area", "parameters": {"width": 3, "height": 2.5}}',
        '{"name": "area", "arguments": "{\\"width\\": 3, \\"height\\": 2.5}"}',
        '{"id": "1", "type": "function", "name": "area", "arguments": {"width": 3, "height": 2.5}}',
    ],
)
def test_other_forms_of_a_call(call):
    for text in (f"<tool_call>{call}</tool_call>", f"<tool_call>\n{call}", f"```json\n{call}\n```"):
        parser = "json" if text.startswith("`") else "hermes"
        assert PARSERS[parser](text) == [("area", {"width": 3, "height": 2.5})]


@pytest.mark.parametrize(
    ("parser", "opening", "closing"), [("hermes", "<tool_call>", "</tool_call>"), ("json", "```json\n", "```")]
)
def test_a_string_may_hold_line_ends_and_the_closing_tag(parser, opening, closing):
    call = f'{{"name": "run", "arguments": {{"code": "print(1)\n# {closing}"}}}}'
    text = f"{opening}{call}{closing} then {opening}{call}{closing}"
    assert PARSERS[parser](text) == [("run", {"code": f"print(1)\n# {closing}"})] * 2


def test_a_list_of_calls():
    text = '```json\n[{"name": "a", "arguments": {"n": 1}}, {"name": "b"}, 3]\n```'
    *right, (name, wrong) = PARSERS["json"](text)
    assert right == [("a", {"n": 1}), ("b", {})]
    assert (name, wrong) == ("", '3 is not a call: write {"name": ..., "arguments": {...}}')


async def later(
    one,
    maybe: int | None = None,
    lists: "list[dict]" = [],  # noqa: B006 - is not changed
    table: dict[str, float] | None = None,
    unit: Literal["m", "ft"] = "m",
    count: Annotated[int, "of them"] = 1,
    names: Sequence[str] = (),
    *more,
    mixed: Literal["all", 1] = 1,
    pair: tuple[int, str] = (1, ""),
    flag: bool = False,
    anything: Any = None,
    **rest,
) -> str:
    """Measure.

    Args:
        one: what is measured,
            wherever it is.
        unit (str): of the length.

    Returns:
        The length: in units.
    """
    await asyncio.sleep(0)
    return f"{one} {unit}"


def test_a_schema_says_what_a_signature_and_its_docstring_say():
    whole = {"anyOf": [{"type": "integer"}, {"type": "null"}]}
    table = {"anyOf": [{"type": "object", "additionalProperties": {"type": "number"}}, {"type": "null"}]}
    parameters = schema("later", later)["parameters"]
    assert parameters["required"] == ["one"]
    assert parameters["properties"] == {
        "one": {"type": "string", "description": "what is measured, wherever it is."},
        "maybe": whole,
        "lists": {"type": "array", "items": {"type": "object"}},
        "table": table,
        "unit": {"type": "string", "enum": ["m", "ft"], "description": "of the length."},
        "count": {"type": "integer"},
        "names": {"type": "array", "items": {"type": "string"}},
        "mixed": {"enum": ["all", 1]},
        "pair": {"type": "array"},
        "flag": {"type": "boolean"},
        "anything": {},
    }


def typed(
    a: int = 0, ratio: float = 0.0, flag: bool = False, names: Sequence[str] = (), table: dict[str, int] | None = None,
    pair: tuple[int, str] = (0, ""), unit: Literal["m", "km"] = "m", note: Annotated[str, "x"] = "", key: int | str = 0,
    free=None,
) -> str:  # fmt: skip
    """Show what arrives."""
    return repr(next(value for key, value in locals().items() if value != _TYPED[key].default))


_TYPED = inspect.signature(typed).parameters


ARGUMENTS = tomli.loads(Path(__file__).with_name("arguments.toml").read_text())["rows"]


@pytest.mark.parametrize(("arguments", "said"), ARGUMENTS)
def test_arguments_have_the_annotated_type_or_are_refused(arguments, said):
    game = called({"typed": typed}, "hermes", False)
    next(game)
    assert game.send(f'<tool_call>{{"name": "typed", "arguments": {arguments}}}</tool_call>').text == said


def test_a_coroutine_is_a_tool():
    game: Any = tools(functions=[f"{__name__}.later"])
    next(game)
    assert game.send('<tool_call>{"name": "later", "arguments": {"one": "2"}}</tool_call>').text == "2 m"


ONE, TWO = '{"name": "a", "arguments": {"x": 1}}', '{"name": "b", "arguments": {"x": "</tool_call>"}}'


@pytest.mark.parametrize(
    ("parser", "text"),
    [
        ("hermes", f"<tool_call>{ONE}\n{TWO}</tool_call>"),
        ("hermes", f"<tool_call>\r\n{ONE}{TWO}\r\n</tool_call>\r\n"),
        ("hermes", f"<tool_call>{ONE}</tool_call><tool_call>{TWO}"),
        ("json", f"```json\r\n{ONE}\r\n{TWO}\r\n```\r\n"),
        ("json", f"```json \n[{ONE}, {TWO}]\n```"),
        ("python", "```python\r\na(x=1)\r\nb(x='</tool_call>')\r\n```\r\n"),
    ],
)
def test_calls_one_after_another_and_line_ends_of_windows(parser, text):
    assert PARSERS[parser](text) == [("a", {"x": 1}), ("b", {"x": "</tool_call>"})]


def test_objects_with_other_text_between_them_are_not_calls():
    [(name, reason)] = PARSERS["hermes"](f"<tool_call>{ONE} and {TWO}</tool_call>")
    assert (name, "not a call" in reason) == ("", True)


def test_python_is_read_and_never_run():
    text = "```python\nx = 1\narea(3)\n__import__('os').getpid()\n```"
    assert [name for name, _ in python_block(text)] == ["", "", ""]


@pytest.mark.slow
def test_the_python_tool_runs_code_under_bubblewrap(tmp_path, monkeypatch):
    if why := missing():
        pytest.skip(why[0])
    functions = ["misbehaving_worlds.patient_python", "retrain.environments.tools.python"]
    params, path = {"functions": functions, "describe": False}, (str(Path(__file__).parent),)
    hello = Hello("tools", "retrain.environments.tools.tools", params, path, 600.0, Limits(9, 9, 9, 9))
    pool = EnvPool(Launch({"": hello}, 2048)).start()
    env = pool.env("", 0)
    event_loop.run(env.reset({"id": "0", "prompt": "p", "answer": "a", "extra": {}}, 0))

    def called(code, name="patient_python"):
        call = json.dumps({"name": name, "arguments": {"code": code}})
        return event_loop.run(env.step(f"<tool_call>{call}</tool_call>", "stop", 0, 9))

    def answer(code, name="patient_python"):
        return called(code, name).messages[0][1]

    assert answer("while True: pass", "python") == "error: TimeoutError: it took more than 5 s"
    assert answer("print(6 * 7)") == "42\n"
    assert "ZeroDivisionError" in answer("1 / 0")
    assert answer("open('/tmp/kept', 'w').write('seen')") == ""  # what a call leaves is gone with it
    assert "FileNotFoundError" in answer("open('/tmp/kept')")
    assert "File too large" in answer("open('/tmp/large', 'wb').write(bytes(1 << 25))")
    forks = "import os, time\nfor _ in range(1000):\n  if not os.fork():\n    time.sleep(1000)"
    if os.geteuid():
        assert "BlockingIOError" in answer(forks)
        alone = "import os, time\nfor _ in range(40):\n  if not os.fork():\n    os.setsid()\n    time.sleep(1000)\n"
        assert [answer(f"{alone}print(1)") for _ in range(2)] == ["1\n"] * 2
        assert answer("import subprocess; print(subprocess.check_output(['/bin/echo', '1']))") == "b'1\\n'\n"
    else:
        assert "PermissionError" in answer(forks), "the kernel does not count root's processes"
    assert answer(f"import os; print(os.path.exists({str(tmp_path)!r}))") == "False\n"
    assert "Error" in answer("import socket; socket.create_connection(('1.1.1.1', 53), 1)")
    assert len(answer("print('x' * 10**6)")) == 1 << 15
    assert answer("import os, signal; os.kill(os.getppid(), signal.SIGKILL); print(1)") == "1\n"  # process 1
    pool.close()
