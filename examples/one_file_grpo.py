"""GRPO in one file: the whole loop, to read and to copy. It runs on a CPU in less than a minute.

    python examples/one_file_grpo.py

A small language model with random weights learns to repeat the digit of its prompt: after "7=" it
should answer "77777777". A step is what a step of `retrain train` is, without its options:

1. sample a group of completions of every prompt            `engine.sample`
2. score each completion                                    `reward`
3. compare each completion with its group                   the component `grpo`
4. move the policy along the clipped surrogate              the components `ppo_clip`, `token_mean`
5. hand the new weights to the sampler                      `engine.load_weights`

What is left out: a reference model and its KL penalty, an environment, evaluation on held-out
problems, checkpoints, LoRA, several GPUs. `retrain explain FILE` shows where each of them enters.
"""

from __future__ import annotations

import random

import torch
from torch import Tensor

from retrain import Request, Sampling, TorchEngine, build_model, build_tokenizer, find

PROMPTS, GROUP, TOKENS = 10, 16, 8
"""Prompts of a step, completions of a prompt (the group), sampled tokens of a completion."""
LEARNING_RATE, MAX_GRAD_NORM = 1e-3, 1.0

# Components by their names: any of `retrain plugins` fits here, your own included.
advantage = find("advantage", "grpo").bind()
loss_term = find("loss", "ppo_clip").bind()
reduction = find("reduction", "token_mean").bind()


def reward(answer: str, completion: str) -> float:
    """Share of the completion's characters that are the digit of the prompt."""
    return completion.count(answer) / max(1, len(completion))


def token_logprobs(model: torch.nn.Module, input_ids: Tensor, response_mask: Tensor) -> Tensor:
    """Log-prob of each response token given the tokens before it, [N, T] in nats; 0 elsewhere.

    Logits at column t-1 predict the token at column t, so column t of the result belongs to
    column t of `input_ids`, as everywhere in retrain.
    """
    logits = model(input_ids).logits[:, :-1].float()
    chosen = logits.log_softmax(-1).gather(-1, input_ids[:, 1:, None])[..., 0]
    first = chosen.new_zeros(len(chosen), 1)
    return torch.cat([first, chosen], 1).where(response_mask, 0.0)


def policy_loss(model: torch.nn.Module, input_ids: Tensor, columns: dict[str, Tensor]) -> Tensor:
    """Sum of the clipped surrogate over the batch, each token weighed by the reduction.

    With one optimizer step per batch the importance ratio has the value 1, so nothing is clipped, and
    the gradient is the policy gradient. The reduction divides by the response tokens of the batch.
    """
    mask = columns["response_mask"]
    logprobs = token_logprobs(model, input_ids, mask)
    columns = {**columns, "logprobs": logprobs, "old_logprobs": logprobs.detach()}
    values, _ = loss_term(*(columns[name] for name in loss_term.reads))
    return (values * reduction(mask.float())).sum()


def main(steps: int = 100, seed: int = 0) -> list[float]:
    """Train and return the mean reward of every step."""
    rng = random.Random(seed)
    tokenizer = build_tokenizer(f"{digit}=" for digit in range(10))
    model = build_model(tokenizer, seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
    engine = TorchEngine(model, dtype="float32")  # samples with a copy of the weights
    rewards_of_steps = list[float]()

    for step in range(steps):
        # 1. Sample. `stream` numbers the random numbers of a prompt.
        answers = [str(rng.randrange(10)) for _ in range(PROMPTS)]
        prompts = [tuple(tokenizer.encode(f"{answer}=")) for answer in answers]
        requests = [Request(ids, GROUP, TOKENS, stream) for stream, ids in enumerate(prompts)]
        groups = engine.sample(requests, Sampling(temperature=1.0, seed=seed * 100_003 + step))

        # 2. Score, and lay out rows: a prompt and its completion. All rows have one length here,
        # because nothing ends a completion before its eight tokens; otherwise pad them.
        rows, rewards, group_ids = list[tuple[int, ...]](), list[float](), list[int]()
        for group, (answer, ids, completions) in enumerate(zip(answers, prompts, groups, strict=True)):
            for completion in completions:
                rows.append((*ids, *completion.ids))
                rewards.append(reward(answer, tokenizer.decode(completion.ids)))
                group_ids.append(group)
        input_ids = torch.tensor(rows)
        response_mask = torch.zeros_like(input_ids, dtype=torch.bool)
        response_mask[:, -TOKENS:] = True

        # 3. Advantages: how much better a completion is than the mean of its group, [N]. Every token
        # of a completion gets the same, [N, T]; token transforms would change that here.
        columns = {
            "rewards": torch.tensor(rewards),
            "group_ids": torch.tensor(group_ids),
            "response_mask": response_mask,
        }
        episode = advantage(*(columns[name] for name in advantage.reads))
        columns["advantages"] = episode[:, None] * response_mask

        # 4. Update.
        loss = policy_loss(model, input_ids, columns)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
        optimizer.step()

        # 5. The sampler takes the new weights, so that the next step is on-policy.
        engine.load_weights(model.state_dict(), step + 1)
        rewards_of_steps.append(sum(rewards) / len(rewards))
        if step % 10 == 0 or step == steps - 1:
            print(f"step {step:3}  mean reward {rewards_of_steps[-1]:.3f}")
    return rewards_of_steps


if __name__ == "__main__":
    main()
