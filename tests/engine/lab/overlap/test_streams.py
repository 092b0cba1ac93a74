"""Token streams are distributed as their names say."""

import numpy as np

from cflow.engine.lab.overlap.streams import local_tokens, uniform_tokens


def test_streams_are_what_they_are_called() -> None:
    uniform = np.bincount(uniform_tokens(16, 4000), minlength=16)
    assert uniform.min() > 180
    local = np.array(local_tokens(64, 4000))
    counts = np.sort(np.bincount(local, minlength=64))[::-1]
    assert counts[0] > 5 * counts[20] > 0
    again = np.mean([token in local[max(i - 4, 0) : i] for i, token in enumerate(local)])
    assert again > 0.5
