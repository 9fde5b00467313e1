"""LightningCLI for the federated trainer: one subcommand, its parser, and what its config or a trial builds."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from textwrap import fill
from typing import Any

import torch
import yaml
from jsonargparse import ActionConfigFile, ArgumentParser, Namespace  # type: ignore[attr-defined]
from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI

import fl_lightning
from fl_lightning import FederatedDataModule, LocalObjective
from fl_lightning.commands import COMMANDS
from fl_lightning.commands.shared.arguments import kept, lists_classes, model_of_configs, prepare, settings_in
from fl_lightning.commands.shared.index import PARTS, ArgumentsError
from fl_lightning.commands.shared.messages import explain
from fl_lightning.commands.shared.parser import INDENT, Command, Parser, readable
from fl_lightning.core import LEFT_OUT, UserError, ensure, generator, hidden, require
from fl_lightning.results import config_of, differences, flatten, say
from fl_lightning.sweeps.trials import Built, Trial, check_alone
from fl_lightning.trainer import FederatedTrainer, Kind, RunFolder, on_rank_zero
from fl_lightning.trainer.callbacks.defaults import Ending
from fl_lightning.trainer.storage import checkpoint

OTHER_RUN = re.compile(r"(model|data|model\.ascent|model\.net(\..*)?|(.*\.)?(rho|seed)) = ")
"""Settings in which a resumed run must agree; a change of others, such as the number of rounds, is only shown."""


def to_continue(
    trainer: FederatedTrainer,
    model: LocalObjective,
    data: FederatedDataModule,
    ckpt_path: str | None,
    kind: Kind = "federated",
) -> str | None:
    """Returns the checkpoint that a run continues from.

    Of ``auto``, ``last`` and ``best`` it prints run and round, and the settings in which this config differs from that
    run's.

    Args:
        trainer: The trainer, with its resolved config, within its environment.
        model: The local objective.
        data: The data.
        ckpt_path: As given. With ``auto`` it is that of the newest run of this name with the same settings, but for
            those that change no result; without one, None: a new run begins.
        kind: Federated or centralized training.

    Raises:
        UserError: If there is no such run, or it is one of another seed, rho or net.
    """
    name = trainer.run_name(model, data, kind)
    if ckpt_path == "auto":
        # on a shared disk the processes may see different files
        newest = on_rank_zero(trainer.fabric, lambda: _of_same_config(trainer, trainer.default_root_dir / name))
        if newest is None:
            trainer.fabric.print(f"auto: no run of this config in {trainer.default_root_dir / name}; a new one begins")
            return None
        path = Path(newest)
    elif ckpt_path in ("last", "best"):
        path = RunFolder.find_checkpoint(ckpt_path, trainer.default_root_dir, name)
    else:
        return ckpt_path
    run = RunFolder.of_checkpoint(path)
    if not (config := config_of(run.path)):
        return ckpt_path  # it was started from Python
    changes = differences(config, trainer.config)
    if conflicts := [line for line in changes if OTHER_RUN.match(line)]:
        raise UserError(
            f"ckpt_path = {ckpt_path}: the newest run, {run.path}, has {', '.join(conflicts)}; name the run that you "
            f"mean: --ckpt_path {path}"
        )
    note = f"; settings that differ: {', '.join(changes)}" if changes else ""
    trainer.fabric.print(f"{ckpt_path}: {run.path}, round {checkpoint.load(path)['round']}{note}")
    return str(path)


def _of_same_config(trainer: FederatedTrainer, folder: Path) -> str | None:
    """Returns the last checkpoint of the newest run in a folder that has this config."""
    checkpoints = folder.glob(f"version_*/{RunFolder.CHECKPOINTS}/last.ckpt")
    newest_first = sorted(checkpoints, key=lambda path: path.stat().st_mtime_ns, reverse=True)
    configs = ((path, config_of(RunFolder.of_checkpoint(path).path)) for path in newest_first)
    return next((str(path) for path, config in configs if config and not differences(config, trainer.config)), None)


for name in fl_lightning.__all__:  # a class goes by its bare name once it is imported
    getattr(fl_lightning, name)


class _Config(ActionConfigFile):
    """A config whose lists replace earlier ones: else an entry would get settings of the one in its place before."""

    def __call__(self, parser: Any, settings: Namespace, file: str, *more: Any) -> None:  # type: ignore[override]
        """Adds the settings in a config to those before."""
        with suppress(yaml.YAMLError):  # the parser names the mistake
            _empty_lists(settings, settings_in(Path(file)) if Path(file).is_file() else {})
        super().__call__(parser, settings, file, *more)  # type: ignore[no-untyped-call]


def _empty_lists(settings: Namespace, config: Mapping[str, Any]) -> None:
    """Empties the lists in settings that are given anew."""
    for key, value in config.items():
        owner = settings if key in settings else settings.get("init_args")
        present = owner.get(key) if isinstance(owner, Namespace) else None
        if lists_classes(value) and isinstance(present, list):
            owner[key] = []
        elif isinstance(value, dict) and isinstance(present, Namespace):
            _empty_lists(present, value)


class FederatedParser(Parser, LightningArgumentParser):
    """A parser whose settings are those of classes.

    Attributes:
        null: The classes that null stands for in a list, by the name of the setting; ``NULL`` of the class has them.
    """

    null: Mapping[str, Sequence[str]] = {}

    def add_class_arguments(self, kind: type, *args: Any, **kwargs: Any) -> Any:
        """Adds the arguments of a class."""
        self.null = getattr(kind, "NULL", {})
        return super().add_class_arguments(kind, *args, **kwargs)

    def parse_object(self, obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Parses settings. Where ``+=`` appends to null, it appends to the list that null stands for."""
        for key, classes in self.null.items():
            namespace = kwargs.get("namespace") or {}
            if f"{key}+" in obj and namespace.get(key) is None:
                settings = {**namespace, key: [{"class_path": name} for name in classes]}
                kwargs["namespace"] = Namespace(settings)  # type: ignore[no-untyped-call]
        return super().parse_object(obj, *args, **kwargs)

    def format_help(self, *args: Any, **kwargs: Any) -> str:
        """Returns the help: types in words, and of a setting's classes those of this package that fit its key."""
        text = super(Parser, self).format_help(*args, **kwargs)
        text = re.sub(r"\Ausage: fl-lightning --.*?\n\n", "", text, flags=re.DOTALL)  # the help of a class has none
        return readable(re.sub(r",\s+known\s+subclasses:([^)]*)\)", _own_classes, text))


