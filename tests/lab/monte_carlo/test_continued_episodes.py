"""Episodes of environments that are continued from a prefix, against an enumeration of all episodes."""

from dataclasses import replace

import pytest

from retrain.errors import ComponentError, UserCodeError
from retrain.lab.monte_carlo.continued_episodes import ContinuedEpisodes
from retrain.lab.monte_carlo.prefixes import prefixes
from retrain.protocols import Sampler
from retrain.run.collectors.rollouts import requests_for, roll, score, train_sampling, valid_rows
from retrain.run.episodes import turn_stream
from retrain.run.reopen import reopen
from retrain.types import Completion

BITS, TURN = 5, 2
"""Tokens of an episode and of a turn: turns of 2, 2 and 1 tokens."""
RUN = f"""
task = {{ name = "numbers" }}
environment = {{ max_turns = 4, turn_tokens = {TURN}, workers = 1 }}
training = {{ max_steps = 0, batch_size = 3, group_size = 4, max_tokens = {BITS} }}
warmup = {{ steps = 0 }}
eval = {{ problems = 0 }}
reward_pool = {{ max_failed = 1.0 }}
"""
LOCKS = '''
from itertools import count

from retrain import Observation, environment

COUNT = count()


def lock(answer, rng, *, fails: str = ""):
    """Ends in each of its turns, or at the limit of tokens; its observations depend on its seed."""
    first = yield f"{rng.randrange(1000)}\\n"
    if fails and first == fails:
        raise ValueError("the lock is stuck")
    if first == "11":
        return 5.0
    second = yield Observation(f"{first} {rng.randrange(1000)}\\n", reward=float(first[0]))
    if second == "00":
        return {"open": 2.0, "neat": 1.0}
    third = yield Observation(None, reward=int(second, 2) / 4)
    assert (third.turn, third.tokens_left, third.finish_reason) == (2, 0, "length")
    if third == "1":
        return 4.0
    yield Observation("no", reward=0.5)


def fickle(answer, *, what: str):
    """Differs in one respect between any two episodes."""
    number = next(COUNT)
    yield f"{number}\\n" if what == "opening" else None
    if what == "end" and number >= 4:
        return 1.0
    yield Observation(f"{number if what == 'text' else 0}\\n", reward=number if what == "reward" else 0.0)
    yield "0\\n"
    return 1.0


@environment("outer", replay=False)
def outer(answer):
    yield None
    return 1.0
'''


def value(bits):
    """(total reward, number of tokens) of the episode in which the policy samples these bits as long as it lasts."""
    first, second, third = bits[:2], bits[2:4], bits[4]
    if first == "11":
        return 5.0, 2
    if second == "00":
        return int(first[0]) + 3.0, 4
    return int(first[0]) + int(second, 2) / 4 + (4.0 if third == "1" else 0.5), 5


