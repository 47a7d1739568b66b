"""What must load without a model, a cluster or an accelerator does."""

import subprocess
import sys

HEAVY = ("torch", "ray", "vllm", "megatron", "transformers")

IMPORT_ALL = """
import importlib, pkgutil, sys
import opdkit.engine, opdkit.protocols
for package in (opdkit.engine, opdkit.protocols):
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        if ".losses" not in module.name:
            importlib.import_module(module.name)
print(*sorted({name.partition(".")[0] for name in sys.modules} & set(sys.argv[1:])))
"""


def test_the_engine_and_the_protocols_load_nothing_heavy() -> None:
    command = [sys.executable, "-c", IMPORT_ALL, *HEAVY]
    answer = subprocess.run(command, capture_output=True, text=True, check=True, cwd=".src")
    assert answer.stdout.split() == []
