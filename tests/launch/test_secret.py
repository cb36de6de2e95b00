"""Ranks agree on a secret: from their private folder, a token, or a file of the user's own."""

import os

import pytest
import torch.distributed as dist

from tests.world import run_each
from vigpipe.errors import InputError, StrangerError
from vigpipe.launch import secret
from vigpipe.launch.environment import Launch


def agree(rank, world_size, case, tokens, caches):
    """Agree as ranks of srun with a token and a cache folder each; return how it went, and words.

    A rank without a cache folder is a stranger, who writes something.
    """
    os.environ |= {"VIGPIPE_TOKEN": tokens[rank], "VIGPIPE_CACHE": str(caches[rank])}
    store = dist.PrefixStore(case, dist.distributed_c10d._get_default_store())
    me = Launch(rank, world_size, rank, world_size, "srun", "tcp://127.0.0.1:1", "slurm-1")
    told = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(secret, "tell", told.append)
        patch.setattr(secret, "_LOOK_SECONDS", 0.0)
        try:
            if caches[rank] is None:
                store.set(f"knows/{rank}", f"file {64 * '0'}")
                return "stranger", told
            found = secret.agree_on_secret(store, me)
        except (InputError, StrangerError) as error:
            return str(error), told
    return found, told


@pytest.mark.multiprocess
def test_ranks_know_one_secret_or_none_does_or_the_difference_is_named(tmp_path):
    here, there = tmp_path / "here", tmp_path / "there"
    (there / "folder").mkdir(parents=True, mode=0o700)
    cases = {
        "token": (["a", "a"], [here, there]),
        "file": (["", ""], [here, here]),
        "two tokens": (["a", "b"], [here, here]),
        "one token": (["a", ""], [here, here]),
        "nothing shared": (["", ""], [here, there]),
        "stranger": (["", ""], [here, None]),
    }
    tokens, caches = zip(*cases.values(), strict=True)
    found = dict(zip(cases, run_each(agree, 2, cases, tokens, caches), strict=True))
    for case in ("token", "file"):
        (first, _), (second, _) = found[case]
        assert first == second
        assert len(first) == 32
    assert list(here.iterdir()) == []  # the file is gone when both have read it
    for first, second in (found["two tokens"], found["one token"]):
        assert first[0].startswith("VIGPIPE_TOKEN: ")
        assert second[0].startswith("VIGPIPE_TOKEN: ")
    assert "is set on rank 0, but not on rank 1; " in found["one token"][1][0]
    (first, told), (second, silent) = found["nothing shared"]
    assert (first, second, silent) == (None, None, [])
    assert "as rank 1 has no secret" in told[0]
    assert "set VIGPIPE_TOKEN" in told[0]
    assert "answers for rank 1" in found["stranger"][0][0]


def test_a_file_that_others_could_have_made_or_read_gives_no_secret(tmp_path, monkeypatch):
    monkeypatch.setattr(secret, "_LOOK_SECONDS", 0.0)
    name = f"secret-{32 * 'a'}"
    path, other = tmp_path / name, tmp_path / "other"
    other.write_bytes(bytes(32))
    other.chmod(0o600)

    def shared():
        path.write_bytes(bytes(32))
        path.chmod(0o640)

    def short():
        path.write_bytes(bytes(31))
        path.chmod(0o600)

    made = [lambda: None, shared, short, lambda: path.symlink_to(other), lambda: os.mkfifo(path)]
    for make in made:
        make()
        with pytest.raises(OSError, match=name):
            secret._read(tmp_path, name)
        path.unlink(missing_ok=True)
    with pytest.raises(OSError, match="malformed"):
        secret._read(tmp_path, "../other")


def test_a_new_file_takes_the_place_of_those_that_killed_ranks_have_left(tmp_path):
    old, new = tmp_path / "secret-old", tmp_path / "secret-new"
    for path in (old, new):
        path.touch()
    os.utime(old, (0, 0))
    with secret._new_file(tmp_path) as (name, content):
        assert secret._read(tmp_path, name) == content
        assert {path.name for path in tmp_path.iterdir()} == {name, new.name}
    assert list(tmp_path.iterdir()) == [new]
