"""What is told about the text that a tokenizer is trained on."""

import json
from pathlib import Path

from data_pipeline.prepare.plan import PrepareOptions
from data_pipeline.prepare.tokenizer_text import training_text


def test_a_word_that_makes_training_a_tokenizer_slow_is_named_once(tmp_path: Path) -> None:
    """Proteins of 200,000 letters were trained on for ever, without a word on the cause."""
    rows = ["a b " * 20_000, "abc," * 20_000, "ABCD" * 50_000, "DCBA" * 50_000]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in rows))
    told: list[str] = []
    pieces, _ = training_text([str(path)], PrepareOptions(), told.append)
    assert "".join(pieces) == "".join(rows)
    (message,) = told
    assert message.startswith(f"{path}, line 3 holds a word of 200,000 letters without a space")
