"""The two forms of the teacher's signal say the same, and the benchmark measures both."""

from collections.abc import Callable

import msgspec
import numpy as np
import pytest

from opdkit.benchmarks import teacher_path
from opdkit.benchmarks.teacher_path import Signal


@pytest.mark.parametrize(
    ("encode", "decode"),
    [
        (teacher_path.encode, teacher_path.decode),
        (teacher_path.encode_json, teacher_path.decode_json),
    ],
    ids=["binary", "json"],
)
def test_what_is_decoded_is_what_was_encoded(
    encode: Callable[[Signal], bytes], decode: Callable[[bytes], Signal]
) -> None:
    signal = teacher_path.random_signal(num_positions=20, top_k=5)
    got = decode(encode(signal))
    for name in Signal.__struct_fields__:
        np.testing.assert_array_equal(getattr(got, name), getattr(signal, name))


def test_the_signal_could_be_a_teachers() -> None:
    signal = teacher_path.random_signal(num_positions=50, top_k=8)
    assert all(len(set(row)) == 8 for row in signal.token_ids.tolist())
    assert (np.diff(signal.logprobs) <= 0).all()
    total = np.exp(signal.logprobs).sum(axis=1) + signal.tail_mass
    np.testing.assert_allclose(total, 1.0, atol=1e-5)


def test_the_bare_numbers_are_counted_as_they_are() -> None:
    signal = teacher_path.random_signal(num_positions=20, top_k=5)
    arrays = [getattr(signal, name) for name in Signal.__struct_fields__]
    size = teacher_path.content_bytes(num_positions=20, top_k=5)
    assert sum(array.nbytes for array in arrays) == size


def test_the_quick_form_measures_every_shape() -> None:
    report = teacher_path.measure(num_runs=1, is_quick=True)
    assert report.holds
    assert {name.partition(".")[0] for name in report.figures} == {"T64_k1", "T64_k16"}
    assert all(figure.median > 0 for figure in report.figures.values())
    assert msgspec.json.decode(msgspec.json.encode(report), type=type(report)).name == report.name
