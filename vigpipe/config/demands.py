"""Check the options that count only where others say something, and fill in those left open."""

from dataclasses import replace

from vigpipe.config.declare import When
from vigpipe.config.options import OPTIONS, TrainConfig, as_given, flag, given
from vigpipe.config.prepared import OF_FOLDER, is_prepared
from vigpipe.config.recipes import MODEL_DEFAULTS
from vigpipe.errors import InputError


def check_demands(config: TrainConfig) -> None:
    """Raise InputError for an option that was given and does not count under the others."""
    for name, value in given(config).items():
        for when in OPTIONS[name].when:
            if not _holds(when, config):
                actual = getattr(config, when.option)
                is_now = "not given" if actual is None else actual
                why = f", {when.why}" if when.why else ""
                raise InputError(
                    f"{as_given(name, value)}: is for {flag(when.option)} {when}{why}, and "
                    f"{flag(when.option)} is {is_now}; leave it out, or choose {when}"
                )


def filled_in(config: TrainConfig) -> TrainConfig:
    """Fill in the options that count and were left open, but for what a prepared folder decides."""
    job = MODEL_DEFAULTS[config.model].job
    of_folder = OF_FOLDER if is_prepared(config.data) else ()
    for name, facts in OPTIONS.items():
        if facts.filled is None or getattr(config, name) is not None or name in of_folder:
            continue
        if facts.job in (None, job) and all(_holds(when, config) for when in facts.when):
            config = replace(config, **{name: facts.filled_for(config)})
    return config


def _holds(when: When, config: TrainConfig) -> bool:
    return getattr(config, when.option) in when.values
