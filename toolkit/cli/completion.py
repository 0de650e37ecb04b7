"""`toolkit completion`: the script by which a shell completes our words, and what it completes them with.

Each TAB starts us anew, so nothing here may import what reads configuration, and Slurm has a tenth of a second to answer.
"""

from __future__ import annotations

import os

import click
from click.shell_completion import (
    BashComplete,
    CompletionItem,
    add_completion_class,
    get_completion_class,
    shell_complete,
)
from click.shell_completion import split_arg_string as words_of

VARIABLE = "_TOOLKIT_COMPLETE"


class Bash(BashComplete):
    """click's script gets words that are cut at `:` and `=`; this one has the line as it was typed."""

    source_template = """\
%(complete_func)s() {
    local type value
    COMPREPLY=()
    while IFS=, read -r type value; do
        case $type in
            plain) COMPREPLY+=("$value") ;;
            dir) compopt -o dirnames ;;
            file) compopt -o default ;;
        esac
    done < <(COMP_TYPED="${COMP_LINE:0:COMP_POINT}" COMP_BREAKS="$COMP_WORDBREAKS" %(complete_var)s=bash_complete "$1" 2>/dev/null)
}
complete -o nosort -F %(complete_func)s %(prog_name)s
"""

    def get_completion_args(self) -> tuple[list[str], str]:
        typed = os.environ["COMP_TYPED"]
        words = words_of(typed)[1:]
        self.incomplete = "" if typed.endswith(" ") or not words else words.pop()
        return words, self.incomplete

    def format_completion(self, item: CompletionItem) -> str:
        """bash replaces what stands behind the last `:` that it cuts words at."""
        value = str(item.value)
        kept, colon, _ = self.incomplete.rpartition(":")
        if colon in os.environ.get("COMP_BREAKS", ":") and value.startswith(kept + colon):
            value = value.removeprefix(kept + colon)
        return f"{item.type},{value}"


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion(ctx: click.Context, shell: str) -> None:
    """Print the script that has SHELL complete commands, options, runs, jobs, sites, partitions, sessions and steps.

    The first line below is for ~/.bashrc, the second for ~/.zshrc, behind compinit.

    \b
    eval "$(toolkit completion bash)"
    eval "$(toolkit completion zsh)"
    toolkit completion fish > ~/.config/fish/completions/toolkit.fish
    """
    add_completion_class(Bash)
    found = get_completion_class(shell)
    assert found is not None  # the choice above
    click.echo(found(ctx.find_root().command, {}, "toolkit", VARIABLE).source().rstrip())


def complete(cli: click.Command, instruction: str) -> int:
    """Answer a shell that completes a line. What is wrong there stays unsaid: it would stand amid the line."""
    from toolkit.errors import ToolkitError

    add_completion_class(Bash)
    try:
        return shell_complete(cli, {}, "toolkit", VARIABLE, instruction)
    except (click.ClickException, ToolkitError, OSError, KeyError):
        return 1
