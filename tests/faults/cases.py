"""The faults that a run must survive, by number, and the tests that inject each: `make faults` prints the table.

python tests/faults/cases.py        every case; exit code 1 if one fails or has no test
python tests/faults/cases.py 6 24   these cases
"""

import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from dataclasses import dataclass
from pathlib import Path

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


def _case(inject: str, must: str, *tests: str) -> Case:
    return Case(inject, must, tests)


SIGKILL, CHECKPOINT, DIRECTORY = "faults/test_sigkill.py", "storage/test_checkpoint.py", "storage/test_run_directory.py"
RANKS = "faults/test_rank_faults.py"
POOL, LOOP, SERVERS = "rewards/test_pool.py", "run/test_loop.py", "engines/vllm/test_servers.py"
COMMANDS, TRAIN, FILES = "cli/test_config_commands.py", "cli/test_run_commands.py", "tasks/test_problem_files.py"
RESULTS, WORKER, CAMPAIGN = (
    "campaign/verdict/test_results.py",
    "campaign/work/test_campaign_worker.py",
    "faults/test_campaign.py",
)

CASES: dict[int, Case] = {
    1: _case("SIGKILL at random moments, restart", "the weights of an undisturbed run",
             f"{SIGKILL}::test_twenty_kills_at_random_moments_leave_the_weights_as_they_would_be"),
    2: _case("SIGKILL after the data, before the manifest", "ignored, the previous one resumes, nothing stays",
             f"{CHECKPOINT}::test_sigkill_at_any_point_of_a_save_never_loses_or_mixes_a_checkpoint"),
    3: _case("bit flip in a checkpoint's files", "refused by hash and by name, the previous one is used",
             f"{CHECKPOINT}::test_damage_is_rejected_by_name_and_the_previous_one_is_used",
             f"{CHECKPOINT}::test_a_flip_in_any_byte_of_a_manifest_matters"),
    4: _case("truncated, missing, empty, linked files", "as 3",
             f"{CHECKPOINT}::test_damage_is_rejected_by_name_and_the_previous_one_is_used",
             f"{CHECKPOINT}::test_wrong_step_format_and_manifest_without_state"),
    5: _case("every checkpoint bad", "exit 6 with each reason; never from zero in silence",
             f"{CHECKPOINT}::test_all_bad_never_starts_from_zero"),
    6: _case("disk full during a save", "the old one whole, nothing stray, exit 6 or a warning",
             f"{CHECKPOINT}::test_a_write_that_hits_the_limit_leaves_the_old_checkpoint_and_no_stray_file",
             f"{DIRECTORY}::test_a_failed_save_warns_or_stops"),
    7: _case("read-only run directory", "exit 6 before the model is loaded",
             f"{TRAIN}::test_a_read_only_run_directory_is_refused_before_anything_is_loaded"),
    8: _case("SIGTERM in a step", "checkpoint after the step, exit 75, exact resume",
             f"{SIGKILL}::test_sigterm_saves_and_exits_75_and_the_resumed_run_is_the_same"),
    9: _case("second SIGTERM", "ends at once; the previous checkpoint is valid",
             "run/test_stop_signal.py::test_the_second_one_ends_the_process",
             f"{SIGKILL}::test_a_second_sigterm_ends_at_once_and_the_resumed_run_is_the_same"),
    10: _case("Ctrl-C", "exit 130 and no process left",
              f"{SIGKILL}::test_ctrl_c_leaves_no_process_behind_and_exits_130"),
    11: _case("SIGKILL with epochs, minibatches and every stateful method", "exact resume",
              f"{SIGKILL}::test_the_state_of_every_method_survives_kills"),
    12: _case("resume with another configuration, data or plug-in", "refused with both values; --allow-change logs it",
              f"{LOOP}::test_resuming_with_another_configuration_is_refused_unless_allowed",
              "run/test_resume.py::test_other_code_of_a_plugin_is_refused_unless_allowed",
              "run/test_resume.py::test_other_problems_under_the_same_path_are_refused_unless_allowed"),
    13: _case("another number of ranks; a rank that is killed, stopped or hangs", "resumes; exit 5 or 75",
              "run/test_rank_runs.py::test_a_run_goes_from_world_to_world",
              f"{RANKS}::test_any_rank_killed_at_any_moment_leaves_a_run_that_resumes",
              f"{RANKS}::test_sigterm_to_the_launcher_ends_all_ranks_after_their_step",
              f"{RANKS}::test_a_launcher_that_is_killed_takes_its_ranks_with_it",
              f"{RANKS}::test_a_rank_that_hangs_is_named_with_its_phase_after_the_timeout",
              f"{RANKS}::test_what_rank_1_alone_raises_is_shown_and_decides_the_exit_code",
              f"{RANKS}::test_torchs_own_launcher_runs_the_command",
              f"{RANKS}::test_the_slurm_script_runs_a_task_per_rank_and_requeues_what_was_stopped"),
    14: _case("second process on a run directory", "owner named; a dead owner is replaced; readers harm nothing",
              "faults/test_readers.py::test_no_reader_harms_a_run_that_replaces_its_checkpoints",
              f"{DIRECTORY}::test_a_second_process_is_refused_by_name_and_a_dead_one_is_replaced",
              f"{DIRECTORY}::test_locks_of_other_hosts_reused_process_ids_and_half_written_ones"),
    15: _case("finished run, no flag", "exit 2 with the three ways out",
              f"{LOOP}::test_an_existing_run_is_refused_resumed_or_replaced"),
    16: _case("loss that is not finite, once", "the update is skipped and counted, weights stay",
              "training/test_policy.py::test_a_non_finite_loss_leaves_weights_and_optimizer_alone"),
    17: _case("three such steps in a row", "exit 4, checkpoints and the batch are kept",
              f"{LOOP}::test_three_nonfinite_updates_end_the_run_and_keep_the_batch"),
    18: _case("reward NaN, inf, None, 10**400", "masked and counted, never 0",
              f"{POOL}::test_every_failure_costs_its_own_item_only",
              f"{LOOP}::test_failed_scores_are_masked_and_counted_never_zero"),
    19: _case("reward that raises", "masked, traceback once; too many: exit 1 with a sample",
              f"{POOL}::test_failures_below_the_ceiling_are_told_once_with_the_traceback",
              f"{POOL}::test_too_many_failures_stop_the_run_with_a_sample"),
    20: _case("reward that hangs", "killed at its limit, the others are scored",
              f"{POOL}::test_a_hang_is_killed_and_costs_its_own_item_only",
              "rewards/test_boxed_math.py::test_hostile_powers_are_killed"),
    21: _case("reward that crashes, exits, forks or takes memory", "a new worker, the run continues",
              f"{POOL}::test_every_failure_costs_its_own_item_only",
              f"{POOL}::test_an_idle_worker_that_dies_is_replaced"),
    22: _case("reward of a wrong type", "function, value, type and step are named",
              f"{POOL}::test_details_name_the_function_and_what_happened",
              f"{LOOP}::test_too_many_failed_scores_are_the_users_error"),
    23: _case("reward that prints without end", "nowhere in the logs or metrics",
              f"{POOL}::test_printing_ctrl_c_and_booleans_are_harmless"),
    24: _case("reward tries network, processes, $HOME", "blocked, bounded, or refused without a sandbox",
             f"{POOL}::test_a_sandboxed_reward_reaches_nothing_outside",
             f"{POOL}::test_whatever_a_reward_starts_is_bounded_and_ends_with_its_worker",
             f"{POOL}::test_no_sandbox_is_refused_or_told",
             "system/test_sandbox.py::test_no_network_no_writing_no_processes_of_others_no_way_out"),
    25: _case("model text that is a program", "no built-in reward executes it",
              "rewards/test_boxed_math.py::test_model_text_is_never_executed"),
    26: _case("typing mistakes in the TOML", "exit 2, line and column, a fix, all at once, no torch",
              f"{COMMANDS}::test_a_mistake_is_shown_with_its_place_and_a_fix",
              f"{COMMANDS}::test_all_mistakes_are_shown_at_once_in_the_order_of_the_file",
              f"{COMMANDS}::test_no_mistake_imports_torch_or_runs_a_dotted_path"),
    27: _case("values of a wrong type or range", "as 26",
              "config/test_load.py::test_nonsense_is_refused_and_never_crashes"),
    28: _case("--set of no key, no value, no index", "exit 2 names the flag",
              f"{COMMANDS}::test_a_mistake_in_an_override_names_the_flag"),
    29: _case("plug-in unknown, broken or of another signature", "exit 2 with the user's traceback",
              f"{COMMANDS}::test_a_plugin_that_raises_is_shown_with_its_traceback",
              f"{COMMANDS}::test_a_plugin_with_the_wrong_signature_is_refused",
              f"{COMMANDS}::test_no_mistake_imports_torch_or_runs_a_dotted_path"),
    30: _case("data rows malformed, incomplete, doubled, no UTF-8", "exit 3 with file:line, or skipped up to a ceiling",
              f"{FILES}::test_a_bad_row_is_named_with_its_line", f"{FILES}::test_duplicate_ids_name_both_places",
              f"{FILES}::test_an_empty_file", f"{FILES}::test_skipping_counts_and_has_a_ceiling"),
    31: _case("prompt too long, no chat template, no pad token", "left out and counted, or a clear error",
              "run/test_collect.py::test_prompts_too_long_for_the_model_are_left_out_and_counted",
              "cli/test_real_checkpoints.py::test_a_pad_token_without_an_embedding_is_never_embedded"),
    32: _case("vLLM server killed in a batch", "the other does its work; without one exit 5 with a checkpoint",
              f"{SERVERS}::test_the_work_of_a_server_process_that_is_killed_or_frozen_is_done_by_the_other",
              "run/test_servers.py::test_without_a_server_the_run_ends_with_exit_5_and_goes_on_where_it_was"),
    33: _case("server that never answers", "the request's limit, then as 32",
              "system/test_http_client.py::test_a_server_that_says_nothing_is_late",
              f"{SERVERS}::test_many_requests_do_not_wait_one_after_the_other_for_a_server_that_never_returns"),
    34: _case("server with other weights or counts", "refused and counted",
              "run/test_servers.py::test_nothing_is_trained_on_that_other_weights_sampled",
              f"{SERVERS}::test_what_went_wrong_is_counted"),
    35: _case("weights that reach a server by half", "it is left out until it has all of them",
              f"{SERVERS}::test_a_server_that_dies_within_a_sync_is_asked_for_nothing_until_it_has_all_weights",
              f"{SERVERS}::test_a_server_whose_sync_fails_is_left_out"),
    36: _case("frozen worker (SIGSTOP)", "killed at its limit; a campaign's run is taken over once",
              f"{POOL}::test_a_hang_is_killed_and_costs_its_own_item_only",
              f"{SERVERS}::test_the_work_of_a_server_process_that_is_killed_or_frozen_is_done_by_the_other",
              f"{CAMPAIGN}::test_a_frozen_worker_loses_its_run_and_does_not_write_its_outcome"),
    37: _case("tracker that raises, hangs or is missing", "one warning, metrics.jsonl complete",
              "tracking/test_tracker_guard.py::test_a_tracker_that_raises_is_dropped_with_one_warning",
              "tracking/test_tracker_guard.py::test_a_tracker_that_hangs_at_close_is_left_behind",
              f"{LOOP}::test_a_tracker_that_cannot_be_built_costs_a_warning"),
    38: _case("canary secrets in the environment and in the TOML", "in no log, report, card or tracker file",
              "run/test_secrets.py::test_nothing_secret_is_in_any_other_file_of_a_run",
              f"{POOL}::test_workers_see_the_environment_that_is_allowed"),
    39: _case("hostile checkpoint or model: pickle, code, ../ names, links", "refused, nothing is executed",
              f"{CHECKPOINT}::test_names_that_leave_the_directory_and_symlinks_are_refused",
              f"{CHECKPOINT}::test_pickles_in_a_checkpoint_are_not_opened",
              "training/model/test_loading.py::test_pickled_weights_execute_nothing",
              "training/model/test_loading.py::test_broken_directory_is_explained"),
    40: _case("campaign: run, worker, driver killed, a bad cell", "each cell once, the report says what is missing",
              f"{CAMPAIGN}::test_a_killed_run_goes_on_from_its_checkpoint",
              f"{CAMPAIGN}::test_a_killed_driver_takes_its_runs_along_and_the_next_one_goes_on",
              f"{CAMPAIGN}::test_a_killed_workers_runs_are_taken_over",
              f"{CAMPAIGN}::test_eight_workers_execute_each_of_sixty_jobs_once",
              f"{WORKER}::test_crashes_are_restarted_mistakes_are_not_and_the_rest_goes_on"),
}  # fmt: skip


