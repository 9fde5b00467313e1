"""``fl-lightning configs``: the configs that come with the package."""

from fl_lightning.commands.shared.configs import config_names, configs_folder
from fl_lightning.commands.shared.output import console

SUMMARY = "List the configs that come with the package; --config takes their names."


def run(folder: str = "") -> None:
    """Prints name and first line of every config.

    Args:
        folder: Only those below this folder, such as experiment/fedgloss.
    """
    names = [name for name in config_names() if name.startswith(folder)]
    width, screen = max(map(len, names), default=0), console()
    for name in names:
        first = (configs_folder() / f"{name}.yaml").read_text(encoding="utf-8").splitlines()[0]
        line = f"{name:{width}}  {first.removeprefix('#').strip()}" if first.startswith("#") else name
        screen.print(line, highlight=False, markup=False, soft_wrap=not screen.is_terminal)
