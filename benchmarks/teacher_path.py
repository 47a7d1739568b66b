"""What does the teacher's signal cost on its way to the trainer?

The way of one sample: the teacher's replica turns arrays into a ``TeacherScores`` message, the
trainer turns that into arrays again. Measured in CPU time of this thread, against the same numbers
as JSON, parsed by the fastest parser we know, and against one copy of the same bytes.
"""

from collections.abc import Callable
from time import thread_time

import msgspec
import numpy as np
import numpy.typing as npt

from opdkit.benchmarks.report import (
    BenchmarkReport,
    Bound,
    Figure,
    Limit,
    check,
    figures_of,
    make_report,
    this_machine,
)
from opdkit.protocols.messages import FLOAT32_BYTES, INT32_BYTES, TeacherScores

SHAPES = tuple((num_positions, top_k) for num_positions in (512, 4096) for top_k in (1, 64))
QUICK_SHAPES = ((64, 1), (64, 16))
NUM_RUNS = 9
MIN_RUN_S = 0.05
"""A run repeats its operation for at least so long: the clock is too coarse for one."""

VOCAB_SIZE = 49_152
SEED = 0
MIN_JSON_RATIO = 10.0
"""Binary must be so many times cheaper than JSON, or it is not worth its format."""
MAX_OVERHEAD_BYTES = 256
"""Names and lengths of the fields, whatever the size of the sample."""

COPY = "one copy of the payload, measured in the same run"
CONTENT = "ids and log-probabilities of k tokens, the sampled token's and the tail, 4 bytes each"

Floats = npt.NDArray[np.float32]


class Columns(msgspec.Struct, frozen=True, kw_only=True):
    """The teacher's arrays as JSON has them: lists of numbers."""

    token_ids: list[list[int]]
    logprobs: list[list[float]]
    sampled_logprobs: list[float]
    tail_mass: list[float]


class Signal(msgspec.Struct, frozen=True, kw_only=True):
    """The teacher's distribution at P positions over k tokens, as arrays."""

    token_ids: npt.NDArray[np.int32]
    """[P, k]"""
    logprobs: Floats
    """[P, k]"""
    sampled_logprobs: Floats
    """[P]"""
    tail_mass: Floats
    """[P]"""


DECODER = msgspec.msgpack.Decoder(TeacherScores)
JSON_DECODER = msgspec.json.Decoder(Columns)


def measure(*, num_runs: int | None, is_quick: bool) -> BenchmarkReport:
    """Measure all shapes."""
    machine = this_machine()
    shapes = QUICK_SHAPES if is_quick else SHAPES
    num_runs = num_runs or NUM_RUNS
    figures: dict[str, Figure] = {}
    limits: dict[str, Limit] = {}
    bounds: list[Bound] = []
    for num_positions, top_k in shapes:
        name = f"T{num_positions}_k{top_k}"
        signal = random_signal(num_positions=num_positions, top_k=top_k)
        figures |= figures_of([_run(signal, name) for _ in range(num_runs)])
        copy_s = figures[f"{name}.copy_s"].median
        limits[f"{name}.total_s"] = Limit(value=copy_s, basis=COPY)
        size = content_bytes(num_positions=num_positions, top_k=top_k)
        limits[f"{name}.payload_bytes"] = Limit(value=size, basis=CONTENT)
        bounds.append(check(figures, f"{name}.overhead_bytes", "<=", MAX_OVERHEAD_BYTES))
        if not is_quick:  # of a few bytes, the call costs more than its content
            bounds.append(check(figures, f"{name}.json_ratio", ">=", MIN_JSON_RATIO))
    return make_report(
        "teacher_path",
        machine=machine,
        config={"shapes": shapes, "num_runs": num_runs, "min_run_s": MIN_RUN_S, "seed": SEED},
        figures=figures,
        limits=limits,
        bounds=bounds,
    )


