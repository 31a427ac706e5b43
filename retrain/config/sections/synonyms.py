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
_LEVELS = {"token": '[[loss]] name = "ppo_clip"', "sequence": '[algorithm] algorithm_mode = "gspo"'}
"""TRL's `importance_sampling_level`."""
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
    **dict.fromkeys(
        ("ppo_mini_batch_size", "steps_per_generation"),
        _said("[training] minibatches is how many optimizer steps a batch is divided into"),
    ),
    **dict.fromkeys(("max_grad_norm", "grad_clip", "max_norm"), _key("[optimizer] max_grad_norm")),
    **dict.fromkeys(("lr_scheduler_type", "lr_scheduler"), _key("[optimizer] schedule")),
    **dict.fromkeys(("warmup_ratio", "lr_warmup_steps_ratio"), _said("[optimizer] warmup_steps counts steps")),
    **dict.fromkeys(("optim", "optimizer_type"), _said('[optimizer] name is "adamw", "adamw8bit" or "muon"')),
    **dict.fromkeys(("lr_warmup_steps", "num_warmup_steps"), _key("[optimizer] warmup_steps")),
    **dict.fromkeys(("adam_beta1", "adam_beta2", "adam_betas"), _said("[optimizer] betas = [0.9, 0.95]")),
    "adam_epsilon": _key("[optimizer] eps"),
    **dict.fromkeys(("total_training_steps", "num_train_steps"), _key("[training] max_steps")),
    **dict.fromkeys(
        ("num_train_epochs", "total_epochs", "num_epochs", "num_episodes"),
        _said("[training] max_steps counts steps of batch_size prompts; the data are read over and over"),
    ),
    **dict.fromkeys(("report_to", "use_wandb", "logger"), _said(_TRACKER)),
    **dict.fromkeys(("wandb_project", "project_name"), _key("[wandb] project")),
    "logging_steps": _said("every step is logged; [logging] rollouts_every says which completions are stored"),
    **dict.fromkeys(("eval_strategy", "save_strategy"), _said("[eval] every and [checkpoint] every count steps")),
    **dict.fromkeys(
        ("resume_from_checkpoint", "resume_mode"), _said("`retrain train FILE --resume auto` continues a run")
    ),
    **dict.fromkeys(
        ("push_to_hub", "hub_model_id"),
        _said("`retrain export RUN DIRECTORY --push-to-hub OWNER/NAME` uploads a model"),
    ),
    **dict.fromkeys(("output_dir", "default_local_dir", "save_path"), _key("[logging] dir")),
    **dict.fromkeys(("run_name", "experiment_name"), _key("[logging] name")),
    **dict.fromkeys(("save_steps", "save_freq", "save_interval"), _key("[checkpoint] every")),
    **dict.fromkeys(("save_total_limit", "max_actor_ckpt_to_keep"), _key("[checkpoint] keep")),
    **dict.fromkeys(("metric_for_best_model", "load_best_model_at_end"), _said('[checkpoint] best = "eval/accuracy"')),
    **dict.fromkeys(("eval_steps", "test_freq"), _key("[eval] every")),
    **dict.fromkeys(("model_name_or_path", "pretrain", "model_name"), _key("[model] path")),
    **dict.fromkeys(("lora_r", "lora_rank", "rank"), _key("[model.lora] r")),
    "lora_alpha": _key("[model.lora] alpha"),
    "lora_target_modules": _key("[model.lora] target_modules"),
    "use_peft": _said("a table [model.lora] trains adapters"),
    **dict.fromkeys(("load_in_4bit", "load_in_8bit"), _said('[model] quantization = "nf4"')),
    **dict.fromkeys(("bf16", "fp16", "torch_dtype", "mixed_precision"), _said('[model] dtype = "bfloat16"')),
    **dict.fromkeys(("use_vllm", "vllm_mode", "inference_backend"), _said('[rollout] engine = "vllm"')),
    "tensor_model_parallel_size": _key("[vllm] tensor_parallel_size"),
    "vllm_gpu_memory_utilization": _key("[vllm] gpu_memory_utilization"),
    **dict.fromkeys(
        ("deepspeed", "fsdp", "nnodes", "n_gpus_per_node", "num_processes", "actor_num_gpus_per_node"),
        _said(
            "`retrain train FILE --ranks N` trains on several GPUs; [distributed] shard says what each of them holds"
        ),
    ),
    **dict.fromkeys(("max_async_level", "async_level"), _key("[rollout] overlap")),
    **dict.fromkeys(
        ("min_p", "repetition_penalty"),
        _said("completions are drawn from the distribution that is trained: [rollout] takes none of it"),
    ),
    "mask_truncated_completions": _key("[rollout] mask_truncated"),
    **dict.fromkeys(("loss_type", "loss_mode", "policy_loss"), _chosen(_LOSS_TYPES)),
    "importance_sampling_level": _chosen(_LEVELS),
    "use_kl_loss": _said('[[loss]] name = "kl", beside the others; [kl] weight is its coefficient'),
    **dict.fromkeys(
        ("critic_learning_rate", "gae_lambda", "lam", "vf_coef", "cliprange_value"),
        _said("there is no critic: [algorithm] advantage_mode compares completions of one prompt"),
    ),
    "loss_agg_mode": _said('[algorithm] reduction is "token_mean", "sequence_mean" or "dr_grpo"'),
    **dict.fromkeys(("scale_rewards", "norm_adv_by_std_in_grpo"), _chosen(_SCALED)),
    **dict.fromkeys(("adv_estimator", "advantage_estimator"), _chosen(_ESTIMATORS)),
    **dict.fromkeys(("reward_weights", "reward_funcs"), _said("[[rewards]] has a name and a weight for each")),
    **dict.fromkeys(("train_files", "train_file", "prompt_data"), _key("[jsonl] path")),
    **dict.fromkeys(("prompt_key", "input_key"), _key("[jsonl] prompt_field")),
    **dict.fromkeys(("answer_key", "label_key"), _key("[jsonl] answer_field")),
    **dict.fromkeys(("dataset_name", "dataset"), _key("[hub] name")),
    "dataset_config": _key("[hub] config"),
    "dataset_split": _key("[hub] split"),
    **dict.fromkeys(
        ("seq_len", "max_seq_length", "max_length", "sequence_len"),
        _said("[training] max_prompt_tokens bounds prompts, and max_tokens completions"),
    ),
    **dict.fromkeys(("packing", "use_remove_padding"), _said("rows are always packed")),
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
