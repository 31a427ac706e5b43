"""Break the mathematics in the ways that happen in practice, and see that tests notice: `make mutants`.

Each mutant is a change of the source in a temporary copy; the tests named with it must fail there, and pass
without it. Prints a table; the exit code is 1 if a mutant survives. `--quick` leaves out the slow tests.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Mutant:
    """A mistake to make.

    Attributes:
        name: of the mistake.
        file: where, under `retrain/`.
        changes: (text that occurs exactly once, what replaces it).
        tests: files or directories under `tests/`, of which at least one must notice.
    """

    name: str
    file: str
    changes: Sequence[tuple[str, str]]
    tests: Sequence[str]

    def source(self, root: Path) -> str:
        """The file's text with the mistake in it; ValueError if a text to replace does not occur exactly once."""
        text = (root / "retrain" / self.file).read_text()
        for old, new in self.changes:
            if text.count(old) != 1:
                raise ValueError(f"{self.name}: {text.count(old)} times in retrain/{self.file}: {old}")
            text = text.replace(old, new)
        return text


MUTANTS = [
    Mutant(
        "mask after exp",
        "functional/ratios.py",
        [
            ("difference = keep(new, mask) - keep(old, mask)", "difference = new - old"),
            ("return keep(difference.clamp(-LIMIT, LIMIT).expand(mask.shape), mask)",
             "return difference.clamp(-LIMIT, LIMIT).expand(mask.shape) * mask"),
        ],
        ["functional/test_ratios.py", "algorithms/losses/test_surrogates.py"],
    ),
    Mutant(
        "wrong sigma",
        "functional/groups.py",
        [("degrees = group_size(group_ids, members) - ddof", "degrees = group_size(group_ids, members) - 1")],
        ["functional/test_groups.py", "algorithms/advantages/test_group_baselines.py"],
    ),
    Mutant(
        "shift off by one",
        "functional/logprobs.py",
        [("return scored.reshape(-1).nonzero()[:, 0] - 1", "return scored.reshape(-1).nonzero()[:, 0]")],
        ["functional/test_logprobs.py"],
    ),
    Mutant(
        "credit averaged over the sequence by gspo",
        "algorithms/losses/soft_gates.py",
        [
            ("sequence = F.masked.row_mean(kept.detach() - old_logprobs, response_mask)",
             "sequence = F.masked.row_mean(kept - old_logprobs, response_mask)"),
            ("(sequence + (kept - kept.detach()))", "(sequence + 0 * kept)"),
        ],
        ["algorithms/losses/test_surrogates.py"],
    ),
    Mutant(
        "padding in the denominator of the loss",
        "algorithms/reductions.py",
        [("return mask / mask.sum().clamp(min=1)", "return mask / mask.numel()")],
        ["algorithms/test_reductions.py"],
    ),
    Mutant(
        "padding in the denominator of a row's mean",
        "functional/masked.py",
        [(".sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp(min=1)", ".mean(-1, keepdim=True)")],
        ["functional/test_masked.py", "algorithms/transforms/test_token_stages.py"],
    ),
    Mutant(
        "min for max",
        "algorithms/losses/surrogates.py",
        [("value = free.maximum(bound)", "value = free.minimum(bound)")],
        ["algorithms/losses/test_surrogates.py"],
    ),
    Mutant(
        "ignoring groups",
        "functional/groups.py",
        [("unique, index = torch.unique(group_ids, return_inverse=True)",
          "unique, index = torch.unique(group_ids * 0, return_inverse=True)")],
        ["functional/test_groups.py", "algorithms/advantages/test_group_baselines.py"],
    ),
    Mutant(
        "brevity compared with wrong answers too",
        "algorithms/dca.py",
        [("brevity = F.groups.group_mean(scores, group_ids, correct) - scores",
          "brevity = F.groups.group_mean(scores, group_ids) - scores")],
        ["algorithms/test_dca.py"],
    ),
    Mutant(
        "SEPA without its delay",
        "algorithms/sepa.py",
        [("start += total // 20 if isinstance(delay, str) else delay", "start += 0")],
        ["algorithms/test_sepa.py"],
    ),
    Mutant(
        "one temperature for both signs in sapo",
        "algorithms/losses/soft_gates.py",
        [(".masked_fill(advantages > 0, tau_pos)", ".masked_fill(advantages > 0, tau_neg)")],
        ["algorithms/test_catalogue.py"],
    ),
    Mutant(
        "gmpo clips rewarded tokens from below",
        "algorithms/losses/soft_gates.py",
        [("log_ratio.clamp(max=eps_high).where(advantages > 0, log_ratio.clamp(min=-eps_low))",
          "log_ratio.clamp(max=eps_high).where(advantages < 0, log_ratio.clamp(min=-eps_low))")],
        ["algorithms/test_catalogue.py"],
    ),
    Mutant(
        "ipo bounds the log-ratio instead of the probabilities",
        "algorithms/losses/sampler_ratios.py",
        [("far = (distance.abs() > eps) & response_mask", "far = (log_ratio.detach().abs() > eps) & response_mask")],
        ["algorithms/test_catalogue.py"],
    ),
    Mutant(
        "topr tapers rewarded tokens",
        "algorithms/losses/sampler_ratios.py",
        [(".masked_fill(advantages > 0, 1.0)", ".masked_fill(advantages < 0, 1.0)")],
        ["algorithms/test_catalogue.py"],
    ),
    Mutant(
        "a missing reward counts as a bad one in gdpo",
        "algorithms/advantages/reward_scale.py",
        [("known = ~reward_parts.isnan()", "known = reward_parts == reward_parts.nan_to_num(0.0).nan_to_num(0.0)"),
         ("values = part.where(has, 0.0)", "has = has | True; values = part.nan_to_num(0.0)")],
        ["algorithms/test_catalogue.py"],
    ),
    Mutant(
        "gdpo with the population's deviation",
        "algorithms/advantages/reward_scale.py",
        [("spread = F.groups.group_std(values, group_ids, has, ddof=ddof)",
          "spread = F.groups.group_std(values, group_ids, has, ddof=0)")],
        ["algorithms/test_catalogue.py"],
    ),
    Mutant(
        "pkpo credits the worse rows",
        "algorithms/advantages/pass_at_k.py",
        [("(ordered[:, None] - ordered).tril()", "(ordered - ordered[:, None]).triu()")],
        ["algorithms/test_catalogue.py"],
    ),
    Mutant(
        "opsm drops rewarded tokens",
        "algorithms/transforms/off_policy_mask.py",
        [("(advantages < 0) & (gap > delta)", "(advantages > 0) & (gap > delta)")],
        ["algorithms/test_catalogue.py"],
    ),
    Mutant(
        "otb weighs a token by itself alone",
        "algorithms/transforms/token_returns.py",
        [(".where(present, 0.0).cumsum(-1)", ".where(present, 0.0)")],
        ["algorithms/test_catalogue.py"],
    ),
    Mutant(
        "gtpo_paper compares columns instead of positions",
        "algorithms/transforms/entropy_credit.py",
        [("(response_mask.cumsum(-1) - 1).clamp(min=0)",
          "torch.arange(width, device=entropy.device).expand(response_mask.shape)")],
        ["algorithms/test_catalogue.py"],
    ),
    Mutant(
        "regularizers skip rows without advantage",
        "algorithms/graph/objective.py",
        [("live | (rows & moved if _vanishes(term) else rows)", "live | (rows & moved)")],
        ["algorithms/graph/test_objective.py"],
    ),
    Mutant(
        "the expert's share given to the policy",
        "algorithms/graph/objective.py",
        [('factor *= share if source_of(term) == "expert" else 1 - share',
          'factor *= 1 - share if source_of(term) == "expert" else share')],
        ["algorithms/graph/test_objective.py"],
    ),
    Mutant(
        "positions run on over packed rows",
        "training/model/packing.py",
        [("return cls(kept, columns[kept][None],", "return cls(kept, torch.arange(int(kept.sum()))[None],")],
        ["training/model/test_packing.py"],
    ),
    Mutant(
        "a micro-batch counted by its shortest row",
        "training/model/forward.py",
        [("* lengths[parts[-1][0]] > budget", "* lengths[row] > budget")],
        ["training/model/test_packing.py"],
    ),
    Mutant(
        "warm-up that starts at zero",
        "training/optim.py",
        [("return (step + 1) / settings.warmup_steps", "return step / settings.warmup_steps")],
        ["training/test_optim.py"],
    ),
    Mutant(
        "sampled without temperature",
        "functional/draws.py",
        [("truncate(logits / temperature, top_k, top_p)", "truncate(logits, top_k, top_p)")],
        ["functional/test_draws.py"],
    ),
    Mutant(
        "a biased pass@k",
        "functional/evaluation.py",
        [("return 1.0 - math.comb(n - c, k) / math.comb(n, k)", "return 1.0 - (1 - c / n) ** k")],
        ["functional/test_evaluation.py"],
    ),
    Mutant(
        "a checkpoint trusted for its size",
        "storage/checkpoint.py",
        [('sha256(file) == entry["sha256"]', 'size == entry["bytes"]')],
        ["storage/test_checkpoint.py"],
    ),
    Mutant(
        "the oldest checkpoints kept",
        "storage/checkpoint.py",
        [("current[:keep]", "current[-keep:]")],
        ["storage/test_checkpoint.py"],
    ),
    Mutant(
        "columns counted from zero",
        "config/positions.py",
        [("(line, at - self.lines[line - 1] + 1)", "(line, at - self.lines[line - 1])")],
        ["config/test_positions.py"],
    ),
    Mutant(
        "tables of a list numbered from one",
        "config/positions.py",
        [("self.entries.get(path, -1) + 1", "self.entries.get(path, 0) + 1")],
        ["config/test_positions.py"],
    ),
    Mutant(
        "ties left out of the permutation test",
        "campaign/verdict/statistics.py",
        [(">= evidence[0, order] * (1 - _TIE) - _TIE", "> evidence[0, order] * (1 + _TIE) + _TIE")],
        ["campaign/verdict/test_statistics.py"],
    ),
    Mutant(
        "the step-down maximum over the earlier comparisons",
        "campaign/verdict/statistics.py",
        [("evidence[:, order[::-1]], axis=1)[:, ::-1]", "evidence[:, order[::-1]], axis=1)")],
        ["campaign/verdict/test_statistics.py"],
    ),
    Mutant(
        "Holm's correction without its floor",
        "campaign/verdict/statistics.py",
        [("floor = max(floor, min(1.0, (len(p_values) - rank) * float(p_values[index])))",
          "floor = min(1.0, (len(p_values) - rank) * float(p_values[index]))")],
        ["campaign/verdict/test_statistics.py"],
    ),
    Mutant(
        "intervals of the population's spread",
        "campaign/verdict/statistics.py",
        [("float(data.std(ddof=1)), floor) / math.sqrt", "float(data.std()), floor) / math.sqrt")],
        ["campaign/verdict/test_statistics.py"],
    ),
    Mutant(
        "process rewards at the end of the episode",
        "algorithms/prime.py",
        [("places = F.masked.turn_ends(response_mask, turn_ids)",
          "places = F.masked.turn_ends(response_mask, turn_ids * 0)")],
        ["algorithms/test_turns.py"],
    ),
    Mutant(
        "a turn compared with itself",
        "algorithms/turns.py",
        [("compared = F.groups.leave_one_out(returns[:, turn], group_ids, members)",
          "compared = returns[:, turn] - F.groups.group_mean(returns[:, turn], group_ids, members)")],
        ["algorithms/test_turns.py"],
    ),
    Mutant(
        "returns that end at an observation",
        "algorithms/turns.py",
        [("total = found[:, turn] = rewards[:, turn] + gamma * total",
          "total = found[:, turn] = rewards[:, turn] + 0 * total")],
        ["algorithms/test_turns.py"],
    ),
    Mutant(
        "the end of a reply said twice",
        "training/chat_stitcher.py",
        [("return ids[place + 1 :] if", "return ids[place:] if")],
        ["training/test_chat_stitcher.py"],
    ),
    Mutant(
        "a cut reply without its end",
        "run/episodes.py",
        [("ids(messages, episode.end)", "ids(messages, self._chat.end_id)")],
        ["run/test_episodes.py"],
    ),
    Mutant(
        "observations trained on",
        "training/layout.py",
        [("            for start, end in spans:\n                response[row, start:end] = True",
          "            for start, _ in spans[:1]:\n                response[row, start : len(ids)] = True")],
        ["run/test_episodes.py"],
    ),
    Mutant(
        "another game for every member of a group",
        "run/episodes.py",
        [("(episode.problem.facts, seed)", "(episode.problem.facts, seed + episode.member)")],
        ["run/test_episodes.py"],
    ),
    Mutant(
        "a replay without the last reply",
        "environments/env_pool.py",
        [("for body, digest in self._history:", "for body, digest in self._history[:-1]:")],
        ["environments/test_env_pool.py"],
    ),
    Mutant(
        "grams across an observation",
        "algorithms/planning/planning_mask.py",
        [("turns = response.long() if turn_ids is None else (turn_ids.cpu() + 1).where(response, 0)",
          "turns = response.long()")],
        ["algorithms/planning/test_planning_mask.py"],
    ),
    Mutant(
        "gradients averaged over the ranks",
        "training/distributed/shards.py",
        [("module.set_gradient_divide_factor(1.0)", "module.set_gradient_divide_factor(2.0)")],
        ["training/test_ranks.py"],
    ),
    Mutant(
        "weights left unsharded after a forward",
        "training/distributed/shards.py",
        [('"reshard_after_forward": True', '"reshard_after_forward": False')],
        ["training/test_ranks.py"],
    ),
    Mutant(
        "repeated micro-batches of idle ranks counted",
        "training/policy.py",
        [("[index, :width] * counts", "[index, :width]")],
        ["training/test_ranks.py"],
    ),
    Mutant(
        "repeated micro-batches of idle ranks in the metrics",
        "training/policy.py",
        [("                if counts:\n", "                if True:\n")],
        ["training/test_ranks.py"],
    ),
    Mutant(
        "adapters' gradients left to each rank",
        "training/policy.py",
        [("        self._shards.sum_gradients(list(self.optimizer.parameters.values()))\n", "")],
        ["training/test_ranks.py"],
    ),
    Mutant(
        "layers left unsharded by a probe that raised",
        "training/model/forward.py",
        [("            self.shards.recover()\n            return False\n", "            return False\n")],
        ["training/test_ranks.py"],
    ),
    Mutant(
        "keys of the listed tokens alone",
        "training/model/packing.py",
        [("for cells in (kept, mask) if ragged", "for cells in (kept, kept) if ragged")],
        ["training/model/test_packing.py"],
    ),
    Mutant(
        "columns seen before they are filled",
        "engines/embedded/static.py",
        [(" | (columns > self._column)", "")],
        ["engines/test_torch_engine.py"],
    ),
    Mutant(
        "the same dropout on every rank",
        "training/model/lora.py",
        [('derive_seed(seed, "rank", ranks.rank)', 'derive_seed(seed, "rank", 0)')],
        ["training/test_ranks.py"],
    ),
    Mutant(
        "the rows of another rank read from a checkpoint",
        "training/distributed/sharded_tensors.py",
        [("(mesh.get_rank(), mesh.get_rank() + 1)", "(0, 1)")],
        ["run/test_rank_runs.py"],
    ),
]  # fmt: skip


