"""Change a package at random and see whether tests notice: `make mutants PACKAGE=retrain/config N=50 SEED=0`.

A mutant is one operator, number, truth value or condition of the syntax tree, changed in a copy of the repository.
There at most 200 tests of `make test` that execute its line run, those with the fewest lines first, until one fails.
Which test executes which line is measured when the sources of the package have changed: `make test` with coverage.
"""

import argparse
import ast
import hashlib
import os
import random
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import pytest
from coverage import CoverageData

ROOT = Path(__file__).parents[1]
KEPT = ROOT / ".mutants"
"""The copy that is changed, and what the tests of a package execute, by the digest of its sources."""
SWAPS: dict[type, type] = {ast.FloorDiv: ast.Mult, ast.Mod: ast.Mult, ast.Pow: ast.Mult} | {
    old: new
    for pair in [
        (ast.Lt, ast.LtE), (ast.Gt, ast.GtE), (ast.Eq, ast.NotEq), (ast.Is, ast.IsNot), (ast.In, ast.NotIn),
        (ast.And, ast.Or), (ast.Add, ast.Sub), (ast.Mult, ast.Div), (ast.BitAnd, ast.BitOr),
    ]
    for old, new in (pair, pair[::-1])
}  # fmt: skip
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
FIXED = ("annotation", "returns", "decorator_list")
"""Fields of the syntax tree that are left alone: types, and `frozen=True`, which no test can see."""
LIMIT_S = 120
"""A test that takes longer than this notices the mutant: most take a hundredth of it."""


def variants(node: ast.AST) -> Iterator[tuple[ast.expr, ast.expr]]:
    """Yield (expression, what replaces it) for every mutant of a node itself."""
    conditions = getattr(node, "ifs", [getattr(node, "test", None)])
    yield from ((condition, ast.UnaryOp(ast.Not(), condition)) for condition in conditions if condition)
    match node:
        case ast.Compare(left, ops, comparators):
            for index, op in enumerate(ops):
                yield node, ast.Compare(left, [*ops[:index], SWAPS[type(op)](), *ops[index + 1 :]], comparators)
        case ast.BoolOp(op, values):
            yield node, ast.BoolOp(SWAPS[type(op)](), values)
        case ast.BinOp(left, op, right) if type(op) in SWAPS and not _is_text(left) and not _is_text(right):
            yield node, ast.BinOp(left, SWAPS[type(op)](), right)
        case ast.UnaryOp(ast.Not() | ast.USub(), operand):
            yield node, operand
        case ast.Constant(bool(value)):
            yield node, ast.Constant(not value)
        case ast.Constant(int(value) | float(value)):
            yield node, ast.Constant(value + 1)


def _is_text(node: ast.expr) -> bool:
    """Whether an operand makes the operator one of strings, whose mutants all raise a TypeError."""
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))


@dataclass(frozen=True)
class Mutant:
    """One change: the `old` expression of a file becomes the `new` one.

    `lines` are those that execute it: of its statement, or of the whole file for what runs when the file is imported.
    """

    file: Path
    old: ast.expr
    new: ast.expr
    lines: range

    @cached_property
    def source(self) -> str:
        """The changed text of the file."""
        lines = (ROOT / self.file).read_bytes().splitlines(keepends=True)  # columns of a node count bytes
        start = sum(map(len, lines[: self.old.lineno - 1])) + self.old.col_offset
        end = sum(map(len, lines[: (self.old.end_lineno or 0) - 1])) + (self.old.end_col_offset or 0)
        text = b"".join(lines)
        return b"".join((text[:start], f"({ast.unparse(self.new)})".encode(), text[end:])).decode()

    def __str__(self) -> str:
        return f"{self.file}:{self.old.lineno}: {ast.unparse(self.old)}  ->  {ast.unparse(self.new)}"


def mutants(file: Path) -> Iterator[Mutant]:
    """Yield every mutant of a file that is Python; annotations, and the texts inside f-strings, are left alone."""
    text = (ROOT / file).read_text()

    def visit(node: ast.AST, lines: range, inside: bool) -> Iterator[Mutant]:
        simple = inside and isinstance(node, ast.stmt | ast.match_case | ast.withitem)
        for old, new in variants(node):
            yield Mutant(file, old, new, _span(old) if simple else lines)
        for field, value in ast.iter_fields(node):
            for child in value if isinstance(value, list) else [value]:
                if not isinstance(child, ast.AST) or field in FIXED or _is_fixed(child):
                    continue
                below = _span(child) if simple and isinstance(child, ast.expr | ast.pattern) else lines
                yield from visit(child, below, inside or (field == "body" and isinstance(node, FUNCTIONS)))

    everything = range(1, text.count("\n") + 2)
    for mutant in visit(ast.parse(text), everything, inside=False):
        try:
            ast.parse(mutant.source)
        except SyntaxError:  # a number of a pattern, or of an attribute's name
            continue
        yield mutant


def _span(node: ast.expr | ast.pattern) -> range:
    return range(node.lineno, (node.end_lineno or node.lineno) + 1)


