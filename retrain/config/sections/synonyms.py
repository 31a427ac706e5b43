"""Key aliases: keys of TRL, verl, prime-rl, OpenRLHF and Trinity-RFT, and the keys that replace them here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

_TRACKER = '[logging] trackers = ["wandb"]'
_LOSS_TYPES = {
    "grpo": '[algorithm] reduction = "sequence_mean"',
    "bnpo": '[algorithm] reduction = "token_mean"',
    "dapo": '[algorithm] algorithm_mode = "dapo"',
    "dr_grpo": '[algorithm] algorithm_mode = "dr_grpo"',
    "cispo": '[algorithm] algorithm_mode = "cispo"',
    "gspo": '[algorithm] algorithm_mode = "gspo"',
    "luspo": '[algorithm] algorithm_mode = "luspo"',
    "sapo": '[[loss]] name = "sapo"',
    "vespo": '[[loss]] name = "vespo"',
    "kl_cov": '[[loss]] name = "importance_sampling" and [[loss]] name = "kl_cov"',
    "importance_sampling": '[[loss]] name = "importance_sampling"',
    "geo_mean": '[[loss]] name = "gmpo", whose bounds are log-ratios',
    "clip_cov": '[algorithm] transform_mode = ["clip_cov"]',
    "dppo_tv": '[[loss]] name = "dppo"',
    "dppo_kl": '[[loss]] name = "dppo" with [dppo] divergence = "kl" and low and high of about 0.05',
}
"""TRL's `loss_type`, verl's `loss_mode` and `loss_agg_mode`."""
_SCALED = {
    "true": '[algorithm] advantage_mode = "grpo_std"',
    "group": '[algorithm] advantage_mode = "grpo_std"',
    "false": '[algorithm] advantage_mode = "grpo"',
    "none": '[algorithm] advantage_mode = "grpo"',
    "batch": '[algorithm] advantage_mode = "lite_ppo"',
}
_AGGREGATIONS = {
    "normalize_then_sum": '[algorithm] algorithm_mode = "gdpo"',
    "sum_then_normalize": '[algorithm] advantage_mode = "grpo_std"',
}
"""TRL's `multi_objective_aggregation`."""
_LEVELS = {"token": '[[loss]] name = "ppo_clip"', "sequence": '[algorithm] algorithm_mode = "gspo"'}
"""TRL's `importance_sampling_level`."""
_ESTIMATORS = {
    "grpo": '[algorithm] advantage_mode = "grpo_std"',
    "group_norm": '[algorithm] advantage_mode = "grpo_std"',
    "dr_grpo": '[algorithm] advantage_mode = "grpo"',
    "rloo": '[algorithm] advantage_mode = "rloo"',
    "opo": '[algorithm] advantage_mode = "opo"',
    "remax": '[algorithm] advantage_mode = "remax"',
    **dict.fromkeys(("grpo_passk", "pkpo"), '[algorithm] advantage_mode = "pkpo"'),
    "gdpo": '[algorithm] algorithm_mode = "gdpo"',
    "gae": '[algorithm] algorithm_mode = "ppo"',
    "gigpo": '[algorithm] transform_mode = ["gigpo"]',
    **dict.fromkeys(("optimal_token_baseline", "tir_optimal_token_baseline"), '[algorithm] transform_mode = ["otb"]'),
    "reinforce_plus_plus": '[algorithm] advantage_mode = "reinforce_pp"',
}
"""`adv_estimator` of verl, whose `grpo` divides by the standard deviation, and `advantage_estimator` of OpenRLHF."""
_HICRA = {"true": '[algorithm] algorithm_mode = "hicra_entropy"', "false": '[algorithm] algorithm_mode = "grpo"'}
"""`use_hicra` of HICRA for TRL, which amplifies tokens of high entropy unless planning tokens are requested."""
_TRINITY = {
    "mix": '[algorithm] algorithm_mode = "mix"',
    "mix_chord": '[algorithm] algorithm_mode = "chord"',
    "grpo": '[algorithm] algorithm_mode = "grpo"',
    "ppo": '[[loss]] name = "ppo_clip"',
    "rloo": '[algorithm] advantage_mode = "rloo"',
    "sft": '[[loss]] name = "sft"',
}
"""`algorithm_type`, `advantage_fn` and `policy_loss_fn` of Trinity-RFT."""
_REDUCTIONS = {
    "token_mean": "token_mean",
    "seq_mean_token_mean": "sequence_mean",
    "seq_mean_token_sum": "sequence_sum",
    "seq_mean_token_sum_norm": "dr_grpo",
}
"""Values of `loss_agg_mode`, with underscores."""
_NESTED = ("sample_strategy_args", "policy_loss_fn_args", "advantage_fn_args")
"""Tables of Trinity-RFT whose keys are keys of several tables here."""

