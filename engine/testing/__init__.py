"""Parts of a run that do what they are told: for tests, benchmarks and users' own schedulers."""

from opdkit.engine.testing.clocks import FakeClock, LoopClock
from opdkit.engine.testing.letter_template import LetterTemplate
from opdkit.engine.testing.recording_queue import RecordingQueue
from opdkit.engine.testing.scripted_student import ScriptedReply, ScriptedStudent, parse_reply
from opdkit.engine.testing.scripted_teacher import ScriptedTeacher
from opdkit.engine.testing.virtual_time import VirtualTimeLoop

__all__ = [
    "FakeClock",
    "LetterTemplate",
    "LoopClock",
    "RecordingQueue",
    "ScriptedReply",
    "ScriptedStudent",
    "ScriptedTeacher",
    "VirtualTimeLoop",
    "parse_reply",
]