def random_signal(*, num_positions: int, top_k: int) -> Signal:
    """Draw scores such as a teacher gives: distinct ids, best first, probabilities below 1."""
    random = np.random.default_rng(SEED)
    first_ids = random.integers(VOCAB_SIZE, size=(num_positions, 1), dtype=np.int32)
    ids = (first_ids + 127 * np.arange(top_k, dtype=np.int32)) % VOCAB_SIZE
    shares = random.dirichlet(np.full(top_k + 1, 0.3), size=num_positions) + 1e-9
    logprobs = np.log(np.sort(shares[:, :top_k])[:, ::-1]).astype(np.float32)
    return Signal(
        token_ids=ids.astype(np.int32),
        logprobs=logprobs,
        sampled_logprobs=logprobs[:, 0].copy(),
        tail_mass=shares[:, top_k].astype(np.float32),
    )


def encode(signal: Signal) -> bytes:
    """Do what the teacher's replica does."""
    num_positions, top_k = signal.logprobs.shape
    return msgspec.msgpack.encode(
        TeacherScores(
            num_positions=num_positions,
            support_size=top_k,
            token_ids=signal.token_ids.tobytes(),
            logprobs=signal.logprobs.tobytes(),
            sampled_logprobs=signal.sampled_logprobs.tobytes(),
            tail_mass=signal.tail_mass.tobytes(),
        )
    )


def decode(payload: bytes) -> Signal:
    """Do what the trainer does."""
    scores = DECODER.decode(payload)
    shape = scores.num_positions, scores.support_size
    return Signal(
        token_ids=np.frombuffer(scores.token_ids, "<i4").reshape(shape),
        logprobs=np.frombuffer(scores.logprobs, "<f4").reshape(shape),
        sampled_logprobs=np.frombuffer(scores.sampled_logprobs, "<f4"),
        tail_mass=np.frombuffer(scores.tail_mass, "<f4"),
    )


def encode_json(signal: Signal) -> bytes:
    """Write the same numbers as JSON; float32 in the shortest form that reads back the same."""
    return msgspec.json.encode(
        Columns(
            token_ids=signal.token_ids.tolist(),
            logprobs=[_shortest(row) for row in signal.logprobs],
            sampled_logprobs=_shortest(signal.sampled_logprobs),
            tail_mass=_shortest(signal.tail_mass),
        )
    )


def decode_json(text: bytes) -> Signal:
    """Parse JSON into the arrays that the loss needs."""
    columns = JSON_DECODER.decode(text)
    return Signal(
        token_ids=np.asarray(columns.token_ids, np.int32),
        logprobs=np.asarray(columns.logprobs, np.float32),
        sampled_logprobs=np.asarray(columns.sampled_logprobs, np.float32),
        tail_mass=np.asarray(columns.tail_mass, np.float32),
    )


def content_bytes(*, num_positions: int, top_k: int) -> int:
    """Return the size of the bare numbers."""
    return num_positions * (top_k * (INT32_BYTES + FLOAT32_BYTES) + 2 * FLOAT32_BYTES)


def cpu_s_of(operation: Callable[[], object]) -> float:
    """Return this thread's CPU time for one call, from as many as take ``MIN_RUN_S``."""
    num_calls, began_s = 0, thread_time()
    while (spent_s := thread_time() - began_s) < MIN_RUN_S:
        operation()
        num_calls += 1
    return spent_s / num_calls


def _shortest(values: Floats) -> list[float]:
    return [float(str(value)) for value in values]


def _content_bytes_of(signal: Signal) -> int:
    num_positions, top_k = signal.logprobs.shape
    return content_bytes(num_positions=num_positions, top_k=top_k)


def _run(signal: Signal, name: str) -> dict[str, float]:
    payload, text = encode(signal), encode_json(signal)
    source = np.frombuffer(payload, np.uint8)
    target = np.empty_like(source)
    encode_s = cpu_s_of(lambda: encode(signal))
    decode_s = cpu_s_of(lambda: decode(payload))
    json_s = cpu_s_of(lambda: decode_json(text))
    values = {
        "encode_s": encode_s,
        "decode_s": decode_s,
        "total_s": encode_s + decode_s,
        "copy_s": cpu_s_of(lambda: np.copyto(target, source)),
        "json_decode_s": json_s,
        "json_ratio": json_s / (encode_s + decode_s),
        "payload_bytes": len(payload),
        "overhead_bytes": len(payload) - _content_bytes_of(signal),
        "json_bytes": len(text),
    }
    return {f"{name}.{key}": value for key, value in values.items()}
