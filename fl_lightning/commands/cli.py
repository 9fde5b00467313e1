"""LightningCLI for the federated trainer."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from itertools import product
from json import dumps
from pathlib import Path
from typing import Any, ClassVar, NoReturn

import torch
from jsonargparse import ActionConfigFile, ArgumentParser, Namespace  # type: ignore[attr-defined]
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI

import fl_lightning.algorithms
import fl_lightning.data
import fl_lightning.nets
from fl_lightning.algorithms.base import LocalObjective
from fl_lightning.algorithms.catalogue import show
from fl_lightning.commands import corruptions, laboratory
from fl_lightning.commands.data import show as show_data
from fl_lightning.commands.main import COMMANDS, EPILOG
from fl_lightning.commands.messages import ArgumentsError, find_user_error
from fl_lightning.commands.plan import plan
from fl_lightning.core.errors import require
from fl_lightning.core.rng import generator
from fl_lightning.results import compare
from fl_lightning.trainer import parallel_runs as group
from fl_lightning.trainer.trainer import FederatedTrainer


class Parser(LightningArgumentParser):
    """A parser whose errors are one line for people, and that takes no abbreviated names."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, allow_abbrev=False, **kwargs)

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Refuse the arguments."""
        raise find_user_error(ex) or ArgumentsError(message)


class FederatedCLI(LightningCLI):
    """LightningCLI over `FederatedTrainer`, `LocalObjective` and `FederatedDataModule`, in subclass mode.

    One seed, ``trainer.seed``, takes the place of ``seed_everything``; the resolved config goes to the run folder and
    to the loggers.
    """

    OWN = ("fit", "plan")
    WITHOUT_MODEL = ("data", "compare", "list")
    OF_CHECKPOINTS: ClassVar[dict[str, Callable[..., Any]]] = {
        "flatness": laboratory.flatness,
        "landscape": laboratory.landscape,
        "interpolate": laboratory.interpolate,
        "corruptions": corruptions.run,
    }
    """Functions of trainer, model, data and their own arguments. Without --config they take that of the checkpoint."""

    def __init__(self, args: Sequence[str] | None = None) -> None:
        if args is None:
            sys.argv[1:] = _with_config_of_run(sys.argv[1:])
        super().__init__(
            model_class=LocalObjective,
            datamodule_class=fl_lightning.data.FederatedDataModule,
            trainer_class=FederatedTrainer,  # type: ignore[arg-type]
            parser_class=Parser,
            subclass_mode_model=True,
            subclass_mode_data=True,
            save_config_callback=None,
            auto_configure_optimizers=False,
            load_from_checkpoint_support=False,
            args=None if args is None else _with_config_of_run(list(args)),
        )

    @classmethod
    def subcommands(cls) -> dict[str, set[str]]:
        """Subcommands with a model, and the arguments that are not options of theirs.

        They are functions in `OF_CHECKPOINTS`, methods of this class in `OWN`, else methods of the trainer.
        """
        given = {"trainer", "model", "data", "datamodule", "a", "b"}
        return {name: given for name in COMMANDS if name not in cls.WITHOUT_MODEL}

    def init_parser(self, **kwargs: Any) -> Parser:
        """A parser with ``--config``."""
        parser = Parser(dump_header=["fl_lightning"], **kwargs)
        parser.add_argument("-c", "--config", action=ActionConfigFile, help="A YAML file with any of these settings.")
        return parser

    def setup_parser(
        self, add_subcommands: bool, main_kwargs: dict[str, Any], subparser_kwargs: dict[str, Any]
    ) -> None:
        """The main parser, the trainer's subcommands, and those that need no model."""
        self.parser = Parser(
            prog="fl-lightning",
            description="Federated learning with flat minima.",
            epilog=EPILOG,
        )
        self._subcommand_parsers: dict[str, LightningArgumentParser] = {}
        self._subcommand_method_arguments: dict[str, list[str]] = {}
        commands = self.parser.add_subcommands()
        for name in self.subcommands():
            summary = COMMANDS[name]
            owner = FederatedCLI if name in self.OWN else FederatedTrainer
            parser = self._prepare_subcommand_parser(owner, name, description=summary)
            if name == "interpolate":
                for end, gamma in (("a", 1), ("b", 0)):
                    parser.add_argument(end, metavar=end.upper(), help=f"Checkpoint at gamma = {gamma}.")
                    self._subcommand_method_arguments[name].append(end)
            self._subcommand_parsers[name] = parser
            commands.add_subcommand(name, parser, help=summary)
        self._subcommand_parsers["data"] = self._data_parser()
        commands.add_subcommand("data", self._subcommand_parsers["data"], help=COMMANDS["data"])
        compared = Parser(description=COMMANDS["compare"])
        compared.add_argument("runs", nargs="+", type=str, metavar="RUN", help="Run folders.")
        compared.add_function_arguments(compare.show, skip={"runs"})
        for name, other in (("compare", compared), ("list", ArgumentParser(description=COMMANDS["list"]))):
            commands.add_subcommand(name, other, help=COMMANDS[name])

    def _prepare_subcommand_parser(self, klass: type, subcommand: str, **kwargs: Any) -> LightningArgumentParser:
        if subcommand not in self.OF_CHECKPOINTS:
            return super()._prepare_subcommand_parser(klass, subcommand, **kwargs)
        parser = self.init_parser(**kwargs)
        self._add_arguments(parser)
        skip: set[str | int] = {*self.subcommands()[subcommand]}
        added = parser.add_function_arguments(self.OF_CHECKPOINTS[subcommand], skip=skip)
        self._subcommand_method_arguments[subcommand] = added
        return parser

    def _data_parser(self) -> Parser:
        """The parser of ``data``, which takes the config of a run and makes neither its model nor its trainer."""
        parser = self.init_parser(description=COMMANDS["data"])
        parser.add_lightning_class_args(self._datamodule_class, "data", subclass_mode=True)
        for key in ("model", "trainer"):
            parser.add_argument(f"--{key}", type=dict | str | None, help="Of a run's config; not used.")
        parser.add_argument("--out", type=str | None, help="Folder for the whole table (CSV) and the figures.")
        return parser

    def add_default_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """None beside the classes' own: the seed is ``trainer.seed``."""

    def add_core_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Arguments of trainer, model and data."""
        # LightningArgumentParser.add_lightning_class_args refuses a trainer that is not a lightning.Trainer
        parser.add_class_arguments(FederatedTrainer, "trainer", instantiate=False, fail_untyped=False, sub_configs=True)
        parser.add_lightning_class_args(self._model_class, "model", subclass_mode=True)
        parser.add_lightning_class_args(self._datamodule_class, "data", subclass_mode=True)

    def _parse_ckpt_path(self) -> None:
        """Checkpoints are read by the trainer, which says what is wrong with one."""

    def _set_seed(self) -> None:
        """Initial weights follow ``trainer.seed``; everything later has a generator of its own."""
        if self.subcommand not in self.WITHOUT_MODEL:
            settings = self.config[self.subcommand].trainer
            require(hasattr(settings, "seed"), "trainer", settings, "give a mapping of settings")
            seed = self.config[self.subcommand].trainer.seed
            torch.manual_seed(generator(seed, "initial weights").initial_seed())

    def before_instantiate_classes(self) -> None:
        """A plan is measured on one process; how many the config asks for is what it is made for."""
        if self.subcommand == "plan":
            given = self.config.plan
            for key, name in (("devices", "devices"), ("nodes", "num_nodes")):
                if given[key] is None:
                    asked = str(given.trainer[name])
                    require(asked.isdecimal(), f"trainer.{name}", asked, f"say how many by --{key}")
                    given[key] = int(asked)
                given.trainer[name] = 1
            given.trainer.strategy = "auto"

    def instantiate_classes(self) -> None:
        """Make model, data and trainer; the trainer gets the resolved config."""
        if self.subcommand in ("compare", "list"):
            return
        if self.subcommand == "data":
            super().instantiate_classes()
            return
        self.group: list[tuple[FederatedTrainer, LocalObjective]] = []
        given = self.config[self.subcommand]
        for settings in _group(given.get("seeds"), given.get("values")):
            for key, value in settings.items():
                _set(given, key, value)
            if settings:
                self._set_seed()
            super().instantiate_classes()
            vars(self).pop("config_dump", None)  # or it stays that of the first run
            self._dump_config()
            for key in ("ckpt_path", "config", "seeds", "values"):
                self.config_dump.pop(key, None)
            trainer: Any = self.trainer
            trainer.config = self.config_dump
            if settings:
                where = "_".join(f"{key.rpartition('.')[2]}_{value}" for key, value in settings.items())
                trainer.name = f"{trainer.name or trainer.default_name(self.model, self.datamodule)}/{where}"
            self.group.append((trainer, self.model))

    def instantiate_trainer(self, **kwargs: Any) -> Any:
        """The trainer; none for ``data``."""
        return None if self.subcommand == "data" else super().instantiate_trainer(**kwargs)

    def _run_subcommand(self, subcommand: str) -> None:
        if subcommand == "list":
            show()
        elif subcommand == "compare":
            compare.show(**self.config.compare.as_dict())
        elif subcommand == "data":
            show_data(self.datamodule, self.config.data.out)
        elif subcommand in self.OF_CHECKPOINTS:
            given = self._prepare_subcommand_kwargs(subcommand)
            model, data = given.pop("model"), given.pop("datamodule")
            self.OF_CHECKPOINTS[subcommand](self.trainer, model, data, **given)
        elif subcommand in self.OWN:
            getattr(self, subcommand)(**self._prepare_subcommand_kwargs(subcommand))
        else:
            super()._run_subcommand(subcommand)

    def fit(
        self,
        model: LocalObjective,
        datamodule: fl_lightning.data.FederatedDataModule,
        ckpt_path: str | None = None,
        seeds: str | None = None,
        values: str | None = None,
    ) -> None:
        """Train for ``max_rounds`` rounds; with several seeds or values, several runs as one batched program.

        Args:
            model: The local objective.
            datamodule: The clients' data.
            ckpt_path: A checkpoint to go on from, in its own run folder; or "last" for the newest run of this name.
            seeds: Values of trainer.seed, such as 0,1,2: a run for each, in a folder of its own.
            values: Values of another number, such as model.rho=0.02,0.05: a run for each (and each seed).
        """
        trainers, models = zip(*self.group, strict=True)
        if len(self.group) == 1 and not (seeds or values):
            trainers[0].fit(model, datamodule, ckpt_path)
        else:
            group.fit(trainers, models, datamodule, ckpt_path)

    def plan(
        self,
        model: LocalObjective,
        datamodule: fl_lightning.data.FederatedDataModule,
        devices: int | None = None,
        nodes: int | None = None,
        bandwidth: float = 10.0,
        json: bool = False,
    ) -> None:
        """Predict hours, memory and bits of a fit.

        Args:
            model: The local objective.
            datamodule: The clients' data.
            devices: Devices (processes) per node; null: trainer.devices.
            nodes: Nodes; null: trainer.num_nodes.
            bandwidth: Between nodes, in Gbit/s.
            json: Print one line of JSON instead of a table.
        """
        assert devices is not None and nodes is not None
        trainer: Any = self.trainer
        made = plan(trainer, model, datamodule, devices, nodes, bandwidth)
        if json:
            print(dumps(asdict(made) | {"seconds": made.seconds}))
        else:
            made.show()


def _with_config_of_run(args: list[str]) -> list[str]:
    """Arguments of a command on checkpoints; without --config, with that of the first checkpoint's run."""
    if not args or args[0] not in FederatedCLI.OF_CHECKPOINTS:
        return args
    names = [arg.partition("=")[0] for arg in args]
    if {"-c", "--config", "-h", "--help"} & set(names):
        return args
    for arg, following in zip(args, [*args[1:], ""], strict=True):
        path = Path(arg.partition("=")[2] or (following if arg == "--ckpt_path" else arg))
        config = path.parent.parent / "config.yaml"
        if path.suffix == ".ckpt" and config.is_file():
            return [args[0], "--config", str(config), *args[1:]]
    return args


