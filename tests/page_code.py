"""The lines of the package beside the papers' boxes in docs/algorithms; ``make renew`` renews them.

A page names what it shows, relative to ``fl_lightning``, in a comment, ``code: algorithms.fedsmoo.FedSMOO.local_step``.
Annotations of types and docstrings are left out, since the box beside says what they say; the rest is the source.
"""

from __future__ import annotations

import ast
import inspect
import pkgutil
import re
from itertools import groupby

BLOCK = re.compile(r"(<!-- code: (.*?) -->\n).*?(<!-- /code -->)", re.DOTALL)


def source(name: str) -> str:
    """A function's source, without its docstring and the types in its signature.

    Args:
        name: Its dotted path below ``fl_lightning``.
    """
    text = inspect.cleandoc("\n" + inspect.getsource(pkgutil.resolve_name(f"fl_lightning.{name}")))
    (function,) = ast.parse(text).body
    assert isinstance(function, ast.FunctionDef)
    for argument in ast.walk(function.args):
        if isinstance(argument, ast.arg):
            argument.annotation = None
    first = function.body[0]
    body = text.splitlines()[first.end_lineno if ast.get_docstring(function) else first.lineno - 1 :]
    return "\n".join([f"def {function.name}({ast.unparse(function.args)}):", *body])


def file(name: str) -> str:
    """The file of a function."""
    return inspect.unwrap(pkgutil.resolve_name(f"fl_lightning.{name}")).__module__.replace(".", "/") + ".py"


def fences(names: list[str]) -> str:
    """Blocks of Markdown, one a file."""
    text = ""
    for title, group in groupby(names, file):
        classes = [(owner, [*methods]) for owner, methods in groupby(group, lambda name: name.split(".")[-2])]
        heads = [f"# of {owner}\n" if len(classes) > 1 else "" for owner, _ in classes]
        parts = ["\n\n\n".join(map(source, methods)) for _, methods in classes]
        code = "\n\n\n".join(head + part for head, part in zip(heads, parts, strict=True))
        text += f'```python title="{title}"\n{code}\n```\n'
    return text


def fill(text: str) -> str:
    """A page with the package's lines between its comments."""
    return BLOCK.sub(lambda match: match[1] + fences(match[2].split()) + match[3], text)
