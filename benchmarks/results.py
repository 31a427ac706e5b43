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


def read(name: str, page: Path | None = None) -> str:
    """Return the content of a block of a page; None: of RESULTS.md."""
    [match] = block(name).finditer((page or RESULTS).read_text(encoding="utf-8"))
    return match[2]


def write(name: str, content: str, page: Path | None = None) -> None:
    """Replace the content of a block of a page; None: of RESULTS.md. Raises ValueError if it has no such block."""
    page = page or RESULTS
    text, count = block(name).subn(
        lambda match: match[1] + content.strip() + match[3], page.read_text(encoding="utf-8")
    )
    if count != 1:
        raise ValueError(f"{page.name} has {count} blocks {name!r}; add <!-- {name} --> and <!-- end -->")
    page.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    write(sys.argv[1], sys.stdin.read())
