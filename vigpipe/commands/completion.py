"""The command `vigpipe completion`: what a shell needs to complete verbs, options and choices."""

import re

from cyclopts import App

from vigpipe.config.choices import Shell


def completion_script(app: App, shell: Shell) -> str:
    """Return a script for a shell that completes the commands and options of a parser.

    That of zsh serves in a folder of `$fpath`, under any name that begins with _, as well as
    sourced: cyclopts' own only defines a function, whose name depends on its version.
    """
    script = app.generate_completion(prog_name="vigpipe", shell=shell)
    if shell != "zsh":
        return script
    function = re.search(r"^(_\w+)\(\)", script, re.MULTILINE)
    assert function is not None
    return f"""{script.rstrip()}

if [[ $zsh_eval_context[-1] == loadautofunc ]]; then
  {function[1]} "$@"
else
  compdef {function[1]} vigpipe
fi"""
