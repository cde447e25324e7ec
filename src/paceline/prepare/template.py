"""The target's chat template: its text and how it is rendered."""

from pathlib import Path

from paceline.errors import TargetError, UsageError
from paceline.target.spec import Target


def template_text(target: Target, path: str | None = None) -> str | None:
    """The chat template in a file, else the target's own; None where the target has none.

    Raises UsageError for a file that is not there.
    """
    if path is not None:
        if not Path(path).is_file():
            raise UsageError(f"chat_template: {path}: no such file")
        return Path(path).read_text()
    template = target.tokenizer.chat_template
    if isinstance(template, dict):
        if "default" not in template:
            raise TargetError(
                f"{target.folder}: the tokenizer has chat templates {sorted(template)} and none "
                "called default: give one in a file as `chat_template`"
            )
        return template["default"]
    return template
