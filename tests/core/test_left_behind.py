"""A state column that was left behind cannot return with its old values."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from arrow_schemas import OperatorFile
from spark_state_ext.errors import CorruptFileError, SchemaChangedError
from spark_state_ext.files.folder import Folder
from spark_state_ext.files.layout import LEFT_BEHIND_NAME
from spark_state_ext.files.left_columns import note_left_behind
from spark_state_ext.files.operator_catalog import OperatorCatalog


def make_operator_file(*state: str) -> OperatorFile:
    def schema(*names: str) -> str:
        fields = [{"name": name, "type": "long", "nullable": True, "metadata": {}} for name in names]
        return json.dumps({"type": "struct", "fields": fields})

    return OperatorFile("counts", "query", 2, schema("k"), schema(*state))


def test_a_column_cannot_reuse_a_name_that_was_left_behind(tmp_path: Path) -> None:
    root = Folder(str(tmp_path))
    OperatorCatalog().admit(root, make_operator_file("n"), False)
    for _ in range(2):
        note_left_behind(root.child("query"), ["x", "y"])
    with pytest.raises(SchemaChangedError, match="cannot get a column 'x': the query left one of that name behind"):
        OperatorCatalog().admit(root, make_operator_file("n", "x"), False)
    # Columns with other names are admitted; existing columns are not checked again.
    assert OperatorCatalog().admit(root, make_operator_file("n", "z"), False).schema_id == 1
    assert OperatorCatalog().admit(root, make_operator_file("n", "z"), False).schema_id == 1


def test_no_file_is_written_if_no_column_is_left_behind(tmp_path: Path) -> None:
    note_left_behind(Folder(str(tmp_path)), [])
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_list_of_columns_is_an_error(tmp_path: Path) -> None:
    root = Folder(str(tmp_path))
    OperatorCatalog().admit(root, make_operator_file("n"), False)
    root.child("query").put(LEFT_BEHIND_NAME, b"{}")
    with pytest.raises(CorruptFileError):
        OperatorCatalog().admit(root, make_operator_file("n", "x"), False)
