"""Mistakes that a hand or a broken disk makes in a TOML file: `mutate(text, rng)` makes a few of them."""

import random
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
SHIPPED = sorted(
    file
    for folder in ("configs", "campaigns", "plugins", "benchmarks/evidence")
    for file in (ROOT / folder).rglob("*.toml")
)

VALUES = (
    "0", "-1", "1", "3.5", "-0.0", "1e400", "nan", "-inf", "inf", "true", "false", '""', '"x"', "'none'", '"grpo"',
    '"grpo_lp"', '"dca"', '"../../etc"', r'"\u0000"', r'"\u001b[2J"', '"🦀"', '":"', '"/"', '"~"', '"a.b.c"',
    '"os.system"',
    "[]", "[[]]", "[1, 'a', {}]", "{}", "{ a = 1 }", "{ weight = { deep = [1] } }", "1979-05-27", "07:32:00", "0xff",
    "9" * 30, "-" + "9" * 400, "2147483648", "9223372036854775808", "1e-400", '"' + "x" * 20000 + '"',
    "[" * 60 + "]" * 60, "{ a = " * 80 + "1" + " }" * 80, "'''\n'''", '"""\n"""',
)  # fmt: skip
KEYS = (
    "lr", "seed", "max_steps", "beta", "weight", "name", "params", "path", "advantage_mode", "transform_mode", "x",
    '""', "a.b", '"a.b"', "'\t'", "ünï", "-", "1", "loss", "rewards", "a" * 3000, ".".join("a" * 40), "__class__",
)  # fmt: skip
TABLES = (
    "[training]", "[[rewards]]", "[[loss]]", "[algorithm]", "[algorithm.params]", "[algorithm.advantage_params]",
    "[gtpo]",
    "[hicra]", "[sepa]", "[dca]", "[grpo_lp]", "[prime]", "[mix]", "[kl]", "[[campaign.conditions]]", "[campaign]",
    "[campaign.grid]", "[model.lora]", "[planning]", "[expert]", "[task]", "[[training]]", "[rewards]", "[x]",
    "[x.y.z]",
    "[logging]", "[plugins]", "[vllm]", "[rollout]", "[eval]", "[checkpoint]", "[optimizer]", "[reward_pool]",
)  # fmt: skip

MAGNITUDES = (
    "0", "1", "-1", "3", "1000", "1000000", "100000000", "2147483648", "9223372036854775807", "0.0", "1e-300", "1e300",
    "-1e9", "nan", "inf",
)  # fmt: skip


def mutate(text: str, rng: random.Random) -> str:
    """The text with one to four mistakes."""
    for _ in range(rng.randint(1, 4)):
        lines = text.split("\n")
        text = rng.choice(MISTAKES)(lines, rng)
    return text


def _settings(lines: list[str]) -> list[int]:
    return [index for index, line in enumerate(lines) if re.match(r"\s*[\w\"'.-]+\s*=", line)] or [0]


def _other_value(lines: list[str], rng: random.Random) -> str:
    index = rng.choice(_settings(lines))
    lines[index] = f"{lines[index].split('=')[0]}= {rng.choice(VALUES)}"
    return "\n".join(lines)


def _other_key(lines: list[str], rng: random.Random) -> str:
    index = rng.choice(_settings(lines))
    lines[index] = f"{rng.choice(KEYS)} = {lines[index].partition('=')[2] or 1}"
    return "\n".join(lines)


def _other_magnitude(lines: list[str], rng: random.Random) -> str:
    numbers = [index for index in _settings(lines) if re.search(r"=\s*[\d.]+\s*(#|$)", lines[index])]
    index = rng.choice(numbers or _settings(lines))
    lines[index] = f"{lines[index].split('=')[0]}= {rng.choice(MAGNITUDES)}"
    return "\n".join(lines)


def _slip(lines: list[str], rng: random.Random) -> str:
    index = rng.randrange(len(lines))
    line = lines[index] or "x"
    at = rng.randrange(len(line))
    lines[index] = line[:at] + rng.choice(("", line[at] * 2, rng.choice("=[]{}\"'#.,\\ \t\0\x1bäx1"))) + line[at + 1 :]
    return "\n".join(lines)


def _new_setting(lines: list[str], rng: random.Random) -> str:
    lines.insert(rng.randrange(len(lines) + 1), f"{rng.choice(KEYS)} = {rng.choice(VALUES)}")
    return "\n".join(lines)


def _new_table(lines: list[str], rng: random.Random) -> str:
    lines.insert(rng.randrange(len(lines) + 1), f"{rng.choice(TABLES)}\n{rng.choice(KEYS)} = {rng.choice(VALUES)}")
    return "\n".join(lines)


def _table_is_no_table(lines: list[str], rng: random.Random) -> str:
    lines.insert(0, f"{rng.choice(TABLES).strip('[]').split('.')[0]} = {rng.choice(VALUES)}")
    return "\n".join(lines)


def _without_a_line(lines: list[str], rng: random.Random) -> str:
    del lines[rng.randrange(len(lines))]
    return "\n".join(lines)


def _line_twice(lines: list[str], rng: random.Random) -> str:
    index = rng.randrange(len(lines))
    lines.insert(rng.randrange(len(lines) + 1), lines[index])
    return "\n".join(lines)


def _cut(lines: list[str], rng: random.Random) -> str:
    text = "\n".join(lines)
    return text[: rng.randrange(len(text) + 1)]


MISTAKES = (
    _other_value, _other_value, _other_magnitude, _other_key, _other_key, _slip, _new_setting, _new_setting, _new_table,
    _table_is_no_table, _without_a_line, _line_twice, _cut,
)  # fmt: skip
