"""Run the tests marked `numeric` with the instruction sets of this CPU and of smaller ones: `make test-isa`.

python tests/isa.py [--row N] [OPTION OF PYTEST ...]    every row, or the one of this number, from 1

PyTorch chooses its own kernels by `ATEN_CPU_CAPABILITY` and oneDNN's by `ONEDNN_MAX_CPU_ISA`; both can be lowered.
Figures may differ from row to row; whether two computations agree may not. The whole of `make test-all` has the CPU's
own choice on one thread.
"""

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

import torch

ROWS = [
    # (ATEN_CPU_CAPABILITY, ONEDNN_MAX_CPU_ISA, threads); oneDNN's is a limit. PyTorch's own kernels for AVX2 cannot be
    # had together with oneDNN's for AMX: attention in bfloat16 packs for the latter, which the former refuse
    # ("pack_vnni2 is only supported when avx512 is supported").
    ("default", "AVX2", 1),
    ("avx2", "AVX512_CORE", 2),
]
FILES = sorted(str(file) for file in Path("tests").rglob("test_*.py") if "mark.numeric" in file.read_text())
FLAGS = {"avx2": "avx2", "AVX2": "avx2"}
"""The flag of /proc/cpuinfo that a setting needs."""


def processor() -> tuple[str, set[str]]:
    """Name and flags of the first CPU."""
    found = dict(line.split(":", 1) for line in Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines())
    facts = {key.strip(): value.strip() for key, value in found.items()}
    return facts.get("model name", "unknown"), set(facts.get("flags", "").split())


def run(row: tuple[str, str, int], options: list[str]) -> tuple[int, str]:
    """Run the numeric tests in one row; returns pytest's exit status and the last line that it printed."""
    capability, isa, threads = row
    chosen = {"ATEN_CPU_CAPABILITY": capability, "ONEDNN_MAX_CPU_ISA": isa, "RETRAIN_TEST_THREADS": str(threads)}
    chosen["OMP_WAIT_POLICY"] = "passive"  # threads that spin while they wait take the processor from each other
    environment = os.environ | chosen
    shared = ["-n", "3", "--dist", "loadgroup", "--no-loadscope-reorder"]
    command = [sys.executable, "-m", "pytest", "-m", "numeric", *shared, *FILES, *options]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        print(done.stdout[-20_000:], done.stderr[-2_000:], sep="\n")
    return done.returncode, done.stdout.strip().rpartition("\n")[2]


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--row", type=int, choices=range(1, len(ROWS) + 1))
    chosen, options = parser.parse_known_args()
    rows = ROWS[chosen.row - 1 : chosen.row] if chosen.row else ROWS
    name, flags = processor()
    extra = " ".join(sorted(flag for flag in flags if flag.startswith("amx") or flag in {"avx512_bf16", "avx_vnni"}))
    print(f"{name}; PyTorch uses {torch.backends.cpu.get_cpu_capability()}; also {extra or 'nothing beyond it'}\n")
    print(f"{'ATEN':<9}{'oneDNN':<13}{'threads':<9}{'seconds':>7}  result")
    failed = 0
    for row in rows:
        missing = sorted({FLAGS[word] for word in row[:2] if FLAGS.get(word, "") not in {"", *flags}})
        began = time.perf_counter()
        status, result = (0, f"not run: this CPU lacks {' and '.join(missing)}") if missing else run(row, options)
        failed += status != 0
        spent = time.perf_counter() - began
        print(f"{row[0]:<9}{row[1]:<13}{row[2]:<9}{spent:>7.0f}  {result}", flush=True)
    print(f"\n{len(rows) - failed} passed, {failed} failed")
    return failed > 0


if __name__ == "__main__":
    sys.exit(main())