_TABLES = {
    "buffer": "[training] batch_size counts prompts, [task] name says where they come from, and [expert] path names "
    "the file of the expert's answers",
    "actor_rollout_ref": "model, sampling and loss are [model], [rollout], [optimizer], [[loss]] (docs/from-verl.md)",
    "custom_reward_function": "a reward is [[rewards]] with a dotted path as name (docs/from-verl.md)",
    "data": "the problems are [task], with the table of the task, and [training] batch_size (docs/from-verl.md)",
    "reward_model": "rewards are [[rewards]] (docs/from-verl.md)",
    "trainer": "steps are in [training], saving in [checkpoint], evaluation in [eval], trackers in [logging] "
    "(docs/from-verl.md)",
    "orchestrator": "sampling is [rollout] and [training], problems are [task] or [environment]",
    "inference": "servers are [vllm], with [rollout] engine",
    "ckpt": "checkpoints are [checkpoint]",
    "wandb": 'it is [logging] trackers = ["wandb"]',
}
"""Tables of other trainers, with the keys that replace them here."""


def _key(name: str) -> Callable[[Any], str]:
    """Return a function that formats the value under the key `name`."""
    return lambda value: f"{name} = {_toml(value)}"


def _fixed(text: str) -> Callable[[Any], str]:
    """Return a function that gives the same advice for every value."""
    return lambda value: text


def _by_value(table: dict[str, str]) -> Callable[[Any], str]:
    """Return a function that looks up the advice for a value, and lists all advice for an unknown value."""
    return lambda value: table.get(str(value).lower().replace("-", "_"), " or ".join(dict.fromkeys(table.values())))


def _reduction(key: str) -> Callable[[Any], str]:
    """Return a function that translates the name of a reduction, which is the value of `key` here."""

    def advice(value: Any) -> str:
        name = _REDUCTIONS.get(str(value).replace("-", "_"))
        return f'{key} = "{name}"' if name else f"{key} is {', '.join(map(_toml, _REDUCTIONS.values()))}"

    return advice


def _clip(value: Any) -> str:
    return f"[ppo_clip] eps_low = {_toml(value)} and [ppo_clip] eps_high = {_toml(value)}"


def _prompts(value: Any) -> str:
    return f"[training] batch_size counts prompts, and group_size their completions; {_toml(value)} counts completions"


