"""Manifests are read strictly, and everything in them has a line."""

import os
from pathlib import Path

import pytest
from kvtier_api import manifest
from kvtier_api.manifest import ManifestError


def test_documents_and_their_lines() -> None:
    first, second = manifest.parse(
        b"a:\n  b: 1\n  c: [v,\n    w]\n---\n---\n# empty above\nlabels:\n  example.com/a.b: 1\n"
    )
    assert first.obj == {"a": {"b": 1, "c": ["v", "w"]}}
    assert [first.line(p) for p in ("", "a", "a.b", "a.c", "a.c[1]", "a.c[9]", "a.z")] == [
        *(1, 1, 2, 3, 4, 3, 1)
    ]
    assert second.line("labels.example.com/a.b") == 9


@pytest.mark.parametrize(
    ("text", "line", "says"),
    [
        (b"a: 1\nb: 2\na: 3\n", 3, "the key a stands twice"),
        (b"x:\n  - a: 1\n    a: 2\n", 3, "the key a stands twice"),
        (b"a: [1\nb: 2\n", 2, "is not YAML"),
        (b"a: 1\n\tb: 2\n", 2, "is not YAML"),
        (b"a: 'unclosed\n", 2, "is not YAML"),
        (b"a: 1\nb: !!python/object:os.system x\n", 2, "is not YAML"),
        (b"ok: 1\nbad: \xff\n", 2, "is not UTF-8"),
        (b"ok: 1\nbad: \x07\n", 2, "control character"),
        (b"? [a]\n: 1\n", 1, "a key must be plain text"),
        (b"a: 1\nnull: 1\n", 2, "a key must be plain text: put it into quotes"),
        (b"a: 1\n~: 1\n", 2, "a key must be plain text: put it into quotes"),
        (b"a: &x [*x]\n", 1, "nested deeper"),
        (b"[" * 5000, 1, "nested deeper"),
        (b"- *nowhere\n", 1, "is not YAML"),
        (b"a: " + b"1" * 5000, 1, "holds a value that cannot be read"),
        (b'{"a": ' + b"1" * 5000 + b"}", 1, "holds a value that cannot be read"),
    ],
)
def test_what_is_no_manifest_is_said_with_its_line(text: bytes, line: int, says: str) -> None:
    with pytest.raises(ManifestError, match=says) as caught:
        manifest.parse(text)
    assert caught.value.line == line


def test_a_small_text_cannot_grow_large() -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 9)]
    with pytest.raises(ManifestError, match="expands to more than"):
        manifest.parse("\n".join(lines).encode())


def test_a_large_text_is_refused_before_it_is_read() -> None:
    with pytest.raises(ManifestError, match="is larger than"):
        manifest.parse(b"#" * (manifest.MAX_FILE_BYTES + 1))


def test_scalars_are_what_kubectl_takes_them_for() -> None:
    (document,) = manifest.parse(
        b"time: 12:30\ndate: 2026-11-30\non: y\noff: n\n1: one\nhex: 0x10\nfloat: 1e3\nempty:\n"
    )
    assert document.obj == {
        "time": "12:30",
        "date": "2026-11-30",
        "true": True,
        "false": False,
        "1": "one",
        "hex": 16,
        "float": 1000.0,
        "empty": None,
    }


def test_anchors_and_merges_work() -> None:
    (document,) = manifest.parse(b"base: &b {a: 1, b: 2}\nuse: {<<: *b, b: 3}\n")
    assert document.obj["use"] == {"a": 1, "b": 3}


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ManifestError, match="cannot be read: No such file"):
        manifest.read(tmp_path / "none.yaml")
    with pytest.raises(ManifestError, match="is a folder"):
        manifest.read(tmp_path)


# ------------------------------------------------- what kubectl takes, and what it does not


def test_json_may_be_indented_with_tabs() -> None:
    (document,) = manifest.parse(b'{\n\t"a": {\n\t\t"b":\t[1,\t2]\n\t}\n}\n')
    assert document.obj == {"a": {"b": [1, 2]}}
    assert document.line("a.b") == 3


def test_json_objects_may_follow_each_other() -> None:
    first, second = manifest.parse(b'\n{"a": 1}\n{"b":\n\t2} ')
    assert (first.obj, second.obj) == ({"a": 1}, {"b": 2})
    assert (first.line("a"), second.line("b")) == (2, 3)


def test_json_means_what_json_says() -> None:
    (document,) = manifest.parse(b'{"a": "\\ud83d\\ude00\\/", "b": 1e3, "c": 0.0, "d": "12:30"}')
    assert document.obj == {"a": "\U0001f600/", "b": 1000.0, "c": 0.0, "d": "12:30"}


def test_a_key_twice_in_json_is_said_with_its_line() -> None:
    with pytest.raises(ManifestError, match="the key b stands twice") as caught:
        manifest.parse(b'{"a": 1}\n{"b": 1,\n\t"b": 2}')
    assert caught.value.line == 3


def test_flow_style_yaml_that_looks_like_json_is_yaml() -> None:
    (document,) = manifest.parse(b"{a: 1,\n\tb: [x,\tz]}\n")
    assert document.obj == {"a": 1, "b": ["x", "z"]}


def test_a_tab_may_stand_after_a_colon() -> None:
    (document,) = manifest.parse(b"model:\tclassic\t# the first\nother: \t 1\n")
    assert document.obj == {"model": "classic", "other": 1}


@pytest.mark.parametrize("line", ["%YAML 1.1", "%TAG ! tag:example.com,2026:"])
def test_a_directive_is_refused(line: str) -> None:
    with pytest.raises(ManifestError, match="kubectl takes no %YAML or %TAG line") as caught:
        manifest.parse(f"# first\n{line}\n---\na: 1\n".encode())
    assert caught.value.line == 2


def test_long_texts_do_not_multiply() -> None:
    text = f"a: &a {'x' * 100_000}\nb: [{', '.join(['*a'] * 1000)}]\n"
    with pytest.raises(
        ManifestError, match=f"expands to more than {manifest.MAX_FILE_BYTES} bytes"
    ):
        manifest.parse(text.encode())


def test_too_many_values_are_refused_while_they_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manifest, "MAX_NODES", 10)
    with pytest.raises(ManifestError, match="has more than 10 values"):
        manifest.parse(b"[" + b"x," * 50)


def test_a_fifo_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(ManifestError, match="is no regular file: write '-' to read standard"):
        manifest.read(tmp_path / "fifo")


def test_a_pipe_that_the_shell_opened_is_read() -> None:
    reader, writer = os.pipe()
    os.write(writer, b"a: 1\n")
    os.close(writer)
    try:
        (document,) = manifest.read(Path(f"/dev/fd/{reader}"))
    finally:
        os.close(reader)
    assert document.obj == {"a": 1}
