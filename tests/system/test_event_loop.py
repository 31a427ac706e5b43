"""A flag ends sampling between two tokens."""

import asyncio
import signal
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

import pytest

from retrain.engines.generate_engine import GenerateEngine
from retrain.engines.torch_engine import TorchEngine
from retrain.errors import EngineError
from retrain.system import event_loop
from retrain.system.event_loop import StopFlag, check_stop
from retrain.types import Request, Sampling
from tests.engines.models import tiny


@pytest.mark.parametrize("kind", [TorchEngine, GenerateEngine])
def test_sampling_stops_after_the_token_that_is_computed(kind):
    """The flag is set within the third of fifty forward passes, in the thread that samples."""
    engine, flag, passes = kind(tiny("qwen3")), StopFlag(), []
    request = Request((3, 4, 5), count=2, max_tokens=50, stream=0)

    def sample():
        flag.adopt()
        return engine.sample([request], Sampling())

    def count(*_):
        passes.append(None)
        if len(passes) == 3:
            flag.set()

    embedding = engine._model.get_input_embeddings() if kind is GenerateEngine else None
    if embedding is not None:
        embedding.register_forward_hook(count)
    else:
        step = engine._decoder.step
        engine._decoder.step = lambda tokens: (count(), step(tokens))[1]
    with ThreadPoolExecutor(1) as thread, pytest.raises(EngineError, match="interrupted"):
        thread.submit(sample).result()
    assert len(passes) == 3


def test_a_flag_belongs_to_its_thread():
    flag = StopFlag()
    flag.set()
    with ThreadPoolExecutor(1) as thread:
        thread.submit(flag.adopt).result()
        with pytest.raises(EngineError, match="interrupted"):
            thread.submit(check_stop).result()
    check_stop()


@pytest.mark.parametrize("early", [True, False])
def test_a_thread_that_waits_for_the_event_loop_is_woken(early):
    flag, waiting, ended = StopFlag(), threading.Event(), []

    async def wait():
        try:
            waiting.set()
            await asyncio.Event().wait()
        finally:
            ended.append(True)

    def work():
        flag.adopt()
        event_loop.run(wait())

    with ThreadPoolExecutor(1) as thread:
        if early:
            flag.set()
        found = thread.submit(work)
        if not early:
            waiting.wait()
            flag.set()
        with pytest.raises(EngineError, match="interrupted"):
            found.result()
    assert ended in ([], [True])
    assert ended or early


def test_an_interrupt_after_the_coroutine_ended_is_raised():
    """Ctrl-C can arrive when the end of the coroutine was taken note of and its result was not yet returned."""

    class Interrupting(StopFlag):
        @contextmanager
        def waking(self, call):
            with super().waking(call):
                yield
            raise KeyboardInterrupt

    def sample():
        Interrupting().adopt()
        event_loop.run(asyncio.sleep(0))

    with ThreadPoolExecutor(1) as thread, pytest.raises(KeyboardInterrupt):
        thread.submit(sample).result(60)


@pytest.mark.parametrize("waits", [lambda: event_loop.run(asyncio.sleep(6000)), lambda: event_loop.wait_for(Future())])
def test_a_signal_that_does_not_wake_the_main_thread_is_handled(waits):
    """As one that arrives just before the thread waits: here, because another thread receives it."""
    thread = threading.Timer(0.1, lambda: signal.pthread_kill(threading.get_ident(), signal.SIGINT))
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        waits()
    thread.join()
