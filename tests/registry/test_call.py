"""What surrounds a call of a component."""

import os

import pytest

from retrain.registry.call import Call


@pytest.mark.parametrize("raised", [None, SystemExit(0), ValueError("child")])
def test_a_forked_process_ends_where_it_leaves_the_component(capfd, raised):
    """It would train as a second copy of the run, and write the same files."""
    with Call("transform", "mine")():
        child = os.fork()
        if child == 0 and raised is not None:
            raise raised
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
    assert 'transform "mine": a forked process ends' in capfd.readouterr().err