WORDS: dict[str, Callable[[Any], str]] = {
    **dict.fromkeys(("num_generations", "n_samples_per_prompt", "rollouts_per_example"), _key("[training] group_size")),
    **dict.fromkeys(("learning_rate", "actor_learning_rate"), _key("[optimizer] lr")),
    **dict.fromkeys(("beta", "kl_coef", "kl_loss_coef", "init_kl_coef"), _key("[kl] weight")),
    "kl_tau": _fixed(
        "nothing weights the squared log-ratio of trainer and sampler; [kl] weight reads a reference model"
    ),
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
        _fixed("[training] micro_batch_tokens bounds the memory of a forward; it changes no result"),
    ),
    **dict.fromkeys(
        ("ppo_mini_batch_size", "steps_per_generation"),
        _fixed("[training] minibatches is the number of optimizer steps per pass over a batch"),
    ),
    **dict.fromkeys(("max_grad_norm", "grad_clip", "max_norm"), _key("[optimizer] max_grad_norm")),
    **dict.fromkeys(("lr_scheduler_type", "lr_scheduler"), _key("[optimizer] schedule")),
    **dict.fromkeys(("warmup_ratio", "lr_warmup_steps_ratio"), _fixed("[optimizer] warmup_steps counts steps")),
    **dict.fromkeys(("optim", "optimizer_type"), _fixed('[optimizer] name is "adamw", "adamw8bit" or "muon"')),
    **dict.fromkeys(("lr_warmup_steps", "num_warmup_steps"), _key("[optimizer] warmup_steps")),
    **dict.fromkeys(("adam_beta1", "adam_beta2", "adam_betas"), _fixed("[optimizer] betas = [0.9, 0.95]")),
    "adam_epsilon": _key("[optimizer] eps"),
    **dict.fromkeys(("total_training_steps", "num_train_steps"), _key("[training] max_steps")),
    **dict.fromkeys(
        ("num_train_epochs", "total_epochs", "num_epochs", "num_episodes"),
        _fixed("[training] max_steps counts steps of batch_size prompts; the data are repeated as often as needed"),
    ),
    **dict.fromkeys(("report_to", "use_wandb", "logger"), _fixed(_TRACKER)),
    **dict.fromkeys(("wandb_project", "project_name"), _key("[wandb] project")),
    "logging_steps": _fixed("every step is logged; [logging] rollouts_every says which completions are stored"),
    **dict.fromkeys(("eval_strategy", "save_strategy"), _fixed("[eval] every and [checkpoint] every count steps")),
    **dict.fromkeys(
        ("resume_from_checkpoint", "resume_mode"), _fixed("`retrain train FILE --resume auto` continues a run")
    ),
    **dict.fromkeys(
        ("push_to_hub", "hub_model_id"),
        _fixed("`retrain export RUN DIRECTORY --push-to-hub OWNER/NAME` uploads a model"),
    ),
    **dict.fromkeys(("output_dir", "default_local_dir", "save_path"), _key("[logging] dir")),
    **dict.fromkeys(("run_name", "experiment_name"), _key("[logging] name")),
    **dict.fromkeys(("save_steps", "save_freq", "save_interval"), _key("[checkpoint] every")),
    **dict.fromkeys(("save_total_limit", "max_actor_ckpt_to_keep"), _key("[checkpoint] keep")),
    **dict.fromkeys(("metric_for_best_model", "load_best_model_at_end"), _fixed('[checkpoint] best = "eval/accuracy"')),
    **dict.fromkeys(("eval_steps", "test_freq"), _key("[eval] every")),
    **dict.fromkeys(("model_name_or_path", "pretrain", "model_name"), _key("[model] path")),
    "enable_thinking": lambda value: f"[model] chat_params = {{ enable_thinking = {_toml(value)} }}",
    **dict.fromkeys(("chat_template_kwargs", "chat_template_args"), _fixed("[model] chat_params = { KEY = VALUE }")),
    **dict.fromkeys(("lora_r", "lora_rank", "rank"), _key("[model.lora] r")),
    "lora_alpha": _key("[model.lora] alpha"),
    "lora_target_modules": _key("[model.lora] target_modules"),
    "use_peft": _fixed("a table [model.lora] trains adapters"),
    **dict.fromkeys(("load_in_4bit", "load_in_8bit"), _fixed('[model] quantization = "nf4"')),
    **dict.fromkeys(("bf16", "fp16", "torch_dtype", "mixed_precision"), _fixed('[model] dtype = "bfloat16"')),
    **dict.fromkeys(("use_vllm", "vllm_mode", "inference_backend"), _fixed('[rollout] engine = "vllm"')),
    **dict.fromkeys(
        ("stop", "stop_strings", "stop_sequences", "stop_words"),
        _fixed(
            "stop strings are not supported: a completion ends at max_tokens or at a token of eos_token_id in the "
            "model's generation_config.json"
        ),
    ),
    "tensor_model_parallel_size": _key("[vllm] tensor_parallel_size"),
    "vllm_gpu_memory_utilization": _key("[vllm] gpu_memory_utilization"),
    **dict.fromkeys(
        ("deepspeed", "fsdp", "nnodes", "n_gpus_per_node", "num_processes", "ngpus_trainer", "actor_num_gpus_per_node"),
        _fixed(
            "`retrain train FILE --ranks N` trains on several GPUs; [distributed] shard decides what each GPU stores"
        ),
    ),
    **dict.fromkeys(("max_async_level", "async_level"), _key("[rollout] overlap")),
    **dict.fromkeys(
        ("min_p", "repetition_penalty"),
        _fixed("completions are sampled from the distribution that is trained, so [rollout] has no such key"),
    ),
    "mask_truncated_completions": _key("[rollout] mask_truncated"),
    **dict.fromkeys(("loss_type", "loss_mode", "policy_loss", "policy_loss_type"), _by_value(_LOSS_TYPES)),
    **dict.fromkeys(("sapo_temperature_pos", "tau_pos"), _key("[sapo] tau_pos")),
    **dict.fromkeys(("sapo_temperature_neg", "tau_neg"), _key("[sapo] tau_neg")),
    **{f"vespo_{name}": _key(f"[vespo] {name}") for name in ("k_pos", "lambda_pos", "k_neg", "lambda_neg")},
    "use_adaptive_entropy": _fixed('[[loss]] name = "adaptive_entropy"'),
    "entropy_target": _key("[entropy_coefficient] target"),
    **{f"entropy_coef_{name}": _key(f"[entropy_coefficient] {name}") for name in ("min", "max", "delta")},
    "clip_cov_ratio": _key("[clip_cov] rate"),
    "clip_cov_lb": _key("[clip_cov] low"),
    "clip_cov_ub": _key("[clip_cov] high"),
    **dict.fromkeys(
        ("kl_cov_ratio", "kl_cov_frac"),
        lambda value: f"[high_covariance] rate = {_toml(value)}, a share and not a percentage",
    ),
    "ppo_kl_coef": _key("[kl_cov] weight"),
    **dict.fromkeys(("off_policy_mask_threshold", "opsm_delta"), _key("[opsm] delta")),
    **dict.fromkeys(("opd_kl_coef", "kl_penalty_coef"), _key("[opd] coef")),
    "kl_discount_factor": _key("[opd] gamma"),
    "distillation_is_clip": _key("[cispo] eps_max"),
    "step_advantage_w": _key("[gigpo] omega"),
    "multi_objective_aggregation": _by_value(_AGGREGATIONS),
    "importance_sampling_level": _by_value(_LEVELS),
    "use_kl_loss": _fixed('[[loss]] name = "kl", beside the others; [kl] weight is its coefficient'),
    **dict.fromkeys(
        ("gae_lambda", "lam", "lambd"), lambda value: f"[gae] lam = {_toml(value)} and [critic] lam = {_toml(value)}"
    ),
    "critic_learning_rate": _key("[critic] lr"),
    "cliprange_value": _key("[critic] clip"),
    **dict.fromkeys(("critic_warmup", "policy_training_start_step"), _key("[critic] warmup_steps")),
    "vf_coef": _fixed("the critic has an optimizer of its own, so its loss needs no coefficient: [critic] lr"),
    **dict.fromkeys(("loss_agg_mode", "grpo_loss_agg_mode"), _reduction("[algorithm] reduction")),
    "sft_loss_agg_mode": _reduction("[mix] sft_reduction"),
    "hicra_alpha": _key("[hicra] alpha"),
    "hicra_entropy_topk": _key("[hicra] entropy_topk"),
    "use_hicra": _by_value(_HICRA),
    "use_planning_tokens": _fixed(
        '[algorithm] algorithm_mode = "hicra" for planning tokens alone, or "hicra_entropy" with [hicra] '
        "use_planning_tokens = true for planning tokens and tokens of high entropy"
    ),
    **dict.fromkeys(("algorithm_type", "sample_strategy", "policy_loss_fn", "advantage_fn"), _by_value(_TRINITY)),
    "repeat_times": _key("[training] group_size"),
    "mu": _key("[mix] mu"),
    "expert_data_ratio": _key("[expert] ratio"),
    "sft_dataset": _key("[expert] path"),
    **dict.fromkeys(
        ("auxiliary_buffers", "sft_dataset_name"), _fixed("[expert] path names the file of the expert's answers")
    ),
    **dict.fromkeys(
        ("train_batch_size_expert", "train_batch_size_usual"),
        _fixed(
            "[expert] ratio is the expert's share of a step's rows; sums are divided by the counts of the whole step"
        ),
    ),
    "clip_range": _clip,
    "clip_range_low": _key("[ppo_clip] eps_low"),
    "clip_range_high": _key("[ppo_clip] eps_high"),
    "use_dynamic_bsz": _fixed("[training] micro_batch_tokens bounds the memory of a forward; it changes no result"),
    **dict.fromkeys(("scale_rewards", "norm_adv_by_std_in_grpo"), _by_value(_SCALED)),
    **dict.fromkeys(("adv_estimator", "advantage_estimator"), _by_value(_ESTIMATORS)),
    **dict.fromkeys(
        ("reward_weights", "reward_funcs", "gdpo_reward_weights", "gdpo_reward_keys"),
        _fixed("[[rewards]] has a name and a weight for each"),
    ),
    **dict.fromkeys(("train_files", "train_file", "prompt_data"), _key("[jsonl] path")),
    **dict.fromkeys(("prompt_key", "input_key"), _key("[jsonl] prompt_field")),
    **dict.fromkeys(("answer_key", "label_key"), _key("[jsonl] answer_field")),
    **dict.fromkeys(("dataset_name", "dataset"), _key("[hub] name")),
    "dataset_config": _key("[hub] config"),
    "dataset_split": _key("[hub] split"),
    **dict.fromkeys(
        ("seq_len", "max_seq_length", "max_length", "sequence_len"),
        _fixed("[training] max_prompt_tokens bounds prompts, and max_tokens completions"),
    ),
    **dict.fromkeys(("packing", "use_remove_padding"), _fixed("rows are always packed")),
    **dict.fromkeys(("val_files", "eval_dataset"), _key("[jsonl] heldout_path")),
}
"""Key of another trainer -> function from its value to the advice what to write here."""


