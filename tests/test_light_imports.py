"""What must load without a model, a cluster or an accelerator does."""

import pathlib
import subprocess
import sys

HEAVY = ("torch", "ray", "vllm", "megatron", "transformers")
ROOT = pathlib.Path(__file__).parent.parent / ".src"

IMPORT_ALL = """
import importlib, sys
modules, heavy = sys.argv[1].split(), sys.argv[2].split()
for module in modules:
    importlib.import_module(module)
print(*(name for name in heavy if name in sys.modules))
"""


def modules_of(package: str) -> list[str]:
    """Name the modules of a package, but for the losses: they are made of torch."""
    files = (ROOT / "opdkit" / package).glob("**/*.py")
    names = [".".join(file.relative_to(ROOT).with_suffix("").parts) for file in files]
    return [name.removesuffix(".__init__") for name in names if ".losses" not in name]


def test_the_engine_and_the_protocols_load_nothing_heavy() -> None:
    modules = modules_of("engine") + modules_of("protocols")
    command = [sys.executable, "-c", IMPORT_ALL, " ".join(modules), " ".join(HEAVY)]
    answer = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    assert answer.stdout.split() == []
    assert len(modules) > 40
