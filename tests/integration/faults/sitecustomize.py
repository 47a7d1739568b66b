"""Raises an exception inside a running job: Python imports this file first in every process.

The variable ``OPDKIT_TEST_FAULT`` says where and when: ``package.module:Class.method:3`` is the
third call of that method in a process. Without it, nothing happens.
"""

import functools
import importlib.abc
import importlib.machinery
import inspect
import os
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any


class FaultyImporter(importlib.abc.MetaPathFinder):
    """Finds the module, and has its loader break the method when the module is there."""

    def __init__(self, module: str, path: str, *, call: int) -> None:
        self._module = module
        self._owner, self._method = path.split(".")
        self._num_left = call

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Answer for the one module only."""
        if fullname != self._module:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        assert spec is not None
        loader: Any = spec.loader
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            owner = getattr(module, self._owner)
            setattr(owner, self._method, self._failing(getattr(owner, self._method)))

        loader.exec_module = exec_module
        return spec

    def _failing(self, method: Any) -> Any:
        @functools.wraps(method)
        def call(*arguments: object, **options: object) -> Any:
            self._num_left -= 1
            if self._num_left == 0:
                raise RuntimeError("a fault that a test wants")
            return method(*arguments, **options)

        @functools.wraps(method)
        async def call_and_wait(*arguments: object, **options: object) -> object:
            result: object = await call(*arguments, **options)
            return result

        return call_and_wait if inspect.iscoroutinefunction(method) else call


if place := os.environ.get("OPDKIT_TEST_FAULT"):
    module, path, call = place.split(":")
    sys.meta_path.insert(0, FaultyImporter(module, path, call=int(call)))
