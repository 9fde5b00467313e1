"""Names that are meant by wrong ones."""

import difflib
from collections.abc import Iterable

SYNONYMS = {
    "lr": "model.optimizer.lr",
    "learning_rate": "model.optimizer.lr",
    "seed_everything": "seed",
    "max_epochs": "trainer.max_rounds",
    "num_rounds": "trainer.max_rounds",
    "rounds": "trainer.max_rounds",
    "epochs": "trainer.local_epochs",
    "clients": "data.num_clients",
    "gpus": "trainer.devices",
    "logger": "trainer.loggers",
    "wandb": "trainer.loggers",
    "output_dir": "trainer.default_root_dir",
}
"""Settings by their names in other programs."""


def similar(name: str, known: Iterable[str], cutoff: float = 0.55) -> list[str]:
    """Returns up to three names like another one, the likest first; the case of letters does not count."""
    folded = {each.casefold(): each for each in known}
    within = [each for each in folded if len(name) > 4 and name.casefold() in each]  # median: CoordinateMedian
    near = dict.fromkeys([*within, *difflib.get_close_matches(name.casefold(), folded, cutoff=cutoff)])
    return [folded[each] for each in near][:3]
