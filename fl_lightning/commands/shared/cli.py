"""LightningCLI for the federated trainer: one subcommand, its parser, and what its config builds."""

import inspect
import re
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from importlib import import_module
from textwrap import fill
from typing import Any, NoReturn

import torch
import yaml
from docstring_parser import parse
from jsonargparse import ActionConfigFile, Namespace, get_loader, set_loader  # type: ignore[attr-defined]
from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI

import fl_lightning
import fl_lightning.algorithms  # a class goes by its bare name once it is imported
import fl_lightning.nets
import fl_lightning.trainer.aggregation.adaptive_privacy
from fl_lightning.algorithms.base import LocalObjective
from fl_lightning.algorithms.parts.base import Part
from fl_lightning.commands.shared.arguments import PARTS, joined, kept, model_of_configs, prepare, split, whole_numbers
from fl_lightning.commands.shared.messages import ArgumentsError, find_user_error
from fl_lightning.commands.shared.resume_check import to_continue
from fl_lightning.core import ensure, generator, require
from fl_lightning.core.secrets import LEFT_OUT, hidden
from fl_lightning.data import FederatedDataModule
from fl_lightning.results.configs import flatten
from fl_lightning.results.yaml_text import load_yaml
from fl_lightning.trainer.trainer import FederatedTrainer


def _load(text: str) -> Any:
    if text == "None":  # jsonargparse loads a nested null a second time, after it has made it text
        return None
    value = load_yaml(text, get_loader("yaml"))
    # an argument, of one line, holds no comment: --trainer.name '#1' is a name
    cut = "\n" not in text and " #" in f" {text}" and not isinstance(value, (list, dict))
    return text if cut and text.lstrip()[0] not in "'\"" else value


set_loader(MODE := "checked yaml", _load, (yaml.YAMLError,))


