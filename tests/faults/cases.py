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
    "campaign/verdict/test_run_reader.py",
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
             f"{DIRECTORY}::test_a_failed_save_is_an_error"),
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
              f"{RANKS}::test_a_signal_to_the_launcher_ends_all_ranks_after_their_step",
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
    24: _case("a score is interrupted while its reward has started processes", "they end with the worker",
              f"{POOL}::test_an_interrupted_score_leaves_nothing_behind_not_even_what_a_reward_has_started"),
    25: _case("model text that is a program", "no built-in reward executes it",
              "rewards/test_boxed_math.py::test_model_text_is_never_executed"),
    26: _case("typing mistakes in the TOML", "exit 2, line and column, a fix, all at once, no torch",
              "config/test_mistakes.py::test_validate_says_what_is_wrong_where_and_what_to_do",
              f"{COMMANDS}::test_no_mistake_imports_torch_or_runs_a_dotted_path"),
    27: _case("values of a wrong type or range", "as 26",
              "fuzz/test_toml.py::test_a_mutant_is_valid_or_its_mistakes_are_listed"),
    28: _case("--set of no key, no value, no index", "exit 2 names the flag",
              "config/test_mistakes.py::test_validate_says_what_is_wrong_where_and_what_to_do"),
    29: _case("plug-in unknown, broken or of another signature", "exit 2 with the user's traceback",
              f"{COMMANDS}::test_a_plugin_that_raises_is_shown_with_its_traceback",
              "config/test_mistakes.py::test_validate_says_what_is_wrong_where_and_what_to_do",
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


CODE, OPENED, TEXT = "system/test_bubblewrap.py", "run/test_foreign_runs.py", "report/test_text_from_outside.py"
JUDGE, SHARED, MASKING = "rewards/test_judge.py", "fuzz/test_shared_state.py", "system/test_masking.py"
NUMBERS, BOXED, GUARD = "functional/test_numbers.py", "rewards/test_boxed_math.py", "tracking/test_tracker_guard.py"
LOADING = "training/model/test_loading.py"

TRUST: dict[str, Case] = {
    "T1": _case("a run directory of a stranger names code, a program or a server", "refused by name; --trust takes it",
                f"{OPENED}::test_code_in_the_run_is_not_imported_unless_it_is_trusted",
                f"{OPENED}::test_search_paths_are_used_with_trust_alone",
                f"{OPENED}::test_programs_variables_and_servers_are_named",
                f"{OPENED}::test_reading_a_run_imports_nothing_of_it"),
    "T2": _case("its model brings Python files", "refused unless trust_remote_code is set here",
                f"{OPENED}::test_code_of_a_model_and_another_interpreter_are_refused"),
    "T3": _case("its model names kernels of the hub, or another model", "refused",
                f"{LOADING}::test_code_of_the_hub_that_a_configuration_names_is_refused",
                f"{LOADING}::test_choosing_an_engine_loads_no_code_of_the_hub",
                f"{LOADING}::test_an_adapter_that_names_another_model_is_refused"),
    "T4": _case("it holds links, hard-linked locks, linked folders", "refused; nothing outside is read or changed",
                f"{OPENED}::test_export_refuses_links_in_the_model",
                f"{DIRECTORY}::test_a_lock_that_is_a_link_is_refused_and_its_target_is_left_alone",
                f"{DIRECTORY}::test_a_lock_that_became_a_hard_link_is_not_emptied",
                f"{DIRECTORY}::test_a_folder_that_is_a_link_is_refused_and_nothing_changes_where_it_leads"),
    "T5": _case("it holds pipes in the place of files", "refused at once",
                f"{TEXT}::test_what_is_no_plain_file_is_neither_followed_nor_waited_for"),
    "T6": _case("it holds a file that unpacks to gigabytes, or has no end", "refused",
                f"{TEXT}::test_a_file_that_unpacks_to_a_thousand_times_its_size_is_refused",
                f"{TEXT}::test_a_file_that_is_too_large_is_refused_before_it_is_read",
                "system/test_files.py::test_hashes_are_those_of_files_in_the_folder"),
    "T7": _case("it names functions of Python or of packages, such as os.system", "refused by name",
                f"{OPENED}::test_functions_of_python_and_packages_are_not_the_users"),
    "T8": _case("code of the model looks for the answer: memory, files, processes", "finds nothing",
                f"{CODE}::test_the_reference_answer_is_out_of_reach",
                f"{CODE}::test_files_of_the_project_are_out_of_reach",
                f"{CODE}::test_only_what_an_environment_reads_is_sent_to_its_worker",
                f"{CODE}::test_the_code_sees_few_variables"),
    "T9": _case("it leaves files, memory, queues or processes behind", "gone with the call",
                f"{CODE}::test_nothing_is_left_for_a_later_call",
                f"{CODE}::test_daemons_of_a_call_have_ended_when_it_returns"),
    "T10": _case("it wants sockets, privileges, memory or processes without end", "refused by the kernel",
                 f"{CODE}::test_sockets_are_out_of_reach", f"{CODE}::test_a_privilege_cannot_be_had",
                 f"{CODE}::test_memory_and_processes_are_limited"),
    "T11": _case("a machine or a configuration that cannot contain it", "validate refuses the tool",
                 f"{CODE}::test_a_machine_without_bubblewrap_is_named_with_the_fix",
                 "config/test_environment_checks.py::test_code_of_the_model_is_not_run_where_nothing_contains_it"),
    "T12": _case("answers that are not one number; completions that hedge", "refused; scored as documented",
                 f"{NUMBERS}::test_a_row_of_the_table", f"{NUMBERS}::test_numbers_are_those_of_fractions",
                 f"{NUMBERS}::test_what_is_no_number_is_never_one"),
    "T13": _case("a box that repeats the question, or holds several answers", "wrong, or refused",
                 f"{BOXED}::test_not_equal", f"{BOXED}::test_an_answer_that_cannot_be_compared_with_is_refused"),
    "T14": _case("a completion that quotes a score to the judge", "one score, at the beginning of the last line",
                 f"{JUDGE}::test_one_score_is_read_at_the_beginning_of_the_last_line",
                 f"{JUDGE}::test_a_damaged_file_of_the_cache_is_asked_again_and_another_reading_does_not_share_it"),
    "T15": _case("rewards whose squares overflow float32, advantages beyond it", "invalid; masked and counted",
                 f"{POOL}::test_a_weighted_sum_that_is_too_large_is_invalid",
                 f"{SHARED}::test_an_advantage_that_float32_does_not_hold_is_refused"),
    "T16": _case("a plug-in that writes into its columns", "refused by name",
                 f"{SHARED}::test_writing_into_a_column_is_refused_by_name",
                 f"{SHARED}::test_writing_into_the_batch_is_refused"),
    "T17": _case("a plug-in that raises, exits, or puts escapes into its error", "named, with its own lines only",
                 "fuzz/test_plugins.py::test_what_is_raised", "fuzz/test_plugins.py::test_what_a_verb_raises"),
    "T18": _case("a tracker whose attributes raise", "one warning, the run goes on",
                 f"{GUARD}::test_a_tracker_whose_attribute_raises_is_dropped_with_one_warning"),
    "T19": _case("resuming with another tokenizer, configuration or base", "refused; --allow-change model",
                 "run/test_changed_model.py::test_another_model_is_refused_unless_it_is_allowed"),
    "T20": _case("keys under the name of a secret, or that a variable holds", "(hidden)",
                 f"{MASKING}::test_words_of_secrets",
                 f"{MASKING}::test_every_value_under_the_name_of_a_secret_is_hidden",
                 f"{MASKING}::test_values_of_variables_are_hidden_wherever_they_turn_up",
                 f"{JUDGE}::test_the_key_is_in_no_error"),
    "T21": _case("HTML in names of metrics", "text", f"{TEXT}::test_names_of_metrics_are_text_in_charts"),
    "T22": _case("Markdown and images in text", "text", f"{TEXT}::test_markdown_shows_text_as_text"),
    "T23": _case("escapes of a terminal in files and names", "dots",
                 f"{TEXT}::test_escape_characters_are_dots_in_pages",
                 "system/test_terminal.py::test_escapes_in_messages_and_logs_are_dots"),
    "T24": _case("two fields of one name in a row of data", "exit 3 with file:line",
                 f"{FILES}::test_a_bad_row_is_named_with_its_line"),
    "T25": _case("a campaign's run without its outcome", "report and status agree",
                 "campaign/work/test_progress.py::test_a_finished_run_without_an_outcome_is_done_as_in_the_report",
                 f"{RESULTS}::test_how_a_cell_ended"),
}  # fmt: skip


def main(arguments: list[str]) -> int:
    """Run the tests of the cases asked for, print a row per case; 1 if any of them failed."""
    cases = {**{str(number): case for number, case in CASES.items()}, **TRUST}
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
        options = [
            "-m",
            "",
            "-n",
            "3",
            "--dist",
            "loadgroup",
            "--no-loadscope-reorder",
            "-p",
            "no:cacheprovider",
            f"--junit-xml={report}",
        ]
        files = [f"tests/{test}" for test in tests]
        subprocess.run([sys.executable, "-m", "pytest", *options, *files], cwd=ROOT, check=False)
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
