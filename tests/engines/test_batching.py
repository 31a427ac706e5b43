"""When a batch begins, in which order its requests are, and what becomes of an engine's error."""

import asyncio

import pytest

from retrain.engines.batching import BatchLane, RequestLane, lanes
from retrain.errors import EngineError
from retrain.system import event_loop
from retrain.types import Completion, Request, Sampling


def request(stream):
    return Request((1,), 1, 1, stream)


class Recorder:
    """An engine that notes the streams of every call, and answers with them."""

    def __init__(self):
        self.calls = []

    def __call__(self, requests):
        self.calls.append([one.stream for one in requests])
        return [[Completion((one.stream,), (0.0,), "stop")] for one in requests]


def test_a_batch_begins_once_all_parties_wait_and_its_order_is_that_of_the_keys():
    engine = Recorder()

    async def party(lane, key, turns):
        found = []
        for turn in range(turns):
            await asyncio.sleep(0 if key % 2 else 0.001 * key)
            [one] = await lane.generate(request(10 * turn + key), (key, turn))
            found.append(one.ids[0])
        lane.parties(-1)
        return found

    async def whole():
        lane = BatchLane(engine)
        lane.parties(4)
        return await event_loop.gather(party(lane, key, turns) for key, turns in enumerate((3, 1, 3, 2)))

    assert event_loop.run(whole()) == [[0, 10, 20], [1], [2, 12, 22], [3, 13]]
    assert engine.calls == [[0, 1, 2, 3], [10, 12, 13], [20, 22]]


def test_an_eager_lane_samples_what_waits_whenever_the_engine_is_free():
    engine = Recorder()

    async def late(lane, first):
        await first
        return await lane.generate(request(2), (2,))

    async def whole():
        lane = BatchLane(engine, eager=True)
        lane.parties(9)
        first = asyncio.create_task(lane.generate(request(1), (1,)))
        same = asyncio.create_task(lane.generate(request(0), (0,)))
        await event_loop.gather([late(lane, first)])
        await same

    event_loop.run(whole())
    assert engine.calls == [[0, 1], [2]]


def test_an_error_of_the_engine_reaches_everyone_who_waits():
    def fail(requests):
        raise EngineError(f"{len(requests)} requests")

    async def whole():
        lane = BatchLane(fail)
        lane.parties(3)
        asked = [lane.generate(request(n), (n,)) for n in range(3)]
        return await asyncio.gather(*asked, return_exceptions=True)

    assert [str(error) for error in event_loop.run(whole())] == ["3 requests"] * 3


def test_once_one_party_has_failed_nothing_more_is_sampled():
    engine = Recorder()

    async def fail(lane):
        await asyncio.sleep(0)
        raise ValueError("of the environment")

    async def whole():
        lane = BatchLane(engine)
        lane.parties(3)
        try:
            await event_loop.gather([lane.generate(request(0), (0,)), lane.generate(request(1), (1,)), fail(lane)])
        finally:
            lane.close()

    with pytest.raises(ValueError, match="of the environment"):
        event_loop.run(whole())
    assert engine.calls == []


def test_an_engine_chooses_by_a_coroutine_function():
    class Batches:
        def sample(self, requests, sampling): ...

        def generate(self, request, sampling):
            """A helper of another meaning."""

    class AsTheyCome(Batches):
        async def generate(self, request, sampling): ...

    assert {type(one) for one in lanes(Batches(), Sampling(), 2)} == {BatchLane}  # pyright: ignore[reportArgumentType]
    found = lanes(AsTheyCome(), Sampling(), 2)  # pyright: ignore[reportArgumentType]
    assert {type(one) for one in found} == {RequestLane}
