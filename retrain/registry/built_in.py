"""Table of the built-in components, by which a module is imported only if a configuration names its component.

To add a component, add a row. A test compares the table with the decorators. Components in
`retrain/lab` register by entry points, as those of installed packages do.
"""

from __future__ import annotations

from collections.abc import Mapping

BUILT_IN: Mapping[str, Mapping[str, str]] = {
    "task": {
        "addition": "retrain.data.addition:Addition",
        "sums": "retrain.data.games:Sums",
        "calculator": "retrain.data.games:CalculatorSums",
        "numbers": "retrain.data.games:Numbers",
        "guess": "retrain.data.games:GuessedNumbers",
        "walks": "retrain.data.games:Walks",
        "gym": "retrain.data.gym:Gym",
        "jsonl": "retrain.data.rows:Jsonl",
        "parquet": "retrain.data.rows:Parquet",
        "hub": "retrain.data.rows:Hub",
        "strategy": "retrain.data.strategy:Strategy",
        "rare": "retrain.data.strategy:Rare",
    },
    "curriculum": {"band": "retrain.data.band:Band"},
    "source": {"expert": "retrain.data.expert_source:ExpertSource", "replay": "retrain.data.replay:Replay"},
    "reward": {
        "gym": "retrain.data.gym:GymReward",
        "boxed_math": "retrain.rewards.boxed_math:BoxedMath",
        "judge": "retrain.rewards.judge:Judge",
        "judge_group": "retrain.rewards.judge_group:JudgeGroup",
        "exact": "retrain.rewards.text:exact",
        "number": "retrain.rewards.text:number",
        "format": "retrain.rewards.text:format_matches",
        "overlong": "retrain.rewards.text:overlong",
    },
    "environment": {
        "trl": "retrain.environments.adapters:trl",
        "skyrl": "retrain.environments.adapters:skyrl",
        "openenv": "retrain.environments.adapters:openenv",
        "calculator": "retrain.environments.calculator:calculator",
        "grid": "retrain.environments.grid:grid",
        "guess": "retrain.environments.guess:guess",
        "tools": "retrain.environments.tools:tools",
    },
    "engine": {
        "transformers": "retrain.engines.generate_engine:GenerateEngine",
        "torch": "retrain.engines.torch_engine:TorchEngine",
        "vllm": "retrain.engines.vllm.in_process:VllmEngine",
        "vllm-server": "retrain.engines.vllm.servers:VllmServerEngine",
    },
    "filter": {
        "uninformative": "retrain.algorithms.filters:uninformative",
        "accuracy_band": "retrain.algorithms.filters:accuracy_band",
        "none": "retrain.algorithms.filters:none",
    },
    "uncertainty": {
        "surprisal": "retrain.algorithms.uncertainty:surprisal",
        "predictive_variance": "retrain.algorithms.uncertainty:predictive_variance",
        "shannon_entropy": "retrain.algorithms.uncertainty:shannon_entropy",
        "varentropy": "retrain.algorithms.uncertainty:varentropy",
    },
    "advantage": {
        "grpo": "retrain.algorithms.advantages.group_baselines:grpo",
        "grpo_std": "retrain.algorithms.advantages.group_baselines:grpo_std",
        "vanilla": "retrain.algorithms.advantages.group_baselines:grpo_std",
        "maxrl": "retrain.algorithms.advantages.group_baselines:maxrl",
        "rloo": "retrain.algorithms.advantages.group_baselines:rloo",
        "reinforce_pp": "retrain.algorithms.advantages.group_baselines:reinforce_pp",
        "grpo_lp": "retrain.algorithms.advantages.group_baselines:grpo_lp",
        "remax": "retrain.algorithms.advantages.greedy_baseline:remax",
        "pkpo": "retrain.algorithms.advantages.pass_at_k:pkpo",
        "pass_at_k": "retrain.algorithms.advantages.pass_at_k:pass_at_k",
        "opo": "retrain.algorithms.advantages.reward_scale:opo",
        "lite_ppo": "retrain.algorithms.advantages.reward_scale:lite_ppo",
        "gdpo": "retrain.algorithms.advantages.reward_scale:gdpo",
        "dca": "retrain.algorithms.dca:dca",
        "dca_grpo": "retrain.algorithms.dca:dca",
        "dca_rloo": "retrain.algorithms.dca:dca_rloo",
        "grpo_s": "retrain.algorithms.transforms.entropy_credit:grpo_s",
    },
    "transform": {
        "hicra": "retrain.algorithms.hicra:hicra",
        "hicra_entropy": "retrain.algorithms.hicra:hicra_entropy",
        "process_rloo": "retrain.algorithms.prime:process_rloo",
        "clip_cov": "retrain.algorithms.transforms.covariance:clip_cov",
        "gtpo_paper": "retrain.algorithms.transforms.entropy_credit:gtpo_paper",
        "opd": "retrain.algorithms.transforms.distillation:opd",
        "opsm": "retrain.algorithms.transforms.off_policy_mask:opsm",
        "gtpo": "retrain.algorithms.transforms.token_stages:gtpo",
        "sepa": "retrain.algorithms.transforms.token_stages:sepa",
        "surprisal_mask": "retrain.algorithms.transforms.token_stages:surprisal_mask",
        "gae": "retrain.algorithms.transforms.token_returns:gae",
        "otb": "retrain.algorithms.transforms.token_returns:otb",
        "whiten": "retrain.algorithms.transforms.token_stages:whiten",
        "tis": "retrain.algorithms.transforms.token_stages:tis",
        "mis": "retrain.algorithms.transforms.token_stages:mis",
        "turn_returns": "retrain.algorithms.turns:turn_returns",
        "turn_grpo": "retrain.algorithms.turns:turn_grpo",
        "gigpo": "retrain.algorithms.turns:gigpo",
    },
    "loss": {
        "ipo": "retrain.algorithms.losses.sampler_ratios:ipo",
        "dppo": "retrain.algorithms.losses.sampler_ratios:dppo",
        "topr": "retrain.algorithms.losses.sampler_ratios:topr",
        "vespo": "retrain.algorithms.losses.sampler_ratios:vespo",
        "importance_sampling": "retrain.algorithms.losses.soft_gates:importance_sampling",
        "sapo": "retrain.algorithms.losses.soft_gates:sapo",
        "gmpo": "retrain.algorithms.losses.soft_gates:gmpo",
        "reinforce": "retrain.algorithms.losses.surrogates:reinforce",
        "ppo_clip": "retrain.algorithms.losses.surrogates:ppo_clip",
        "gspo": "retrain.algorithms.losses.soft_gates:gspo",
        "cispo": "retrain.algorithms.losses.surrogates:cispo",
        "kl": "retrain.algorithms.losses.surrogates:kl",
        "entropy": "retrain.algorithms.losses.surrogates:entropy",
        "adaptive_entropy": "retrain.algorithms.adaptive_entropy:adaptive_entropy",
        "sft": "retrain.algorithms.losses.surrogates:sft",
        "sft_phi": "retrain.algorithms.losses.surrogates:sft_phi",
        "kl_cov": "retrain.algorithms.transforms.covariance:kl_cov",
    },
    "reduction": {
        "token_mean": "retrain.algorithms.reductions:token_mean",
        "sequence_mean": "retrain.algorithms.reductions:sequence_mean",
        "sequence_sum": "retrain.algorithms.reductions:sequence_sum",
        "dr_grpo": "retrain.algorithms.reductions:dr_grpo",
        # The same reductions by verl's names.
        "token-mean": "retrain.algorithms.reductions:token_mean",
        "seq-mean-token-mean": "retrain.algorithms.reductions:sequence_mean",
        "seq-mean-token-sum": "retrain.algorithms.reductions:sequence_sum",
        "seq-mean-token-sum-norm": "retrain.algorithms.reductions:dr_grpo",
    },
    "signal": {
        "entropy_coefficient": "retrain.algorithms.adaptive_entropy:EntropyCoefficient",
        "mu": "retrain.algorithms.mix:mix_weight",
        "planning_mask": "retrain.algorithms.planning.planning_mask:PlanningMask",
        "sepa_lambda": "retrain.algorithms.sepa:SepaLambda",
        "high_covariance": "retrain.algorithms.transforms.covariance:high_covariance",
        "process_rewards": "retrain.training.prm:ProcessRewards",
        "values": "retrain.training.auxiliary.critic:Critic",
        "teacher_logprobs": "retrain.training.auxiliary.teacher:TeacherLogprobs",
        "ref_logprobs": "retrain.training.reference:ReferenceLogprobs",
    },
    "tracker": {
        "wandb": "retrain.tracking.trackers:Wandb",
        "tensorboard": "retrain.tracking.trackers:Tensorboard",
        "trackio": "retrain.tracking.trackers:Trackio",
    },
    "executor": {
        "local": "retrain.campaign.work.executors:Local",
        "dir": "retrain.campaign.work.executors:Directory",
        "ray": "retrain.campaign.work.ray_executor:RayCluster",
    },
}
"""Kind -> name -> module:object."""

