"""`toolkit completion`: the shell script for TAB completion, and the answer to one TAB.

Each TAB starts a new process, so this module must not import anything that reads configuration.
"""

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
    """click's script receives arguments that bash split at `:` and `=`; this one receives the line as typed."""

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
        """Return the item without the part up to the last `:`, because bash replaces only the part after it."""
        value = str(item.value)
        kept, colon, _ = self.incomplete.rpartition(":")
        if colon in os.environ.get("COMP_BREAKS", ":") and value.startswith(kept + colon):
            value = value.removeprefix(kept + colon)
        return f"{item.type},{value}"


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion(ctx: click.Context, shell: str) -> None:
    """Print the script with which SHELL completes commands, options, runs, jobs, sites, partitions, sessions and steps.

    The first line below is for ~/.bashrc, the second for ~/.zshrc, after compinit.

    \b
    eval "$(toolkit completion bash)"
    eval "$(toolkit completion zsh)"
    toolkit completion fish > ~/.config/fish/completions/toolkit.fish
    """
    add_completion_class(Bash)
    completion_class = get_completion_class(shell)
    assert completion_class is not None  # click.Choice accepts only supported shells
    click.echo(completion_class(ctx.find_root().command, {}, "toolkit", VARIABLE).source().rstrip())


def complete(cli: click.Command, instruction: str) -> int:
    """Print the completions of a line, but no errors: they would appear in the middle of the command line."""
    from toolkit.errors import ToolkitError

    add_completion_class(Bash)
    try:
        return shell_complete(cli, {}, "toolkit", VARIABLE, instruction)
    except (click.ClickException, ToolkitError, OSError, KeyError):
        return 1