def _own_classes(match: re.Match[str]) -> str:
    paths = "".join(match[1].split()).split(",")
    names = [path.removeprefix("fl_lightning.") for path in paths if path.startswith("fl_lightning.")]
    setting = re.findall(r"^  --(?:\S+\.)?(\w+)", match.string[: match.start()], re.M)[-1]
    public = [name for name in names if name in fl_lightning.__all__ and name != "Part"]
    keys = {name: getattr(fl_lightning, name).config_key.partition(":")[0] for name in public}
    fitting = [name for name in public if keys[name].rpartition(".")[2] == setting]
    choices = fitting or [name for name in public if "." not in keys[name] and keys[name] not in PARTS]
    if len(names) < len(paths) or not choices:
        choices.append(
            "or a loss of torch.nn" if setting == "loss" else "or a dotted path" if choices else "by a dotted path"
        )
    return ",\n" + fill(f"classes: {', '.join(choices)})", 80, initial_indent=INDENT, subsequent_indent=INDENT)


class FederatedCLI(Command, LightningCLI):
    """LightningCLI over `FederatedTrainer`, `LocalObjective` and `FederatedDataModule`, in subclass mode.

    It holds the parser of one subcommand and its parsed arguments, ``config``; `build` makes the objects, `run` runs
    the subcommand. It overrides public methods only: ``run=False`` keeps LightningCLI from its own subcommands, which
    would take those of a ``lightning.Trainer``. One seed, ``trainer.seed``, takes the place of ``seed_everything``.

    Args:
        command: The subcommand.
        args: Its arguments.
    """

    def read(self, args: list[str]) -> None:
        """Makes the parser, and parses the arguments."""
        self.needs = PARTS if "cli" in self.parameters else tuple(part for part in PARTS if part in self.parameters)
        LightningCLI.__init__(
            self,
            trainer_class=FederatedTrainer,  # type: ignore[arg-type]
            save_config_callback=None,
            auto_configure_optimizers=False,
            load_from_checkpoint_support=False,
            run=False,
            args=prepare(args),
        )

    def init_parser(self, **kwargs: Any) -> FederatedParser:
        """Makes an empty parser."""
        parser = FederatedParser(
            prog=f"fl-lightning {self.command}",
            description=COMMANDS[self.command],
            dump_header=["fl_lightning"],
            **kwargs,
        )
        parser.add_argument(
            "-c", "--config", action=_Config, help="A YAML file with any of these settings; later ones win."
        )
        return parser

    def add_default_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Adds nothing: the seed is ``trainer.seed``."""

    def add_core_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Adds the parts of the config that the subcommand needs; a run's whole config is accepted nonetheless."""
        for part in PARTS:
            if part not in self.needs:
                parser.add_argument(f"--{part}", type=dict | str | None, help="Part of a run's config; not used.")
            elif part == "trainer":  # add_lightning_class_args refuses one that is not a lightning.Trainer
                parser.add_class_arguments(
                    FederatedTrainer, part, instantiate=False, fail_untyped=False, sub_configs=True
                )
            else:
                parser.add_lightning_class_args(
                    LocalObjective if part == "model" else FederatedDataModule, part, subclass_mode=True
                )

    def parse_arguments(self, parser: ArgumentParser, args: Any) -> None:
        """Parses the arguments; an integer may be written as 3.0."""
        super().parse_arguments(parser, args)
        self.config["seed_everything"] = False  # LightningCLI would seed everything with 0

    def instantiate_classes(self) -> None:
        """Builds nothing: `build` does, once or for several runs."""

    def instantiate_trainer(self, **kwargs: Any) -> Any:
        """Builds the trainer, if the subcommand needs one."""
        return super().instantiate_trainer(**kwargs) if "trainer" in self.needs else None

    def build(self, nets: dict[str, torch.nn.Module] | None = None) -> Namespace:
        """Builds what the subcommand needs, with initial weights that follow ``trainer.seed``.

        Args:
            nets: Nets of earlier calls by their settings, which are taken as they are, and get those of this call.

        Returns:
            ``trainer``, which has the resolved config, ``model``, ``data``, and the subcommand's own arguments.

        Raises:
            UserError: If a setting is out of range, or a secret is missing.
        """
        if "trainer" in self.needs:
            trainer = self.config.trainer
            ensure(hasattr(trainer, "seed"), "trainer: no mapping of settings; give one, such as {max_rounds: 100}")
            require(trainer.seed >= 0, "trainer.seed", trainer.seed, "give a whole number of 0 or more")
            torch.manual_seed(generator(trainer.seed, "initial weights").initial_seed())
        self.config.pop("seed_everything", None)  # LightningCLI has read it
        config = self.resolved()
        settings = config["model"].get("init_args", {}) if nets is not None else {}
        key = json.dumps(settings.get("net"))
        if nets and key in nets:
            self.config.model.init_args.net = nets[key]
        super().instantiate_classes()
        objects: Namespace = self.config_init
        if nets is not None:
            nets[key] = objects.model.net
        if "trainer" in self.needs:
            objects.trainer = self.trainer
            objects.trainer.config = config
        return objects

    def resolved(self) -> dict[str, Any]:
        """Returns the config of the run with every default and without secrets, as its run folder has it.

        Raises:
            UserError: If a secret is missing, since the config is that of a run folder.
        """
        # with values of None, no defaults left out, checked by the parser before
        text = self.parser.dump(self.config, "yaml", skip_unset=False, skip_validation=True)
        config = {key: value for key, value in yaml.safe_load(text).items() if key in PARTS}
        for key, value in flatten(config).items():
            require(
                not LEFT_OUT.search(value),
                key,
                value,
                "a run folder keeps no secrets; give this one again, as an argument or in another --config",
            )
        return dict(hidden(config))

    def make(self, *args: str, nets: dict[str, torch.nn.Module] | None = None) -> Namespace:
        """Parses other arguments, and builds what they describe.

        Args:
            args: Arguments of the subcommand, in the place of those of the constructor.
            nets: As for `build`.

        Raises:
            UserError: As `build`.
        """
        self.parse_arguments(self.parser, prepare(args))
        return self.build(nets)

    def run(self) -> None:
        """Runs the subcommand."""
        objects = self.config if "cli" in self.parameters else self.build()
        if self.command == "fit":
            self._say_what_is_kept(objects.model.as_dict())
        if "trainer" not in self.parameters:
            return self.call(objects)
        kind: Kind = "centralized" if self.command == "centralized" else "federated"
        ckpt_path = objects.get("ckpt_path")
        with objects.trainer.environment():
            require(
                kind == "centralized" or ckpt_path != "auto", "ckpt_path", ckpt_path, "give a checkpoint, last or best"
            )
            self.call(objects, ckpt_path=to_continue(objects.trainer, objects.model, objects.data, ckpt_path, kind))

    @rank_zero_only
    def _say_what_is_kept(self, run_model: Mapping[str, Any]) -> None:
        """Prints which settings an algorithm keeps from the config's algorithm that it replaces."""
        config_model = model_of_configs(prepare(self.args))
        if names := kept(config_model, run_model):
            (old, new) = (model["class_path"].rpartition(".")[2] for model in (config_model, run_model))
            say(
                f"model = {new}: keeps {', '.join(names)} of the config's {old}; --print_config shows them, "
                "--model.NAME replaces one"
            )


