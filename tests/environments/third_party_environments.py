"""Environments as users of other libraries have them: nothing in the classes knows of this package."""

from types import SimpleNamespace


class Vault:
    """As TRL's documentation writes a class for `environment_factory`."""

    def reset(self, **columns) -> str | None:
        self.code, self.open = int(columns["answer"]), False
        return f" It has {columns['digits']} digits." if "digits" in columns else None

    def turn_dial(self, number: int) -> str:
        """Turns the dial.

        Args:
            number: where to turn it.

        Returns:
            What is heard.
        """
        self.open = number == self.code
        return "click" if self.open else "too low" if number < self.code else "too high"

    def get_reward(self) -> float:
        return float(self.open)

    def _hidden(self):
        raise AssertionError("no tool")


class Unscored:
    def reset(self, **columns):
        return None

    def look(self):
        """Looks."""
        return "dark"


class Walk:
    """As OpenEnv's `Environment`: typed actions and observations."""

    def reset(self, seed=None, **kwargs):
        self.left = seed % 5 + 2
        return SimpleNamespace(text=f"{self.left} left", done=False, reward=None)

    def step(self, action, timeout_s=None):
        self.left -= action.steps
        return SimpleNamespace(text=f"{self.left} left", done=self.left <= 0, reward=float(self.left == 0))


def steps_of(text):
    return SimpleNamespace(steps=int(text))


def text_of(observation):
    return observation.text


class Halves:
    """As SkyRL-gym's `BaseTextEnv`."""

    def __init__(self, env_config, extras):
        self.answer, self.max_turns, self.turns = extras["reward_spec"]["ground_truth"], extras["max_turns"], 0
        self.closed = env_config.get("closed", [])

    def init(self, prompt):
        return [*prompt, {"role": "user", "content": " Guess."}], {}

    def step(self, action):
        self.turns += 1
        done = action == self.answer or self.turns >= self.max_turns
        said = [] if done else [{"role": "user", "content": "No."}, {"role": "user", "content": "Again."}]
        return {"observations": said, "reward": float(action == self.answer), "done": done, "metadata": {}}

    def close(self):
        self.closed.append(self.turns)


class Rewriting(Halves):
    def init(self, prompt):
        prompt[0]["content"] += " Be brief."
        return prompt, {}
