"""Manifests: what is written is read, and what is none is refused."""

import json
import os
import pickle
from dataclasses import asdict

import pytest

from pipeline.data.shards.manifest_format import load_manifest, make_manifest
from pipeline.errors import UserError


def rows(sizes, name="a"):
    return [(f"{name}/{i:03d}é.tar", size, 100 * size, f"{i:064x}") for i, size in enumerate(sizes)]


def test_manifests_are_written_like_json_and_read_in_any_order_of_keys(tmp_path):
    facts = {"a": {"b": [1, 2.5, None], "c": '[] é "quoted"'}, "empty": {}, "offset": 3}
    written = make_manifest([*rows([3, 1, 4]), ("b", 2, 5, "")], root=tmp_path, failures={"dns": 2}, facts=facts)
    path = written.save(tmp_path)
    tree = json.loads(path.read_text())
    assert path.read_text() == json.dumps(tree, indent=1) + "\n"
    assert tree["shards"] == [asdict(shard) for shard in written.shards]
    for text in (path.read_text(), json.dumps(dict(reversed(tree.items())), ensure_ascii=False)):
        path.write_text(text)
        stored = load_manifest(path)
        assert list(stored.shards) == list(pickle.loads(pickle.dumps(stored)).shards) == list(written.shards)
        assert [stored.shards[i] for i in (0, 1, 2, -1)] == list(written.shards)
        assert (stored.n, stored.bytes, stored.attempted, stored.digest) == (10, 805, 12, written.digest)
        assert [stored.shard_of(i).offset for i in range(10)] == [0, 0, 0, 3, 4, 4, 4, 4, 8, 8]
        assert (stored.failures, stored.facts) == ({"dns": 2}, facts)
    make_manifest([]).save(tmp_path)
    assert path.read_text() == json.dumps(json.loads(path.read_text()), indent=1) + "\n"


def test_what_is_no_manifest_is_refused(tmp_path):
    path = make_manifest(rows([3, 1])).save(tmp_path)
    text = path.read_text()
    changed = [
        ('"samples": 3', '"samples": 2', "contradict each other"),
        ('"samples": 3', '"samples": 0', "1 are empty"),
        ('"version": 1', '"version": 2', "version 2"),
        ('"sha256"', '"md5"', "it lacks 'sha256'"),
        ("\n ]\n}", "", "is damaged"),
        ('"a/000', '3, "x": "', "is damaged"),
        ('"a/000', '"a\\u0000/000', "zero byte"),
        ('"samples": 3,\n   "b', '"samples": "3",\n   "b', "is damaged"),
        ('"samples": 3,\n   "b', f'"samples": {2**63},\n   "b', "is damaged"),
    ]
    cases = [(text.replace(old, new, 1), message) for old, new, message in changed]
    cases += [(t, "is not a manifest") for t in ("", "[]", "{", '{"a" 1}', '{"shards": [1, 2', "a", "[" * 10**5)]
    cases += [
        ('{"format": "neuclip-manifest", "version": 1, "shards": [{}]}', "lacks 'name'"),
        ('{"format": "neuclip-manifest", "version": 1, "shards": 3}', "is damaged"),
    ]
    for damaged, message in cases:
        assert damaged != text
        path.write_text(damaged)
        with pytest.raises(UserError, match=message):
            load_manifest(tmp_path)
    for make in (os.mkfifo, lambda path: path.symlink_to("/dev/zero")):
        path.unlink()
        make(path)
        with pytest.raises(UserError, match=r"cannot be read: not a regular file"):
            load_manifest(tmp_path)
