"""The `eyas` command, and what its subcommands share in arguments."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
import typer.core

ORDER = (
    "target", "data", "generate", "prepare", "inspect", "plan", "serve", "capture", "verify", "merge", "train",
    "evaluate", "export", "doctor", "report", "status", "watch", "version",
)  # fmt: skip
"""As the work goes, not as the modules are imported."""


class InOrder(typer.core.TyperGroup):
    def list_commands(self, ctx: Any) -> list[str]:
        return sorted(super().list_commands(ctx), key=ORDER.index)


app = typer.Typer(
    cls=InOrder,
    help="Trains EAGLE-3 drafters from a verified data set of the target's hidden states.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
target_app = typer.Typer(help="The target: the model whose hidden states are captured.", no_args_is_help=True)
app.add_typer(target_app, name="target")
data_app = typer.Typer(help="Conversations, before they become samples.", no_args_is_help=True)
app.add_typer(data_app, name="data")

RunFile = Annotated[Path, typer.Argument(metavar="RUN.TOML", help="The run's configuration.")]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="[SECTION.FIELD=VALUE]...", help="Overrides of single fields.")
]
DraftDir = Annotated[
    Path | None, typer.Option("--draft", metavar="DIR", help="A checkpoint; default: the best one of train.out.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
DataSetDir = Annotated[Path, typer.Argument(metavar="DIR", help="A data set: the directory named by capture.out.")]