def main(wanted: list[int]) -> int:
    """Run the tests of these cases, print a row per case; 1 if any of them failed."""
    tests = sorted({f"tests/{test}" for number in wanted for test in CASES[number].tests})
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        options = ["-m", "", "-n", "2", "--dist", "loadfile", "-p", "no:cacheprovider", f"--junit-xml={report}"]
        subprocess.run([sys.executable, "-m", "pytest", *options, *tests], cwd=ROOT, check=False)
        outcomes = read(report)
    bad = 0
    print(f"\n{'case':>4}  {'result':<7} {'tests':>5} {'seconds':>8}  fault -> what must happen")
    for number in wanted:
        found = [one for test in CASES[number].tests for one in outcomes.get(test, [("missing", 0.0)])]
        worst = next(
            (result for result in ("missing", "failed", "skipped") if any(r == result for r, _ in found)), "ok"
        )
        bad += worst in ("missing", "failed")
        seconds = sum(time for _, time in found)
        print(
            f"{number:>4}  {worst:<7} {len(found):>5} {seconds:>8.1f}  {CASES[number].inject} -> {CASES[number].must}"
        )
    print(f"{len(wanted) - bad} passed, {bad} failed")
    return int(bad > 0)


def read(report: Path) -> dict[str, list[tuple[str, float]]]:
    """(result, seconds) of every executed test by `file::function`, from pytest's JUnit file."""
    outcomes: dict[str, list[tuple[str, float]]] = {}
    if not report.is_file():
        return outcomes
    for one in ET.parse(report).getroot().iter("testcase"):
        file = one.get("classname", "").replace(".", "/").removeprefix("tests/")
        function = one.get("name", "").split("[")[0]
        result = "ok"
        if one.find("failure") is not None or one.find("error") is not None:
            result = "failed"
        elif one.find("skipped") is not None:
            result = "skipped"
        outcomes.setdefault(f"{file}.py::{function}", []).append((result, float(one.get("time", 0))))
    return outcomes


if __name__ == "__main__":
    sys.exit(main([int(word) for word in sys.argv[1:]] or list(CASES)))