def build_trial(trial: Trial, folder: Path) -> Built:
    """Makes the run of a trial from its arguments; it prints nothing.

    Raises:
        UserError: If they are wrong.
    """
    location = [f"--trainer.default_root_dir={folder}", f"--trainer.name={trial.name}"]
    with _explained(trial.command):
        objects = _cli(trial.command).make(*trial.args, *location, "--trainer.enable_progress_bar=false")
    objects.trainer.callbacks = [callback for callback in objects.trainer.callbacks if not isinstance(callback, Ending)]
    return Built(objects.trainer, objects.model, objects.data)


def check_trial(trial: Trial) -> dict[str, Any]:
    """Parses the arguments of a trial, and returns its resolved config.

    Raises:
        UserError: If they are wrong.
    """
    with _explained(trial.command):
        config = _config(trial.command, trial.args)
    devices, nodes = config["trainer"]["devices"], config["trainer"]["num_nodes"]
    check_alone(nodes * devices if isinstance(devices, int) else nodes)
    return config


@contextmanager
def _explained(command: str) -> Iterator[None]:
    """Raises what the parser of a subcommand refuses as one line."""
    try:
        yield
    except (ArgumentsError, ValueError) as error:
        if (line := explain(error, command=command)) is None:
            raise
        raise UserError(line) from None


@cache
def _config(command: str, args: tuple[str, ...]) -> dict[str, Any]:
    cli = _cli(command)
    cli.parse_arguments(cli.parser, prepare(args))
    return cli.resolved()


@cache
def _cli(command: str) -> FederatedCLI:
    """Returns a parser of a subcommand, whose construction takes longer than to parse the arguments of a trial."""
    return FederatedCLI(command, "--config", "quickstart")