def _group(seeds: str | None, values: str | None) -> list[dict[str, Any]]:
    """Settings of each run of a group, by key; of a single run, none."""
    names: list[tuple[str, list[Any]]] = []
    if values is not None:
        key, equals, listed = values.partition("=")
        require(bool(equals), "values", values, "give key=number,number, as in model.rho=0.02,0.05")
        require(key.startswith("model."), "values", values, "give a number of the model, as in model.rho=0.02,0.05")
        names.append((key, _numbers("values", listed, float)))
    if seeds is not None:
        names.append(("trainer.seed", _numbers("seeds", seeds, int)))
    return [dict(zip([key for key, _ in names], chosen, strict=True)) for chosen in product(*(v for _, v in names))]


def _numbers(key: str, listed: str, number: type) -> list[Any]:
    try:
        found = [number(value) for value in listed.split(",")]
    except ValueError:
        found = []
    require(bool(found) and len(set(found)) == len(found), key, listed, "give different numbers, such as 0,1,2")
    return found


def _set(config: Namespace, key: str, value: Any) -> None:
    """Set a config key as it is written on the command line, without init_args."""
    at: Any = config
    *path, last = key.split(".")
    for name in (*path, last):
        if isinstance(at, Namespace) and "init_args" in at and name not in at:
            at = at.init_args
        require(isinstance(at, Namespace) and name in at, "values", key, "no such setting; see the run's config.yaml")
        if name != last:
            at = at[name]
    at[last] = value
