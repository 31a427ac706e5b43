"""Exit with an error unless the run in the given directory learned what the quickstart should learn."""

import json
import sys
from pathlib import Path

rows = [json.loads(line) for line in (Path(sys.argv[1]) / "eval.jsonl").read_text().splitlines()]
for name, most, least in (("accuracy", 0.45, 0.78), ("greedy_accuracy", 0.35, 0.93)):
    first, last = rows[0][name], rows[-1][name]
    if first >= most or last < least:
        sys.exit(f"held-out {name} went from {first} to {last}; it should go from below {most} to at least {least}")