def _is_fixed(node: ast.AST) -> bool:
    """Whether a change below says nothing: positions inside f-strings are wrong, `strict` guards what cannot be."""
    if isinstance(node, ast.keyword):
        return node.arg == "strict"
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the listed tests alone, in their order, where pytest has this module as a plug-in."""
    listed = Path(os.environ["MUTANT_TESTS"]).read_text().splitlines()
    order = {test: number for number, test in enumerate(listed)}
    items[:] = sorted((item for item in items if item.nodeid in order), key=lambda item: order[item.nodeid])


def run_pytest(folder: Path, *arguments: str, data: Path | None = None) -> int:
    """Run the tests in a folder, whose package comes before the installed one; returns pytest's exit code."""
    environment = {"PYTHONPATH": str(folder), "COVERAGE_FILE": str(data)}
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", f"-ofaulthandler_timeout={LIMIT_S}"]
    return subprocess.run(
        [*command, *arguments], cwd=folder, env=os.environ | environment, stdout=subprocess.DEVNULL
    ).returncode


def executed_lines(package: Path, files: Sequence[Path], marks: str) -> CoverageData:
    """Which lines of the package each test executes, measured unless the sources are those of the last time."""
    digest = hashlib.sha256(b"".join((ROOT / file).read_bytes() for file in files)).hexdigest()[:12]
    stored = KEPT / f"{'.'.join(package.parts)}-{digest}"
    if not stored.exists():
        KEPT.mkdir(exist_ok=True)
        settings = KEPT / "coveragerc"
        settings.write_text(f"[run]\nsource = {package}\nrelative_files = true\n")
        part = stored.with_suffix(".part")
        cover = ["--cov", f"--cov-config={settings}", "--cov-context=test", "--cov-report="]
        if run_pytest(ROOT, "-m", marks, *cover, data=part):
            sys.exit("tests fail without any mutant: run make test")
        part.rename(stored)
    data = CoverageData(str(stored))
    data.read()
    return data


def tests_of(mutant: Mutant, by_line: dict[int, list[str]], sizes: Counter[str]) -> list[str]:
    """The tests that execute the mutant's lines, those first that execute the fewest lines of the package."""
    contexts = {context for line in mutant.lines for context in by_line.get(line, [])}
    tests = {context.rpartition("|")[0] for context in contexts} - {""}  # "": outside of any test
    return sorted(tests, key=lambda test: (sizes[test], test))


def main() -> int:
    """Try N mutants of a package; prints those that survive and the share that dies."""
    parser = argparse.ArgumentParser()
    parser.add_argument("package", type=Path)
    parser.add_argument("--marks", required=True, help="the tests that may notice: those of make test")
    parser.add_argument("-n", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--most", type=int, default=200, help="tests that are run for one mutant")
    options = parser.parse_args()
    files = sorted(file.relative_to(ROOT) for file in (ROOT / options.package).rglob("*.py"))
    data = executed_lines(options.package, files, options.marks)
    by_file = {file: data.contexts_by_lineno(str(file)) for file in files}
    sizes = Counter(
        context.rpartition("|")[0] for lines in by_file.values() for tests in lines.values() for context in tests
    )
    every = [mutant for file in files for mutant in mutants(file)]
    chosen = random.Random(options.seed).sample(every, min(options.n, len(every)))
    copy = KEPT / f"copy-{os.getpid()}"
    shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".*", "__pycache__", "runs", "site"))
    survivors = 0
    try:
        for number, mutant in enumerate(chosen, 1):
            tests = tests_of(mutant, by_file[mutant.file], sizes)[: options.most]
            survived = not tests or survives(mutant, copy, tests, number)
            survivors += survived
            verdict = "survived" if survived and tests else "no test" if survived else "died"
            print(f"{verdict:<9} {mutant} ({len(tests)} tests)", flush=True)
    finally:
        shutil.rmtree(copy)
    died = len(chosen) - survivors
    print(f"{died} of {len(chosen)} mutants of {options.package} died ({died / len(chosen):.0%}); seed {options.seed}")
    return 1 if survivors else 0


def survives(mutant: Mutant, copy: Path, tests: Sequence[str], number: int) -> bool:
    """Whether all tests pass with the mutant in the copy; the first few alone, which find most, import little."""
    listed = copy / "listed"
    os.environ["MUTANT_TESTS"] = str(listed)
    file = copy / mutant.file
    original = file.read_bytes()
    file.write_text(mutant.source)
    os.utime(file, (number, number))  # or else a compiled file of the same second and length would be taken for it
    try:
        for part in (tests[:20], tests[20:]):
            listed.write_text("".join(f"{test}\n" for test in part))
            files = dict.fromkeys(test.partition("::")[0] for test in part)
            # 5: no test of the list is there, because the name of a parametrized one has the folder in it.
            if part and run_pytest(copy, "-x", "-p", "tests.mutants", *files) not in (0, 5):
                return False
        return True
    finally:
        file.write_bytes(original)
        os.utime(file, (number, number))


if __name__ == "__main__":
    sys.exit(main())
