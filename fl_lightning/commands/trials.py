"""Stand-in for what the commands that make many runs share."""

from pathlib import Path
from typing import Any

from fl_lightning.commands.cli import FederatedCLI
from fl_lightning.sweeps.trials import Trial


def build(trial: Trial, folder: Path) -> Any:
    """Makes the run of a trial from its arguments."""
    own = [f"--trainer.default_root_dir={folder}", f"--trainer.name={trial.name}"]
    return FederatedCLI(trial.command, *trial.args, *own, "--trainer.enable_progress_bar=false").build()
