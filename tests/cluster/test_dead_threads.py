"""A test whose double has died does not wait for its whole timeout."""

from __future__ import annotations

import threading

import pytest

from tests.support.background import ThreadDied
from tests.support.devcluster import wait_until

pytestmark = pytest.mark.unit


def die() -> None:
    raise OSError("address in use")


# pytest fails such a test by itself as well: pyproject.toml makes its warning an error.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_wait_ends_with_the_cause_of_the_dead_thread() -> None:
    thread = threading.Thread(target=die, name="double")
    thread.start()
    with pytest.raises(ThreadDied, match=r"for pods: thread double:(.|\n)*OSError: address in use"):
        wait_until(lambda: False, "pods")
    thread.join()  # pytest gets the error at the thread's very end, which must not be in the next test


def test_the_next_test_hears_nothing_of_it() -> None:
    answers = iter((False, True))
    wait_until(lambda: next(answers), "the second answer")
