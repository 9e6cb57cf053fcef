"""Counts the lines by which each script differs from its version through the door: the table of docs/how-to/program.md.

python examples/published/count.py
"""

import difflib
from pathlib import Path

SCRIPTS = {
    "nanogpt": "nanoGPT's training loop, on characters",
    "timm_finetune": "a timm fine-tune",
    "transformers_classifier": "a transformers classifier",
    "diffusers_lora": "a diffusers LoRA",
}


def lines(name: str) -> list[str]:
    """Return the lines of a script: of code, without its docstring, blank lines and indentation."""
    text = (Path(__file__).parent / f"{name}.py").read_text(encoding="utf-8")
    code = text.split('"""', 2)[2]
    return [line.strip() for line in code.splitlines() if line.strip()]


def table() -> str:
    """Return the table."""
    rows = ["| script | lines | gone | new | the same |", "|---|---|---|---|---|"]
    for name, about in SCRIPTS.items():
        before, after = lines(f"{name}_plain"), lines(name)
        same = sum(
            block.size for block in difflib.SequenceMatcher(None, before, after, autojunk=False).get_matching_blocks()
        )
        link = f"[{about}](../../examples/published/{name}.py)"
        rows.append(f"| {link} | {len(before)} | {len(before) - same} | {len(after) - same} | {same} |")
    return "\n".join(rows)


if __name__ == "__main__":
    print(table())
