"""A sample of models.py, and what its page says of them."""

import models
import pytest

SAMPLE = (
    "cohere2",  # scales its logits
    "deepseek_v3",
    "exaone4",
    "glm4v",  # reads images, too
    "granitemoehybrid",
    "lfm2_moe",
    "phimoe",  # its router draws experts at random while it trains
    "qwen2",
    "qwen3_5_text",
    "falcon",  # has an attention of its own
)


@pytest.mark.parametrize("name", SAMPLE)
def test_the_page_of_models_is_true(name):
    """A cell that is no on the page is refused in one line, and any other has a small error."""
    kind = models.types_that_write()[name]
    [line] = [x for x in models.PAGE.read_text().splitlines() if x.startswith(f"| {name} |")]
    row = models.row_of(name, kind)
    for column, said in zip(models.COLUMNS, line.split(" | ")[1:], strict=False):
        cell = row[column]
        if said == "no":
            assert cell.startswith("--"), (column, cell)
        else:
            assert cell < models.LIMIT, (column, cell)


def test_a_fault_is_no_number():
    """What raises anything else than a line for the user is a fault, and no cell has one."""
    assert "FAULT" not in models.PAGE.read_text()