TABLES: Mapping[str, Mapping[str, str]] = {
    "task": {"calculator": "sums", "guess": "numbers"},
    "engine": {"vllm-server": "vllm"},
    "advantage": {"vanilla": "grpo_std", "dca_grpo": "dca", "dca_rloo": "dca"},
    "transform": {"hicra_entropy": "hicra", "process_rloo": "prime"},
    "reduction": {
        "token-mean": "token_mean",
        "seq-mean-token-mean": "sequence_mean",
        "seq-mean-token-sum": "sequence_sum",
        "seq-mean-token-sum-norm": "dr_grpo",
    },
    "signal": {
        "mu": "mix",
        "planning_mask": "planning",
        "sepa_lambda": "sepa",
        "process_rewards": "prime",
        "teacher_logprobs": "teacher",
        "values": "critic",
    },
}
"""Kind -> name -> TOML table of the component's parameters, if it differs from the name."""

_GRAMS = ("strategic_grams", "strategic_grams_path")

ALIASES: Mapping[tuple[str | int, ...], tuple[str, str]] = {
    ("training", "lr"): ("optimizer", "lr"),
    ("logging", "strategic_grams"): ("planning", "strategic_grams"),
    **{
        ("hicra", key): ("planning", key)
        for key in (*_GRAMS, "sg_n_range", "log_semantic_entropy", "log_planning_token_ratio")
    },
}
"""Documented alias of a key -> the key. Setting a key and its alias in one file is an error."""

ALTERNATIVES: Mapping[tuple[str | int, ...], tuple[str, str]] = {
    ("planning", key): ("planning", other) for key, other in (_GRAMS, _GRAMS[::-1])
}
"""Pairs of keys that exclude each other: an override of one removes the other."""
