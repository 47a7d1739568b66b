"""Jobs in virtual time: what a cluster of given speeds would reach, and what bounds it."""

from opdkit.engine.simulation.bounds import Bounds
from opdkit.engine.simulation.simulate import (
    SimulationReport,
    drawn_replies,
    simulate,
    with_one_more,
)

__all__ = ["Bounds", "SimulationReport", "drawn_replies", "simulate", "with_one_more"]
