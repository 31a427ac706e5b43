"""The faults that a run must survive, and what strangers try, by number, with the tests that inject each.

`make faults` prints both tables; those of trust have numbers that begin with T.

python tests/faults/cases.py         every case; exit code 1 if one fails or has no test
python tests/faults/cases.py 6 T24   these cases

`--results FILE` takes what `make test-all JUNIT=FILE` has just found, and runs only the tests that it did not run.
"""

import argparse
import re
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from dataclasses import dataclass
from pathlib import Path

import tomli

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Case:
    """A fault, what must happen, and where that is tested.

    Attributes:
        inject: the fault.
        must: what must be there afterwards.
        tests: `file::function` under `tests/`; all parameters of each count.
    """

    inject: str
    must: str
    tests: tuple[str, ...]


EVERY = {
    name: Case(row["inject"], row["must"], tuple(row["tests"]))
    for name, row in tomli.loads(Path(__file__).with_suffix(".toml").read_text()).items()
}
CASES = {int(name): case for name, case in EVERY.items() if name.isdigit()}
TRUST = {name: case for name, case in EVERY.items() if name not in map(str, CASES)}


def main(arguments: list[str]) -> int:
    """Run the tests of the cases asked for, print a row per case; 1 if any of them failed."""
    cases = EVERY
    parser = argparse.ArgumentParser()
    parser.add_argument("cases", nargs="*")
    parser.add_argument("--results", type=Path)
    options = parser.parse_args(arguments)
    wanted: list[str] = options.cases or [*cases]
    if unknown := set(wanted) - set(cases):
        parser.error(f"unknown case {', '.join(sorted(unknown))}")
    outcomes = read(options.results) if options.results else {}
    tests = sorted({test for name in wanted for test in cases[name].tests} - set(outcomes))
    if tests:
        outcomes |= run(tests)
    faults, trust = (
        {name: cases[name] for name in wanted if (name in TRUST) == of_trust} for of_trust in (False, True)
    )
    bad = _table("fault", faults, outcomes) if faults else 0
    return int(bad + (_table("what strangers try", trust, outcomes) if trust else 0) > 0)


def run(tests: list[str]) -> dict[str, list[tuple[str, float]]]:
    """Run these tests, whatever their marks; returns what `read` does."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        options = ["-m", "", "-n", "3", "--dist", "loadgroup", "--no-loadscope-reorder", "-p", "no:cacheprovider"]
        files = [f"tests/{test}" for test in tests]
        subprocess.run(
            [sys.executable, "-m", "pytest", *options, f"--junit-xml={report}", *files], cwd=ROOT, check=False
        )
        return read(report)


def _table(title: str, cases: dict[str, Case], outcomes: dict[str, list[tuple[str, float]]]) -> int:
    """Print a row per case, and how many failed, which is returned."""
    bad, spent = 0, 0.0
    print(f"\n{'case':>4}  {'result':<7} {'tests':>5} {'seconds':>8}  {title} -> what must happen")
    for name, case in cases.items():
        found = [one for test in case.tests for one in outcomes.get(test, [("missing", 0.0)])]
        worst = next(
            (result for result in ("missing", "failed", "ok") if any(r == result for r, _ in found)), "skipped"
        )
        skipped = sum(result == "skipped" for result, _ in found)
        left_out = f" ({skipped} tests were skipped)" if skipped and worst != "skipped" else ""
        bad += worst in ("missing", "failed")
        seconds = sum(time for _, time in found)
        spent += seconds
        print(f"{name:>4}  {worst:<7} {len(found):>5} {seconds:>8.1f}  {case.inject} -> {case.must}{left_out}")
    print(f"{len(cases) - bad} passed, {bad} failed, {spent:.0f} s of tests")
    return bad


def read(report: Path) -> dict[str, list[tuple[str, float]]]:
    """(result, seconds) of every executed test by `file::function`, from pytest's JUnit file."""
    outcomes: dict[str, list[tuple[str, float]]] = {}
    if not report.is_file():
        return outcomes
    for one in ET.parse(report).getroot().iter("testcase"):
        file = one.get("classname", "").replace(".", "/").removeprefix("tests/")
        function = re.split(r"[\[@]", one.get("name", ""))[0]  # [case]@group of pytest-xdist
        result = "ok"
        if one.find("failure") is not None or one.find("error") is not None:
            result = "failed"
        elif one.find("skipped") is not None:
            result = "skipped"
        outcomes.setdefault(f"{file}.py::{function}", []).append((result, float(one.get("time", 0))))
    return outcomes


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
