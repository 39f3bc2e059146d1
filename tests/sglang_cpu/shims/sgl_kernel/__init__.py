"""SGLang imports its GPU kernels by name: every name is there, and raises when it is called."""

from typing import Any


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*_: Any, **__: Any) -> None:
        raise RuntimeError(f"sgl_kernel.{name} was called on a CPU")

    return missing