class AllBits(Sampler):
    """A sampler whose 2^BITS members of a group together sample every sequence of bits, each one once."""

    count = 1 << BITS

    def __init__(self, chat):
        self.ids = {bit: chat.encode(bit)[0] for bit in "01"}
        self.seeds = set[int]()
        turns = range(-(-BITS // TURN))
        self.places = {
            turn_stream(s, member, turn): (member, turn)
            for s in range(100)
            for member in range(self.count)
            for turn in turns
        }

    def load_weights(self, weights, version):
        """It has none."""

    def sample(self, requests, sampling):
        self.seeds.add(sampling.seed)
        return [self.bits(one) for one in requests]

    def bits(self, request):
        places = [self.places[request.stream]] if request.count == 1 else [(m, 0) for m in range(self.count)]
        found = []
        for member, turn in places:
            end = min(BITS, TURN * (turn + 1))
            ids = [self.ids[bit] for bit in format(member, f"0{BITS}b")[end - request.max_tokens : end]]
            found.append(Completion(tuple(ids), (-1.0,) * len(ids), "length"))
        return found


@pytest.fixture
def opened(train, tmp_path):
    """`opened(NAME, overrides)`: a run in an environment of LOCKS, with a sampler of bits."""
    (tmp_path / "locks.py").write_text(LOCKS)
    contexts = []

    def go(name, *overrides):
        run = train(f'plugins.search_paths=["{tmp_path}"]', f'environment.name="locks.{name}"', *overrides)
        contexts.append(reopen(run, (), lambda *_: None, trust=True))
        return replace(contexts[-1], sampler=AllBits(contexts[-1].chat))

    yield go
    for one in contexts:
        one.close()


def played(context, seed=3):
    """Two groups of all episodes: the rollouts with a reward, and the problems by the numbers of their groups."""
    rendered = [(one, context.chat.prompt(one.prompt)) for one in map(context.task.problem, range(2))]
    most = context.config.training.max_tokens
    requests = requests_for(rendered, context.sampler.count, most)
    rollouts = roll(context, rendered, requests, train_sampling(context.config, context.trained.loaded, seed))
    return valid_rows(score(context.chat, context.pool, rendered, rollouts, most)), dict(enumerate(rendered))


def continued(context, seed=3):
    """(prefixes, their bits, rewards of their continuations, number of sampled tokens)."""
    rollouts, problems = played(context, seed)
    batch = context.layout.batch(rollouts, 0)
    found, _ = prefixes(batch.input_ids, batch.response_mask, batch.group_ids, batch.response_mask)
    episodes = ContinuedEpisodes(context)
    episodes.record(rollouts, seed)
    rewards, tokens = episodes(problems, found, context.sampler.count, 9)
    rows = {}
    for row, one in enumerate(rollouts):
        sampled = "".join(context.chat.decode(one.completion_ids[turn.start : turn.end]) for turn in one.turns)
        for place in batch.response_mask[row].nonzero()[:, 0].tolist():
            ids = (*one.prompt_ids, *one.completion_ids)[:place]
            rows[one.group, ids] = sampled[: int(batch.response_mask[row, :place].sum())]
    return found, [rows[one.group, one.ids] for one in found], rewards, tokens


def every(prefix):
    """All sequences of bits that begin with a prefix."""
    return [word for word in (format(n, f"0{BITS}b") for n in range(1 << BITS)) if word.startswith(prefix)]


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("workers", [1, 2])
def test_the_value_of_a_prefix_is_that_of_the_enumeration(opened, workers):
    context = opened("lock", f"environment.workers={workers}")
    found, bits, rewards, tokens = continued(context)
    # Without bits, in the first turn, at its end, in the second, at its end: an episode ends at 11 and at ..00.
    assert len(found) == 2 * len(set(bits)) == 2 * (1 + 2 + 3 + 6 + 9)
    assert {len(one.ids) - one.sampled for one in found} != {len(found[0].ids)}  # observations lie between turns
    assert rewards.shape == (len(found), 32)
    for own, row in zip(bits, rewards, strict=True):
        expected = [value(word)[0] for word in every(own)]
        assert row.mean().item() == pytest.approx(sum(expected) / len(expected))
        assert set(row.tolist()) == set(expected)
    lengths = [sum(value(word)[1] - len(own) for word in every(own)) * 32 // len(every(own)) for own in bits]
    assert tokens == sum(lengths)
    assert context.sampler.seeds == {3, 9}  # the recorded episodes and their continuations


@pytest.mark.slow
@pytest.mark.parametrize("what", ["opening", "text", "reward", "end"])
def test_an_environment_that_does_not_repeat_is_named(opened, what):
    text = r'environment "locks.fickle" does not repeat: .* deterministic given its seed and the actions'
    with pytest.raises(UserCodeError, match=text):
        continued(opened("fickle", f'environment.params.what="{what}"'))


@pytest.mark.slow
def test_an_environment_that_declares_no_replay_is_refused(opened):
    with pytest.raises(ComponentError, match=r'"locks\.outer" cannot be replayed'):
        ContinuedEpisodes(opened("outer"))
