"""Lines and imports of the package, read from its source."""

from __future__ import annotations

import ast
import io
import tokenize
import tomllib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

ROOT = Path(__file__).parents[1]
_BLANK = {tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER, tokenize.ENCODING}


def code_lines(source: str) -> frozenset[int]:
    """Numbers of the lines of a Python source that are neither docstring, comment nor blank."""
    lines = set[int]()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _BLANK | {tokenize.COMMENT}:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            lines.difference_update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return frozenset(lines)


@dataclass(frozen=True)
class Module:
    """One file of the package.

    Attributes:
        name: dotted, `retrain.run.loop`; a package has the name of its folder.
        file: its path.
    """

    name: str
    file: Path

    @property
    def package(self) -> str:
        """The subpackage that contains it, such as `run`; "" for a module of `retrain` itself."""
        return f"{self.name}.".split(".")[1]

    @cached_property
    def tree(self) -> ast.Module:
        """The parsed source."""
        return ast.parse(self.file.read_text(encoding="utf-8"))

    @cached_property
    def code(self) -> frozenset[int]:
        """Numbers of the lines that are neither docstring, comment nor blank."""
        return code_lines(self.file.read_text(encoding="utf-8"))

    def functions(self) -> Iterator[tuple[str, int]]:
        """(name, code lines) of every function, methods and inner functions included."""
        for node in ast.walk(self.tree):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                yield node.name, len(self.code.intersection(range(node.lineno, (node.end_lineno or 0) + 1)))

    def bindings(self) -> Iterator[str]:
        """Names of its variables, parameters and aliases: one for every place that binds a name."""
        for node in ast.walk(self.tree):
            match node:
                case ast.Name(id=name, ctx=ast.Store()) | ast.arg(arg=name) | ast.alias(asname=str(name)):
                    yield name

    def type_names(self) -> Iterator[str]:
        """Names of its classes, inner ones included, and of its type aliases."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.ClassDef):
                yield node.name
        for node in self.tree.body:
            if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
                name = node.targets[0].id.lstrip("_")
                if name[:1].isupper() and not name.isupper():  # a constant is in capitals
                    yield node.targets[0].id

    def imported_modules(self) -> set[str]:
        """Names of the package's modules that it imports; imports inside functions and for type checking count."""
        known = {module.name for module in modules()}
        found = set[str]()
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names} & known
            elif isinstance(node, ast.ImportFrom) and node.module in known:
                inner = {f"{node.module}.{alias.name}" for alias in node.names}
                found |= inner & known or {node.module}
        return found - {self.name}

    def imports(self) -> Iterator[str]:
        """The packages that it imports from, one for each statement; imports inside functions count too."""
        for node in ast.walk(self.tree):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.module and not node.level:
                names = [f"{node.module}.{node.names[0].name}"]
            yield from (name.split(".")[1] for name in names if name.startswith("retrain."))


@cache
def modules() -> tuple[Module, ...]:
    """Every module of the package, sorted by path."""
    found: list[Module] = []
    for file in sorted((ROOT / "retrain").rglob("*.py")):
        parts = file.relative_to(ROOT).with_suffix("").parts
        found.append(Module(".".join(parts[:-1] if parts[-1] == "__init__" else parts), file))
    return tuple(found)


def layers() -> list[list[str]]:
    """The layers of the import contract, highest first; packages of one layer do not import each other."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"]
    contract = next(
        one for one in settings["contracts"] if one["type"] == "layers" and one["containers"] == ["retrain"]
    )
    return [[package.strip() for package in line.split("|")] for line in contract["layers"]]


def lines_of_packages() -> Counter[str]:
    """Code lines of every package."""
    return Counter(
        {package: sum(len(one.code) for one in modules() if one.package == package) for package in packages()}
    )


def packages() -> list[str]:
    """Every package, from the highest layer to the lowest."""
    return [package for line in layers() for package in line]


def arrows() -> Counter[tuple[str, str]]:
    """(package, package that it imports from) -> import statements."""
    known = set(packages())
    pairs = Counter((one.package, other) for one in modules() for other in one.imports())
    return Counter({pair: count for pair, count in pairs.items() if known.issuperset(pair) and pair[0] != pair[1]})