def translated(key: str, value: Any) -> str:
    """Return the advice what to write instead of another trainer's key, or "" for an unknown key.

    A table without a counterpart here, such as Trinity-RFT's `policy_loss_fn_args`, gets advice for each of its keys.
    """
    if key in _NESTED and isinstance(value, Mapping):
        table = cast("Mapping[str, Any]", value)
        known = list(dict.fromkeys(advice for name, one in table.items() if (advice := _advice(name, one))))
        return f"here {'; '.join(known)}" if known else ""
    if isinstance(value, Mapping):
        return f"here {_TABLES[key]}" if key in _TABLES else ""
    advice = _advice(key, value)
    return advice and f"{'write' if ' = ' in advice else 'here'} {advice}"


def _advice(key: str, value: Any) -> str:
    return WORDS[key](value) if key in WORDS else ""


def _toml(value: Any) -> str:
    """Format a value as in TOML; tables and lists become "...", which the user fills in."""
    if isinstance(value, bool):
        return str(value).lower()
    return f'"{value}"' if isinstance(value, str) else str(value) if isinstance(value, int | float) else "..."


UNREAD: dict[tuple[str, str], str] = {
    ("hicra", "use_planning_tokens"): 'transform "hicra" always amplifies planning tokens and no others: remove the '
    'key, or use "hicra_entropy", which amplifies tokens of high entropy and with this key planning tokens too',
}
"""(table, key) -> fix for a key that users of another trainer may set although nothing reads it."""
