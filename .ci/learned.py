"""Exit with an error unless the run in the given directory learned what the quickstart should learn."""

import json
import sys
from pathlib import Path

rows = [json.loads(line) for line in (Path(sys.argv[1]) / "eval.jsonl").read_text().splitlines()]
first, last = rows[0]["accuracy"], rows[-1]["accuracy"]
if first >= 0.45 or last < 0.85:
    sys.exit(f"held-out accuracy went from {first} to {last}; it should go from below 0.45 to at least 0.85")