def main() -> int:
    """Try all of them."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    chosen = ["-m", "not slow and not ranks"] if parser.parse_args().quick else []
    every = sorted({test for mutant in MUTANTS for test in mutant.tests})
    with tempfile.TemporaryDirectory() as temporary:
        copy = Path(temporary)
        ignored = shutil.ignore_patterns("__pycache__")
        for name in ("retrain", "tests", "docs"):
            shutil.copytree(ROOT / name, copy / name, ignore=ignored)
        shutil.copy(ROOT / "pyproject.toml", copy)
        if not passes(copy, every, chosen):
            print("the tests fail without any mutant: run make test")
            return 1
        survivors = [mutant.name for mutant in MUTANTS if not killed(copy, mutant, chosen)]
    print(f"{len(MUTANTS) - len(survivors)} killed, {len(survivors)} survived")
    return 1 if survivors else 0


def killed(copy: Path, mutant: Mutant, chosen: Sequence[str]) -> bool:
    """Whether its tests notice the mutant; says so."""
    file = copy / "retrain" / mutant.file
    original = file.read_text()
    file.write_text(mutant.source(copy))
    try:
        noticed = not passes(copy, mutant.tests, chosen)
    finally:
        file.write_text(original)
    print(f"{'killed' if noticed else 'SURVIVED':<10}{mutant.name:<45}{mutant.file}", flush=True)
    return noticed


def passes(copy: Path, tests: Sequence[str], chosen: Sequence[str]) -> bool:
    """Whether these tests pass in the copy."""
    command = [sys.executable, "-B", "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"]
    result = subprocess.run(
        [*command, *chosen, *(f"tests/{test}" for test in tests)],
        cwd=copy,
        env=os.environ | {"PYTHONPATH": str(copy)},
        capture_output=True,
        text=True,
    )
    if result.returncode == 5 and chosen:  # every test is a slow one
        return True
    if result.returncode not in (0, 1):  # not a failed test, but no tests at all
        raise RuntimeError(result.stdout + result.stderr)
    return result.returncode == 0


if __name__ == "__main__":
    sys.exit(main())
