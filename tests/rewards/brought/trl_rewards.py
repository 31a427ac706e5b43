"""Reward functions as TRL's documentation writes them; nothing in here knows of this package."""

import asyncio
import re


def reward_len(completions, **kwargs):
    return [float(len(completion)) for completion in completions]


def by_ids(completion_ids, **kwargs):
    return [float(len(ids)) for ids in completion_ids]


def format_reward_func(completions, **kwargs):
    """Reward function that checks if the completion has a specific format."""
    pattern = r"^<think>.*?</think><answer>.*?</answer>$"
    completion_contents = [completion[0]["content"] for completion in completions]
    matches = [re.match(pattern, content) for content in completion_contents]
    return [1.0 if match else 0.0 for match in matches]


def boxed(completions, ground_truth, **kwargs):
    matches = [re.search(r"\\boxed\{(.*?)\}", completion) for completion in completions]
    contents = [match.group(1) if match else "" for match in matches]
    return [1.0 if c == gt else 0.0 for c, gt in zip(contents, ground_truth)]


def math_reward_func(prompts, completions, task, **kwargs):
    """Reward for math problems; None for the others."""
    rewards = []
    for prompt, completion, t in zip(prompts, completions, task):
        rewards.append(float(prompt in completion) if t == "math" else None)
    return rewards


async def async_reward(prompts, completions, **kwargs):
    await asyncio.sleep(0)
    return [float(len(prompt) + len(completion)) for prompt, completion in zip(prompts, completions)]


def one_too_few(completions, **kwargs):
    return [0.0] * (len(completions) - 1)


def batch_raises(completions, **kwargs):
    raise KeyError("column")
