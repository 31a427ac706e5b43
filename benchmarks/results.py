"""Write what a script prints into its block of benchmarks/RESULTS.md, between `<!-- NAME -->` and `<!-- end -->`.

python benchmarks/fleet.py | python benchmarks/results.py fleet
"""

import re
import sys
from pathlib import Path

RESULTS = Path(__file__).with_name("RESULTS.md")


def block(name: str) -> re.Pattern[str]:
    """A pattern of the block: its first line, its content, its last line."""
    return re.compile(rf"(<!-- {re.escape(name)} -->\n)(.*?)(\n<!-- end -->)", re.DOTALL)


def read(name: str) -> str:
    """Return the content of a block."""
    [found] = block(name).finditer(RESULTS.read_text(encoding="utf-8"))
    return found[2]


def write(name: str, content: str) -> None:
    """Replace the content of a block. Raises ValueError if the file has no such block."""
    text, count = block(name).subn(
        lambda found: found[1] + content.strip() + found[3], RESULTS.read_text(encoding="utf-8")
    )
    if count != 1:
        raise ValueError(f"{RESULTS.name} has {count} blocks {name!r}; add <!-- {name} --> and <!-- end -->")
    RESULTS.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    write(sys.argv[1], sys.stdin.read())
