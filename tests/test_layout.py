"""The layering of DESIGN.md section 4 and the house rules that a script can check."""

import ast
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "minips"
LAYERS = [
    {"command", "config", "errors", "reading", "results", "turns"},
    {"rope", "kv_storage", "attention", "block_attention", "sampling", "tokenizer", "chat", "gguf_convert", "shipped", "hub", "weights", "files", "matrix", "compiling"},
    {"kv_cache", "model", "lora", "mapper", "quantize"},
    {"prompts", "decoding", "answering", "engine", "adapter", "branch_files", "cuda_graph", "compiled", "opening", "merge_kernels"},
    {"change", "pieces", "transform_eager", "transform_compiled", "transform", "merge", "synthesis"},
    {"training", "evaluation", "screen", "screen_live", "workflow", "workflow_checks", "running", "record", "chat_loop"},
    {"corpus"},
    {"generate", "convert", "adapters", "train", "distill", "evaluate"},
]
SAME_LAYER = {
    ("command", "errors"), ("config", "errors"), ("config", "reading"), ("reading", "errors"), ("results", "errors"), ("results", "turns"), ("turns", "errors"),
    ("chat", "tokenizer"), ("hub", "gguf_convert"), ("hub", "weights"), ("hub", "shipped"), ("compiling", "hub"),
    ("gguf_convert", "weights"), ("kv_storage", "weights"), ("attention", "kv_storage"), ("attention", "block_attention"),
    ("answering", "decoding"), ("engine", "answering"), ("engine", "prompts"), ("engine", "decoding"), ("engine", "cuda_graph"), ("engine", "compiled"), ("engine", "merge_kernels"), ("cuda_graph", "compiled"),
    ("engine", "branch_files"), ("branch_files", "engine"),
    ("opening", "prompts"), ("engine", "opening"),
    ("answering", "engine"), ("opening", "engine"),  # for type checkers only
    ("synthesis", "merge"), ("merge", "transform"), ("synthesis", "change"), ("synthesis", "transform"), ("transform", "change"), ("transform", "transform_eager"), ("transform", "transform_compiled"), ("transform_eager", "change"), ("transform_eager", "pieces"),
    ("transform_compiled", "change"), ("transform_compiled", "pieces"), ("transform", "pieces"), ("lora", "model"), ("quantize", "model"),
    ("screen", "screen_live"), ("screen_live", "screen"), ("workflow", "workflow_checks"), ("running", "screen"), ("running", "workflow"),
    ("train", "adapters"), ("record", "running"), ("record", "workflow"), ("record", "workflow_checks"), ("chat_loop", "screen"),
}  # fmt: skip


def layer_of(name):
    return next((level for level, names in enumerate(LAYERS) if name in names), None)


def imports(path):
    """Names of minips modules that a file imports."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.level or (node.module or "").startswith("minips")):
            parts = path.relative_to(PACKAGE).parts
            if node.level and node.level < len(parts):  # stays in its own subpackage
                yield parts[0]
                continue
            module = (node.module or "").removeprefix("minips").lstrip(".")
            names = [module.split(".")[0]] if module else [alias.name for alias in node.names]
            yield from (name for name in names if name != "__version__")
        elif isinstance(node, ast.Import):
            yield from (alias.name.split(".")[1] for alias in node.names if alias.name.startswith("minips."))


def test_files_import_from_lower_layers_only():
    for path in PACKAGE.rglob("*.py"):
        name = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        if name in ("__init__", "examples"):
            continue
        assert layer_of(name) is not None, f"{path.name} stands in no layer"
        for target in imports(path):
            assert layer_of(target) is not None, f"{path.name} imports {target}, which stands in no layer"
            fine = layer_of(target) < layer_of(name) or (name, target) in SAME_LAYER or name == target
            assert fine, f"{path.name} imports {target}"
            assert (name, target) != ("training", "evaluation")


def test_type_checking_imports_stay_so():
    assert "if TYPE_CHECKING:\n    from .engine import Engine" in (PACKAGE / "answering.py").read_text()


def test_no_file_is_long():
    files = [path for folder in ("minips", "bench", "tests") for path in (ROOT / folder).rglob("*.py")]
    assert files and not [f"{path.name}: {n}" for path in files if (n := len(path.read_text().splitlines())) > 400]


def test_no_pickles_no_utils_no_stray_prints():  # FAULTS 83
    for path in PACKAGE.rglob("*.py"):
        assert path.stem != "utils"
        level = layer_of(path.relative_to(PACKAGE).parts[0].removesuffix(".py"))
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call):
                continue
            called = ast.unparse(node.func)
            if called in ("torch.load", "torch.jit.load"):
                assert any(k.arg == "weights_only" and ast.unparse(k.value) == "True" for k in node.keywords), path.name
            assert called not in ("pickle.load", "pickle.loads"), path.name
            to_stderr = any(k.arg == "file" for k in node.keywords)
            assert called != "print" or level in (5, 7, None) or to_stderr, f"{path.name} prints"
