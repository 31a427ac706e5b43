"""Words of other trainers (TRL, verl, prime-rl, OpenRLHF) and what they are called here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_TRACKER = '[logging] trackers = ["wandb"]'
_LOSS_TYPES = {
    "grpo": '[algorithm] reduction = "sequence_mean"',
    "bnpo": '[algorithm] reduction = "token_mean"',
    "dapo": '[algorithm] algorithm_mode = "dapo"',
    "dr_grpo": '[algorithm] algorithm_mode = "dr_grpo"',
    "cispo": '[algorithm] algorithm_mode = "cispo"',
    "gspo": '[algorithm] algorithm_mode = "gspo"',
}
"""TRL's `loss_type`, verl's `loss_mode` and `loss_agg_mode`."""
_SCALED = {
    "true": '[algorithm] advantage_mode = "grpo_std"',
    "group": '[algorithm] advantage_mode = "grpo_std"',
    "false": '[algorithm] advantage_mode = "grpo"',
    "none": '[algorithm] advantage_mode = "grpo"',
}
_ESTIMATORS = {
    "grpo": '[algorithm] advantage_mode = "grpo_std"',
    "group_norm": '[algorithm] advantage_mode = "grpo_std"',
    "dr_grpo": '[algorithm] advantage_mode = "grpo"',
    "rloo": '[algorithm] advantage_mode = "rloo"',
    "reinforce_plus_plus": '[algorithm] advantage_mode = "reinforce_pp"',
}
"""`adv_estimator` of verl, whose `grpo` divides by the standard deviation, and `advantage_estimator` of OpenRLHF."""


def _key(name: str) -> Callable[[Any], str]:
    """The same value under another key."""
    return lambda value: f"{name} = {_toml(value)}"


def _said(text: str) -> Callable[[Any], str]:
    return lambda value: text


def _chosen(table: dict[str, str]) -> Callable[[Any], str]:
    """A key that depends on the value; all of them for a value that is not known."""
    return lambda value: table.get(str(value).lower().replace("-", "_"), " or ".join(dict.fromkeys(table.values())))


def _prompts(value: Any) -> str:
    return f"[training] batch_size counts prompts, and group_size their completions; {_toml(value)} counts completions"


WORDS: dict[str, Callable[[Any], str]] = {
    **dict.fromkeys(("num_generations", "n_samples_per_prompt", "rollouts_per_example"), _key("[training] group_size")),
    **dict.fromkeys(("learning_rate", "actor_learning_rate"), _key("[optimizer] lr")),
    **dict.fromkeys(("beta", "kl_coef", "kl_loss_coef", "init_kl_coef", "kl_tau"), _key("[kl] weight")),
    **dict.fromkeys(("entropy_coeff", "entropy_coef"), _key("[entropy] weight")),
    **dict.fromkeys(("epsilon", "cliprange", "clip_ratio", "eps_clip", "clip_ratio_low"), _key("[ppo_clip] eps_low")),
    **dict.fromkeys(("epsilon_high", "clip_ratio_high", "eps_clip_high"), _key("[ppo_clip] eps_high")),
    **dict.fromkeys(("delta", "clip_ratio_c"), _key("[ppo_clip] dual_clip")),
    **dict.fromkeys(("num_iterations", "ppo_epochs"), _key("[training] epochs")),
    **dict.fromkeys(
        ("max_completion_length", "max_response_length", "max_new_tokens", "generate_max_len"),
        _key("[training] max_tokens"),
    ),
    **dict.fromkeys(("max_prompt_length", "prompt_max_len"), _key("[training] max_prompt_tokens")),
    **dict.fromkeys(("train_batch_size", "rollout_batch_size"), _key("[training] batch_size")),
    **dict.fromkeys(("per_device_train_batch_size", "generation_batch_size"), _prompts),
    **dict.fromkeys(
        ("gradient_accumulation_steps", "ppo_micro_batch_size_per_gpu", "micro_train_batch_size", "micro_batch_size"),
        _said("[training] micro_batch_tokens bounds the memory of a forward; it changes no result"),
    ),
    "ppo_mini_batch_size": _said("[training] minibatches is how many optimizer steps a batch is divided into"),
    **dict.fromkeys(("max_grad_norm", "grad_clip", "max_norm"), _key("[optimizer] max_grad_norm")),
    **dict.fromkeys(("lr_scheduler_type", "lr_scheduler"), _key("[optimizer] schedule")),
    **dict.fromkeys(("lr_warmup_steps", "num_warmup_steps"), _key("[optimizer] warmup_steps")),
    **dict.fromkeys(("adam_beta1", "adam_beta2", "adam_betas"), _said("[optimizer] betas = [0.9, 0.95]")),
    "adam_epsilon": _key("[optimizer] eps"),
    **dict.fromkeys(("total_training_steps", "num_train_steps"), _key("[training] max_steps")),
    **dict.fromkeys(
        ("num_train_epochs", "total_epochs", "num_episodes"),
        _said("[training] max_steps counts steps of batch_size prompts; the data are read over and over"),
    ),
    **dict.fromkeys(("report_to", "use_wandb", "logger"), _said(_TRACKER)),
    **dict.fromkeys(("output_dir", "default_local_dir", "save_path"), _key("[logging] dir")),
    **dict.fromkeys(("run_name", "experiment_name"), _key("[logging] name")),
    **dict.fromkeys(("save_steps", "save_freq", "save_interval"), _key("[checkpoint] every")),
    **dict.fromkeys(("save_total_limit", "max_actor_ckpt_to_keep"), _key("[checkpoint] keep")),
    **dict.fromkeys(("metric_for_best_model", "load_best_model_at_end"), _said('[checkpoint] best = "eval/accuracy"')),
    **dict.fromkeys(("eval_steps", "test_freq"), _key("[eval] every")),
    **dict.fromkeys(("model_name_or_path", "pretrain", "model_name"), _key("[model] path")),
    **dict.fromkeys(("lora_r", "lora_rank", "rank"), _key("[model.lora] r")),
    "lora_alpha": _key("[model.lora] alpha"),
    **dict.fromkeys(("bf16", "torch_dtype", "mixed_precision"), _said('[model] dtype = "bfloat16"')),
    **dict.fromkeys(("use_vllm", "vllm_mode", "inference_backend"), _said('[rollout] engine = "vllm"')),
    "mask_truncated_completions": _key("[rollout] mask_truncated"),
    **dict.fromkeys(("loss_type", "loss_mode", "policy_loss"), _chosen(_LOSS_TYPES)),
    "loss_agg_mode": _said('[algorithm] reduction is "token_mean", "sequence_mean" or "dr_grpo"'),
    "scale_rewards": _chosen(_SCALED),
    **dict.fromkeys(("adv_estimator", "advantage_estimator"), _chosen(_ESTIMATORS)),
    **dict.fromkeys(("reward_weights", "reward_funcs"), _said("[[rewards]] has a name and a weight for each")),
    **dict.fromkeys(("train_files", "train_file", "prompt_data"), _key("[jsonl] path")),
    **dict.fromkeys(("val_files", "eval_dataset"), _key("[jsonl] heldout_path")),
}
"""Key elsewhere -> what to write here, made from its value there."""


def translated(key: str, value: Any) -> str:
    """What to write instead of another trainer's key; empty if it is none."""
    says = WORDS[key](value) if key in WORDS else ""
    return says and f"{'write' if ' = ' in says else 'here'} {says}"


def _toml(value: Any) -> str:
    """A value as TOML writes it; what is no value of a key is left to the reader."""
    if isinstance(value, bool):
        return str(value).lower()
    return f'"{value}"' if isinstance(value, str) else str(value) if isinstance(value, int | float) else "..."
