"""Functions run in a forked child: for limits that cannot be lifted, and for tests of forks."""

from __future__ import annotations

import json
import os
import traceback
import warnings
from collections.abc import Callable

import torch


def in_child(work: Callable[[], object]) -> object:
    """Return the result of `work`, sent through JSON. Raises AssertionError with the child's traceback."""
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        # The child starts no work in threads that needs a lock held by the parent's threads.
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        os.close(reader)
        torch.set_num_threads(1)  # torch's own threads exist in the parent only
        try:
            answer = json.dumps({"value": work()})
        except BaseException:
            answer = json.dumps({"error": traceback.format_exc()})
        os.write(writer, answer.encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        text = pipe.read()
    _, status = os.waitpid(pid, 0)
    assert text, f"the child ended with {status} and said nothing"
    answer_of = json.loads(text)
    assert "error" not in answer_of, answer_of["error"]
    return answer_of["value"]
