"""Score functions as verl's documentation and recipes write them; nothing in here knows of this package."""

import re


def extract_solution(solution_str):
    solutions = re.findall("#### (\\-?[0-9\\.\\,]+)", solution_str)
    return solutions[-1].replace(",", "").replace("$", "") if solutions else None


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    answer = extract_solution(solution_str)
    return 0.0 if answer is None else float(answer == ground_truth)


def compute_score_dict(data_source, solution_str, ground_truth, extra_info, **kwargs):
    correct = extract_solution(solution_str) == ground_truth
    return {"score": 1.0 if correct else -1.0, "acc": correct, "pred": "text", "split": extra_info["index"] + 0.5}


def compute_score_batched(data_sources, solution_strs, ground_truths, extra_infos):
    rows = zip(data_sources, solution_strs, ground_truths, extra_infos, strict=True)
    return [float(source == "openai/gsm8k" and truth in text) for source, text, truth, _ in rows]


def wants_more(data_source, solution_str, ground_truth, teacher):
    return 0.0
