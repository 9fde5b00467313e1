"""Keys, tokens and passwords in configs, command lines and diffs: what looks like one is hidden."""

import re
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

HIDDEN = "***"
"""What stands for a secret."""
LEFT_OUT = re.compile(r"(?<![^/:,\s])\*{3}(?![^@,])")
"""Where a secret stood."""
NAME = re.compile(
    r"passw|passphrase|secret|credential|bearer|cookies?$|authori[sz]ation|^key$|webhook([-_ ]?url)?$"
    r"|amz[-_]signature$|(?<![a-z])(o?auth|otp|pass([-_]?code)?|pin([-_]?code)?|pwd|sig|licen[cs]e([-_]?(code|key))?)$"
    r"|(api|access|account|auth|client|private|service|session|signing|ssh|hf|hub|wandb|comet|neptune)[-_ ]?key"
    r"|(?<!bos_)(?<!cls_)(?<!eos_)(?<!mask_)(?<!pad_)(?<!sep_)(?<!unk_)token$",
    re.IGNORECASE,
)
"""What the name of a secret contains; the special tokens of a vocabulary are none."""
VALUE = re.compile(
    r"\b(?:hf_|gh[opsu]_|github_pat_|glpat-|sk-|xox[abp]-|wandb_v1_|AKIA)[\w-]{12,}|\beyJ[\w-]+\.[\w-]+\.[\w-]*"
    r"|(?i:bearer\s+)\S+|\b(?:hooks\.slack\.com/|discord(?:app)?\.com/api/webhooks/|\w+\.webhook\.office\.com/)\S+"
    r"|-----BEGIN[^-]* PRIVATE KEY-----"
)
"""A key that its form gives away, whatever its name."""
RANDOM = re.compile(r"(-[\w.+-]+=)?(?=\D*\d)(?=[^A-Za-z]*[A-Za-z])[A-Za-z0-9+]{20,}={0,2}")
"""A word of a command line whose value seems to be drawn at random."""
ADDRESS = re.compile(r"(https?://|[\w+.-]+://[^/\s:@'\"]*:)[^/\s'\"]+@")
"""The user of an address, or the password behind its user."""
NAMED = re.compile(r"([\w.-]+)[\"']?\s*[:=]\s*[\"']?(?!null\b|None\b|\*\*\*|[\"'\s]|$)")
"""A name before its value within a text."""
LISTED = re.compile(r"([\w.-]+)[\"']?[\s:=,]+(?!\*\*\*)\S")
"""The same, also where both are entries of a list."""
LITERAL = re.compile(r"""(?P<before>(?P<name>[\w.-]+)["']?\s*[:=]\s*(?P<quote>["']))[^"'\n]+(?P<after>(?P=quote))""")
VARIABLE = re.compile(r"^(?P<before>\W*(?:export\s+)?(?P<name>[A-Z][A-Z0-9_]*)=)\S+(?P<after>)", re.MULTILINE)
"""A value in quotes, and one of the shell, with what stands before and after it."""


def hidden(value: Any, secret: bool = False) -> Any:
    """Returns plain values, such as a config, without the secrets among them.

    Args:
        value: Mappings, lists, text, numbers.
        secret: Whether the value has the name of a secret.
    """
    match value:
        case Mapping():
            return {key: hidden(v, key != "class_path" and (secret or is_secret(key))) for key, v in value.items()}
        case list():
            return [hidden(v, secret) for v in value]
        case str():
            sensitive = secret or VALUE.search(value) or any(map(is_secret, NAMED.findall(value)))
            return HIDDEN if value and sensitive else ADDRESS.sub(rf"\1{HIDDEN}@", value)
    return HIDDEN if secret and type(value) is int else value  # a fraction is a setting, such as a sigma named sig


def hidden_words(words: Sequence[str]) -> list[str]:
    """Returns the words of a command line without secrets; of a mapping or list that has one, nothing is left."""
    shown = []
    for previous, word in pairwise(["", *words]):
        name, equals, _ = word.partition("=") if word[:1] == "-" else ("", "", "")
        named = previous[:1] == "-" and "=" not in previous and is_secret(previous)
        secret = named or RANDOM.fullmatch(word) or any(map(is_secret, LISTED.findall(word)))
        text = HIDDEN if secret else hidden(word)
        shown.append(f"{name}={HIDDEN}" if text == HIDDEN and equals else text)
    return shown


def hidden_text(text: str) -> str:
    """Returns source code or its diff without keys, passwords in addresses, and literals with a secret's name."""

    def without(match: re.Match[str]) -> str:
        return f"{match['before']}{HIDDEN}{match['after']}" if is_secret(match["name"]) else match[0]

    return VALUE.sub(HIDDEN, VARIABLE.sub(without, LITERAL.sub(without, ADDRESS.sub(rf"\1{HIDDEN}@", text))))


def is_secret(name: object) -> bool:
    """Returns whether a name, or a part of a dotted one, is that of a secret."""
    return any(NAME.search(part.strip("-+")) for part in str(name).split("."))
