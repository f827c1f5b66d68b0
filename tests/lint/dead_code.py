"""`python -m tests.lint.dead_code`: what vulture finds in verl_mux that nothing in verl_mux uses; exits with 1 if anything is.

Tests are not read: what only they use is dead. Fields are left out (msgspec and dataclasses write them out unseen); a name in a
string of the code counts as used (tables of commands, of predictors, of what verl loads by name).
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path

from vulture import Vulture
from vulture.core import Item

ROOT = Path(__file__).parents[2]
SEEN = ("verl_mux", "verl_mux_cpu", "bench", "research")
# Whole modules whose names are another package's interface.
INTERFACES = ("verl_mux_cpu/verl_cpu.py",)
REGISTERED = ["@register_trainer", "@CheckpointEngineRegistry.register", "@EngineRegistry.register"]
KINDS = ("class", "function", "method", "property", "import", "unreachable_code")

# Called by others, by these names.
VERL_TRAINER = {
    "get_llm_client", "_get_n_gpus_for_throughput", "on_step_begin", "on_sample_end", "on_step_end", "on_validate_begin",
    "on_validate_end",
}  # fmt: skip
VERL_ENGINE = {
    "build_topology", "init_process_group", "finalize", "receive_weights", "get_ray_class_with_init_args",
    "_init_global_load_balancer", "release_kv_cache", "resume_kv_cache",
}  # fmt: skip
TRAINER_BY_VERB = {"mux_wake"}
SGLANG_SAVER = {"check_validity", "configure_subprocess", "cuda_graph", "disable"}
VLLM_PLATFORM = {"is_sleep_mode_available", "get_offset", "set_offset"}
STANDARD_LIBRARY = {"__getattr__", "create_module", "exec_module", "do_GET", "log_message", "find_distributions"}
LIBRARIES = {"manipulate_search_path", "curve_user_id", "record_event"}  # Hydra, pyzmq, Megatron-Core
# The lists that tests/upstream goes through.
UPSTREAM = {"VERL", "SGLANG"}
# By the tests against a real engine, which have no other way to look into it.
END_TO_END = {"read_weight", "weights_mapped"}
ALLOWED = (
    VERL_TRAINER
    | VERL_ENGINE
    | TRAINER_BY_VERB
    | SGLANG_SAVER
    | VLLM_PLATFORM
    | STANDARD_LIBRARY
    | LIBRARIES
    | UPSTREAM
    | END_TO_END
)


def named_in_strings() -> set[str]:
    """Every last part of a string that looks like a dotted name, with a colon or without."""
    trees = (ast.parse(path.read_text()) for name in SEEN for path in (ROOT / name).rglob("*.py"))
    texts = {n.value for tree in trees for n in ast.walk(tree) if isinstance(n, ast.Constant) and isinstance(n.value, str)}
    for place in (ROOT, ROOT / "verl_mux_cpu"):
        texts |= set((place / "pyproject.toml").read_text().replace('"', " ").split())
    return {text.replace(":", ".").rpartition(".")[2] for text in texts if not text.strip().count(" ")}


def dead() -> list[str]:
    """One line a find."""
    vulture = Vulture(ignore_decorators=REGISTERED)
    vulture.scavenge([str(ROOT / name) for name in SEEN])
    used = ALLOWED | named_in_strings()
    return [
        f"{item.filename.relative_to(ROOT)}:{item.first_lineno}: {item.typ} {item.name} is used by nothing in verl_mux"
        for item in vulture.get_unused_code()
        if not str(item.filename).endswith(INTERFACES) and item.name not in used
        if item.typ in KINDS or _is_constant(item)
    ]


def _is_constant(item: Item) -> bool:
    """A module's, not a class's: members of an enum are made from their values."""
    return item.typ == "variable" and item.filename.read_text().splitlines()[item.first_lineno - 1].startswith(item.name)


if __name__ == "__main__":
    found = dead()
    print("\n".join(found) or "no dead code")
    sys.exit(bool(found))
