"""The configs that come with the package, by name: ``quickstart``, ``experiment/fedgloss/cifar10_alpha0.05``, ..."""

import difflib
from pathlib import Path

from fl_lightning.core.errors import UserError, ensure

SUFFIX = ".yaml"


def configs_folder() -> Path:
    """Returns the folder of the configs: in a clone next to the package, in an installed wheel inside it."""
    package = Path(__file__).parents[2]
    shipped = package / "configs"
    return shipped if shipped.is_dir() else package.parent / "configs"


def config_names() -> list[str]:
    """Returns the names of all configs, sorted; a name is a path below the folder without suffix."""
    folder = configs_folder()
    return sorted(path.relative_to(folder).as_posix()[: -len(SUFFIX)] for path in folder.rglob(f"*{SUFFIX}"))


def find_config(name: str, key: str = "config") -> Path:
    """Returns the file of a config.

    Args:
        name: A path, or the name of a config of the package.
        key: What it is given for, for the message.

    Raises:
        UserError: If there is neither.
    """
    checkpoint = key == "config" and name.endswith(".ckpt")
    ensure(not checkpoint, f"{key} = {name}: a checkpoint; give it as --ckpt_path")
    if Path(name).is_file():
        return Path(name)
    # a path of a clone works from an installed wheel, too
    short, names = name.removeprefix("configs/").removesuffix(SUFFIX), config_names()
    if short in names:
        return configs_folder() / f"{short}{SUFFIX}"
    ensure(not Path(name).is_dir(), f"{key} = {name}: a folder; give a config of it, such as config.yaml")
    ends = [known for known in names if known.endswith(f"/{short.rpartition('/')[2]}")]
    near = ends or difflib.get_close_matches(short, names, cutoff=0.5)
    hint = f"did you mean {', '.join(near[:4])}?" if near else "`fl-lightning configs` lists the names"
    raise UserError(f"{key} = {name}: no such file or config; {hint}")
