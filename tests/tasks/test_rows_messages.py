"""Rows with chat messages need no configuration."""

import json

from retrain.data.rows import Jsonl


def test_messages_serve_where_there_is_no_prompt(tmp_path):
    rows = [{"messages": [{"role": "user", "content": f"{i}+1?"}], "answer": str(i + 1)} for i in range(12)]
    path = tmp_path / "chat.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert Jsonl(0, path=str(path)).problem(0).prompt[0]["role"] == "user"
