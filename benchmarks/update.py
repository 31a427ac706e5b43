"""The update alone, on one core: the packed policy against a padded transformers forward, and against TRL's loss.

One batch of 128 rows, about 8 prompt and 31 response tokens, on a Qwen3-architecture model of 1.4 million
parameters. Systems take turns in every repetition; figures are medians of CPU seconds, and a ratio pairs the
two figures of one repetition. TRL takes part where it is installed.

    python benchmarks/update.py [--repetitions 9]
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from retrain.algorithms.graph.objective import Objective
from retrain.registry import find
from retrain.training.policy import TorchPolicy
from retrain.training.settings import PolicySettings
from retrain.types import Batch

ROWS, GROUP, VOCABULARY = 128, 8, 128
LEARNING_RATE, BETAS = 2e-4, (0.9, 0.95)
Step = Callable[[], object]


def model() -> Qwen3ForCausalLM:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
    )
    return Qwen3ForCausalLM(config)


def make_batch() -> Batch:
    """Groups of eight share a prompt of 6 to 10 tokens; responses have 10 to 52 tokens; no advantage is 0."""
    generator = torch.Generator().manual_seed(0)
    prompt = torch.randint(6, 11, (ROWS // GROUP,), generator=generator).repeat_interleave(GROUP)
    response = torch.randint(10, 53, (ROWS,), generator=generator)
    columns = torch.arange(int((prompt + response).max()))[None]
    mask = columns < (prompt + response)[:, None]
    scored = mask & (columns >= prompt[:, None])
    ids = torch.randint(0, VOCABULARY, mask.shape, generator=generator)
    ids = ids[torch.arange(ROWS) // GROUP * GROUP].where(columns < prompt[:, None], ids) * mask
    off = torch.zeros(ROWS, dtype=torch.bool)
    return Batch(
        input_ids=ids,
        attention_mask=mask,
        response_mask=scored,
        sampler_logprobs=torch.zeros(mask.shape),
        rewards=torch.zeros(ROWS),
        correct=off,
        lengths=response,
        group_ids=torch.arange(ROWS) // GROUP,
        is_expert=off,
        advantages=torch.randn(ROWS, 1, generator=generator) * scored,
        max_tokens=64,
    )


def packed(batch: Batch, dtype: str) -> Step:
    """This package's policy, metrics included."""
    objective = Objective([find("loss", "ppo_clip").bind({})], find("reduction", "token_mean").bind({}))
    settings: Any = PolicySettings(lr=LEARNING_RATE, betas=BETAS, dtype=dtype)  # type: ignore[arg-type]
    policy = TorchPolicy(model(), settings)
    return lambda: policy.update(batch, objective)


def padded(batch: Batch, dtype: str) -> Step:
    """What one would write first: padded forward, log-softmax over everything, fused AdamW."""
    own = model()
    optimizer = torch.optim.AdamW(own.parameters(), lr=LEARNING_RATE, betas=BETAS, weight_decay=0.0, fused=True)
    mask, tokens = batch.response_mask[:, 1:], batch.input_ids[:, 1:, None]

    def step() -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == "bfloat16"):
            logits = own(input_ids=batch.input_ids, attention_mask=batch.attention_mask.long(), use_cache=False).logits
        lp = torch.log_softmax(logits[:, :-1].float(), -1).gather(-1, tokens)[..., 0]
        ratio = (lp - lp.detach()).exp()
        gain = torch.minimum(ratio * batch.advantages[:, 1:], ratio.clamp(0.8, 1.2) * batch.advantages[:, 1:])
        loss = -(gain * mask).sum() / mask.sum()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(own.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def trl(batch: Batch, dtype: str) -> Step:
    """GRPOTrainer's own loss on the same tokens, with its accelerator, clipping and optimizer."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    from retrain.training.model.builtin_model import build_tokenizer

    config = GRPOConfig(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=ROWS,
        num_generations=GROUP,
        max_completion_length=64,
        beta=0.0,
        learning_rate=LEARNING_RATE,
        adam_beta1=BETAS[0],
        adam_beta2=BETAS[1],
        bf16=dtype == "bfloat16",
        gradient_checkpointing=False,
        use_cpu=True,
        report_to="none",
    )
    trainer = GRPOTrainer(
        model=model(),
        reward_funcs=[lambda completions, **_: [0.0] * len(completions)],
        args=config,
        train_dataset=Dataset.from_list([{"prompt": "1+1?"}] * ROWS),
        processing_class=build_tokenizer(["1+1?"]),
    )
    trainer.current_gradient_accumulation_steps = 1
    own, optimizer = trainer.accelerator.prepare(trainer.model, trainer.create_optimizer())
    own.train()
    inputs = trl_inputs(batch)

    def step() -> None:
        with trainer.compute_loss_context_manager():
            loss = trainer.compute_loss(own, inputs)
        trainer.accelerator.backward(loss)
        trainer.accelerator.clip_grad_norm_(own.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def trl_inputs(batch: Batch) -> dict[str, torch.Tensor]:
    """Prompts padded on the left, completions on the right, as TRL splits them."""
    length = batch.attention_mask.sum(-1) - batch.lengths
    width, longest = int(length.max()), int(batch.lengths.max())
    columns = torch.arange(width)[None] - (width - length)[:, None]
    after = torch.arange(longest)[None] + length[:, None]
    ends = torch.arange(longest)[None] < batch.lengths[:, None]
    ids = torch.nn.functional.pad(batch.input_ids, (0, longest))
    return {
        "prompt_ids": ids.gather(1, columns.clamp_min(0)),
        "prompt_mask": (columns >= 0).long(),
        "completion_ids": ids.gather(1, after) * ends,
        "completion_mask": ends.long(),
        "advantages": batch.advantages.gather(1, length[:, None])[:, 0],
        "num_items_in_batch": ends.sum(),
    }


def measure(repetitions: int, dtypes: Sequence[str]) -> dict[tuple[str, str], list[float]]:
    """CPU seconds of every repetition, by system and dtype."""
    batch = make_batch()
    makers = {"packed": packed, "padded": padded} | ({"trl": trl} if importlib.util.find_spec("trl") else {})
    steps = {(name, dtype): make(batch, dtype) for dtype in dtypes for name, make in makers.items()}
    seconds: dict[tuple[str, str], list[float]] = {key: [] for key in steps}
    for repetition in range(repetitions + 2):
        for key, step in steps.items():
            began = time.process_time()
            step()
            if repetition >= 2:  # allocations and caches settle first
                seconds[key].append(time.process_time() - began)
    return seconds


def main() -> None:
    """Print medians, and the ratio of every system to the packed policy of the same dtype."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--repetitions", type=int, default=9)
    repetitions = parser.parse_args().repetitions
    torch.set_num_threads(1)
    seconds = measure(repetitions, ["float32", "bfloat16"])
    print(f"{int(make_batch().attention_mask.sum())} tokens in {ROWS} rows; CPU seconds")
    print(f"{'system':<10}{'dtype':<10}{'median':>8}{'least':>8}{'x packed':>10}")
    for (name, dtype), own in seconds.items():
        ratio = statistics.median(a / b for a, b in zip(own, seconds["packed", dtype], strict=True))
        print(f"{name:<10}{dtype:<10}{statistics.median(own):>8.3f}{min(own):>8.3f}{ratio:>10.2f}")


if __name__ == "__main__":
    main()