class Parser(LightningArgumentParser):
    """A parser that raises its errors, and refuses abbreviated names and YAML with a key given twice.

    Attributes:
        null: The classes that null stands for in a list, by the name of the setting; ``NULL`` of the class has them.
    """

    null: Mapping[str, Sequence[str]] = {}

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{"prog": "fl-lightning", "allow_abbrev": False, "parser_mode": MODE, **kwargs})

    def add_class_arguments(self, kind: type, *args: Any, **kwargs: Any) -> Any:
        """Adds the arguments of a class."""
        self.null = getattr(kind, "NULL", {})
        return super().add_class_arguments(kind, *args, **kwargs)

    def parse_object(self, obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Parses settings. Where ``+=`` appends to null, it appends to the list that null stands for."""
        base = "namespace" if "namespace" in kwargs else "cfg_base"  # its name before jsonargparse 4.50
        for key, classes in self.null.items():
            before = kwargs.get(base) or {}
            if f"{key}+" in obj and before.get(key) is None:
                default = [{"class_path": name} for name in classes]
                kwargs[base] = Namespace({**before, key: default})  # type: ignore[no-untyped-call]
        return super().parse_object(obj, *args, **kwargs)

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Refuses the arguments."""
        raise find_user_error(ex) or ArgumentsError(message)

    def format_help(self, *args: Any, **kwargs: Any) -> str:
        """Returns the help; of subclasses it lists only this package's, and of parts those without another setting."""
        text: str = super().format_help(*args, **kwargs)
        text = re.sub(r"Annotated\[([^,]+),\s+([^\]]+)\]", r"\1 \2", text)
        return re.sub(r",\s+known\s+subclasses:([^)]*)\)", _own_classes, text)


def _own_classes(match: re.Match[str]) -> str:
    paths = "".join(match[1].split()).split(",")
    named = [path.removeprefix("fl_lightning.") for path in paths if path.startswith("fl_lightning.")]
    own = [name for name in named if name in fl_lightning.__all__]
    if "Part" in own:  # other parts have a setting of their own
        own = [name for name in own if name != "Part" and getattr(fl_lightning, name).config_key == Part.config_key]
    if len(named) < len(paths) or not own:  # algorithms are modules, too
        own = [name for name in own if not issubclass(getattr(fl_lightning, name), LocalObjective)]
        own.append("or a dotted path" if own else "by a dotted path")
    indent = 24 * " "
    return ",\n" + fill(f"classes: {', '.join(own)})", 80, initial_indent=indent, subsequent_indent=indent)


class FederatedCLI(LightningCLI):
    """LightningCLI over `FederatedTrainer`, `LocalObjective` and `FederatedDataModule`, in subclass mode.

    It holds the parser of one subcommand and its parsed arguments, ``config``; `build` makes the objects, `run` runs
    the subcommand. It overrides public methods only: ``run=False`` keeps LightningCLI from its own subcommands, which
    would take those of a ``lightning.Trainer``. One seed, ``trainer.seed``, takes the place of ``seed_everything``.

    Args:
        command: The subcommand: a module of this folder.
        args: Its arguments.
    """

    def __init__(self, command: str, *args: str) -> None:
        module = import_module(f"fl_lightning.commands.{command}")
        self.command, self.function, self.summary = command, module.run, module.SUMMARY
        self.args = own = joined(args)
        self.parameters = inspect.signature(module.run, eval_str=True).parameters
        places = [name for name, p in self.parameters.items() if p.kind is p.POSITIONAL_ONLY]
        self.places = [name for name in places if name not in (*PARTS, "cli")]
        options = {arg.partition("=")[0] for arg in own}
        for name in self.places:
            usage = " ".join(["fl-lightning", command, *map(str.upper, self.places)])
            ensure(f"--{name}" not in options, f"--{name}: no option; give it by its place: {usage}")
        # the parameter for the settings of the subcommand's runs, *settings
        self.rest = next((name for name, p in self.parameters.items() if p.kind is p.VAR_POSITIONAL), None)
        own, self.settings = split(own) if self.rest else (own, list[str]())
        self.needs = PARTS if "cli" in self.parameters else tuple(part for part in PARTS if part in self.parameters)
        super().__init__(
            trainer_class=FederatedTrainer,  # type: ignore[arg-type]
            save_config_callback=None,
            auto_configure_optimizers=False,
            load_from_checkpoint_support=False,
            run=False,
            args=prepare(own) if self.needs else own,
        )

    def init_parser(self, **kwargs: Any) -> Parser:
        """Makes an empty parser."""
        parser = Parser(
            prog=f"fl-lightning {self.command}", description=self.summary, dump_header=["fl_lightning"], **kwargs
        )
        if self.needs:
            text = "A YAML file with any of these settings; later ones win."
            parser.add_argument("-c", "--config", action=ActionConfigFile, help=text)
        return parser

    def add_default_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Adds nothing: the seed is ``trainer.seed``."""

    def add_core_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Adds the parts of the config that the subcommand needs; a run's whole config is accepted nonetheless."""
        for part in PARTS if self.needs else ():
            if part not in self.needs:
                parser.add_argument(f"--{part}", type=dict | str | None, help="Part of a run's config; not used.")
            elif part == "trainer":  # add_lightning_class_args refuses one that is not a lightning.Trainer
                parser.add_class_arguments(
                    FederatedTrainer, part, instantiate=False, fail_untyped=False, sub_configs=True
                )
            else:
                kind = LocalObjective if part == "model" else FederatedDataModule
                parser.add_lightning_class_args(kind, part, subclass_mode=True)

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Adds the subcommand's own arguments."""
        texts = {param.arg_name: param.description for param in parse(inspect.getdoc(self.function) or "").params}
        for name in self.places:
            nargs = "+" if self.parameters[name].annotation == list[str] else None
            parser.add_argument(name, metavar=name.upper(), type=str, nargs=nargs, help=texts.get(name))
        flags = {name: p.default for name, p in self.parameters.items() if p.annotation is bool}
        for name, default in flags.items():  # --dry-run, --dry_run, or one of them with true or false
            spelled, text = dict.fromkeys((f"--{name.replace('_', '-')}", f"--{name}")), texts.get(name)
            parser.add_argument(*spelled, type=bool, nargs="?", const=True, default=default, help=text)
        if self.rest is not None:
            parser.epilog = texts.get(f"*{self.rest}")
        parser.add_function_arguments(self.function, skip={*PARTS, "cli", *self.places, *flags})
        null = getattr(import_module(self.function.__module__), "NULL", {})
        parser.set_defaults({name: [{"class_path": each} for each in null[name]] for name in null})

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        """Parses the arguments; an integer may be written as 3.0."""
        try:
            self.config = parser.parse_args(args)
        except ArgumentsError as error:
            whole = whole_numbers(args, str(error))
            if whole == args:
                raise
            return self.parse_arguments(parser, whole)
        self.config["seed_everything"] = False  # LightningCLI would seed everything with 0

    def instantiate_classes(self) -> None:
        """Builds nothing: `build` does, once or for several runs."""

    def instantiate_trainer(self, **kwargs: Any) -> Any:
        """Builds the trainer, if the subcommand needs one."""
        return super().instantiate_trainer(**kwargs) if "trainer" in self.needs else None

    def build(self) -> Namespace:
        """Builds what the subcommand needs, with initial weights that follow ``trainer.seed``.

        Returns:
            ``trainer``, which has the resolved config, ``model``, ``data``, and the subcommand's own arguments.

        Raises:
            UserError: If a setting is out of range, or a secret is missing.
        """
        if "trainer" in self.needs:
            given = self.config.trainer
            require(hasattr(given, "seed"), "trainer", given, "give a mapping of settings")
            require(given.seed >= 0, "trainer.seed", given.seed, "give a whole number of 0 or more")
            torch.manual_seed(generator(given.seed, "initial weights").initial_seed())
        self.config.pop("seed_everything", None)  # LightningCLI has read it
        config = self.resolved()
        super().instantiate_classes()
        made: Namespace = self.config_init
        if "trainer" in self.needs:
            made.trainer = self.trainer
            made.trainer.config = config
        return made

    def resolved(self) -> dict[str, Any]:
        """Returns the config of the run with every default and without secrets, as its run folder has it.

        Raises:
            UserError: If a secret is missing, since the config is that of a run folder.
        """
        # with values of None, no defaults left out, checked by the parser before; by position, since jsonargparse
        # 4.50 has other names for these
        text = self.parser.dump(self.config, "yaml", False, False, True)
        config = {key: value for key, value in yaml.safe_load(text).items() if key in PARTS}
        for key, value in flatten(config).items():
            remedy = "a run folder keeps no secrets; give this one again, as an argument or in another --config"
            require(not LEFT_OUT.search(value), key, value, remedy)
        return dict(hidden(config))

    def make(self, *args: str) -> Namespace:
        """Parses other arguments, and builds what they describe.

        Args:
            args: Arguments of the subcommand, in the place of those of the constructor.

        Raises:
            UserError: As `build`.
        """
        self.parse_arguments(self.parser, prepare(args))
        return self.build()

    def run(self) -> None:
        """Runs the subcommand."""
        made = self.config if "cli" in self.parameters else self.build()
        given = {name: self if name == "cli" else made[name] for name in self.parameters if name != self.rest}
        if self.command == "fit":
            self._say_what_is_kept(made.model.as_dict())
        positional = [given.pop(name) for name, p in self.parameters.items() if p.kind is p.POSITIONAL_ONLY]
        with made.trainer.environment() if "trainer" in self.parameters else nullcontext():
            if "trainer" in self.parameters:
                asked, central = made.get("ckpt_path"), self.command == "centralized"
                require(central or asked != "auto", "ckpt_path", asked, "give a checkpoint, last or best")
                found = to_continue(
                    made.trainer, made.model, made.data, asked, "centralized" if central else "federated"
                )
                if "ckpt_path" in given:
                    given["ckpt_path"] = found
            self.function(*positional, *self.settings, **given)

    @rank_zero_only
    def _say_what_is_kept(self, now: Mapping[str, Any]) -> None:
        """Prints which settings an algorithm keeps from the config's algorithm that it replaces."""
        before = model_of_configs(prepare(self.args))
        if names := kept(before, now):
            (old, new) = (model["class_path"].rpartition(".")[2] for model in (before, now))
            print(
                f"model = {new}: keeps {', '.join(names)} of the config's {old}; --print_config shows them, "
                "--model.NAME replaces one"
            )
