"""Every error this project raises on purpose.

Three kinds, kept apart because they are paid from different budgets: a mistake in the job
(``ConfigError``), a fault of one sample (``SampleError``), a fault of the machinery
(``InfrastructureError``).
"""


class OpdkitError(Exception):
    """Base of all errors raised by opdkit itself."""


class ConfigError(OpdkitError, ValueError):
    """The job cannot be run as described. The message names the field, the value and the bound."""


class SampleError(OpdkitError):
    """One sample cannot be trained on; the run goes on without it."""


class PromptError(SampleError, ValueError):
    """A dataset row is no usable prompt: not JSON, without messages, or longer than the context."""


class GenerationError(SampleError, ValueError):
    """A reply of the student's engine breaks the token contract (no ids, other prompt ids)."""


class TeacherAlignmentError(SampleError, ValueError):
    """The teacher's scores do not belong to the ids that were sent."""


class NonFiniteScoresError(SampleError, ArithmeticError):
    """The teacher's scores hold NaN or positive infinity."""


class HookError(SampleError):
    """A hook, tool or environment of the scheduler raised, or returned what it may not."""


class HookTimeout(HookError, TimeoutError):
    """A hook did not return by its deadline."""


class InfrastructureError(OpdkitError):
    """A part of the machinery failed; the work it held can be done again elsewhere."""


class DeadlineExceeded(InfrastructureError, TimeoutError):
    """A remote call had no answer by its deadline. The message names the call."""


class ReplicaLost(InfrastructureError, ConnectionError):
    """The replica or actor that held a call died."""


class StartupTimeout(InfrastructureError, TimeoutError):
    """A part did not report ready by the deadline. The message names the part."""


class WeightUpdateError(InfrastructureError, RuntimeError):
    """A replica did not take the published weights, or proved others."""


class TrainerError(InfrastructureError, RuntimeError):
    """A trainer rank failed; the step it was in has not happened."""


class QueueClosed(OpdkitError):
    """The sample queue was closed; nothing passes through it any more."""


class JobFailed(OpdkitError, RuntimeError):
    """The job ended without its result. The cause is chained."""
